"""Batches that workers may make: ranges of steps, and in which rows of the windows their records lie."""

from __future__ import annotations

from typing import NamedTuple

from loaderd.plan.batches import Segment


class BatchRange(NamedTuple):
    """Batches ``first`` to ``stop - 1``: one, or several whose rows lie one behind the other in the same window.

    ``segments``: where the rows of the first lie. ``omit``: the rows, counted from the start of the batch, that are
    left out. ``suspects``: its rows from the first of these on may kill workers. So they are decoded in parts before
    the batch is made; a part begins at each of these rows.
    """

    first: int
    stop: int
    segments: tuple[Segment, ...]
    omit: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()

    def has(self, step: int) -> bool:
        """Whether ``step`` is one of them."""
        return self.first <= step < self.stop

    def batch(self, step: int) -> BatchRange:
        """Batch ``step`` of them alone."""
        return self.part(step, step + 1)

    def part(self, first: int, stop: int) -> BatchRange:
        """Batches ``first`` to ``stop - 1`` of them."""
        if first == self.first:
            return self._replace(stop=stop)
        ((window, start, end, arena),) = self.segments
        shift = (first - self.first) * (end - start)
        return BatchRange(first, stop, (Segment(window, start + shift, end + shift, arena),), self.omit)

    @property
    def num_rows(self) -> int:
        """Rows of each batch, with those that are left out."""
        return sum(stop - start for _, start, stop, _ in self.segments)

    @property
    def num_records(self) -> int:
        """Records of each batch."""
        return self.num_rows - len(self.omit)

    def suspects_at(self, row: int) -> list[int]:
        """The rows of the part of the suspects that begins at ``row``; none if no part begins there."""
        if row not in self.suspects:
            return []
        stop = next((start for start in self.suspects if start > row), self.num_rows)
        return [suspect for suspect in range(row, stop) if suspect not in self.omit]

    def place_of(self, row: int) -> tuple[int, int]:
        """(window, place in it) of a row of the first batch."""
        for segment in self.segments:
            size = segment.stop - segment.start
            if row < size:
                return segment.window, segment.start + row
            row -= size
        raise IndexError(row)


def without(ranges: list[BatchRange], step: int) -> list[BatchRange]:
    """The same batches but for ``step``."""
    left = []
    for one in ranges:
        if not one.has(step):
            left.append(one)
            continue
        if one.first < step:
            left.append(one.part(one.first, step))
        if step + 1 < one.stop:
            left.append(one.part(step + 1, one.stop))
    return left
