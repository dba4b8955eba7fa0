"""The daemon's event loop: between one client, the scheduler and the workers.

::

    client ──Open──►  list the shards, load cached indexes
                      IndexTask … for the rest                   IndexPass is the source of tasks
                      plan, make the memories, Attach, ProbeTask    Probe is
           ◄─Listed─
           ◄─Opened─
           ──List──►  (where data sets grow) list them again, IndexTask …, Attach
           ◄─Listed─
           ──Start──► LoadTask, FillTask …                       the Stream is
           ◄─Ready──
           ─Release─►

One thread; it waits in ``select`` for the client, for a worker, or for the training process to end, and after each
event hands out what can be handed out. Whatever goes wrong for good is sent as Failed, and the daemon ends.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

from loaderd.daemon.data import Data, list_sets
from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.opening import OpenedStream
from loaderd.daemon.outgoing import BrokenBatch, Delivery, Fault, PassEnd
from loaderd.daemon.probe import Probe
from loaderd.daemon.scheduler import Scheduler
from loaderd.daemon.tasks import IndexWork, LoadWork, Task
from loaderd.daemon.waits import describe
from loaderd.daemon.wires import Wires
from loaderd.daemon.worker_pool import WorkerPool
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError, from_wire, to_wire
from loaderd.machine import remedy
from loaderd.plan.passes import Listing, Pass, listing_of
from loaderd.plan.positions import Position
from loaderd.protocol.channel import Channel
from loaderd.protocol.messages import (
    Ask,
    Broken,
    Ended,
    Failed,
    List,
    Message,
    Open,
    Progress,
    Ready,
    Release,
    Skipped,
    Start,
    State,
    Warned,
)
from loaderd.protocol.worker_messages import ATTACH_TASK, Advanced, Attach, Attached, Done, IndexTask, TaskFailed
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ShardIndex
from loaderd.shards.index_cache import IndexCache

_CLIENT = -1
_MAX_TICK_S = 1.0
_MIN_TICKS = 8
# To start, a worker imports what the schema needs.
_MIN_START_TIMEOUT_S = 60.0
_LAST_WORDS_S = 5.0


class Service:
    """Serves one client until it goes, or its process ends."""

    def __init__(self, client: Channel, parent: int) -> None:
        self._scheduler = Scheduler()
        self._pool = WorkerPool()
        self._wires = Wires()
        self._parent_fd = os.pidfd_open(parent)
        self._wires.add(_CLIENT, client, self._parent_fd)
        self._pickled = b""
        self._description: StreamDescription | None = None
        self._index_pass: IndexPass | None = None
        self._sets: list[list[ShardFile]] = []
        self._known: dict[ShardFile, ShardIndex] = {}
        self._num_cached = 0
        self._probe: Probe | None = None
        self._opened: OpenedStream | None = None
        self._began_s = time.monotonic()
        self._index_s = 0.0
        self._tick_s = _MAX_TICK_S
        self._ticked_s = time.monotonic()

    def run(self) -> None:
        """Until the client or its process is gone."""
        try:
            while True:
                for number, messages in self._wires.wait(self._tick_s):
                    if number != _CLIENT:
                        self._from_worker(number, messages)
                    elif messages is None:
                        return
                    else:
                        for message in messages:
                            self._from_client(message)
                self._tick()
                self._hand_out()
        except LoaderdError as error:
            self._fail(error)
        except Exception as error:
            self._fail(
                DaemonError(
                    f"the daemon failed: {type(error).__name__}: {error}",
                    hint=remedy(error),
                    traceback=traceback.format_exc(),
                )
            )
        finally:
            self._wires.close()
            self._pool.kill()
            os.close(self._parent_fd)

    def _fail(self, error: LoaderdError) -> None:
        self._tell(Failed(to_wire(error)))
        self._wires.finish(_CLIENT, _LAST_WORDS_S)

    def _tell(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        self._wires.post(_CLIENT, message, fds)

    def describe(self) -> str:
        """Who waits for whom."""
        return describe(self._pool, self._scheduler, self._index_pass, self._opened, self._tick_s)

    # ------------------------------------------------------------------------------------------- client

    def _from_client(self, message: Message) -> None:
        if isinstance(message, Release):
            assert self._opened is not None
            self._opened.stream.release(message.slots)
        elif isinstance(message, Start):
            assert self._opened is not None
            self._opened.stream.start(message.generation, Pass.from_wire(message.which), message.step)
        elif isinstance(message, List):
            assert self._opened is not None
            self._opened.stream.stop()
            self._list(listing_of(message.listing))
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Ask):
            self._tell(State(self.describe()))
        else:
            raise DaemonError(f"the client sent {type(message).__name__}, which is not for the daemon")

    def _open(self, message: Open) -> None:
        self._pickled = message.description
        try:
            description = replace(pickle.loads(message.description), start=message.start)
        except Exception as error:
            raise DaemonError(
                f"the daemon cannot take the schema over: {type(error).__name__}: {error}",
                hint="A derived field's function must be importable, or picklable by value, in another process.",
            ) from None
        self._description = description
        stall_timeout = description.options.stall_timeout
        if stall_timeout is not None:
            self._tick_s = min(_MAX_TICK_S, stall_timeout / _MIN_TICKS)
        start = None if description.start is None else Position.from_json(description.start)
        self._list(None if start is None else start.listing)

    def _list(self, listing: Listing | None) -> None:
        """Find the shards; what goes wrong with those of sets that have grown costs the client nothing more."""
        assert self._description is not None
        options = self._description.options
        try:
            self._sets = list_sets(self._description.dataset, listing)
        except LoaderdError as error:
            self._refuse(error)
            return
        files = [file for files in self._sets for file in files]
        self._index_pass = IndexPass(files, IndexCache(options.index_cache, options.block_records), self._known)
        self._scheduler.add_source(self._index_pass)
        if not self._index_pass.finished and not self._pool.numbers:
            self._start_workers(options.num_workers)

    def _refuse(self, error: LoaderdError) -> None:
        if self._opened is None:
            raise error
        self._tell(self._opened.listed_message(error))

    # ------------------------------------------------------------------------------------------ workers

    def _start_workers(self, number: int) -> None:
        for _ in range(number):
            self._start_worker()

    def _start_worker(self) -> None:
        worker, channel, pidfd = self._pool.start()
        self._wires.add(worker, channel, pidfd)
        self._attach(worker)
        self._scheduler.add_worker(worker)

    def _attach(self, worker: int) -> None:
        if self._opened is not None:
            self._wires.post(worker, self._opened.attach_message(), self._opened.fds())
        else:
            self._wires.post(worker, Attach(self._pickled, [], [], 0))

    def _from_worker(self, worker: int, messages: list[Message] | None) -> None:
        if messages is None:
            self._lose(worker)
            return
        for message in messages:
            if isinstance(message, Attached):
                self._scheduler.ready(worker)
                continue
            if isinstance(message, Advanced):
                self._scheduler.advanced(worker, message.task, message.done_bytes)
            elif isinstance(message, Done):
                self._scheduler.end_task(worker, message.task, self._result_of(message))
            elif isinstance(message, TaskFailed):
                error = from_wire(message.error)
                if message.task == ATTACH_TASK:
                    raise error
                self._scheduler.end_task(worker, message.task, None, error)
            self._pool.achieved()

    def _result_of(self, message: Done) -> Any:
        if isinstance(self._scheduler.work_of(message.task), LoadWork):
            return [Fault(tuple(places), from_wire(error)) for places, error in message.result]
        return message.result

    def _tick(self) -> None:
        """Time passes, but not while this process is stopped: then no more than a tick."""
        now_s = time.monotonic()
        if now_s - self._ticked_s < self._tick_s:
            return
        self._ticked_s = now_s
        self._pool.reap()
        self._scheduler.tick()
        timeout_s = None if self._description is None else self._description.options.stall_timeout
        if timeout_s is None:
            return
        limit = math.ceil(timeout_s / self._tick_s)
        start_limit = math.ceil(max(timeout_s, _MIN_START_TIMEOUT_S) / self._tick_s)
        for worker in self._scheduler.stalled(limit, start_limit):
            self._lose(worker, f"made no progress for {timeout_s:g} s")

    def _lose(self, worker: int, stalled: str = "") -> None:
        """A worker is dead, or has ``stalled``: another one takes its place."""
        tasks, pid = self._scheduler.tasks_of(worker), self._pool.pid_of(worker)
        self._wires.remove(worker)
        reason = self._pool.bury(worker)
        at = f" at {tasks[0].work}" if tasks else ""
        self._scheduler.lose_worker(worker, stalled or reason, bool(stalled))
        self._start_worker()
        text = f"worker process {pid} {stalled or reason}{at}; another one does its work again"
        self._tell(Warned(text, self._pool.restarts))

    # --------------------------------------------------------------------------------------- after events

    def _hand_out(self) -> None:
        """Go on to the next phase if this one is over; give out tasks; tell the client."""
        if self._index_pass is not None:
            self._after_indexing(self._index_pass)
        if self._probe is not None and self._probe.finished:
            self._after_probe(self._probe)
        for worker, task in self._scheduler.assign():
            self._wires.post(worker, self._message_of(task))
        self._tell_client()

    def _message_of(self, task: Task) -> Message:
        if isinstance(task.work, IndexWork):
            assert self._index_pass is not None
            file = self._index_pass.files[task.work.file]
            return IndexTask(task.number, [file.uri, file.size_bytes, file.mtime_ns])
        assert self._opened is not None
        return self._opened.task_message(task)

    def _after_indexing(self, index_pass: IndexPass) -> None:
        if index_pass.total_bytes:
            self._tell(Progress(index_pass.done_bytes, index_pass.total_bytes))
        if not index_pass.finished:
            return
        self._scheduler.remove_source(index_pass)
        self._num_cached = index_pass.num_cached
        self._index_s = time.monotonic() - self._began_s
        if index_pass.unstored:
            text = f"the index could not be kept, so the next start makes it again: {index_pass.unstored}"
            self._tell(Warned(text, self._pool.restarts))
        self._index_pass = None
        indexes = {file: index_pass.indexes[number] for number, file in enumerate(index_pass.files)}
        try:
            self._use(indexes)
        except LoaderdError as error:
            self._refuse(error)

    def _use(self, indexes: dict[ShardFile, ShardIndex]) -> None:
        """The data are there: plan, and have the workers know of them."""
        assert self._description is not None
        options = self._description.options
        data = Data(self._description.dataset, options, self._sets, indexes.__getitem__)
        if data.listing is not None:
            self._known = indexes
        if data.unreadable:
            text = f"{len(data.unreadable)} of {len(data.files)} shards cannot be indexed and are left out"
            self._tell(Warned(f"{text}: {data.unreadable[0].message}", self._pool.restarts))
        opened = self._opened
        if opened is None:
            self._opened = OpenedStream(self._description, self._pickled, data, len(self._pool.numbers))
        else:
            opened.use(data)
        for worker in self._pool.numbers:
            self._attach(worker)
        if opened is not None:
            self._tell(opened.listed_message())
            return
        if not self._pool.numbers:  # the index was there; what is wrong with the options was said before this
            self._start_workers(options.num_workers)
        self._probe = Probe()
        self._scheduler.add_source(self._probe)

    def _after_probe(self, probe: Probe) -> None:
        if probe.error is not None:
            raise probe.error
        assert self._opened is not None
        self._scheduler.remove_source(probe)
        self._probe = None
        self._scheduler.add_source(self._opened.stream)
        self._tell(self._opened.listed_message())
        message = self._opened.opened_message(self._index_s, self._num_cached)
        self._tell(message, (self._opened.slots.fd,))

    def _tell_client(self) -> None:
        if self._opened is None:
            return
        stream = self._opened.stream
        ready: list[list[int]] = []
        while stream.outbox:
            item = stream.outbox.popleft()
            if isinstance(item, Delivery) and not item.errors:
                ready.append([item.step, item.slot, item.num_records])
                continue
            if ready:
                self._tell(Ready(stream.generation, ready))
                ready = []
            if isinstance(item, Delivery):
                errors = [to_wire(error) for error in item.errors]
                self._tell(Skipped(stream.generation, item.step, errors, item.num_skipped))
                ready = [[item.step, item.slot, item.num_records]]
            elif isinstance(item, BrokenBatch):
                self._tell(Broken(stream.generation, item.step, to_wire(item.error)))
            elif isinstance(item, PassEnd):
                self._tell(Ended(stream.generation))
        if ready:
            self._tell(Ready(stream.generation, ready))


def main() -> None:
    """Entry point of the daemon process: see ``protocol.process.start_process``."""
    from loaderd.protocol.process import enter_process

    sock, parent = enter_process("loaderd-daemon")
    try:
        service = Service(Channel(sock), parent)
    except ProcessLookupError:  # the training process was killed while this one started
        return
    signal.signal(signal.SIGUSR1, lambda *_: print(service.describe(), file=sys.stderr, flush=True))
    service.run()
