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

import logging
import os
import pickle
import selectors
import time
import traceback
from dataclasses import replace
from typing import Any

from loaderd.daemon.data import Data, list_sets
from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.opening import OpenedStream
from loaderd.daemon.scheduler import Scheduler
from loaderd.daemon.stream import BrokenBatch, Delivery, Fault, PassEnd, Skip
from loaderd.daemon.tasks import IndexWork, LoadWork, ProbeWork, Task
from loaderd.daemon.worker_pool import WorkerPool
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError, from_wire, to_wire
from loaderd.plan.passes import Listing, Pass, listing_of
from loaderd.plan.positions import Position
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import (
    ATTACH_TASK,
    Ask,
    Attach,
    Broken,
    Done,
    Ended,
    Failed,
    IndexTask,
    List,
    Message,
    Open,
    Progress,
    Ready,
    Release,
    Skipped,
    Start,
    State,
    TaskFailed,
    Warned,
)
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ShardIndex
from loaderd.shards.index_cache import IndexCache

_logger = logging.getLogger(__name__)

_CLIENT = "client"
_PARENT = "parent"


class _Probe:
    """The one task between the index pass and the stream: does the first record fit the schema?"""

    def __init__(self) -> None:
        self._given = False
        self.finished = False
        self.error: LoaderdError | None = None

    def next_task(self) -> Task | None:
        if self._given:
            return None
        self._given = True
        return Task(self, ProbeWork())

    def done(self, task: Task, result: Any) -> None:
        self.finished = True

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.finished, self.error = True, error

    def retry(self, task: Task) -> bool:
        return True


