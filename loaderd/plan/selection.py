"""Which records are in a data set: operations on the list of all records, in the order of the files.

A **selection** is a tuple of operations; each works on what the ones before it left. :class:`HashSplit` keeps the
records (or the shards) whose hash lies in a range, :class:`Range` a part of the list. All keep the records' order, so
what is left of a block is a range of its record numbers, less those that a hash leaves out, or the ``where`` of the
data set. The daemon counts what is left; a worker finds out which records these are, from :data:`Condition` s.

A hash depends only on the shard's name and on the record's number in the shard. So a record stays on its side of a
split when shards are added, or moved to another folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.errors import OptionError
from loaderd.options import as_count, as_float, require
from loaderd.plan.permutation import random_words
from loaderd.randomness import key_of
from loaderd.schema.functions import name_of

Int64s = npt.NDArray[np.int64]

HASHES = 1 << 32
# So many hashes fit in a core's own cache, and in memory that need not be fetched from the kernel each time.
_CHUNK_RECORDS = 1 << 14


class HashCondition(NamedTuple):
    """Of the records of one shard, those whose hash by ``key`` is in ``start`` .. ``stop - 1``."""

    key: int
    start: int
    stop: int

    def met_by(self, low: int, high: int) -> npt.NDArray[np.bool_]:
        """bool, (high - low,): which of the records of these numbers meet it."""
        hashes = random_words(self.key, high - low, low)
        hashes >>= np.uint64(32)
        hashes -= np.uint64(self.start)
        met: npt.NDArray[np.bool_] = hashes < np.uint64(self.stop - self.start)  # below 0 is a very large number
        return met


class BitCondition(NamedTuple):
    """Of the records of one shard, those whose bit is set: ``bits``, uint8, begin with record ``8 * first_byte``."""

    bits: npt.NDArray[np.uint8]
    first_byte: int = 0

    def met_by(self, low: int, high: int) -> npt.NDArray[np.bool_]:
        begin, end = low // 8 - self.first_byte, -(-high // 8) - self.first_byte
        first = 8 * (begin + self.first_byte)
        bits = np.unpackbits(self.bits[begin:end], bitorder="little").view(np.bool_)
        return bits[low - first : high - first]

    def slice(self, low: int, high: int) -> BitCondition:
        """The same for records low .. high - 1 alone."""
        begin = low // 8
        return BitCondition(self.bits[begin - self.first_byte : -(-high // 8) - self.first_byte].copy(), begin)


Condition = HashCondition | BitCondition


class HashSplit(NamedTuple):
    """The records, members or shards whose hash is in ``start`` .. ``stop - 1``, of ``HASHES`` equally likely ones.

    ``level``: how many splits were made before. Each split has hashes of its own, so that it divides what the one
    before left in the same proportions.
    """

    by: Literal["record", "member", "shard"]
    seed: int
    level: int
    start: int
    stop: int

    def __str__(self) -> str:
        part = f"{self.start / HASHES:.4g} to {self.stop / HASHES:.4g}"
        return f'the part from {part} of split(by="{self.by}", seed={self.seed})'

    def condition(self, shard: str) -> HashCondition:
        """The condition for the records of the shard of that name; with ``by="shard"``, for its number 0 alone."""
        return HashCondition(key_of("split", self.by, self.seed, self.level, shard), self.start, self.stop)

    def has_shard(self, shard: str) -> bool:
        """With ``by="shard"``: whether the shard of that name is in."""
        return self.has_member(shard, 0)

    def has_member(self, shard: str, first_record: int) -> bool:
        """With ``by="member"``: whether the member is in that begins with this record of the shard of that name."""
        return len(numbers_that([self.condition(shard)], first_record, first_record + 1)) == 1


@dataclass(frozen=True)
class PowerLaw:
    """The size of a window of the newest records, by how many records there are: for ``Dataset.newest``.

    Of N records, the newest ``min_rows + per_row · (x**exponent - s**exponent) / (exponent · s**(exponent - 1))``,
    with ``x = N - min_rows + s + added``, cut to an integer, at least ``min_rows`` and at most ``max_rows``. So the
    window is ``min_rows`` where N is, grows by ``per_row`` for each new record then, and more slowly later. ``s``:
    ``scale``, by default ``min_rows``. ``added``: older records that have been deleted; below 0: records that are not
    to count, as those of random play above ``min_rows`` do not for shuffle.py. If there are fewer records than that,
    all of them are taken.

    This is ``compute_desired_num_rows`` of lightvector/KataGo, python/shuffle.py; its options -taper-window-exponent,
    -expand-window-per-row and -taper-window-scale are ``exponent``, ``per_row`` and ``scale``. The defaults are those
    of KataGo's python/selfplay/shuffle.sh. Raises OptionError for numbers that make no such window.
    """

    exponent: float = 0.65
    per_row: float = 0.4
    min_rows: int = 250_000
    max_rows: int | None = None
    scale: float | None = None
    added: int = 0

    def __post_init__(self) -> None:
        for name in ("exponent", "per_row", "scale"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_float(value, f"{name} of PowerLaw", "a number of at least 0"))
        object.__setattr__(self, "min_rows", as_count(self.min_rows, "min_rows of PowerLaw", "a positive integer"))
        object.__setattr__(self, "added", as_count(self.added, "added of PowerLaw", "an integer", -(1 << 62)))
        if self.max_rows is not None:
            must = "a positive integer or None"
            object.__setattr__(self, "max_rows", as_count(self.max_rows, "max_rows of PowerLaw", must))
        require(0.01 <= self.exponent <= 1, "exponent of PowerLaw", "from 0.01 to 1", self.exponent)
        require(self.per_row <= 1e6, "per_row of PowerLaw", "at most 1,000,000", self.per_row)
        require(self.scale is None or self.scale >= 1, "scale of PowerLaw", "at least 1 record", self.scale)

    def __call__(self, total: int) -> int:
        """How many of ``total`` records."""
        scale = self.min_rows if self.scale is None else self.scale
        x = max(total - self.min_rows + scale + self.added, scale)
        grown = (x**self.exponent - scale**self.exponent) / (self.exponent * scale ** (self.exponent - 1))
        wanted = max(int(grown * self.per_row + self.min_rows), self.min_rows)
        return wanted if self.max_rows is None else min(wanted, self.max_rows)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of the list: its first ``count`` records, all but those ("skip"), or its last ones ("newest").

    ``count`` of "newest" may be a function of how many records there are.
    """

    kind: Literal["take", "skip", "newest"]
    count: int | Callable[[int], int]

    def __post_init__(self) -> None:
        if self.kind != "newest" or not callable(self.count):
            object.__setattr__(self, "count", self._checked(self.count))

    def __str__(self) -> str:
        is_number_or_law = isinstance(self.count, (int, PowerLaw))
        return f"{self.kind}({self.count if is_number_or_law else name_of(self.count)})"

    def _checked(self, count: Any) -> int:
        return as_count(count, f"the number of records of {self.kind}", "an integer of at least 0", 0)

    def _counted(self, total: int) -> int:
        assert callable(self.count)
        try:
            count = self.count(total)
        except Exception as error:  # whatever a user's function raises
            said = f"{type(error).__name__}: {error}"
            raise OptionError(
                f"the function of {self.kind} must give a number for {total} records, {said}"
            ) from error
        return self._checked(count)

    def range_of(self, total: int) -> tuple[int, int]:
        """(start, stop) of what is left of ``total`` records. Raises OptionError where a function gives no number."""
        count = min(self._counted(total) if callable(self.count) else self.count, total)
        return {"take": (0, count), "skip": (count, total), "newest": (total - count, total)}[self.kind]


