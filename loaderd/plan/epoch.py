"""The order of one epoch: which record is in which row.

An epoch is a sequence of **rows**, one for each healthy record. With shuffling, the blocks of all shards are permuted
(another permutation each epoch) and laid end to end; without, they lie in the files' own order. Then the rows of each
**window**, a run of consecutive rows, are permuted among themselves (:class:`WindowOrder`). Both permutations are
functions of (seed, epoch), so any process can say where a record goes without asking another.

::

    blocks   │ 7 │ 2 │ 9 │ 0 │ 5 │ 1 │ 8 │ …      permuted by (seed, epoch)
    windows  │── window 0 ──│── window 1 ──│ …    may cut a block in two
    row r of window w lies at place WindowOrder(…).places()[r]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.plan.permutation import permutation, places
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


class EpochOrder:
    """The rows of one epoch, from the record counts of the blocks. Takes 16 bytes a block."""

    def __init__(self, counts: Int64s, seed: int, epoch: int, shuffle: bool) -> None:
        """``counts``: int64, (blocks,): records of each block, in the order of the shards."""
        self._epoch = epoch
        if shuffle:
            self._blocks = permutation(key_of("blocks", seed, epoch), len(counts))
        else:
            self._blocks = np.arange(len(counts))
        self._ends = np.cumsum(counts[self._blocks])

    def slices(self, start: int, stop: int) -> list[Slice]:
        """What rows ``start`` to ``stop - 1`` of the epoch consist of, in order of row."""
        if stop <= start:
            return []
        begin, last = np.searchsorted(self._ends, (start, stop - 1), side="right").tolist()
        ends = self._ends[begin : last + 1]
        begins = np.append(self._ends[begin - 1] if begin else 0, ends[:-1])
        first_rows, last_rows = np.maximum(begins, start), np.minimum(ends, stop)
        columns = (self._blocks[begin : last + 1], first_rows - begins, last_rows - begins, first_rows - start)
        parts = zip(*(column.tolist() for column in columns), repeat(self._epoch, len(ends)), strict=True)
        return list(map(Slice._make, parts))


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
