"""The order of one epoch: which record is in which row.

An epoch is a sequence of **rows**, one a healthy record. With shuffling, the blocks of all shards are permuted
(another permutation each epoch) and laid end to end; without, they lie in the files' own order. Then the rows of each
**window**, a run of consecutive rows, are permuted among themselves (:class:`WindowOrder`). Both permutations are
functions of (seed, epoch), so any process can say where a record goes without asking another.

::

    blocks   │ 7 │ 2 │ 9 │ 0 │ 5 │ 1 │ 8 │ …      permuted by (seed, epoch)
    windows  │── window 0 ──│── window 1 ──│ …    may cut a block in two
    row r of window w lies at place WindowOrder.of(…).places()[r]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loaderd.plan.permutation import key_of, permutation, places

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Slice:
    """Records ``first`` to ``stop - 1`` of ``block`` in ``epoch``; the first of them is row ``row`` of its window."""

    block: int
    first: int
    stop: int
    row: int
    epoch: int


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

    @property
    def num_records(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def slices(self, start: int, stop: int) -> list[Slice]:
        """What rows ``start`` to ``stop - 1`` of the epoch consist of, in order of row."""
        found: list[Slice] = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        row = start
        while row < stop:
            block_end = int(self._ends[index])
            block_start = int(self._ends[index - 1]) if index else 0
            end = min(stop, block_end)
            if end > row:
                first, last = row - block_start, end - block_start
                found.append(Slice(int(self._blocks[index]), first, last, row - start, self._epoch))
            row = end
            index += 1
        return found


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """Where the rows of a window go: permuted by ``key``, or each to its own place if that is None."""

    key: int | None
    size: int

    @classmethod
    def of(cls, seed: int, epoch: int, start: int, size: int, shuffle: bool) -> WindowOrder:
        """That of the window of ``size`` rows that begins at row ``start`` of the epoch."""
        return cls(key_of("rows", seed, epoch, start) if shuffle else None, size)

    def places(self, first: int = 0, stop: int | None = None) -> Int64s:
        """int64, (stop - first,): the places of rows ``first`` to ``stop - 1`` (None: to the last)."""
        stop = self.size if stop is None else stop
        return np.arange(first, stop) if self.key is None else places(self.key, self.size, first, stop)


def split_evenly(total: int, parts: int, index: int) -> int:
    """The size of part ``index`` of ``total`` in ``parts`` parts that differ by one at most, larger ones first."""
    return total // parts + (index < total % parts)


def evenly_before(total: int, parts: int, index: int) -> int:
    """The sum of the parts in front of part ``index``: see :func:`split_evenly`."""
    return total // parts * index + min(index, total % parts)


@dataclass(frozen=True)
class HostShare:
    """The rows of an epoch that one host of ``num_hosts`` gets, as windows of nearly equal size.

    The epoch is cut into rounds; each round holds one window for each host, side by side, so that after any round all
    hosts together have taken a front part of the epoch. Over all hosts every row is in exactly one window, and the
    hosts' shares differ by one row at most.
    """

    num_records: int
    host: int
    num_hosts: int
    window_records: int

    @cached_property
    def size(self) -> int:
        """Rows that this host gets in an epoch."""
        return split_evenly(self.num_records, self.num_hosts, self.host)

    @cached_property
    def smallest_size(self) -> int:
        """Rows that the host with the fewest gets."""
        return self.num_records // self.num_hosts

    @cached_property
    def num_windows(self) -> int:
        """Windows (rounds) of an epoch, the same on all hosts, and none of them empty."""
        wanted = -(-split_evenly(self.num_records, self.num_hosts, 0) // self.window_records)
        return max(1, min(wanted, self.smallest_size))

    @cached_property
    def largest_window(self) -> int:
        """Rows of the largest window: ``window_records`` at most (one more where hosts differ by a row)."""
        return split_evenly(self.size, self.num_windows, 0)

    def begin_of(self, window: int) -> int:
        """How many of this host's rows come before ``window``."""
        return evenly_before(self.size, self.num_windows, window)

    def epoch_row_of(self, window: int) -> int:
        """The row of the epoch at which ``window`` of this host begins."""
        larger_hosts = self.num_records % self.num_hosts
        row = 0
        for host in range(self.num_hosts):
            share = self.smallest_size + (host < larger_hosts)
            row += evenly_before(share, self.num_windows, window)
            if host < self.host:
                row += split_evenly(share, self.num_windows, window)
        return row

    def size_of(self, window: int) -> int:
        """Rows of ``window``."""
        return split_evenly(self.size, self.num_windows, window)

    def window_of(self, row: int) -> int:
        """The window in which this host's row ``row`` is."""
        larger, rest = self.size % self.num_windows, self.size // self.num_windows
        if row < larger * (rest + 1):
            return row // (rest + 1)
        return larger + (row - larger * (rest + 1)) // rest
