"""A stream with made-up data, whose tasks are done, and whose batches are made and taken, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loaderd.daemon.pool.scheduler import Scheduler
from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.errors import LoaderdError, WorkerError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import FillFailed, WorkerTask
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Pass
from loaderd.shm.page import POSITION, key_of
from tests.daemon.page_workers import Delivery, answer_to, new_page, plan_of, stream_of


class Alone(NamedTuple):
    """A worker decodes rows of a batch with suspects apart from the others; ``row``: the first of them."""

    step: int
    row: int
    num_rows: int = 1


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
    """See the module's docstring. There is one worker; when it is lost, another one takes its place.

    ``tasks``, ``made`` and ``alone``: all that was begun; ``queue``: the tasks that wait; ``sent``: what the consumer
    got.
    """

    def __init__(self, num_records: int, batch_size: int, window: int, *, skip_damaged: bool = False) -> None:
        self.plan = plan_of(num_records, batch_size, window)
        self.page = new_page(8, 2)
        self.stream = stream_of(self.plan, self.page, skip_damaged=skip_damaged, error_context=error_context)
        self.scheduler = scheduler_of(self.stream, workers=1)
        self.deaths = self._worker = 0
        self.queue: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.made: list[BatchRange] = []
        self.alone: list[Alone] = []
        self.sent: list[Delivery | BatchFailed] = []
        self._notes: dict[int, Any] = {}
        self.start(1, 0)

    def start(self, generation: int, step: int) -> None:
        self.generation = generation
        self.come_to(step)
        self.stream.start(generation, Pass(0, 1), step)
        self.sent.clear()
        self._notes.clear()
        self.hand_out()

    def come_to(self, step: int) -> None:
        """The consumer takes this batch next."""
        self.step = step
        self.page.words[POSITION] = key_of(self.generation, step)

    def hand_out(self) -> None:
        assigned = [task for _, task in self.scheduler.assign()]
        self.tasks += assigned
        self.queue.extend(assigned)

    def end_task(self, error: LoaderdError | None = None) -> Task:
        """End the next task."""
        task = self.queue.popleft()
        self.scheduler.end_task(self._worker, task.number, error or answer_to(task))
        return task

    def load_all(self) -> None:
        """As far as there is room."""
        self.hand_out()
        while self.queue:
            self.end_task()
            self.stream.look()
            self.hand_out()

    def lose(self, task: Task | None = None, stalled: bool = False) -> None:
        """The worker is lost at a task, or at a batch."""
        self.deaths += 1
        self.scheduler.lose_worker(self._worker, STALLED if stalled else REASON, stalled, task)
        self.queue.clear()
        self._worker += 1
        self.scheduler.add_worker(self._worker)
        self.scheduler.ready(self._worker)

    def lose_at_batch(self, stalled: bool = False, row: int = -1) -> None:
        self.lose(None, stalled)
        self.stream.lost_at(key_of(self.generation, self.step), row, STALLED if stalled else REASON, stalled)

    def not_made(
        self,
        error: LoaderdError,
        faults: Mapping[int, LoaderdError],
        omit: Sequence[int] = (),
        all_faults: bool = True,
    ) -> None:
        """A worker says that the next batch cannot be made."""
        left = {row: why for row, why in faults.items() if row not in omit}
        self.stream.not_made(FillFailed(0, self.generation, self.step, list(omit), left, all_faults, error))

    def _deadly_row(self, batch: BatchRange, is_deadly: Callable[[Any], bool]) -> int:
        """Where the part begins that a worker does not survive; -1: it survives all of them."""
        for row in batch.suspects:
            self.alone.append(Alone(batch.first, row, len(batch.suspects_at(row))))
            if is_deadly(self.alone[-1]):
                return row
        return -1

    def to_the_end(
        self,
        is_deadly: Callable[[Any], bool] = lambda work: False,
        error_at: Callable[[Any], LoaderdError | None] = lambda work: None,
        stalled: bool = False,
        faults: Mapping[int, LoaderdError] | None = None,
        all_faults: bool = True,
        until: Callable[[], bool] = lambda: False,
    ) -> list[Delivery | BatchFailed]:
        """Have all done but what kills a worker (or has it ``stalled``), or fails; what was sent.

        ``is_deadly`` and ``error_at`` are asked of the work of tasks, and of batches; the first also of rows that are
        decoded alone. Batches fail because of the
        ``faults`` of rows that are not left out yet; these may be only the first of all.
        """
        assert self.plan.num_steps is not None
        while self.step < self.plan.num_steps and not until():
            self.stream.look()
            self._notes |= {note.step: note for note in self.stream.notes}
            self.stream.notes.clear()
            note = self._notes.get(self.step)
            batch = next((one.batch(self.step) for one in self.stream.granted if one.has(self.step)), None)
            if isinstance(note, BatchFailed):
                self.sent.append(note)
                self.come_to(self.step + 1)
            elif batch is not None:
                if (row := self._deadly_row(batch, is_deadly)) >= 0:
                    self.lose_at_batch(stalled, row)
                    continue
                self.made.append(batch)
                if is_deadly(batch):
                    self.lose_at_batch(stalled)
                elif (error := error_at(batch)) is not None:
                    self.not_made(error, faults or {}, batch.omit, all_faults)
                else:
                    self.sent.append(Delivery(self.step, 0, batch.num_records, note))
                    self.come_to(self.step + 1)
            else:
                self.hand_out()
                assert self.queue, "nothing will ever happen"
                if is_deadly(self.queue[0].work):
                    self.lose(self.queue[0], stalled)
                else:
                    self.end_task(error_at(self.queue[0].work))
        return self.sent
