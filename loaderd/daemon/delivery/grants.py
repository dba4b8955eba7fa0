"""Which batches the workers may make: runs of them, each cut from one window like the one before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from loaderd.daemon.pool.tasks import PlannedBatch
from loaderd.memory.runs import Run
from loaderd.plan.batches import Segment


class Grant(NamedTuple):
    """Batches ``first.step`` to ``stop - 1`` may be made; behind ``first``, each lies behind the one before."""

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
        """What is left of them."""
        front = [Grant(self.first, step)] if self.first.step < step else []
        return [*front, Grant(self.batch(step + 1), self.stop)] if step + 1 < self.stop else front

    @property
    def run(self) -> Run:
        """As workers see it."""
        return Run(self.first.step, self.stop, self.first.arena_segments, self.first.omit)


class Withdrawal(NamedTuple):
    """This batch may not be made any more."""

    step: int


class Grants:
    """All that are in force."""

    def __init__(self) -> None:
        self._grants: list[Grant] = []

    def add(self, grants: Iterable[Grant]) -> None:
        """These too."""
        self._grants += grants

    def clear(self) -> None:
        """None."""
        self._grants.clear()

    def all(self) -> list[Grant]:
        """In the order in which they were added."""
        return list(self._grants)

    def has(self, step: int) -> bool:
        """Whether a batch may be made."""
        return any(grant.has(step) for grant in self._grants)

    def drop_before(self, step: int) -> None:
        """Those that lie in front of a batch are over."""
        self._grants = [grant for grant in self._grants if grant.stop > step]

    def take_out(self, step: int) -> PlannedBatch:
        """A batch that may be made, may not be made any more; returns it."""
        grant = next(grant for grant in self._grants if grant.has(step))
        self._grants.remove(grant)
        self._grants += grant.without(step)
        return grant.batch(step)
