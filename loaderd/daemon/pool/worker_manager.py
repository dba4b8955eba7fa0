"""The workers and what they are given: messages to them, messages from them, and their replacement.

::

    sources of tasks ──► Scheduler (who does what) ──► WorkerManager (how it is said) ──► worker processes
                                                          ├ every worker is attached to every stream: Attach, Detach
                                                          └ and of what it may make: Granted, Withdrawn

The daemon's loop passes on what comes from workers, and calls :meth:`WorkerManager.tick` and
:meth:`WorkerManager.assign` after each round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from loaderd.daemon.pool.scheduler import Scheduler
from loaderd.daemon.pool.tasks import Task, TaskSource, current_task
from loaderd.daemon.pool.worker_pool import WorkerPool
from loaderd.daemon.pool.worker_usage import WorkerUsage
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.event_loop import EventLoop
from loaderd.ipc.messages import Message
from loaderd.ipc.worker_messages import (
    ATTACH_TASK,
    NO_STREAM,
    Attach,
    Detach,
    Ended,
    FillFailed,
    Granted,
    IndexTask,
    News,
    OutageReport,
    Seat,
    TaskProgress,
    WorkerNotice,
)
from loaderd.shm.page import Counter, Page, new_bell, silence, step_of
from loaderd.snapshots import Outage

BELL = -3
"""The number of the daemon's bell among what ``EventLoop`` listens to."""
_MAX_TICK_S = 1.0
_MIN_TICKS = 8
_SAID_AGAIN_S = 10.0
# While it starts, a worker imports what the schema needs.
_MIN_START_TIMEOUT_S = 60.0


class Attachable(Protocol):
    """A stream that workers are to know of: see ``delivery.opened_stream``."""

    number: int

    @property
    def page(self) -> Page: ...

    def attach_message(self, seat: int) -> tuple[Attach, tuple[int, ...]]: ...

    def granted_message(self) -> Granted: ...

    def attach_failed(self, error: LoaderdError) -> None: ...

    def is_under_way(self, key: int) -> bool: ...

    def received(self, seat: int, message: FillFailed | OutageReport) -> None: ...

    def lose_claims(self, seat: int, reason: str, stalled: bool) -> None: ...


