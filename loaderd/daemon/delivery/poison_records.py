"""Which records of a batch do the workers die of?

Worker after worker was lost at the batch, so its rows are tried in halves, and in halves of those, until only single
rows are left, the first of them first. Rows that a worker survives are acquitted; a single row that costs three more
workers is guilty. Nothing is delivered of a trial: the batch is made when it is known which rows to leave out. Where
too many are guilty, it is not the records' fault, and the batch is broken.
"""

from __future__ import annotations

from loaderd.daemon.pool.tasks import MAX_DEATHS
from loaderd.errors import WorkerError
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS, TrialTask
from loaderd.plan.batch_range import BatchRange
from loaderd.worker.halving import HalvingSearch

_MOST_STALLING_ROWS = 3
"""More are not looked for: each one costs several times the seconds after which a worker counts as stalled."""


class PoisonSearch:
    """The trial of ``batch`` of a stream, one task at a time.

    With ``first_only``, it ends with the first row that is guilty.
    """

    def __init__(self, stream: int, batch: BatchRange, first_only: bool) -> None:
        self._stream = stream
        self.batch = batch
        self.guilty: dict[int, WorkerError] = {}
        self.is_hopeless = False
        """Whether more rows are guilty than are left out of a batch."""
        self.under_way = False
        self._first_only = first_only
        self._num_stalling = 0
        self._search = HalvingSearch(sorted(set(range(batch.num_rows)).difference(batch.omit)))

    @property
    def finished(self) -> bool:
        over = not self._search or (self._first_only and bool(self.guilty)) or self.is_hopeless
        return over and not self.under_way

    def next_work(self) -> TrialTask | None:
        """What to try next; None while something is being tried."""
        if self.under_way or self.finished:
            return None
        self.under_way = True
        return TrialTask(self._stream, self.batch.first, self.batch.segments, self._search.next())

    def most_deaths(self, work: TrialTask) -> int:
        """How many workers may be lost at it: one is enough to try halves of it, but not to find a row guilty."""
        return MAX_DEATHS if len(work.rows) == 1 else 1

    def tried(self, work: TrialTask, error: WorkerError | None, stalled: bool) -> None:
        """What was tried is acquitted, or, if there is an ``error``, not: then a single row is guilty.

        Several are tried in halves.
        """
        self.under_way = False
        if error is None:
            return
        if self._search.failed(work.rows):
            self.guilty[work.rows[0]] = error
            self._num_stalling += stalled
            self.is_hopeless = len(self.guilty) > MOST_ROW_FAULTS or self._num_stalling > _MOST_STALLING_ROWS

    def too_many(self) -> WorkerError:
        """Why the batch is broken if the trial is hopeless; the first guilty row is the one to name."""
        first = self.guilty[min(self.guilty)]
        text = f"workers are lost at {len(self.guilty)} records of batch {self.batch.first} or more; at the first, "
        return WorkerError(text + first.message, hint=first.hint)
