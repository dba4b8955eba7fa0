"""The training process's end of a private daemon: starts it, speaks with it, takes it down.

There is no thread: whoever wants a batch reads the socket. A slot is given back by whatever thread drops the last
reference to its batch, with one small, unlocked write (:class:`~loaderd.protocol.channel.Channel`). Slots are given
back two at a time, to halve the cost of that, but at once while somebody waits for a batch: he may wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle

from loaderd.dataset import StreamDescription
from loaderd.errors import ClosedError, DaemonError, LoaderdError, from_wire
from loaderd.memory.shared import SharedMemory
from loaderd.plan.passes import Listing, Pass
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import (
    Broken,
    Ended,
    Failed,
    List,
    Listed,
    Message,
    Open,
    Opened,
    Progress,
    Ready,
    Release,
    Skipped,
    Start,
    Warned,
)
from loaderd.protocol.process import how_it_ended, start_process

_CLOSE_TIMEOUT_S = 5.0
_SLOTS_PER_RELEASE = 2

_logger = logging.getLogger("loaderd")


class Connection:
    """A stream served by a daemon of our own."""

    def __init__(self, description: StreamDescription, on_progress: Callable[[int, int], None]) -> None:
        """Start the daemon and wait until the stream is open; raises LoaderdError."""
        process, sock = start_process("loaderd.daemon.service")
        self._channel = Channel(sock)
        self._end = weakref.finalize(self, _end_daemon, self._channel, process, os.getpid())
        self._process = process
        self._generation = 0
        self._batches: deque[list[int] | LoaderdError | None] = deque()
        self._freed: deque[int] = deque()
        self._waiting = False
        self._opened: Opened | None = None
        self._listed: Listed | None = None
        self._on_progress = on_progress
        self.skipped: list[LoaderdError] = []
        self.records_skipped = 0
        self.workers_restarted = 0
        self._send(Open(cloudpickle.dumps(description)))
        while self._opened is None:
            self._receive()
        self.slots: SharedMemory = SharedMemory(self._channel.take_fd())
        self.slots.close_fd()

    @property
    def data(self) -> Listed:
        """What the daemon said of the data that it uses now."""
        assert self._listed is not None
        return self._listed

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of ``Statistics``."""
        assert self._opened is not None
        return {**self._opened.facts, **self.data.facts}

    def list_shards(self, listing: Listing | None) -> None:
        """Have the daemon use the shards that there are now, or those of ``listing``, where sets grow.

        Drops what was on its way, and needs a :meth:`start`. Raises LoaderdError; then nothing has changed.
        """
        self._drop()
        before, self._listed = self._listed, None
        self._send(List(None if listing is None else list(listing)))
        while self._listed is None:
            self._receive()
        if self._listed.error is not None:
            error, self._listed = self._listed.error, before
            raise from_wire(error)

    def start(self, pass_: Pass, step: int) -> None:
        """Have a pass delivered from ``step`` on; drops what was on its way."""
        self._drop()
        self._send(Start(self._generation, pass_.to_wire(), step))

    def _drop(self) -> None:
        self._generation += 1
        for batch in self._batches:
            if isinstance(batch, list):
                self.release(batch[1])
        self._batches.clear()

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`next_batch` can answer now."""
        return bool(self._batches)

    def wait_for_batch(self) -> None:
        """Wait until :meth:`next_batch` can answer; raises the error that ended the stream, if one did."""
        # In this order: whoever frees a slot puts it down first and looks at ``_waiting`` then.
        self._waiting = True
        self._send_freed()
        try:
            while not self._batches:
                self._receive()
        finally:
            self._waiting = False

    def next_batch(self) -> tuple[int, int, int] | None:
        """(step, slot, records) of the next batch, the slot being ours; None at the end of the pass.

        Raises the error of a batch that cannot be delivered; the next call goes on behind it.
        """
        batch = self._batches[0]
        if batch is None:
            return None
        self._batches.popleft()
        if isinstance(batch, LoaderdError):
            raise batch
        step, slot, num_records = batch
        return step, slot, num_records

    def release(self, slot: int) -> None:
        """Give a slot back. From any thread, and from a finalizer."""
        self._freed.append(slot)
        if self._waiting or len(self._freed) >= _SLOTS_PER_RELEASE:
            self._send_freed()

    def _send_freed(self) -> None:
        slots = []
        with contextlib.suppress(IndexError):  # empty; other threads may be at it too
            while True:
                slots.append(self._freed.popleft())
        if slots:
            with contextlib.suppress(ChannelClosed):  # if the daemon is gone, the memory goes with its last view
                self._channel.send(Release(slots))

    def close(self) -> None:
        """End the daemon and its workers, and wait until they are gone."""
        self._end()

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._raise_gone()

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except ChannelClosed:
            self._raise_gone()
        for message in messages:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Ready):
            if message.generation == self._generation:
                self._batches.extend(message.batches)
            else:
                for _, slot, _ in message.batches:
                    self.release(slot)
        elif isinstance(message, Broken):
            if message.generation == self._generation:
                self._batches.append(from_wire(message.error))
        elif isinstance(message, Ended):
            if message.generation == self._generation:
                self._batches.append(None)
        elif isinstance(message, Progress):
            self._on_progress(message.done_bytes, message.total_bytes)
        elif isinstance(message, Listed):
            self._listed = message
        elif isinstance(message, Opened):
            self._opened = message
        elif isinstance(message, Skipped):
            self.records_skipped += message.num_records
            self.skipped += map(from_wire, message.errors)
        elif isinstance(message, Warned):
            self.workers_restarted = message.workers_restarted
            _logger.warning("%s", message.text)
        elif isinstance(message, Failed):
            self.close()
            raise from_wire(message.error)

    def _raise_gone(self) -> None:
        if not self._end.alive:
            raise ClosedError("the loader is closed")
        process = self._process
        self.close()
        raise DaemonError(f"the daemon process {how_it_ended(process)}", hint="Make a new loader to go on.")


def _end_daemon(channel: Channel, process: subprocess.Popen[bytes], creator: int) -> None:
    """A fork of the training process inherits this, and must not end its parent's daemon."""
    if os.getpid() != creator:
        return
    channel.close()
    try:
        process.wait(_CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
