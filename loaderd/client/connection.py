"""The training process's end of one stream: of a private daemon, of a server, or of a relay to one (see ``sources``).

There is no thread: whoever wants a batch reads the socket, one at a time. A slot is given back by the next one who
does, two at a time, to halve the cost of that: as many as a consumer may hold are never missed by the workers.

**Interrupts.** Ctrl-C may come at any bytecode. In the wait for a batch it costs nothing. Anywhere else, messages may
be lost or half read; so ``torn`` is set before anything is touched and taken back when all is in order again, and
whoever finds it set must not go on with this connection, but make another.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loaderd.client.batch import SlotReader
from loaderd.client.link import LinkLost
from loaderd.client.patience import Patience
from loaderd.client.report import DamageReport
from loaderd.client.sources import Source
from loaderd.errors import LoaderdError, from_wire
from loaderd.memory.layout import SlotLayout
from loaderd.memory.shared import SharedMemory
from loaderd.plan.passes import Listing, Pass
from loaderd.protocol.channel import ChannelClosed
from loaderd.protocol.descriptors import standard_is_taken
from loaderd.protocol.messages import (
    Ask,
    Broken,
    Bye,
    Ended,
    Failed,
    Joined,
    List,
    Listed,
    Message,
    Opened,
    Progress,
    Ready,
    Release,
    Skipped,
    Start,
    State,
    Want,
    Warned,
    Welcome,
)

_MIN_START_LIMIT_S = 30.0
_MAX_SEND_LIMIT_S = 1e6  # the kernel counts no further than some centuries
_SLOTS_PER_RELEASE = 2

_logger = logging.getLogger("loaderd")


@dataclass
class Counts:
    """What all daemons of a loader did, one after the other: fields of ``Statistics``."""

    batches: int = 0
    records: int = 0
    copies: int = 0
    starts: int = 0
    wait_s: float = 0.0
    records_skipped: int = 0
    report: DamageReport = field(default_factory=DamageReport)
    workers_restarted: int = 0
    daemon_restarts: int = 0


class Connection:
    """A stream that somebody serves. Every wait raises LinkLost when they are gone or stalled, or say goodbye."""

    def __init__(self, source: Source, counts: Counts) -> None:
        """Start the daemon, or connect to the server; :meth:`open` comes next."""
        self._source = source
        self._link = link = source.link()
        self._channel = link.channel
        self._stall_timeout = stall_timeout = source.options.stall_timeout
        sock = self._channel.socket
        if stall_timeout is not None:  # a daemon that does not read must not keep us writing
            seconds, rest = divmod(min(stall_timeout, _MAX_SEND_LIMIT_S), 1.0)
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 1 + int(rest * 999_999))
            )
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self._generation = 0
        self._batches: deque[list[int] | Broken | None] = deque()
        self._skips: dict[int, Skipped] = {}
        self._freed: list[int] = []
        self._heard = False
        self._unsent = False
        self._reader: SlotReader | None = None
        self._opened: Opened | None = None
        self._listed: Listed | None = None
        self._bye: Bye | None = None
        self._joined: Joined | None = None
        self.torn = True
        """Whether nobody knows what was said: see the module's docstring."""
        self.delivered = False
        """Whether a batch has come."""
        self.step = 0
        """That of the batch which :meth:`next_batch` gave last."""
        self._counts = counts
        self._workers_restarted = 0

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Of ours, that ends with the connection."""
        return self._link.process

    @property
    def data(self) -> Listed:
        """What the daemon said of the data that it uses now."""
        assert self._listed is not None
        return self._listed

    @property
    def reader(self) -> SlotReader:
        """What makes batches of slots."""
        assert self._reader is not None
        return self._reader

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return 0 if self._reader is None else self._reader.num_lent

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of ``Statistics``."""
        assert self._opened is not None
        return self._opened.facts

    # -------------------------------------------------------------------------------------- speaking

    def open(self, start: str, on_progress: Callable[[int, int], None]) -> None:
        """Wait until the stream is there; ``start`` as in Open. Torn until the data are taken over."""
        self._on_progress = on_progress
        for message in self._source.greeting(start):
            self._send(message)
        limit_s = self._stall_timeout
        # Until then it is an interpreter that imports, maybe of a slow file system or on a busy core.
        start_limit_s = None if limit_s is None else max(limit_s, _MIN_START_LIMIT_S)
        self._wait(self._link.what, lambda: self._heard, start_limit_s)
        self._wait("the data", lambda: self._opened, limit_s)
        with standard_is_taken():
            memory = SharedMemory(self._channel.take_fd())
            memory.close_fd()
        specs, batch_size = self._source.schema.specs, self._source.options.batch_size
        self._reader = SlotReader(memory.bytes, SlotLayout(specs, batch_size, several_readers=not memory.writable))

    def list_shards(self, listing: Listing | None) -> None:
        """Have the daemon use the shards that there are now, or those of ``listing``, where sets grow.

        Drops what was on its way, and needs a :meth:`start`. It stays torn until the data are taken over. Raises
        LoaderdError; then nothing has changed.
        """
        self.torn = True
        self._drop()
        before, self._listed = self._listed, None
        self._send(List(None if listing is None else list(listing)))
        self._wait("the data", lambda: self._listed, self._stall_timeout)
        error = self.data.error
        if error is not None:
            self._listed = before
            self.torn = False
            raise from_wire(error)

    def start(self, pass_: Pass, step: int) -> None:
        """Have a pass delivered from ``step`` on; drops what was on its way."""
        self.torn = True
        self._drop()
        self._send(Start(self._generation, pass_.to_wire(), step))
        self.torn = False

    def join(self, pass_: Pass, step: int, taken: list[int]) -> None:
        """Take part in the pass of a group, of which this is what we know; drops what was on its way.

        Waits until it is known where the group is. ``taken`` as in Start. Leaves the connection torn.
        """
        self.torn = True
        self._drop()
        self._send(Start(self._generation, pass_.to_wire(), step, taken))
        self._wait("the group", lambda: self._joined, self._stall_timeout)

    @property
    def joined(self) -> tuple[Pass, int]:
        """The pass that the group is at, and the step before which all is used up."""
        assert self._joined is not None
        return Pass.from_wire(self._joined.which), self._joined.step

    def want(self, count: int) -> None:
        """Ask for so many batches of the group's. Leaves the connection torn."""
        self.torn = True
        self._send(Want(count))

    def _drop(self) -> None:
        self._generation += 1
        self._joined = None
        self._freed += [batch[1] for batch in self._batches if isinstance(batch, list)]
        self._batches.clear()
        self._skips.clear()

    # --------------------------------------------------------------------------------------- batches

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`next_batch` can answer now."""
        return bool(self._batches)

    def wait_for_batch(self) -> None:
        """Wait until :meth:`next_batch` can answer."""
        self.torn = True
        self._wait("a batch", lambda: self._batches, self._stall_timeout, for_batch=True)
        self.torn = False

    def next_batch(self) -> tuple[int, int] | LoaderdError | None:
        """(slot, records) of the next batch, the slot being ours; or why it cannot be had; None: the pass is over.

        Leaves the connection torn: whoever has used the slot takes that back.
        """
        self.torn = True
        if len(self.reader.ended) + len(self._freed) >= _SLOTS_PER_RELEASE:
            self._take_back()
        batch = self._batches[0]
        if batch is None:
            return None
        self._batches.popleft()
        self.step = step = batch.step if isinstance(batch, Broken) else batch[0]
        skipped = self._skips.pop(step, None) if self._skips else None
        if skipped is not None:
            self._counts.records_skipped += skipped.num_records
            self._counts.report.add("epoch", [one for error in skipped.errors for one in from_wire(error).damages])
        if isinstance(batch, Broken):
            error = from_wire(batch.error)
            self._counts.report.add("epoch", error.damages)
            return error
        return batch[1], batch[2]

    def release(self, slot: int) -> None:
        """Give back a slot that was not lent on."""
        self._freed.append(slot)

    def _take_back(self) -> None:
        """Tell the daemon of the slots that nobody refers to any more."""
        self._freed += self.reader.take_back()
        if self._freed:
            self._send(Release(self._freed))
            self._freed = []

    # ------------------------------------------------------------------------------------- the socket

    def _send(self, message: Message) -> None:
        """If the daemon is gone, its last words are still to be read, and then the end: whoever waits finds out."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._unsent = True

    def _wait(
        self, what: str, is_there: Callable[[], object], limit_s: float | None, *, for_batch: bool = False
    ) -> None:
        """``for_batch``: slots are given back meanwhile, and Ctrl-C leaves nothing torn."""
        patience = Patience(limit_s)
        while not is_there():
            if self._bye is not None:
                self.close()
                raise LinkLost(f"{self._link.what} ends: {self._bye.text}")
            if for_batch:
                self._take_back()  # what came for an older generation, too: the workers may wait for it
            self.torn = not for_batch
            arrived = self._poll.poll(1000 * patience.tick_s)
            self.torn = True
            if arrived:
                patience.heard()
                for message in self._link.receive():
                    if isinstance(message, State) and patience.must_report():
                        _logger.warning("waiting for %s for %.0f s: %s", what, patience.waited_s, message.text)
                    self._handle(message)
                continue
            patience.tick()
            if patience.is_over or self._unsent:
                raise LinkLost(f"{self._link.what} said nothing for {patience.limit_s:g} s and {self._link.kill()}")
            if patience.must_ask():
                self._send(Ask())

    def _handle(self, message: Message) -> None:
        if isinstance(message, Bye):
            self._bye = message
            return
        self._heard = True
        if isinstance(message, Ready):
            if message.generation == self._generation:
                self._batches.extend(message.batches)
                self.delivered = True
            else:
                self._freed += [slot for _, slot, _ in message.batches]
        elif isinstance(message, Broken):
            if message.generation == self._generation:
                self._batches.append(message)
                self.delivered = True
        elif isinstance(message, Ended):
            if message.generation == self._generation:
                self._batches.append(None)
        elif isinstance(message, Skipped):
            if message.generation == self._generation:
                self._skips[message.step] = message
        elif isinstance(message, Progress):
            self._on_progress(message.done_bytes, message.total_bytes)
        elif isinstance(message, Listed):
            self._listed = message
        elif isinstance(message, Opened):
            self._opened = message
        elif isinstance(message, Warned):
            self._counts.workers_restarted += message.workers_restarted - self._workers_restarted
            self._workers_restarted = message.workers_restarted
            _logger.warning("%s", message.text)
        elif isinstance(message, Joined):
            if message.generation == self._generation:
                self._joined = message
        elif isinstance(message, Welcome):
            try:
                self._source.welcomed(message)
            except LoaderdError as error:
                self._give_up(error)
        elif isinstance(message, Failed):
            self._give_up(from_wire(message.error))

    def _give_up(self, error: LoaderdError) -> None:
        self.close()
        raise LinkLost(f"{self._link.what} gave up: {error.message}", error)

    def wake(self) -> None:
        """Have a wait in another thread end, and the daemon; without waiting for it."""
        self._link.wake()

    def kill(self) -> None:
        """End the stream, whatever a daemon of ours is at. Its workers end with it, a moment later."""
        self._link.kill()

    def close(self) -> None:
        """End the stream, and wait for the end of our daemon; from any thread. A wait in another one ends, too."""
        self._link.close()
