"""What becomes of loads that storage does not answer: they are tried again, and the consumer is told of it.

A load fails after it has been tried for ``Storage.retry_s`` (of servers: ``reconnect_timeout``), or at once where it
is refused. It rests for some seconds, and is tried again: without the rest, a load that is refused would keep workers
and daemon busy with nothing else. The loads under way fail one after the other for the same reason, so the consumer
is told once, and again only when one of them has failed a second time. It is told only if it is waiting when a load
fails: as long as it has batches to take, storage may come back before it needs more.
"""

from __future__ import annotations

from loaderd.daemon.pool.tasks import LoadWork
from loaderd.errors import ServerError, StorageError

NotAnswered = StorageError | ServerError

REST_S = 5.0


class Away:
    """The loads of a stream that storage did not answer. Pure."""

    def __init__(self) -> None:
        self.error: NotAnswered | None = None
        """What the consumer should be told now, if it waits."""
        self._failed: set[LoadWork] = set()
        self._resting: list[tuple[LoadWork, float]] = []
        """Each load that rests, and for how many more seconds."""

    def failed(self, work: LoadWork, error: NotAnswered) -> None:
        """A load has failed; it rests."""
        if not self._failed or work in self._failed:
            self._failed.clear()
            self.error = error
        self._failed.add(work)
        self._resting.append((work, REST_S))

    def tick(self, seconds: float) -> list[LoadWork]:
        """So much time has passed. Returns the loads that are to be tried again."""
        resting = [(work, left_s - seconds) for work, left_s in self._resting]
        self._resting = [(work, left_s) for work, left_s in resting if left_s > 0]
        return [work for work, left_s in resting if left_s <= 0]

    def told(self, somebody_waits: bool) -> None:
        """The consumers that wait were told of ``error``; if none waits, the next failure of any load is told."""
        self.error = None
        if not somebody_waits:
            self._failed.clear()

    def is_back(self) -> None:
        """A load was done."""
        self.error = None
        self._failed.clear()

    def clear(self) -> None:
        """No load is wanted any more."""
        self.is_back()
        self._resting.clear()

    @property
    def num_resting(self) -> int:
        """Loads that rest."""
        return len(self._resting)
