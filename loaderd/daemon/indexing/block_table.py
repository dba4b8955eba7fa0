"""The blocks of all shards in one table, in the order of the shards, and what a selection leaves of them.

The table is the indexes of the shards, and 8 more bytes for each block. With a ``where`` or a selection, blocks of
which nothing is left are dropped. What is left of any other block is a range of its record numbers, without those
that ``where`` or hashes leave out; the range is the whole block, except in two blocks for each take, skip or newest.
The plan counts the records that are left, and knows of no others; a worker is told how to find them in the block.
With a ``sample``, each epoch draws some of these: 8 bytes more for each block, and 8 for each of
the last four epochs, say how many (``plan.sampling``).
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import NoShardsError, OptionError
from loaderd.formats.shard_index import ShardIndex
from loaderd.ipc.worker_messages import BlockSelection, FilePlace
from loaderd.kernels.crc import crc32c
from loaderd.options import OnCorrupt
from loaderd.plan.sampling import MOST_MASS, UNIT, Codes, Drawing, Sample, drawing_of, masses_of, shared_out
from loaderd.plan.selection import (
    BitCondition,
    Condition,
    HashCondition,
    HashSplit,
    NewestShards,
    Operation,
    Selection,
    counts_that,
    numbers_that,
)
from loaderd.randomness import key_of
from loaderd.storage.shard_file import Block

_MOST_WEIGHTS = 100_000_000
"""Of a block: a worker gets them in one message, which has at most 256 MiB."""
_HINTS = {
    "shard": 'Give more shards, or another seed, or split by="record".',
    "member": 'Give more games, or another seed, or split by="record".',
    "record": "Give more records, or another seed, or a larger fraction.",
}

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


class BlockTable:
    """See the module's docstring. With ``"skip_shard"``, shards with damage are left out whole.

    ``where``: in words, the function whose bits the indexes hold; "": all records are in, before the selection.
    ``first_shard``: how many shards there are in front of these, in other sets, of which there are ``of_set``.
    ``sample``: if it has a weight, the indexes hold those of all records. Raises NoShardsError where ``where``, an
    operation of the selection or ``sample`` leaves no record, and OptionError where weights are too large.
    """

    def __init__(
        self,
        indexes: Sequence[ShardIndex],
        on_corrupt: OnCorrupt,
        selection: Selection = (),
        first_shard: int = 0,
        has_keys: bool = True,
        where: str = "",
        sample: Sample | None = None,
        of_set: int = 0,
    ) -> None:
        """``has_keys``: whether :meth:`place` gives keys, which take longer than all the rest; else they are 0."""
        self.compressions = [index.compression for index in indexes]
        self.first_shard = first_shard
        self._names = [index.file.name for index in indexes] if has_keys else None
        self._shards = [
            number for number, index in enumerate(indexes) if not (on_corrupt == "skip_shard" and index.damages)
        ]
        self._indexes = [indexes[number] for number in self._shards]
        self._ends: list[int] = np.cumsum([len(index.counts) for index in self._indexes], dtype=np.int64).tolist()
        left = _Selection(self._indexes, self._ends)
        self.num_before_where = int(left.counts.sum())
        if where:
            left.apply_bits(where)
        self.num_passing: float = int(left.counts.sum())
        """Records of weight 1 that pass; with weights, their sum."""
        for operation in selection:
            left.apply(operation)
        self._conditions = left.conditions
        self._blocks = None if left.counts.all() else np.flatnonzero(left.counts)
        self._ranges = left.clipped
        self.counts: Int64s = left.counts if self._blocks is None else left.counts[self._blocks]
        """int64, (blocks,): records of each block that are in the data set, at least 1."""
        self.drawing = None if sample is None else self._drawing(left, sample, of_set)
        """What each epoch draws of the blocks; None: all."""
        self._has_weights = sample is not None and sample.weight is not None
        self.num_records = int(self.counts.sum()) if self.drawing is None else self.drawing.num_records
        """Records of an epoch."""
        self.num_shards, self.digest = self._take_stock(left)

    def _take_stock(self, left: _Selection) -> tuple[int, str]:
        """How many shards have a record in the data set; and 8 hex digits that tell which records it holds.

        The digits depend on what the records hold, on their order, and on how they are cut into blocks; not on where
        the shards are, nor on their names, unless a hash of the names chooses among the records.
        """
        digest = hashlib.blake2b(digest_size=4)
        chosen = left.counts > 0
        columns = (left.lows, left.highs, _column([index.num_bytes for index in self._indexes]))
        of_chosen = np.stack(columns)[:, chosen].astype("<i8")
        ends = np.append(0, np.cumsum(chosen))[self._ends].tolist()
        num_shards = 0
        for index, (begin, end) in zip(self._indexes, itertools.pairwise([0, *ends]), strict=True):
            if begin < end:
                num_shards += 1
                hashes = [tuple(condition) for condition in self._conditions.hashes_of(index)]
                digest.update(repr((index.digest, end - begin, hashes)).encode())
                digest.update(of_chosen[:, begin:end].tobytes())
                if self._conditions.has_bits:
                    digest.update(index.passing.tobytes())
                if self._has_weights:
                    digest.update(crc32c(index.weights.astype("<u2")).to_bytes(4, "little"))
        if self.drawing is not None:
            digest.update(repr((self.num_records, self.drawing.most_mass)).encode())
            digest.update(self.drawing.masses.astype("<i8").tobytes())
            if self.drawing.is_first is not None:
                digest.update(self.drawing.is_first.tobytes())
        return num_shards, digest.hexdigest()

    def _drawing(self, left: _Selection, sample: Sample, of_set: int) -> Drawing | None:
        """What ``sample`` draws of the blocks of which records are left. Raises NoShardsError and OptionError."""
        most, sample = sample.records, sample.of_total(int(self.counts.sum()))
        masses = left.masses(sample)
        if sample.weight is not None:
            self.num_passing = int(masses.sum()) / UNIT
        if sample.per_member is not None:
            left.lower(masses, min(sample.per_member * sample.most_mass, MOST_MASS))
        is_first = None if sample.per_member is None else left.first_of_members(self._blocks)
        drawing = drawing_of(sample, masses if self._blocks is None else masses[self._blocks], of_set, is_first, most)
        if drawing is None and len(self.counts):
            raise NoShardsError(
                f"{sample} draws no record of {self.counts.sum()}: their probabilities sum to "
                f"{masses.sum() / sample.most_mass:.3g}",
                hint="Choose a larger share." if masses.any() else "Give some of them a weight above 0.",
            )
        return drawing

    def place(self, number: int, seed: int = 0, epoch: int | None = None) -> FilePlace:
        """Where block ``number`` is read; the keys of its records, and what is drawn, come from ``seed``.

        ``epoch``: None: all records of the block in the data set, also those that no epoch draws.
        """
        own = number if self._blocks is None else int(self._blocks[number])
        shard = bisect_right(self._ends, own)
        index = self._indexes[shard]
        of_set = self._shards[shard]
        block = Block(self.first_shard + of_set, *index.block(own - (self._ends[shard - 1] if shard else 0)))
        left = None
        is_drawn = self.drawing is not None and epoch is not None
        if self._conditions or own in self._ranges or is_drawn:
            first = block.first_record
            low, high = self._ranges.get(own, (first, first + block.num_records))
            left = BlockSelection(low, high, self._conditions.of(index, low, high))
            if self.drawing is not None and epoch is not None:
                weights = index.weights[low:high].copy() if self._has_weights else None
                left = left._replace(draw=self.drawing.block(number, seed, epoch, low, weights))
        key = 0 if self._names is None else key_of("record", seed, epoch or 0, self._names[of_set])
        return FilePlace(block, left, key)


def _column(parts: list[npt.NDArray[Any]]) -> Int64s:
    joined: Int64s = np.concatenate([*parts, np.zeros(0, dtype=np.int64)], dtype=np.int64)
    return joined


class _Conditions:
    """What a record that is left must meet: the hashes ``by_record``, and ``has_bits``: the bit of its index."""

    def __init__(self) -> None:
        self.by_record: list[HashSplit] = []
        self.has_bits = False

    def __bool__(self) -> bool:
        return self.has_bits or bool(self.by_record)

    def hashes_of(self, index: ShardIndex) -> list[HashCondition]:
        return [operation.condition(index.file.name) for operation in self.by_record]

    def of(self, index: ShardIndex, low: int = 0, high: int | None = None) -> list[Condition]:
        """Those for records ``low`` to ``high - 1`` of a shard; None: to its end."""
        if not self.has_bits:
            return [*self.hashes_of(index)]
        bits = BitCondition(index.passing)
        return [bits if high is None else bits.slice(low, high), *self.hashes_of(index)]


class _Selection:
    """What the operations so far have left of every block: ``counts`` of its records ``lows`` .. ``highs - 1``.

    ``clipped``: the ``low`` and the ``high`` that are left of each block that take, skip or newest has cut.
    """

    def __init__(self, indexes: Sequence[ShardIndex], ends: list[int]) -> None:
        self._indexes = indexes
        self._ends = ends
        self.counts = _column([index.counts for index in indexes])
        self.lows = _column([index.first_records for index in indexes])
        self.highs = self.lows + self.counts
        self.conditions = _Conditions()
        self.clipped: dict[int, tuple[int, int]] = {}

    def apply_bits(self, where: str) -> None:
        """Leave the records whose bits are set; raises NoShardsError if there are records, and none is left."""
        self.conditions.has_bits = True
        before, self.counts = self.counts, self._counts_again()
        self._drop_empty()
        if before.any() and not self.counts.any():
            raise NoShardsError(
                f"no record passes where={where}, of {before.sum()} records in {len(self._indexes)} shards",
                hint="Look at what it is called with: `loaderd inspect SHARD --schema …` shows a record.",
            )

    def _drop_empty(self) -> None:
        self.highs = np.where(self.counts > 0, self.highs, self.lows)

    def apply(self, operation: Operation) -> None:
        """Apply ``operation``; raises NoShardsError if there were records, and it leaves none."""
        before = self.counts
        if isinstance(operation, NewestShards):
            self.counts = self._of_newest(operation.count)
        elif not isinstance(operation, HashSplit):
            self.counts = self._clip(*operation.range_of(int(before.sum())))
        elif operation.by == "shard":
            self.counts = self._of_shards(operation)
        elif operation.by == "member":
            self.counts = self._of_members(operation)
        else:
            self.conditions.by_record.append(operation)
            self.counts = self._counts_again()
        self._drop_empty()
        if before.any() and not self.counts.any():
            num_shards = sum(bool(before[own].any()) for _, own in self.by_shard())
            what = operation.by if isinstance(operation, HashSplit) else "record"
            raise NoShardsError(
                f"{operation} holds no {what}, of {before.sum()} records in {num_shards} shards",
                hint=_HINTS[what] if isinstance(operation, HashSplit) else "Choose a number that leaves some.",
            )

    def by_shard(self) -> Iterator[tuple[ShardIndex, slice]]:
        """Each index, and which blocks of the table are its own."""
        return zip(self._indexes, itertools.starmap(slice, itertools.pairwise([0, *self._ends])), strict=True)

    def _of_shards(self, operation: HashSplit) -> Int64s:
        counts: Int64s = self.counts.copy()
        for index, own in self.by_shard():
            if not operation.has_shard(index.file.name):
                counts[own] = 0
        return counts

    def _of_members(self, operation: HashSplit) -> Int64s:
        counts: Int64s = self.counts.copy()
        for index, own in self.by_shard():
            if index.compression != "tar":
                counts[own] *= operation.has_shard(index.file.name)
                continue
            for block, first in enumerate(index.first_records.tolist(), own.start):  # each is a member
                counts[block] *= operation.has_member(index.file.name, first)
        return counts

    def masses(self, sample: Sample) -> Int64s:
        """int64, (blocks,): the mass of the records that are left of each block. Raises OptionError."""
        most = sample.most_mass
        if sample.weight is None:
            return self.counts * sample.unit
        heaviest = masses_of(np.array([index.weights.max(initial=0) for index in self._indexes], np.uint16), most)
        if int(heaviest.max(initial=0)) * int(self.counts.sum()) >= MOST_MASS:
            raise OptionError(
                f"the weights of {sample} are too large: the largest is {int(heaviest.max()) / UNIT:.6g}",
                hint="Divide all weights by a number, and multiply the share by it.",
            )
        largest = int((self.highs - self.lows).max(initial=0))
        if largest > _MOST_WEIGHTS:
            raise OptionError(
                f"{sample}: a shard has a block of {largest:,} records, and weights are for up to {_MOST_WEIGHTS:,}",
                hint="Write it as several shards, a zstd file in several frames, or Parquet in smaller row groups.",
            )
        masses = np.zeros_like(self.counts)
        for index, own in self.by_shard():

            def of_records(start: int, stop: int, weights: Codes = index.weights) -> Int64s:
                return masses_of(weights[start:stop], most)

            masses[own] = counts_that(self.conditions.of(index), self.lows[own], self.highs[own], of_records)
        return masses

    def lower(self, masses: Int64s, most: int) -> None:
        """Lower the masses of each member of a tar, and of each shard of other kinds, to ``most`` in all."""
        for index, own in self.by_shard():
            if index.compression == "tar":  # each block is a member
                np.minimum(masses[own], most, out=masses[own])
            else:
                masses[own] = shared_out(masses[own], most)

    def first_of_members(self, blocks: Int64s | None) -> Bools | None:
        """bool, (blocks,): which ``blocks`` (None: all) are the first of a member, or of a shard of another kind.

        None: all are.
        """
        own = np.arange(len(self.counts)) if blocks is None else blocks
        shards = np.searchsorted(self._ends, own, side="right")
        is_tar = np.array([index.compression == "tar" for index in self._indexes], np.bool_)
        is_first: Bools = is_tar[shards] | (np.diff(shards, prepend=-1) > 0)
        return None if is_first.all() else is_first

    def _of_newest(self, num_shards: int) -> Int64s:
        counts: Int64s = self.counts.copy()
        starts = [own.start for _, own in self.by_shard() if counts[own].any()]
        counts[: starts[-num_shards] if len(starts) > num_shards else 0] = 0
        return counts

    def _counts_again(self) -> Int64s:
        counts: Int64s = np.empty_like(self.counts)
        for index, own in self.by_shard():
            counts[own] = counts_that(self.conditions.of(index), self.lows[own], self.highs[own])
        return counts

    def _clip(self, start: int, stop: int) -> Int64s:
        """Keep only numbers ``start`` .. ``stop - 1`` of the records that are left so far; returns the counts."""
        ends = np.cumsum(self.counts)
        begins = ends - self.counts
        first, last = np.clip(begins, start, stop), np.clip(ends, start, stop)
        counts: Int64s = last - first
        for block in np.flatnonzero((counts > 0) & (counts < self.counts)).tolist():
            conditions = self.conditions.of(self._indexes[bisect_right(self._ends, block)])
            numbers = numbers_that(conditions, int(self.lows[block]), int(self.highs[block]))
            numbers = numbers[first[block] - begins[block] : last[block] - begins[block]]
            self.lows[block], self.highs[block] = self.clipped[block] = int(numbers[0]), int(numbers[-1]) + 1
        return counts