class Service:
    """Serves one client until it goes, or its process ends."""

    def __init__(self, client: Channel, parent: int) -> None:
        self._client = client
        self._scheduler = Scheduler()
        self._pool = WorkerPool()
        self._selector = selectors.DefaultSelector()
        self._selector.register(client, selectors.EVENT_READ, _CLIENT)
        # The training process may have forked, and then its end of the socket outlives it; its pid does not.
        self._parent_fd = os.pidfd_open(parent)
        self._selector.register(self._parent_fd, selectors.EVENT_READ, _PARENT)
        self._channels: dict[int, Channel] = {}
        self._pickled = b""
        self._description: StreamDescription | None = None
        self._index_pass: IndexPass | None = None
        self._sets: list[list[ShardFile]] = []
        self._known: dict[ShardFile, ShardIndex] = {}
        self._num_cached = 0
        self._probe: _Probe | None = None
        self._opened: OpenedStream | None = None
        self._skips: list[Skip] = []
        self._began_s = time.monotonic()
        self._index_s = 0.0

    def run(self) -> None:
        """Until the client or its process is gone."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data == _PARENT:
                        return
                    if key.data == _CLIENT:
                        for message in self._client.receive():
                            self._from_client(message)
                    else:
                        self._from_worker(key.data)
                self._hand_out()
        except ChannelClosed:
            return
        except LoaderdError as error:
            self._fail(error)
        except Exception as error:
            self._fail(
                DaemonError(f"the daemon failed: {type(error).__name__}: {error}", traceback=traceback.format_exc())
            )
        finally:
            self._pool.kill()
            os.close(self._parent_fd)
            self._selector.close()
            self._client.close()

    def _fail(self, error: LoaderdError) -> None:
        try:
            self._client.send(Failed(to_wire(error)))
        except ChannelClosed:
            _logger.debug("the client left before it could be told: %s", error)

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
            self._client.send(State(f"the daemon is there, and so are its {len(self._pool.numbers)} workers"))
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
        self._client.send(self._opened.listed_message(error))

    # ------------------------------------------------------------------------------------------ workers

    def _start_workers(self, number: int) -> None:
        for _ in range(number):
            self._start_worker()

    def _start_worker(self) -> None:
        worker, channel = self._pool.start()
        self._channels[worker] = channel
        self._selector.register(channel, selectors.EVENT_READ, worker)
        self._attach(worker)
        self._scheduler.add_worker(worker)

    def _attach(self, worker: int) -> None:
        if self._opened is not None:
            self._pool.send(worker, self._opened.attach_message(), self._opened.fds())
        else:
            self._pool.send(worker, Attach(self._pickled, [], [], 0))

    def _from_worker(self, worker: int) -> None:
        try:
            messages = self._pool.receive(worker)
        except ChannelClosed:
            self._replace(worker)
            return
        for message in messages:
            if isinstance(message, Done):
                self._scheduler.end_task(worker, message.task, self._result_of(message))
            elif isinstance(message, TaskFailed):
                error = from_wire(message.error)
                if message.task == ATTACH_TASK:
                    raise error
                self._scheduler.end_task(worker, message.task, None, error)

    def _result_of(self, message: Done) -> Any:
        if isinstance(self._scheduler.work_of(message.task), LoadWork):
            return [Fault(tuple(places), from_wire(error)) for places, error in message.result]
        return message.result

    def _replace(self, worker: int) -> None:
        self._selector.unregister(self._channels.pop(worker))
        reason = self._pool.bury(worker)
        self._scheduler.lose_worker(worker, reason)
        self._start_worker()
        self._client.send(Warned(f"a worker process {reason}; another one does its work again", self._pool.restarts))

    # --------------------------------------------------------------------------------------- after events

    def _hand_out(self) -> None:
        """Go on to the next phase if this one is over; give out tasks; tell the client."""
        if self._index_pass is not None:
            self._after_indexing(self._index_pass)
        if self._probe is not None and self._probe.finished:
            self._after_probe(self._probe)
        for worker, task in self._scheduler.assign():
            self._pool.send(worker, self._message_of(task))
        self._tell_client()

    def _message_of(self, task: Task) -> Message:
        if isinstance(task.work, IndexWork):
            assert self._index_pass is not None
            file = self._index_pass.files[task.work.file]
            return IndexTask(task.number, [file.uri, file.size_bytes, file.mtime_ns])
        assert self._opened is not None
        return self._opened.task_message(task)

    def _after_indexing(self, index_pass: IndexPass) -> None:
        if index_pass.error is not None:
            self._scheduler.remove_source(index_pass)
            self._index_pass = None
            self._refuse(index_pass.error)
            return
        if index_pass.total_bytes:
            self._client.send(Progress(index_pass.done_bytes, index_pass.total_bytes))
        if not index_pass.finished:
            return
        self._scheduler.remove_source(index_pass)
        self._num_cached = index_pass.num_cached
        self._index_s = time.monotonic() - self._began_s
        if index_pass.unstored:
            text = f"the index could not be kept, so the next start makes it again: {index_pass.unstored}"
            self._client.send(Warned(text, self._pool.restarts))
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
        if self._opened is not None:
            self._opened.use(data)
            for worker in self._pool.numbers:
                self._attach(worker)
            self._client.send(self._opened.listed_message())
            return
        self._opened = OpenedStream(self._description, self._pickled, data)
        for worker in self._pool.numbers:
            self._attach(worker)
        if not self._pool.numbers:  # the index was there; what is wrong with the options was said before this
            self._start_workers(options.num_workers)
        self._probe = _Probe()
        self._scheduler.add_source(self._probe)

    def _after_probe(self, probe: _Probe) -> None:
        if probe.error is not None:
            raise probe.error
        assert self._opened is not None
        self._scheduler.remove_source(probe)
        self._probe = None
        self._scheduler.add_source(self._opened.stream)
        self._client.send(self._opened.listed_message())
        message = self._opened.opened_message(self._index_s, self._num_cached)
        self._client.send(message, (self._opened.slots.fd,))

    def _tell_client(self) -> None:
        if self._opened is None:
            return
        stream = self._opened.stream
        ready: list[list[int]] = []
        while stream.outbox:
            item = stream.outbox.popleft()
            if isinstance(item, Skip):
                self._skips.append(item)
                continue
            if self._skips and isinstance(item, (Delivery, BrokenBatch)):
                if ready:
                    self._client.send(Ready(stream.generation, ready))
                    ready = []
                errors = [to_wire(skip.fault.error) for skip in self._skips]
                count = sum(len(skip.fault.places) for skip in self._skips)
                self._client.send(Skipped(stream.generation, item.step, errors, count))
                self._skips.clear()
            if isinstance(item, Delivery):
                ready.append([item.step, item.slot, item.num_records])
                continue
            if ready:
                self._client.send(Ready(stream.generation, ready))
                ready = []
            if isinstance(item, BrokenBatch):
                self._client.send(Broken(stream.generation, item.step, to_wire(item.error)))
            elif isinstance(item, PassEnd):
                self._client.send(Ended(stream.generation))
        if ready:
            self._client.send(Ready(stream.generation, ready))


def main() -> None:
    """Entry point of the daemon process: see ``protocol.process.start_process``."""
    from loaderd.protocol.process import enter_process

    sock, parent = enter_process("loaderd-daemon")
    try:
        service = Service(Channel(sock), parent)
    except ProcessLookupError:  # the training process is gone already
        return
    service.run()
