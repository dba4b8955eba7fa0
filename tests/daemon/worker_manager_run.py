"""The real worker manager, and what it is told of streams, over workers that are no processes: each step is called.

A worker does what ``worker.worker`` does, in the same order; between any two steps others may do theirs, the daemon
included, and it may die. What it is told and what it says lies there until somebody reads it. While it sleeps it
does nothing until it is told something or its bell is rung: a wake-up that is lost stays lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.pool.tasks import Task
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.worker_messages import (
    ATTACH_TASK,
    NO_STREAM,
    Attach,
    Ended,
    FillFailed,
    IndexTask,
    LoadTask,
    News,
    WorkerTask,
)
from loaderd.shm.page import Page, new_bell, step_of
from loaderd.worker.page_producer import Claim, PageProducer
from tests.daemon.page_workers import Opened, answer_to
from tests.helpers.bells import was_rung


class _Wires:
    """What is on its way to each worker."""

    def __init__(self) -> None:
        self.inboxes: dict[int, deque[Any]] = {}
        self.sent: list[int] = []
        """The numbers of the tasks that were given out."""

    def add(self, number: int, channel: Any, death_fd: int | None) -> None:
        self.inboxes[number] = deque()

    def remove(self, number: int) -> None:
        del self.inboxes[number]

    def watch(self, number: int, what: int) -> None:
        """The tests look at the daemon's bell themselves."""

    def post(self, number: int, message: Any, fds: tuple[int, ...] = ()) -> None:
        self.inboxes[number].append(message)
        if isinstance(message, WorkerTask):
            self.sent.append(message.task)


class _Pool:
    """Seats and their bells, as the real one gives them."""

    def __init__(self) -> None:
        self.seats: dict[int, int] = {}
        self.bells: list[int] = []
        self.restarts = 0
        self.excused: list[bool] = []
        """Of those that were buried."""
        self.refuses = False
        """Whether the machine lets us have no more processes."""

    @property
    def numbers(self) -> list[int]:
        return list(self.seats)

    def start(self) -> tuple[int, None, int]:
        if self.refuses:
            raise DaemonError("cannot start a worker: no memory", hint="Have more.")
        number = len(self.seats) + self.restarts
        seat = next(seat for seat in range(len(self.seats) + 1) if seat not in self.seats.values())
        if seat == len(self.bells):
            self.bells.append(new_bell())
        self.seats[number] = seat
        return number, None, -1

    def reap(self, worker: int, excused: bool) -> str:
        del self.seats[worker]
        self.excused.append(excused)
        self.restarts += 1
        return "was killed by SIGKILL"

    def achieved(self) -> None:
        """However many have died: these tests know why."""

    def pid_of(self, worker: int) -> int:
        return worker

    def seat_of(self, worker: int) -> int:
        return self.seats[worker]


def nobody() -> None:
    """Tells consumers nothing: whoever takes batches in these tests looks at the stream's notes first."""


@dataclass(eq=False)
class Job:
    """What a worker is at: a task, or a batch of a stream."""

    task: Task | None = None
    stream: int = NO_STREAM
    claim: Claim | None = None

    @property
    def suspect(self) -> int:
        """Where the first part of its suspects begins, and it comes no further; -1: it has none."""
        return next(iter(self.claim.batch.suspects), -1) if self.claim is not None else -1


