"""A stream with made-up data, and workers that do its tasks and make its batches at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from loaderd.daemon.pool.scheduler import Scheduler
from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.errors import LoaderdError, WorkerError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import WorkerTask
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Pass
from loaderd.worker.page_producer import Claim
from tests.daemon.page_run import Floor
from tests.daemon.page_workers import Delivery, answer_to, plan_of, stream_of

REASON = "was killed by SIGSEGV"
STALLED = "made no progress"


def scheduler_of(*sources: Any, workers: int) -> Scheduler:
    """Workers that have started."""
    scheduler = Scheduler()
    for source in sources:
        scheduler.add_source(source)
    for worker in range(workers):
        scheduler.add_worker(worker)
        scheduler.ready(worker)
    return scheduler


class OneTask(TaskSource):
    """A source of one task, which no worker lives to end."""

    def __init__(self, work: WorkerTask, survives_stalls: bool = True) -> None:
        self.task = Task(self, work, survives_stalls=survives_stalls)
        self.error: LoaderdError | None = None
        self._is_begun = False

    def next_task(self) -> Task | None:
        is_first, self._is_begun = not self._is_begun, True
        return self.task if is_first else None

    def done(self, task: Task, result: Any) -> None:
        raise AssertionError("nobody lives to end it")

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.error = error


def error_context(records: Sequence[Slice], error: LoaderdError, *, survived: bool = False) -> WorkerError:
    """Names the records by block and number."""
    named = [(part.block, number) for part in records for number in range(part.first, part.stop)]
    return WorkerError(f"{sorted(named)}: {error.message}")


class Run:
    """A stream, workers that take turns, and a consumer that takes what there is and gives it back at once.

    A worker does its task, if it has one, else it makes a batch; with ``batches_first``, it is the other way round.
    ``assigned`` and ``claimed`` say what was begun; ``sent``, what the consumer got; ``deaths``, how many workers
    were lost.
    """

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        window: int,
        *,
        workers: int = 1,
        slots: int = 8,
        skip_damaged: bool = False,
        batches_first: bool = False,
    ) -> None:
        self.batches_first = batches_first
        self.plan = plan_of(num_records, batch_size, window)
        self.floor = Floor(slots, workers)
        self.stream = stream_of(self.plan, self.floor.page, skip_damaged=skip_damaged, error_context=error_context)
        self.floor.stream = self.stream
        self.scheduler = scheduler_of(self.stream, workers=workers)
        self.workers = list(range(workers))
        """The number of the worker at each seat."""
        self.deaths = 0
        self.working: deque[tuple[int, Task]] = deque()
        self.assigned: list[Task] = []
        self.claimed: list[Claim] = []
        self.sent: list[Delivery | BatchFailed] = []
        self.start(1, 0)

    def close(self) -> None:
        self.floor.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, generation: int, step: int) -> None:
        self.floor.consumer.begin(generation, step)
        self.stream.start(generation, Pass(0, 1), step)
        self.sent.clear()
        self.hand_out()

    def hand_out(self) -> None:
        """What the daemon does when it is awake."""
        self.floor.say()
        assigned = self.scheduler.assign()
        self.assigned += [task for _, task in assigned]
        self.working.extend(assigned)

    def claims(self, seat: int) -> Claim | None:
        """What the worker of a seat has claimed, or claims now."""
        hand = self.floor.hands[seat]
        hand.read_some()
        if hand.at is None and hand.try_claim() is not None:
            assert hand.at is not None
            self.claimed.append(hand.at)
        return hand.at

    def take(self) -> list[int]:
        """The consumer takes what there is; returns the slots."""
        slots = []
        while not self.ended and (item := self.floor.consumer.next()) is not None:
            self.sent.append(item)
            if isinstance(item, Delivery):
                slots.append(item.slot)
        if self.floor.wake_daemon():
            self.hand_out()
        return slots

    @property
    def ended(self) -> bool:
        """Whether the consumer has all there is."""
        return self.floor.consumer.taker.step == self.plan.num_steps

    def die(self, seat: int, task: Task | None = None, stalled: bool = False) -> None:
        self.deaths += 1
        worker, reason = self.workers[seat], STALLED if stalled else REASON
        self.scheduler.lose_worker(worker, reason, stalled, task)
        self.working = deque(item for item in self.working if item[0] != worker)
        self.floor.lose(seat, reason, stalled)
        self.workers[seat] = 1 + max(self.workers)
        self.scheduler.add_worker(self.workers[seat])
        self.scheduler.ready(self.workers[seat])
        self.hand_out()

    def end_task(self, task: Task, error: LoaderdError | None = None) -> None:
        (worker,) = [worker for worker, other in self.working if other is task]
        self.working.remove((worker, task))
        self.scheduler.end_task(worker, task.number, error or answer_to(task))
        self.hand_out()

    def to_the_end(
        self,
        is_deadly: Any = lambda work: False,
        error_at: Any = lambda work: None,
        stalled: bool = False,
        faults: Mapping[int, LoaderdError] | None = None,
        all_faults: bool = True,
    ) -> list[Delivery | BatchFailed]:
        """Have all done but what kills a worker (or has it ``stalled``), or fails; what was sent.

        ``is_deadly`` and ``error_at`` are asked of the work of tasks, and of claims. Batches fail because of the
        ``faults`` of rows that are not left out yet; these may be only the first of all.
        """
        while not self.ended:
            progress = False
            for seat in range(len(self.workers)):
                task = next((task for worker, task in self.working if worker == self.workers[seat]), None)
                claim = self.claims(seat) if task is None or self.batches_first else None
                if claim is not None:
                    task = None
                elif task is None:
                    continue
                work = claim if task is None else task.work
                progress = True
                hand = self.floor.hands[seat]
                if is_deadly(work):
                    self.die(seat, task, stalled)
                elif task is not None:
                    self.end_task(task, error_at(work))
                elif (error := error_at(work)) is not None:
                    left = {row: why for row, why in (faults or {}).items() if row not in work.batch.omit}
                    hand.not_made(error, left, all_faults)
                    self.floor.hear(seat)
                else:
                    hand.made()
            for slot in self.take():
                progress = True
                self.floor.consumer.taker.release(slot)
            assert progress or self.ended, "nothing will ever happen"
        return self.sent
