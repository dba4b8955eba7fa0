"""Which records of a batch do the workers die of?

Worker after worker was lost at the batch, so its rows are tried in halves, and in halves of those, until only single
rows are left, the first of them first. Rows that a worker survives are acquitted; a single row that costs three more
workers is guilty. Nothing is delivered of a trial: the batch is made when it is known which rows to leave out. Where
too many are guilty, it is not the records' fault, and the batch is broken.
"""

from __future__ import annotations

from loaderd.errors import WorkerError
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS, TrialTask
from loaderd.plan.batch_range import BatchRange
from loaderd.worker.halving import HalvingSearch

_MOST_STALLING_ROWS = 3
"""More are not looked for: each one costs several times the seconds after which a worker counts as stalled."""


class PoisonSearch:
    """The trial of ``batch``, one task at a time. With ``first_only``, it ends with the first row that is guilty."""

    def __init__(self, stream: int, batch: BatchRange, first_only: bool) -> None:
        self.batch = batch
        self.guilty: dict[int, WorkerError] = {}
        self.hopeless: WorkerError | None = None
        """Why the batch is broken, if more rows are guilty than are left out of one."""
        self._stream = stream
        self._first_only = first_only
        self._under_way = False
        self._num_stalling = 0
        self._search = HalvingSearch(sorted(set(range(batch.num_rows)).difference(batch.omit)))

    @property
    def finished(self) -> bool:
        is_found = self._first_only and bool(self.guilty)
        return not self._under_way and (not self._search or is_found or self.hopeless is not None)

    def next_work(self) -> TrialTask | None:
        """What to try next; None while something is being tried."""
        if self._under_way or self.finished:
            return None
        self._under_way = True
        return TrialTask(self._stream, self.batch.first, self.batch.segments, self._search.next())

    def tried(self, work: TrialTask, error: WorkerError | None, stalled: bool) -> None:
        """Rows are acquitted; or, with an ``error``, a single one is guilty, and several are tried in halves."""
        self._under_way = False
        if error is None or not self._search.failed(work.rows):
            return
        self.guilty[work.rows[0]] = error
        self._num_stalling += stalled
        if len(self.guilty) > MOST_ROW_FAULTS or self._num_stalling > _MOST_STALLING_ROWS:
            first = self.guilty[min(self.guilty)]
            lost = f"workers are lost at {len(self.guilty)} records of batch {self.batch.first} or more"
            self.hopeless = WorkerError(f"{lost}; at the first, {first.message}", hint=first.hint)