class WorkerManager:
    """See the module's docstring.

    ``warn`` gets a line for every worker that is replaced, and the notices of workers.
    """

    def __init__(
        self, event_loop: EventLoop, pool: WorkerPool, stall_timeout: float | None, warn: Callable[[str], None]
    ) -> None:
        self.scheduler = Scheduler()
        self.pool = pool
        self.stall_timeout = stall_timeout
        """Seconds in which a worker must make progress; None: it may take for ever."""
        self._event_loop = event_loop
        self._warn = warn
        self._streams: dict[int, Attachable] = {}
        self._num_fills = 0
        self._num_missing = 0
        """Workers that are lost, and could not be replaced yet."""
        self._shortage: DaemonError | None = None
        """Why the machine lets us have no others in their place."""
        self._said: dict[str, float] = {}
        self._outages: dict[int, Outage] = {}
        """Of workers whose requests have no answer, for tasks that belong to no stream."""
        self._values: dict[int, bytes | None] = {}
        """The ``values`` of the last task of each worker, which need not be sent again: they may be large."""
        self.use = WorkerUsage(pool)
        """For samples."""
        self.bell = new_bell()
        """The daemon's bell: a consumer rings it when it has come to the batch that its page names."""
        event_loop.watch(BELL, self.bell)

    @property
    def tick_s(self) -> float:
        """How often :meth:`tick` is to be called."""
        return _MAX_TICK_S if self.stall_timeout is None else min(_MAX_TICK_S, self.stall_timeout / _MIN_TICKS)

    # ---------------------------------------------------------------------------------- what there is to do

    def attach(self, stream: Attachable) -> None:
        """Have all workers, present and future ones, know of a stream. Call it again when the shards are others."""
        self._streams[stream.number] = stream
        for worker in self.pool.numbers:
            self._tell_of(worker, stream)

    def tell(self, stream: Attachable, message: News, fds: tuple[int, ...] = ()) -> None:
        """Have all workers know what they may make of a stream, or where a column of it lies."""
        for worker in self.pool.numbers:
            self._tell_news(worker, stream, message, fds)

    def _tell_news(self, worker: int, stream: Attachable, message: News, fds: tuple[int, ...] = ()) -> None:
        stream.page.add_news(self.pool.seat_of(worker))
        self._event_loop.post(worker, message, fds)

    def tell_all(self, message: Message) -> None:
        for worker in self.pool.numbers:
            self._event_loop.post(worker, message)

    def detach(self, stream: Attachable) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self.tell_all(Detach(stream.number))

    def _tell_of(self, worker: int, stream: Attachable) -> None:
        self._event_loop.post(worker, *stream.attach_message(self.pool.seat_of(worker)))
        self._tell_news(worker, stream, stream.granted_message())
        self.scheduler.unready(worker)

    # ------------------------------------------------------------------------------------------ workers

    def start(self, number: int) -> None:
        """Start workers until there are ``number``, with those that are still to be replaced."""
        while len(self.pool.numbers) + self._num_missing < number:
            self._start_worker()

    def _start_worker(self) -> None:
        worker, channel, pidfd = self.pool.start()
        self._event_loop.add(worker, channel, pidfd)
        seat = self.pool.seat_of(worker)
        self._event_loop.post(worker, Seat(seat), (self.pool.bells[seat],))
        self.scheduler.add_worker(worker)
        for stream in self._streams.values():
            self._tell_of(worker, stream)

    def _replace(self) -> None:
        """Replace workers that are lost. While the machine lets us have none, those that are left go on.

        Raises DaemonError if none is left.
        """
        while self._num_missing:
            try:
                self._start_worker()
            except DaemonError as error:
                if not self.pool.numbers:
                    raise
                if self._shortage is None:
                    text = f"{error.message}. {error.hint}".strip()
                    self._warn(f"{text} Those that are left ({len(self.pool.numbers)}) go on; it is tried again")
                self._shortage = error
                return
            self._num_missing -= 1
        self._shortage = None

    def shortage(self, page: Page) -> DaemonError | None:
        """Why no free slot of a page has its worker; None: some have, or none is free."""
        lacking = {page.seat_of(slot) for slot in range(page.num_slots) if page.is_free(slot)}
        has_worker = not lacking.isdisjoint(map(self.pool.seat_of, self.pool.numbers))
        return None if has_worker or not lacking else self._shortage

    def received(self, worker: int, messages: list[Message] | None) -> None:
        """Handle what has come from a worker (None: it is dead), or from BELL: the daemon's bell was rung."""
        if worker == BELL:
            silence(self.bell)
            return
        if messages is None:
            self._lose(worker)
            return
        for message in messages:
            if isinstance(message, Ended) and message.task == ATTACH_TASK:
                self._attached(worker, message)
                continue
            if isinstance(message, WorkerNotice):
                self._pass_on(message.text)
                continue
            if isinstance(message, OutageReport):
                self._unanswered(worker, message)
                continue
            if isinstance(message, TaskProgress):
                self.scheduler.advanced(worker, message.task, message.done_bytes)
                if not message.done_bytes:  # no progress: the task only waits, or has begun
                    continue
            elif isinstance(message, Ended):
                self.scheduler.end_task(worker, message.task, message.result)
            elif isinstance(message, FillFailed) and message.stream in self._streams:
                self._streams[message.stream].received(self.pool.seat_of(worker), message)
            self.pool.achieved()

    def _unanswered(self, worker: int, message: OutageReport) -> None:
        if message.stream in self._streams:
            self._streams[message.stream].received(self.pool.seat_of(worker), message)
        elif message.stream == NO_STREAM and message.outage is not None:
            self._outages[worker] = message.outage
        elif message.stream == NO_STREAM:
            self._outages.pop(worker, None)

    def outage(self, source: TaskSource) -> Outage | None:
        """The longest outage that a worker waits for which is at a task of ``source``, of no stream; or None."""
        at_work = (one for one in self._outages if any(t.source is source for t in self.scheduler.tasks_of(one)))
        return max((self._outages[worker] for worker in at_work), default=None)

    def _pass_on(self, text: str) -> None:
        """Warn once of what several workers say."""
        now_s = time.monotonic()
        self._said = {said: at_s for said, at_s in self._said.items() if now_s - at_s < _SAID_AGAIN_S}
        if text not in self._said:
            self._warn(text)
        self._said.setdefault(text, now_s)

    def _attached(self, worker: int, message: Ended) -> None:
        self.scheduler.ready(worker)
        stream = self._streams.get(message.stream)
        if stream is not None and message.result is not None:
            stream.attach_failed(message.result)

    def silent(self, source: TaskSource, limit_s: float) -> Task | None:
        """A task of ``source`` that a worker is at, and of which nothing has come for ``limit_s`` seconds."""
        return self.scheduler.silent(source, math.ceil(limit_s / self.tick_s))

    def tick(self) -> None:
        """``tick_s`` have passed, in which this process ran: replace workers that have stalled, or are missing."""
        self._replace()
        self.scheduler.tick(self._at)
        timeout_s = self.stall_timeout
        if timeout_s is None:
            return
        limit = math.ceil(timeout_s / self.tick_s)
        start_limit = math.ceil(max(timeout_s, _MIN_START_TIMEOUT_S) / self.tick_s)
        for worker in self.scheduler.stalled(limit, start_limit):
            self._lose(worker, f"made no progress for {timeout_s:g} s")

    def batch_of(self, worker: int) -> tuple[int, int] | None:
        """(stream, key) of the batch that a worker is making, wanted or not."""
        seat = self.pool.seat_of(worker)
        making = ((number, stream.page.makes(seat)) for number, stream in self._streams.items())
        return next(((number, key) for number, key in making if key), None)

    def task_of(self, worker: int) -> Task | None:
        """The task that a worker is at, unless it makes a batch."""
        tasks = self.scheduler.tasks_of(worker)
        if not tasks or self.batch_of(worker) is not None:
            return None
        seat = self.pool.seat_of(worker)
        begun = [stream.page.task(seat) for stream in self._streams.values()]
        for task in tasks:
            if task.number in begun:
                return task
        return current_task(tasks)

    def _neglected(self, worker: int) -> tuple[int, int] | None:
        """(stream, key) of the next batch of a consumer, if the worker has claimed it, or if it could and nobody has.

        The worker counts as being at that batch: it may have been suspended just before its claim, or just behind.
        """
        seat = self.pool.seat_of(worker)
        for number, stream in self._streams.items():
            page = stream.page
            key = page.least_place()
            if not stream.is_under_way(key):
                continue
            has_claimed = any(claimed == key for _, claimed in page.unfinished(seat))
            could_claim = page.keys().count(key) == 0 and any(map(page.is_free, page.slots_of(seat)))
            if has_claimed or could_claim:
                return number, key
        return None

    def _at(self, worker: int) -> Hashable:
        """What must change for a worker to make progress.

        The batch, the part of its suspects, the time that attempts took, or the task.
        """
        seat, tasks = self.pool.seat_of(worker), self.scheduler.tasks_of(worker)
        fill_ns = sum(stream.page.counted(seat, Counter.FILL_NS) for stream in self._streams.values())
        if (batch := self.batch_of(worker)) is not None:
            return (*batch, fill_ns, self._streams[batch[0]].page.row(seat))
        return (tasks[0].number, fill_ns) if tasks else self._neglected(worker)

    def doing(self, worker: int) -> str:
        if (batch := self.batch_of(worker)) is not None:
            return f"the decoding of batch {step_of(batch[1])}"
        task = self.task_of(worker)
        return "" if task is None else str(task.work)

    def _lost_at(self, worker: int, stalled: str) -> str:
        if doing := self.doing(worker):
            return f" at {doing}"
        neglected = self._neglected(worker) if stalled else None
        return "" if neglected is None else f" while batch {step_of(neglected[1])} had to be made"

    def _lose(self, worker: int, stalled: str = "") -> None:
        """A worker is dead, or has ``stalled``: another one takes its place."""
        task, what = self.task_of(worker), self._lost_at(worker, stalled)
        seat, pid = self.pool.seat_of(worker), self.pool.pid_of(worker)
        was_idle = self.scheduler.is_ready(worker) and self._at(worker) is None
        at_batch = self.batch_of(worker) is not None
        num_fills = sum(stream.page.total(Counter.FILLS) for stream in self._streams.values())
        if num_fills != self._num_fills:
            self._num_fills = num_fills
            self.pool.achieved()
        self._event_loop.remove(worker)
        self._outages.pop(worker, None)
        self._values.pop(worker, None)
        reason = self.pool.reap(worker, was_idle or at_batch)
        for stream in self._streams.values():
            stream.lose_claims(seat, stalled or reason, bool(stalled))
        self.scheduler.lose_worker(worker, stalled or reason, bool(stalled), task)
        self._warn(f"worker process {pid} {stalled or reason}{what}; another one does its work again")
        self._num_missing += 1
        self._replace()

    def assign(self) -> None:
        for worker, task in self.scheduler.assign():
            work = task.work._replace(task=task.number)
            values = work.values if isinstance(work, IndexTask) else b""
            if isinstance(work, IndexTask) and values and values is self._values.get(worker):
                work = work._replace(values=None)
            self._values[worker] = values
            self._event_loop.post(worker, work)
