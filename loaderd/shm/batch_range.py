"""Batches that workers may make: ranges of steps, and in which rows of the arenas their records lie."""

from __future__ import annotations

from typing import NamedTuple


class ArenaSegment(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of the window in ``arena``."""

    arena: int
    start: int
    stop: int


class BatchRange(NamedTuple):
    """Batches ``first`` to ``stop - 1``. ``segments``: of the first; ``omit``: numbers of rows that are left out."""

    first: int
    stop: int
    segments: tuple[ArenaSegment, ...]
    omit: tuple[int, ...]

    def segments_of(self, step: int) -> tuple[ArenaSegment, ...]:
        """Where the rows of a batch lie. In a run of several, each lies behind the one before."""
        if step == self.first:
            return self.segments
        ((arena, start, stop),) = self.segments
        shift = (step - self.first) * (stop - start)
        return (ArenaSegment(arena, start + shift, stop + shift),)

    @property
    def num_records(self) -> int:
        """Records of each batch."""
        return sum(stop - start for _, start, stop in self.segments) - len(self.omit)


def without(runs: list[BatchRange], step: int) -> list[BatchRange]:
    """The same batches but for ``step``."""
    found = []
    for run in runs:
        if not run.first <= step < run.stop:
            found.append(run)
            continue
        if run.first < step:
            found.append(BatchRange(run.first, step, run.segments, run.omit))
        if step + 1 < run.stop:
            found.append(BatchRange(step + 1, run.stop, run.segments_of(step + 1), run.omit))
    return found
