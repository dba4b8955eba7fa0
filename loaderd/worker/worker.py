"""The worker process: makes the batches that it may, and does the tasks that it is given. Ends with the daemon.

::

    ┌─► a task is due ────────► do it
    ├─► a batch can be made ──► make it     of each stream in turn
    ├─► a task is there ──────► do it
    └── sleep until the daemon says something, or a slot comes back ◄─┘
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError, WorkerError
from loaderd.formats.reader import Reading
from loaderd.ipc.channel import Channel, ChannelClosed, WorkerChannel
from loaderd.ipc.messages import Message, UseServers
from loaderd.ipc.worker_messages import (
    ATTACH_TASK,
    NO_STREAM,
    AskTask,
    Attach,
    Detach,
    Ended,
    FillFailed,
    IndexTask,
    ListTask,
    LoadTask,
    News,
    OutageReport,
    Seat,
    Shards,
    TaskProgress,
    UseColumn,
    WorkerNotice,
    WorkerTask,
)
from loaderd.machine import be_killed_first, remedy
from loaderd.options import Storage
from loaderd.shm.anonymous import mapped
from loaderd.shm.page import STORAGE_COUNTERS, Counter, Page, barrier, ring, silence
from loaderd.stages import Stage
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile, is_remote
from loaderd.worker.file_rows import FileRows
from loaderd.worker.page_producer import Claim, PageProducer
from loaderd.worker.task_runner import TaskRunner, index_group, value_pass_of

if TYPE_CHECKING:
    from loaderd.remote.row_fetcher import RowFetcher
    from loaderd.remote.source import RemoteRows

_TELL_EVERY_S = 0.2
_SAY_EVERY_S = 1.0
# How often it listens while there is work: to listen costs 2 µs, and no message is so urgent.
_LISTEN_EVERY_S = 0.001
_MOST_SLEEP_MS = 1000

_OF_NO_STREAM = (ListTask, AskTask, IndexTask)


class _Stream:
    """What a worker has of a stream."""

    def __init__(self, number: int, runner: TaskRunner, producer: PageProducer, bells: list[int]) -> None:
        self.number = number
        self.runner = runner
        self.producer = producer
        self._bells = bells

    def close(self) -> None:
        self.runner.rows.close()
        for bell in self._bells:
            os.close(bell)


class Worker:
    """Answers each task with Ended. Of batches, it only reports those that cannot be made."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._seat = self._bell = -1
        self._streams: dict[int, _Stream] = {}
        self._turns: deque[_Stream] = deque()
        """The streams, in the order in which they get a batch made."""
        self._tasks: deque[WorkerTask] = deque()
        self._task = ATTACH_TASK
        self._said: deque[str] = deque()
        self._told_s = self._listened_s = self._looked_s = 0.0
        self._unanswered_s: dict[int, float] = {}
        """When it was last said of a stream that its requests have no answer."""
        self._done_bytes = 0
        self._values: bytes | None = b""
        """Those of the last task that has come, if it is an IndexTask."""
        self._accesses: dict[bytes, Access] = {}
        """By the pickles of their options."""
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    # ------------------------------------------------------------------------------------------- messages

    def _listen(self, timeout_ms: float) -> None:
        """Handle what the daemon says, waiting for up to ``timeout_ms``. Raises ChannelClosed when it is gone."""
        arrived = [fd for fd, _ in self._poll.poll(timeout_ms)]
        if self._bell in arrived:
            silence(self._bell)
        if self._channel.fileno() in arrived:
            for message in self._channel.receive():
                self._received(message)
        self._listened_s = time.monotonic()

    def _received(self, message: Message) -> None:
        if isinstance(message, WorkerTask):
            if isinstance(message, IndexTask) and message.values is None:
                message = message._replace(values=self._values)
            self._values = message.values if isinstance(message, IndexTask) else b""
            if not self._values:
                value_pass_of.cache_clear()
            self._tasks.append(message)
            self._begin(message)
        elif isinstance(message, UseServers):
            for stream in self._streams.values():
                stream.runner.rows.use_servers(tuple(message.addresses))
        elif isinstance(message, News):
            memories = mapped(self._channel.take_fd()) if isinstance(message, UseColumn) else ()
            if message.stream in self._streams:
                self._streams[message.stream].producer.received(message, *(memory.bytes for memory in memories))
        elif isinstance(message, Attach):
            self._channel.send(self._try_attach(message))
        elif isinstance(message, Detach):
            self.detach(message.stream)
        elif isinstance(message, Seat):
            self._seat, self._bell = message.seat, self._channel.take_fd()
            self._poll.register(self._bell, select.POLLIN)

    def _begin(self, task: WorkerTask) -> None:
        if isinstance(task, LoadTask) and task.stream in self._streams:
            self._streams[task.stream].runner.rows.begin(task)
        elif isinstance(task, IndexTask):
            for file in task.group:
                for part in file.parts:
                    if is_remote(part.uri):
                        self._access_of(task.storage).fetch_ahead(part)

    def _access_of(self, pickled: bytes) -> Access:
        """One for all tasks and streams with the same options: they share its threads and its connections.

        Equal bytes are enough: file systems that came from the same bytes need not compare as equal.
        """
        if pickled not in self._accesses:
            storage: Storage = pickle.loads(pickled)
            equal = (access for access in self._accesses.values() if access.storage == storage)
            access = next(equal, None)
            if access is None:
                access = Access(storage, lambda: self._tell(self._done_bytes), lambda: ring(self._bell), self._say)
            self._accesses[pickled] = access
        return self._accesses[pickled]

    def _try_attach(self, message: Attach) -> Message:
        memories = [self._channel.take_fd() for _ in range(3 + message.num_members)]
        bells = [self._channel.take_fd() for _ in range(max(1, message.num_members))]
        failure: LoaderdError
        try:
            self.attach(message, memories, bells)
        except LoaderdError as error:
            failure = error
        except (Exception, SystemExit) as error:  # modules of the user's are imported
            failure = WorkerError(
                f"a worker cannot take the schema over: {type(error).__name__}: {error}",
                hint="A derived field's function must be importable, or picklable by value, in another process.",
                traceback=traceback.format_exc(),
            )
        else:
            return Ended(ATTACH_TASK, None, message.stream)
        for bell in bells:
            os.close(bell)
        return Ended(ATTACH_TASK, failure, message.stream)

    def attach(self, message: Attach, memories: list[int], bells: list[int]) -> None:
        """Take over a stream: its description, its files, its memories. It may come again, with other files."""
        self.detach(message.stream)
        windows, slots, words, *columns = mapped(*memories)
        description = pickle.loads(message.description)
        sizes = message.num_slots, message.num_seats, message.num_members
        page = Page(words.bytes, *sizes, [column.bytes for column in columns])
        spent = page.spent(self._seat)
        rows = self._rows_of(description, message.source, spent)
        runner = TaskRunner(description, rows, message.max_rows, windows, slots, spent)
        producer = PageProducer(page, self._seat, message.news, bells)
        stream = self._streams[message.stream] = _Stream(message.stream, runner, producer, bells)
        self._turns.append(stream)

    def _rows_of(
        self, description: StreamDescription, source: Shards | bytes, spent: memoryview[int]
    ) -> FileRows | RowFetcher:
        """What reads the records of a stream; ``source`` as in Attach."""
        if isinstance(source, Shards):
            reading = Reading(self._tell, self._access_of(source.storage).counted_apart(), spent)
            return FileRows(description.schema, source.files, source.compressions, reading)
        from loaderd.remote.row_fetcher import RowFetcher  # for those who need it

        rows: RemoteRows = pickle.loads(source)
        return RowFetcher(rows, self._tell, self._say, lambda: ring(self._bell), spent)

    def detach(self, stream: int) -> None:
        """Forget a stream, if there is one of that number."""
        if stream in self._streams:
            gone = self._streams.pop(stream)
            self._unanswered_s.pop(stream, None)
            self._turns.remove(gone)
            self._count_storage(gone)  # it may come again, with the same page
            gone.close()
            over = [task for task in self._tasks if not isinstance(task, _OF_NO_STREAM) and task.stream == stream]
            for task in over:
                self._tasks.remove(task)
                self._channel.send(Ended(task.task, WorkerError("the stream is over")))

    def _tell(self, done_bytes: int) -> None:
        """Say now and then that a long task makes progress."""
        self._pass_on()
        self._done_bytes = done_bytes
        now_s = time.monotonic()
        if now_s - self._told_s > _TELL_EVERY_S:
            self._told_s = now_s
            self._channel.send(TaskProgress(self._task, done_bytes))
        self._tell_outages()

    def _tell_outages(self) -> None:
        """Say once a second whose requests have no answer; and, when they have again, that they have."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _TELL_EVERY_S:
            return
        self._looked_s = now_s
        outages = {number: stream.runner.rows.outage for number, stream in self._streams.items()}
        of_tasks = (access.outages.outage for access in self._accesses.values())
        outages[NO_STREAM] = next((outage for outage in of_tasks if outage is not None), None)
        for number, outage in outages.items():
            told_s = self._unanswered_s.get(number)
            if outage is None and told_s is not None:
                del self._unanswered_s[number]
                self._channel.send(OutageReport(number, None))
            elif outage is not None and (told_s is None or now_s - told_s >= _SAY_EVERY_S):
                self._unanswered_s[number] = now_s
                self._channel.send(OutageReport(number, outage))

    def _say(self, text: str) -> None:
        """Send the user a notice; in any thread."""
        self._said.append(text)  # the thread that speaks with the daemon sends it

    def _pass_on(self) -> None:
        while self._said:
            self._channel.send(WorkerNotice(self._said.popleft()))

    # --------------------------------------------------------------------------------------- what it does

    def run(self) -> None:
        """Work until the daemon closes the channel, which raises ChannelClosed."""
        self._channel.send(Ended(ATTACH_TASK))
        while True:
            if not self._work():
                self._sleep()
            elif time.monotonic() - self._listened_s > _LISTEN_EVERY_S:
                self._listen(0)

    def _work(self) -> bool:
        """Do one thing; False if there is nothing to do."""
        there = next((task for task in self._tasks if self._is_there(task)), None)
        if there is not None and self._is_due(there):
            self._do_task(there)
            return True
        for stream in list(self._turns):
            if stream.producer.has_news:  # the message is on its way; other streams need not wait for it
                self._listen(_MOST_SLEEP_MS if len(self._turns) == 1 else 0)
            if stream.producer.has_news or self._streams.get(stream.number) is not stream:
                continue
            claim = stream.producer.claim()
            if claim is not None:
                self._turns.remove(stream)
                self._turns.append(stream)
                self._make(stream, claim)
                return True
        if there is not None and there in self._tasks:  # else its stream has ended meanwhile
            self._do_task(there)
            return True
        return False

    def _sleep(self) -> None:
        """Sleep until there may be something to do."""
        for stream in self._turns:
            stream.producer.page.say_sleeps(self._seat, True)
        barrier()
        slept_ns = 0
        waiting: list[LoadTask] = []
        if not self._work():
            waiting = [task for task in self._tasks if isinstance(task, LoadTask)]
            began_ns = time.monotonic_ns()
            self._listen(_MOST_SLEEP_MS)
            slept_ns = time.monotonic_ns() - began_ns
            if waiting and waiting[0] in self._tasks:  # not stalled: storage limits its own silence
                self._task = waiting[0].task
                self._tell(0)
        self._tell_outages()
        on_their_way = {task.stream for task in waiting}
        for stream in self._turns:
            stream.producer.page.say_sleeps(self._seat, False)
            self._count_sleep(stream.producer, slept_ns, stream.number in on_their_way)

    def _count_sleep(self, producer: PageProducer, slept_ns: int, rows_are_on_their_way: bool) -> None:
        page = producer.page
        if not producer.has_slot:
            page.count(self._seat, Counter.SLOT_WAIT_NS, slept_ns)
        elif rows_are_on_their_way:  # storage, or a server, is waited for: that is reading
            page.spend(self._seat, Stage.READ, slept_ns)
            page.count(self._seat, Counter.LOAD_NS, slept_ns)
        else:
            page.count(self._seat, Counter.WINDOW_WAIT_NS, slept_ns)

    def _is_due(self, task: WorkerTask) -> bool:
        """Whether the task must be done before more batches are made."""
        if not isinstance(task, LoadTask):
            return True
        return self._streams[task.stream].producer.page.least_place() >= task.due

    def _is_there(self, task: WorkerTask) -> bool:
        """Whether the task need not wait for storage. Until then, the worker does others, and makes batches."""
        return not isinstance(task, LoadTask) or self._streams[task.stream].runner.rows.is_there(task)

    def _make(self, stream: _Stream, claim: Claim) -> None:
        """Make a batch, and say so on the page; or tell the daemon why it cannot be made."""
        if claim.batch.suspects:
            self._try_suspects(stream, claim)
        began_ns, segments, omit = time.monotonic_ns(), claim.batch.segments, list(claim.batch.omit)
        fill = partial(stream.runner.fill, claim.slot, segments, omit)
        error = self._outcome_of(fill, f"the decoding of batch {claim.step}")
        page, fill_ns = stream.producer.page, time.monotonic_ns() - began_ns
        count_ns = partial(page.count, self._seat, Counter.FILL_NS)  # whose rise shows that it has not stalled
        count_ns(fill_ns)
        page.count(self._seat, Counter.FILLS, 1)
        if error is None:
            stream.producer.made(claim)
            return
        faults, all_faults = stream.runner.row_faults(claim.slot, segments, omit, fill_ns, count_ns)
        stream.producer.not_made(claim)
        self._channel.send(FillFailed(stream.number, *claim.place, omit, faults, all_faults, error))

    def _try_suspects(self, stream: _Stream, claim: Claim) -> None:
        """Say on the page which part is decoded, so that the daemon knows of which one this process has died."""
        page = stream.producer.page
        for row in stream.runner.decode_suspects(claim.slot, claim.batch):
            if page.least_place() > claim.key:  # nobody wants the batch any more
                break
            page.say_row(self._seat, row)
        page.say_row(self._seat, -1)

    def _do_task(self, task: WorkerTask) -> None:
        """Do a task, and answer."""
        self._tasks.remove(task)
        self._task, self._done_bytes = task.task, 0
        stream = None if isinstance(task, _OF_NO_STREAM) else self._streams.get(task.stream)
        began_ns = time.monotonic_ns()
        if stream is not None:
            stream.producer.page.say_task(self._seat, task.task)
        outcome = self._outcome_of(partial(self._result_of, task), task)
        if stream is not None:
            page = stream.producer.page
            page.say_task(self._seat, None)
            if isinstance(task, LoadTask):
                self._count_storage(stream)
                page.count(self._seat, Counter.LOADS, 1)
                page.count(self._seat, Counter.LOAD_NS, time.monotonic_ns() - began_ns)
        self._pass_on()
        self._tell_outages()
        self._channel.send(Ended(task.task, outcome))

    def _count_storage(self, stream: _Stream) -> None:
        rows = stream.runner.rows
        if isinstance(rows, FileRows):
            for counter, amount in zip(STORAGE_COUNTERS, astuple(rows.access.take_counts()), strict=True):
                stream.producer.page.count(self._seat, counter, amount)

    def _result_of(self, task: WorkerTask) -> Any:
        if isinstance(task, ListTask):
            return self._list(task)
        if isinstance(task, AskTask):
            from loaderd.remote.ask_once import ask_table  # for those who need it

            return ask_table(task, self._tell, self._say)
        if isinstance(task, IndexTask):
            return index_group(task, self._tell, self._access_of(task.storage))
        runner = self._streams[task.stream].runner
        if isinstance(task, LoadTask):
            return runner.load(task)
        return runner.probe(task)

    def _list(self, task: ListTask) -> list[list[ShardFile]]:
        listed: list[list[ShardFile]] = []
        access = self._access_of(task.storage)
        for names in task.sets:
            listed.append(list_shards(names, lambda more: self._tell(sum(map(len, listed)) + more), access))
        return listed

    def _outcome_of(self, do: Callable[[], Any], doing: object) -> Any:
        """What ``do`` returns; or what goes wrong while it is ``doing`` that, as an error of loaderd's."""
        try:
            return do()
        except LoaderdError as error:
            return error
        except Exception as error:
            text = f"a worker failed at {doing}: {type(error).__name__}: {error}"
            return WorkerError(text, hint=remedy(error), traceback=traceback.format_exc())


def main(sock: socket.socket) -> None:
    """What a worker process does; it speaks with the daemon through ``sock``."""
    be_killed_first()
    if "numpy.random" in sys.modules:  # all workers are forks, with the same random state
        sys.modules["numpy.random"].seed()
    channel, status = WorkerChannel(sock), 0
    with contextlib.suppress(ChannelClosed):
        try:
            Worker(channel).run()
        except DaemonError as error:  # it can open too few files for what it was sent
            status = 1
            channel.send(WorkerNotice(f"a worker {error.message}. {error.hint}"))
        except WorkerError as error:
            status = 1
            channel.send(WorkerNotice(f"a worker ends: {error.message}"))
    os._exit(status)  # a thread may wait for storage, for ever