class Hand:
    """A worker of the ``crew``."""

    def __init__(self, crew: Crew, number: int) -> None:
        self.number = number
        self.seat = crew.pool.seat_of(number)
        self.inbox = crew.event_loop.inboxes[number]
        self.said: list[Any] = [Ended(ATTACH_TASK)]
        self.started = False
        self.sleeps = False
        self.job: Job | None = None
        self.fillers: dict[int, PageProducer] = {}
        self.tasks: deque[Task] = deque()
        self._crew = crew
        self._turns: deque[int] = deque()

    def read(self) -> None:
        """Take the next thing that it was told."""
        message = self.inbox.popleft()
        if isinstance(message, WorkerTask):
            self.tasks.append(self._crew.task_of(message))
        elif isinstance(message, News):
            self.fillers[message.stream].received(message)
        elif isinstance(message, Attach):
            page = self._crew.pages[message.stream]
            if message.stream not in self._turns:
                self._turns.append(message.stream)
            bells = [self._crew.worker_manager.bell]
            self.fillers[message.stream] = PageProducer(page, self.seat, message.news, bells)
            self.said.append(Ended(ATTACH_TASK, None, message.stream))

    def start(self) -> None:
        """Come to know of all streams there are."""
        self.started = True
        self.read_all()

    def read_all(self) -> None:
        while self.inbox:
            self.read()

    def begin(self, reads: bool = True) -> None:
        """Have it begin with something, if it is at nothing; ``reads``: it looks first what it is told."""
        if not self.started or self.job is not None:
            return
        if self.sleeps and not (was_rung(self._crew.pool.bells[self.seat]) or self.inbox):
            return
        self._say_sleeps(False)
        if reads:
            self.read_all()
        self.job = self._choose()
        if self.job is None:
            self._say_sleeps(True)
            self.job = self._choose()
            if self.job is None and self.inbox:
                self.read_all()
                self.job = self._choose()
            if self.job is not None:
                self._say_sleeps(False)
        if self.job is not None and self.job.task is not None and self.job.stream in self._crew.pages:
            self._crew.pages[self.job.stream].say_task(self.seat, self.job.task.number)
        elif self.job is not None and self.job.claim is not None:
            self._crew.pages[self.job.stream].say_row(self.seat, self.job.suspect)

    def _say_sleeps(self, sleeps: bool) -> None:
        self.sleeps = sleeps
        for stream in self._turns:
            self._crew.pages[stream].say_sleeps(self.seat, sleeps)

    def _choose(self) -> Job | None:
        if self.tasks and self._is_due(self.tasks[0]):
            return self._job_of(self.tasks.popleft())
        for stream in list(self._turns):
            while self.fillers[stream].has_news:
                assert self.inbox, "nobody waits for what was never sent"
                self.read()
            claim = self.fillers[stream].claim()
            if claim is not None:
                self._turns.remove(stream)
                self._turns.append(stream)
                return Job(None, stream, claim)
        return self._job_of(self.tasks.popleft()) if self.tasks else None

    def _job_of(self, task: Task) -> Job:
        return Job(task, self._crew.stream_of(task))

    def _is_due(self, task: Task) -> bool:
        if not isinstance(task.work, LoadTask):
            return True
        page = self._crew.pages[self._crew.stream_of(task)]
        return bool(page.least_place() >= task.work.due)

    def end(self, answer: Any = None, error: LoaderdError | None = None) -> None:
        """Have it end what it is at, and say what there is to say; ``answer``: of a task, if it is no usual one."""
        job, self.job = self.job, None
        assert job is not None
        if job.task is not None:
            number = job.task.number
            if job.stream in self._crew.pages:
                self._crew.pages[job.stream].say_task(self.seat, None)
            self.said.append(Ended(number, error or answer or answer_to(job.task)))
            return
        assert job.claim is not None
        self._crew.pages[job.stream].say_row(self.seat, -1)
        filler = self.fillers[job.stream]
        if error is None:
            filler.made(job.claim)
        else:
            filler.not_made(job.claim)
            self.said.append(FillFailed(job.stream, *job.claim.place, [*job.claim.batch.omit], {}, True, error))

    def overlooked(self) -> list[tuple[int, int]]:
        """(stream, step) of the batches that it would make if it looked: asked in a way that claims none."""
        found = []
        for stream, filler in self.fillers.items():
            assert not filler.has_news
            if filler._free_slot() >= 0 and (following := filler._next_key(set(filler.page.keys()))) is not None:
                found.append((stream, step_of(following[0])))
        return found

    def task_numbers(self) -> list[int]:
        """Of all tasks that the daemon must believe it to have."""
        numbers = [each.task for each in self.said if isinstance(each, Ended) and each.task != ATTACH_TASK]
        unread = [self._crew.task_of(message) for message in self.inbox if isinstance(message, WorkerTask)]
        tasks = [*self.tasks, *unread]
        if self.job is not None and self.job.task is not None:
            tasks.insert(0, self.job.task)
        return [*numbers, *[task.number for task in tasks]]


class Crew:
    """Workers, and the worker manager that they are. ``hands``: those that live, by number."""

    def __init__(self, stall_timeout: float | None = None) -> None:
        self.event_loop, self.pool = _Wires(), _Pool()
        self.warnings: list[str] = []
        make: Any = WorkerManager
        self.worker_manager: WorkerManager = make(self.event_loop, self.pool, stall_timeout, self.warnings.append)
        self.hands: dict[int, Hand] = {}
        self.pages: dict[int, Page] = {}
        self._streams: dict[Stream, int] = {}

    def close(self) -> None:
        for bell in [*self.pool.bells, self.worker_manager.bell]:
            os.close(bell)

    def stream_of(self, task: Task) -> int:
        """The number of the stream that a task is of; NO_STREAM: of none."""
        return NO_STREAM if isinstance(task.work, IndexTask) else self._streams[task.source]

    def attach(self, stream: Stream, tell_consumers: Callable[[], None] = nobody) -> Opened:
        """Have the workers know of a stream, and do its tasks."""
        number = len(self._streams)
        self._streams[stream] = number
        self.pages[number] = stream.page
        opened = Opened(number, stream, self.worker_manager, tell_consumers)
        self.worker_manager.attach(opened)
        self.add_source(stream)
        return opened

    def add_source(self, source: Any) -> None:
        self.worker_manager.scheduler.add_source(source)

    def task_of(self, message: Any) -> Task:
        """What the daemon has sent as this message."""
        return self.worker_manager.scheduler._tasks[message.task]

    def assign(self) -> list[Task]:
        """Have tasks given out; returns them in order."""
        self.event_loop.sent = []
        self.worker_manager.assign()
        return [self.worker_manager.scheduler._tasks[number] for number in self.event_loop.sent]

    def start(self, number: int) -> None:
        """So many workers more, who have yet to start."""
        self.worker_manager.start(len(self.pool.seats) + number)
        self._hire()

    def _hire(self) -> None:
        self.hands = {
            number: self.hands[number] if number in self.hands else Hand(self, number) for number in self.pool.numbers
        }

    def hear(self) -> bool:
        """Have the daemon read what the workers say; whether there was anything, or its bell was rung."""
        heard = was_rung(self.worker_manager.bell)
        for number, hand in self.hands.items():
            if hand.started and hand.said:
                said, hand.said = hand.said, []
                self.worker_manager.received(number, said)
                heard = True
        return heard

    def kill(self, number: int) -> None:
        """A worker dies, and the daemon sees it, behind what it has said last."""
        hand = self.hands[number]
        if hand.started:
            self.worker_manager.received(number, hand.said)
        self.worker_manager.received(number, None)
        self._hire()

    def tick(self) -> list[int]:
        """A moment has passed: the workers that were lost for it."""
        before = list(self.hands)
        self.worker_manager.tick()
        self._hire()
        return [number for number in before if number not in self.hands]