@dataclass(frozen=True, slots=True)
class NewestShards:
    """The last ``count`` shards of those that hold a record of the list."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", as_count(self.count, "the shards of newest", "an integer of at least 1"))

    def __str__(self) -> str:
        return f"newest(shards={self.count})"


Operation = HashSplit | Range | NewestShards
Selection = tuple[Operation, ...]


def numbers_that(conditions: Sequence[Condition], low: int, high: int) -> Int64s:
    """int64, (found,): which of the records low .. high - 1 of a shard meet all conditions."""
    met = np.ones(high - low, dtype=np.bool_)
    for condition in conditions:
        met &= condition.met_by(low, high)
    return np.flatnonzero(met) + low


def counts_that(
    conditions: Sequence[Condition],
    lows: Int64s,
    highs: Int64s,
    values_of: Callable[[int, int], Int64s] | None = None,
) -> Int64s:
    """int64, (ranges,): how many of the numbers low .. high - 1 meet all conditions, for each pair of the two arrays.

    The ranges (int64, (ranges,) each) must be in order and not overlap. 5 ns a number and hash; little memory.
    ``values_of`` returns what the numbers from the first to in front of the second count for; None: 1 each, and there
    must be a condition.
    """
    edges = np.stack([lows, highs], axis=1).ravel()
    met_before = np.zeros_like(edges)
    total = 0
    ends = np.zeros(_CHUNK_RECORDS + 1, np.int64)
    chunks = range(int(edges[0]), int(edges[-1]), _CHUNK_RECORDS) if len(edges) else range(0)
    for start in chunks:
        stop = min(start + _CHUNK_RECORDS, int(edges[-1]))
        values: Any = np.int64(1) if values_of is None else values_of(start, stop)
        for condition in conditions:
            values = values * condition.met_by(start, stop)
        np.cumsum(values, out=ends[1 : stop - start + 1])
        # The edges behind `start` up to `stop`; nothing is before the very first.
        here = slice(*np.searchsorted(edges, [start, stop], side="right"))
        met_before[here] = total + ends[edges[here] - start]
        total += int(ends[stop - start])
    return met_before[1::2] - met_before[::2]
