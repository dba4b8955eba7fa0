"""The order of one epoch: which record is in which row.

An epoch is a sequence of **rows**, one for each healthy record. With shuffling, the blocks of all shards are permuted
(another permutation each epoch) and laid end to end; without, they lie in the files' own order
(:class:`~loaderd.plan.rows.DatasetRows`). Then the rows of each **window**, a run of consecutive rows, are permuted
among themselves (:class:`WindowOrder`). Both permutations are functions of (seed, epoch), so any process can say
where a record goes without asking another.

::

    blocks   │ 7 │ 2 │ 9 │ 0 │ 5 │ 1 │ 8 │ …      permuted by (seed, epoch)
    windows  │── window 0 ──│── window 1 ──│ …    may cut a block in two
    row r of window w lies at place WindowOrder(…).places()[r]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.plan.permutation import places
from loaderd.randomness import key_of

Int64s = npt.NDArray[np.int64]


class Slice(NamedTuple):
    """Records ``first`` to ``stop - 1`` of ``block`` in ``epoch``; the first of them is row ``row`` of its window."""

    block: int
    first: int
    stop: int
    row: int
    epoch: int

    def record(self, number: int) -> Slice:
        """Record ``number`` of the slice, counted from its first."""
        first = self.first + number
        return self._replace(first=first, stop=first + 1, row=self.row + number)


def record_at(slices: Sequence[Slice], row: int) -> Slice:
    """The record in this row of a window; ``slices``: what the window consists of, in order of row."""
    part = slices[bisect_right(slices, row, key=lambda part: part.row) - 1]
    return part.record(row - part.row)


class WindowOrder(NamedTuple):
    """Where the rows of a window go: permuted by ``key``, or each to its own place if that is None.

    ``size``: rows of the window. Only the places from ``first`` to ``stop - 1`` are still to be delivered; they are
    counted from ``first``. Other hosts have delivered the others.
    """

    key: int | None
    size: int
    first: int
    stop: int

    @property
    def num_places(self) -> int:
        """Places that are still to be delivered."""
        return self.stop - self.first

    def places(self, begin: int = 0, end: int | None = None) -> Int64s:
        """int64, (end - begin,): the places of rows ``begin`` to ``end - 1`` (None: the last).

        -1: the row was delivered before.
        """
        end = self.size if end is None else end
        whole = np.arange(begin, end) if self.key is None else places(self.key, self.size, begin, end)
        if self.num_places == self.size:
            return whole
        return np.where((whole >= self.first) & (whole < self.stop), whole - self.first, -1)


def window_key(seed: int, epoch: int, start: int) -> int:
    """The key of the permutation of the window that begins at row ``start`` of the epoch."""
    return key_of("rows", seed, epoch, start)
