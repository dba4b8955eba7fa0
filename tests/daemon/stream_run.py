"""A stream with made-up data, and workers that do its tasks at once."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from loaderd.daemon.outgoing import Outgoing, PassEnd
from loaderd.daemon.scheduler import Scheduler
from loaderd.daemon.stream import Stream
from loaderd.daemon.tasks import LoadWork, Task
from loaderd.errors import LoaderdError, WorkerError
from loaderd.plan.batches import BatchPlan
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import SetRows
from loaderd.plan.shares import HostShare, Rest


def scheduler_of(*sources: Any, workers: int) -> Scheduler:
    """Workers that have started."""
    scheduler = Scheduler()
    for source in sources:
        scheduler.add_source(source)
    for worker in range(workers):
        scheduler.add_worker(worker)
        scheduler.ready(worker)
    return scheduler


def blame(records: list[Slice], error: LoaderdError) -> WorkerError:
    """Names the records by block and number."""
    named = [(part.block, number) for part in records for number in range(part.first, part.stop)]
    return WorkerError(f"{sorted(named)}: {error.message}")


class Run:
    """A stream, and workers that do their tasks in turn: the one that has waited longest goes first."""

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        window: int,
        *,
        workers: int = 1,
        slots: int = 8,
        skip_damaged: bool = False,
    ) -> None:
        batches = BatchPlan(HostShare(Rest(num_records), 0, 1, window), batch_size, "short", 1)
        counts = np.full(num_records // 10, 10)
        self.plan = PassPlan(SetRows(counts, 0, True), batches, 0, True, 0)
        self.stream = Stream(
            lambda _: self.plan,
            num_slots=slots,
            num_arenas=2,
            num_workers=workers,
            skip_damaged=skip_damaged,
            blame=blame,
        )
        self.scheduler = scheduler_of(self.stream, workers=workers)
        self.next_worker = workers
        self.deaths = 0
        self.working: deque[tuple[int, Task]] = deque()
        self.assigned: list[Task] = []
        self.sent: list[Outgoing] = []
        self.stream.start(0, Pass(0, 1), 0)

    def hand_out(self) -> None:
        assigned = self.scheduler.assign()
        self.assigned += [task for _, task in assigned]
        self.working.extend(assigned)
        while self.stream.outbox:
            self.sent.append(self.stream.outbox.popleft())

    def give_back(self) -> None:
        self.stream.release(list(self.stream._lent))

    def die(self, stalled: bool = False) -> None:
        self.deaths += 1
        worker = self.working[0][0]
        self.scheduler.lose_worker(worker, "made no progress" if stalled else "was killed by SIGSEGV", stalled)
        self.working = deque(item for item in self.working if item[0] != worker)
        self.scheduler.add_worker(self.next_worker)
        self.scheduler.ready(self.next_worker)
        self.next_worker += 1

    def to_the_end(
        self, is_deadly: Any = lambda work: False, error_at: Any = lambda work: None, stalled: bool = False
    ) -> list[Outgoing]:
        """Do all tasks but those that kill their worker (or have it ``stalled``), or fail; what was sent."""
        self.hand_out()
        while PassEnd() not in self.sent:
            worker, task = self.working[0]
            if is_deadly(task.work):
                self.die(stalled)
            else:
                self.working.popleft()
                error = error_at(task.work)
                self.scheduler.end_task(worker, task.number, [] if isinstance(task.work, LoadWork) else None, error)
            self.give_back()
            self.hand_out()
        return self.sent
