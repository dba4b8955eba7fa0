"""The rows of each epoch of a data set, of several that are mixed, and of several in a row.

Whatever it is made of, an epoch is a sequence of rows. To load a window of it, one asks which records are in rows
``start`` to ``stop - 1``. A mix takes the rows of each of its sets in that set's own order, epoch after epoch,
so each set is used up evenly::

    set 0 (weight 0.75)   epoch 0 ──────────────────► │ epoch 1 ────────────────► │ …
    set 1 (weight 0.25)   epoch 0 ───► │ epoch 1 ───► │ epoch 2 ───► │ …
    mix                   epoch 0 ──────────────────────────► │ epoch 1 ─────────────────────────► │ …
                          rows 0 … 9,999: the next 7,500 rows of set 0 and the next 2,500 rows of set 1

The order in which these rows are delivered follows from the window's permutation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loaderd.plan.epoch import Slice
from loaderd.plan.permutation import permutation
from loaderd.plan.sampling import Drawing
from loaderd.randomness import key_of

if TYPE_CHECKING:
    from fractions import Fraction

Int64s = npt.NDArray[np.int64]

# The most epochs that a set can begin in one epoch of a mix: so each of them has a number of its own.
_MOST_EPOCHS_OF_A_SET = 1 << 32


class DatasetRows:
    """One data set. Takes 16 bytes a block for each of two epochs.

    ``num_records``: rows of an epoch. ``num_blocks``: blocks, which are numbered through all sets.
    """

    def __init__(self, counts: Int64s, seed: int, shuffle: bool, drawing: Drawing | None = None) -> None:
        """``counts``: integers, (blocks,): records of each block, in the order of the shards.

        ``drawing``: what each epoch draws of them; None: all. It draws equally many in each.
        """
        self.num_records = int(counts.sum()) if drawing is None else drawing.num_records
        self.num_blocks = len(counts)
        self._has_all = drawing is None  # else there may be blocks of which nothing is drawn

        def order_of(epoch: int) -> tuple[Int64s, Int64s]:
            of_epoch = counts if drawing is None else drawing.counts(seed, epoch)
            shuffled = permutation(key_of("blocks", seed, epoch), len(counts)) if shuffle else np.arange(len(counts))
            return shuffled, np.cumsum(of_epoch[shuffled])

        # Windows are opened in order, so one epoch and the next are all that is ever asked for.
        self._order_of = lru_cache(maxsize=2)(order_of)
        """The blocks of an epoch in their order, and the row behind the last one of each: int64, (blocks,)."""

    def slices(self, epoch: int, start: int, stop: int) -> list[Slice]:
        """What rows ``start`` to ``stop - 1`` of an epoch consist of, in order of row; in them, rows count from 0."""
        if stop <= start:
            return []
        blocks, all_ends = self._order_of(epoch)
        begin, last = np.searchsorted(all_ends, (start, stop - 1), side="right").tolist()
        ends = all_ends[begin : last + 1]
        begins = np.append(all_ends[begin - 1] if begin else 0, ends[:-1])
        first_rows, last_rows = np.maximum(begins, start), np.minimum(ends, stop)
        columns = (blocks[begin : last + 1], first_rows - begins, last_rows - begins, first_rows - start)
        parts = zip(*(column.tolist() for column in columns), repeat(epoch, len(ends)), strict=True)
        slices = list(map(Slice._make, parts))
        return slices if self._has_all else [part for part in slices if part.first < part.stop]


class ConcatRows:
    """Several data sets in a row: an epoch consists of an epoch of each, one behind the other."""

    def __init__(self, sets: Sequence[RowSequence]) -> None:
        self._sets = sets
        self.num_records: int = sum(one.num_records for one in sets)
        self.num_blocks: int = sum(one.num_blocks for one in sets)

    def slices(self, epoch: int, start: int, stop: int) -> list[Slice]:
        slices: list[Slice] = []
        first_row = first_block = 0
        for one in self._sets:
            begin, end = max(start, first_row), min(stop, first_row + one.num_records)
            if begin < end:
                part = one.slices(epoch, begin - first_row, end - first_row)
                slices += _moved(part, first_block, begin - start)
            first_row += one.num_records
            first_block += one.num_blocks
        return slices


def rows_of_each(weights: Sequence[Fraction], rows: int) -> list[int]:
    """For each set, how many of the first ``rows`` rows of an epoch are its own, in exact proportion to ``weights``.

    The first set takes its part, rounded down, the second its part of what is left, and so on: none of them, nor
    what is left, gets less when a row is added.
    """
    counts: list[int] = []
    weight_left: Fraction | int = 1
    for weight in weights:
        taken = rows if weight == weight_left else rows * weight // weight_left
        counts.append(int(taken))
        rows -= counts[-1]
        weight_left -= weight
    return counts


class MixRows:
    """Several data sets in proportion to their weights; an epoch has ``num_records`` rows of all of them."""

    def __init__(
        self,
        sets: Sequence[RowSequence],
        num_records: int,
        weights: Mapping[int, Sequence[Fraction]],
        anew: Sequence[bool],
    ) -> None:
        """``weights``: by the epoch of the mix from which they hold (0 among them), one for each set, with sum 1.

        ``anew``: for each set, whether it begins a new epoch with each epoch of the mix, even if its last one was not
        used up.
        """
        self._sets = sets
        self._anew = anew
        self.num_records = num_records
        self.num_blocks: int = sum(one.num_blocks for one in sets)
        self._weights = [(epoch, tuple(weights[epoch])) for epoch in sorted(weights)]

    def rows_before(self, epoch: int) -> list[int]:
        """How many rows of each set were used in front of an epoch."""
        used = [0] * len(self._sets)
        firsts = [first for first, _ in self._weights]
        for (first, weights), following in zip(self._weights, [*firsts[1:], epoch], strict=True):
            epochs = max(0, min(following, epoch) - first)
            parts = rows_of_each(weights, self.num_records)
            used = [rows + epochs * part for rows, part in zip(used, parts, strict=True)]
        return used

    def slices(self, epoch: int, start: int, stop: int) -> list[Slice]:
        slices: list[Slice] = []
        first_block = row = 0
        weights = [weights for first, weights in self._weights if first <= epoch][-1]
        for one, anew, used, begin, end in zip(
            self._sets,
            self._anew,
            self.rows_before(epoch),
            rows_of_each(weights, start),
            rows_of_each(weights, stop),
            strict=True,
        ):
            first_epoch = epoch * _MOST_EPOCHS_OF_A_SET if anew else 0
            at, last = (begin, end) if anew else (used + begin, used + end)
            while at < last:
                of_set, first = divmod(at, one.num_records)
                of_set += first_epoch
                take = min(last - at, one.num_records - first)
                slices += _moved(one.slices(of_set, first, first + take), first_block, row)
                at += take
                row += take
            first_block += one.num_blocks
        return slices


RowSequence = DatasetRows | ConcatRows | MixRows
"""The rows of all epochs of one or more data sets."""


def _moved(slices: list[Slice], blocks: int, rows: int) -> list[Slice]:
    return [part._replace(block=part.block + blocks, row=part.row + rows) for part in slices]
