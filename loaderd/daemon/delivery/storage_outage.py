"""Storage, or servers, that do not answer: which loads wait for them, and which error consumers get.

::

    requests that are not answered ──for a second──► each worker says so, again and again       report ─────┐
                                   ──for retry_s───► the load fails, rests, and is tried again  failed ─────┴─► now

A load fails after it has been tried for ``Storage.retry_s`` (of servers: ``reconnect_timeout``), or at once where it
is refused. It rests for some seconds, and is tried again: without the rest, a load that is refused would keep workers
and daemon busy with nothing else. The loads under way fail one after the other for the same reason, so the consumer
gets one error, and another only when one of them has failed a second time. It gets it only if it is waiting when a
load fails: as long as it has batches to take, storage may come back before it needs more.
"""

from __future__ import annotations

from loaderd.errors import ServerError, StorageError
from loaderd.ipc.worker_messages import LoadTask
from loaderd.plan.epoch import Slice
from loaderd.snapshots import Outage

NotAnswered = StorageError | ServerError

REST_S = 5.0


class StorageOutage:
    """See the module's docstring. Pure."""

    def __init__(self) -> None:
        self.error: NotAnswered | None = None
        """The error that the consumer should get now, if it waits."""
        self._resting: list[tuple[LoadTask, float]] = []
        """Each load that rests, and for how many more seconds."""
        self.is_back()

    def is_back(self) -> None:
        """A load was done."""
        self.error = None
        self._reported: set[tuple[Slice, ...]] = set()
        """The slices of loads whose failures the last error stands for that the consumer got."""
        self._num_failed, self._failure = 0, ""
        """Loads that have failed since one was done, and why the last of them did."""
        self._reports: dict[int, Outage | None] = {}
        self._quiet_s = 0.0

    def clear(self) -> None:
        """No load is wanted any more."""
        self.is_back()
        self._resting.clear()

    def report(self, seat: int, outage: Outage | None) -> None:
        """What the worker of a seat says of its requests; None: they are answered, or the worker is gone."""
        self._reports[seat] = outage

    def begin(self) -> None:
        """A load begins, while no other is under way: what workers waited for before is not waited for any more."""
        self._quiet_s = 0.0

    def failed(self, work: LoadTask, error: NotAnswered) -> None:
        """A load has failed; it rests."""
        if not self._reported or work.slices in self._reported:
            self._reported.clear()
            self.error = error
        self._reported.add(work.slices)
        self._num_failed, self._failure = self._num_failed + 1, error.message
        self._resting.append((work, REST_S))

    def tick(self, seconds: float) -> list[LoadTask]:
        """So much time has passed. Returns the loads that are to be tried again."""
        self._quiet_s += seconds
        resting = [(work, left_s - seconds) for work, left_s in self._resting]
        self._resting = [(work, left_s) for work, left_s in resting if left_s > 0]
        return [work for work, left_s in resting if left_s <= 0]

    def told(self, somebody_waits: bool) -> None:
        """The consumers that wait were told of ``error``; if none waits, the next failure of any load is told."""
        self.error = None
        if not somebody_waits:
            self._reported.clear()

    @property
    def has_resting(self) -> bool:
        """Whether loads rest."""
        return bool(self._resting)

    @property
    def now(self) -> Outage | None:
        """The outage that the loads under way wait for; None: their requests are answered, or are not a second old.

        A worker may still report what another one has got an answer to: nothing is older than the last load.
        """
        if reports := list(filter(None, self._reports.values())):
            for_s = min(self._quiet_s, max(one.for_s for one in reports))
            error = max(reports, key=lambda one: one.failures).error
            return Outage(for_s, sum(one.failures for one in reports), error)
        if self._num_failed:
            return Outage(self._quiet_s, self._num_failed, self._failure)
        return None
