"""Which batches the workers may make, in runs: batches that lie one behind the other in the same window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from loaderd.daemon.pool.tasks import PlannedBatch
from loaderd.plan.batches import Segment
from loaderd.shm.batch_range import BatchRange


class Grant(NamedTuple):
    """Batches ``first.step`` to ``stop - 1`` may be made; the rows of each lie behind those of the one before."""

    first: PlannedBatch
    stop: int

    def has(self, step: int) -> bool:
        """Whether ``step`` is one of them."""
        return self.first.step <= step < self.stop

    def batch(self, step: int) -> PlannedBatch:
        """Batch ``step`` of them."""
        if step == self.first.step:
            return self.first
        (part,) = self.first.segments
        shift = (step - self.first.step) * (part.stop - part.start)
        segment = Segment(part.window, part.start + shift, part.stop + shift)
        return PlannedBatch(step, (segment,), self.first.arenas)

    def without(self, step: int) -> list[Grant]:
        """What is left of the grant when batch ``step`` is taken out."""
        front = [Grant(self.first, step)] if self.first.step < step else []
        return [*front, Grant(self.batch(step + 1), self.stop)] if step + 1 < self.stop else front

    @property
    def run(self) -> BatchRange:
        """The grant as workers get it."""
        return BatchRange(self.first.step, self.stop, self.first.arena_segments, self.first.omit)


class Withdrawal(NamedTuple):
    """Batch ``step`` may not be made any more."""

    step: int


class Grants:
    """All grants that are in force."""

    def __init__(self) -> None:
        self._grants: list[Grant] = []

    def add(self, grants: Iterable[Grant]) -> None:
        """Put more grants in force."""
        self._grants += grants

    def clear(self) -> None:
        """Forget all grants."""
        self._grants.clear()

    def all(self) -> list[Grant]:
        """All, in the order in which they were added."""
        return list(self._grants)

    def has(self, step: int) -> bool:
        """Whether a batch may be made."""
        return any(grant.has(step) for grant in self._grants)

    def drop_before(self, step: int) -> None:
        """Forget grants all of whose batches come before ``step``."""
        self._grants = [grant for grant in self._grants if grant.stop > step]

    def batch(self, step: int) -> PlannedBatch:
        """A batch that may be made."""
        return self._of(step).batch(step)

    def take_out(self, step: int) -> PlannedBatch:
        """Take a batch, which must be granted, out of its grant; returns the batch."""
        grant = self._of(step)
        self._grants.remove(grant)
        self._grants += grant.without(step)
        return grant.batch(step)

    def _of(self, step: int) -> Grant:
        return next(grant for grant in self._grants if grant.has(step))
