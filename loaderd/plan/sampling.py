"""Which records an epoch draws (``sample=``): systematic sampling, on a circle.

Each record of the data set has a **mass**: its weight in units of about 2**-24, an integer, as weights are kept as
float16; at most that of a record that every epoch draws. All masses, one behind the other, make a circle. Each epoch
lays n **points** on it, ``total // n`` apart, the first one at a random place. A record that a point falls on is
drawn::

    blocks    │     block 0     │ block 1 │        block 2        │      masses: 17, 9 and 23
    points     ▲        ▲        ▲        ▲        ▲        ▲           n = 6, 49 // 6 = 8 apart, turned by 1
    drawn      2 of block 0      1         3 of block 2

- No record's mass is above the distance of two points, so none is drawn twice, and an epoch has exactly n records.
- Each place of the circle is equally likely for each point: a record is drawn with the probability n · mass / total.
- How many points are in front of a place is one division. So a block's records are counted without looking at them.

The circle passes the blocks, and in a block its records, in a random order, another one in each epoch. Otherwise two
neighbours would never be drawn together, and of records of equal weight, a record always with the same others. Blocks
of a member that may give so many records at most stay together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Rational, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.options import as_count, require
from loaderd.plan.permutation import permutation, random_words
from loaderd.randomness import key_of
from loaderd.schema import Derived
from loaderd.schema.functions import name_of

if TYPE_CHECKING:
    from fractions import Fraction

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Codes = npt.NDArray[np.unsignedinteger[Any]]
"""Weights as an index holds them: the bits of float16, as unsigned integers."""

UNIT = 1 << 24
"""The mass of a record of weight 1: each float16 is a multiple of 2**-24."""
MOST_MASS = 1 << 62
_LEAST_SHARE, _MOST_SHARE = 1e-9, 1e6


@dataclass(frozen=True)
class Sample:
    """The records that each epoch draws anew, from the seed; as ``sample=`` of a :class:`~loaderd.Dataset`.

    Each record is drawn with the probability ``min(1, share · weight)``. An epoch has exactly as many records as
    these probabilities sum to, rounded down, for which all are lowered alike. No record comes twice in it.

    ``share``: a number above 0, at most 1 unless there are weights. ``weight``: the name of a field or of a stored
    feature, a number for each record; or a :class:`~loaderd.Derived` whose function returns such an array. It is
    called once for each record that passes ``where=``, and what it returns, 0 or 2**-14 to 65,504, is kept as
    float16, with 11 binary digits: 2 bytes a record in the index and in the daemon's memory. None: all weigh 1.

    ``per_member``: at most so many records of each member of a tar (a game, mostly) in an epoch; of shards of other
    kinds, of each shard. The probabilities of a member that would give more are lowered in proportion.

    ``records``: so many records an epoch, or all if there are fewer; in place of ``share`` and ``weight``.

    Neighbours are drawn independently but for the numbers: each block gives the sum of its probabilities, rounded up
    or down (:mod:`loaderd.plan.sampling` has the arithmetic). Raises OptionError.
    """

    share: Any = 1
    weight: str | Derived | None = None
    per_member: int | None = None
    records: int | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, Real) and not isinstance(self.share, bool)
        most = 1 if self.weight is None else _MOST_SHARE
        must = f"a number above 0 (at least {_LEAST_SHARE:g}), and at most {most:g}"
        require(is_number and _LEAST_SHARE <= self.share <= most, "the share of sample", must, self.share)
        if self.weight is not None:
            must = "the name of a field or feature, or a loaderd.Derived of a function and its inputs"
            require(isinstance(self.weight, (str, Derived)), "the weight of sample", must, self.weight)
        if self.per_member is not None:
            object.__setattr__(
                self, "per_member", as_count(self.per_member, "per_member", "a positive integer or None")
            )
        if self.records is not None:
            count = as_count(self.records, "the records of sample", "a positive integer or None")
            object.__setattr__(self, "records", count)
            require(
                self.share == 1 and self.weight is None, "the records of sample", "without share and weight", self
            )

    def __str__(self) -> str:
        if self.records is not None:
            return f"Sample(records={self.records}, per_member={self.per_member})"
        weight = name_of(self.weight.function) if isinstance(self.weight, Derived) else self.weight
        return f"Sample(share={self.share}, weight={weight}, per_member={self.per_member})"

    def of_total(self, total: int) -> Sample:
        """The same with a share in place of ``records``, for a data set of ``total`` records.

        It is rounded up: a drawing can have fewer records than its share, and no more.
        """
        if self.records is None:
            return self
        from fractions import Fraction  # imports decimal

        share = 1 / Fraction((total << 20) // self.records, 1 << 20) if self.records < total else 1
        return Sample(share, None, self.per_member)

    @classmethod
    def of(cls, sample: Any) -> Sample | None:
        """What ``sample=`` says: a share alone, or all of it. Raises OptionError."""
        if sample is None or isinstance(sample, Sample):
            return sample
        require(isinstance(sample, Real), "sample", "a share, such as 1/32, or a loaderd.Sample", sample)
        return cls(sample)

    @cached_property
    def _exact(self) -> Fraction:
        """The share: 3/100 for the float 0.03, which is a little less."""
        from fractions import Fraction  # imports decimal

        share: Any = self.share if isinstance(self.share, Rational) else Fraction(float(self.share))
        # Turned over, so that the numerator is small, and a unit of mass can be a multiple of it.
        return 1 / Fraction(int(share.denominator), int(share.numerator)).limit_denominator(1 << 20)

    @property
    def unit(self) -> int:
        """The mass of a record of weight 1; without weights, one that makes ``most_mass`` exact."""
        return UNIT if self.weight is not None else UNIT - UNIT % self._exact.numerator

    @property
    def most_mass(self) -> int:
        """The mass of a record that each epoch draws: no record counts for more."""
        return self.unit * self._exact.denominator // self._exact.numerator

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("share", "weight", "per_member", "records")}


def masses_of(codes: Codes, most_mass: int) -> Int64s:
    """int64, (records,): the mass of each record of these weights. 2 ns each."""
    return _mass_table(most_mass).take(codes)


@lru_cache(maxsize=4)
def _mass_table(most_mass: int) -> Int64s:
    """int64, (1 << 16,): the mass of each code; 0 for those that are no weights."""
    weights = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    masses = np.where((weights >= 0) & np.isfinite(weights), weights, 0).astype(np.float64) * UNIT
    return np.minimum(masses.astype(np.int64), most_mass)


class Circle(NamedTuple):
    """The points of one epoch. ``turn``: where the first one is. ``key``: of the orders of the records in blocks."""

    key: int
    total: int
    num_points: int
    turn: int
    most_mass: int

    @property
    def step(self) -> int:
        """How far one point is behind the other; the first is at least as far behind the last."""
        return self.total // self.num_points

    def before(self, place: Any) -> Any:
        """How many points are before ``place``, 0 to ``total``; or before each of an array of places, int64."""
        step, behind_turn = self.step, self.total - self.turn
        # How far the place is behind the turn, 1 to the total; and so how many points there are up to it.
        ahead = (place - self.turn - 1) % self.total + 1
        points = np.minimum(-(-ahead // step), self.num_points)
        behind = min(-(-behind_turn // step), self.num_points)
        return points - behind + (place > self.turn) * self.num_points

    def points(self, begin: int, mass: int) -> Int64s:
        """int64, (points,): how far behind ``begin`` each point of the next ``mass`` is, in order."""
        first, stop = int(self.before(begin)), int(self.before(begin + mass))
        step = self.step
        # The points that are numbered first have gone round.
        gone_round = self.num_points - min(-(-(self.total - self.turn) // step), self.num_points)
        numbers = np.arange(first, stop)
        places = self.turn + (numbers - gone_round) * step
        return places - np.where(numbers < gone_round, self.total - self.num_points * step, 0) - begin


class BlockDraw(NamedTuple):
    """What an epoch draws of block ``number``, whose ``mass`` lies at ``begin`` of the circle.

    ``weights``: (records,): of the block's records from ``low`` on, as codes; None: all weigh the same.
    """

    circle: Circle
    number: int
    begin: int
    mass: int
    low: int
    weights: Codes | None

    @property
    def num_drawn(self) -> int:
        """How many records are drawn."""
        return int(self.circle.before(self.begin + self.mass) - self.circle.before(self.begin))

    def of(self, numbers: Int64s) -> Int64s:
        """int64, (drawn,): which are drawn of the block's records in the data set, whose ``numbers`` rise."""
        key = int(random_words(self.circle.key, 1, self.number)[0])
        if self.weights is None:
            # The records with the least words, no two of which are equal: any of them is as likely as any other.
            count = self.num_drawn
            words = random_words(key, len(numbers))
            drawn = np.argpartition(words, count)[:count] if count < len(numbers) else np.arange(count)
        else:
            order = permutation(key, len(numbers))
            points = self.circle.points(self.begin, self.mass)
            ends = np.cumsum(masses_of(self.weights[numbers - self.low], self.circle.most_mass)[order])
            whole = int(ends[-1])
            if whole > self.mass:  # a member gives less than its records weigh
                points = np.array([point * whole // self.mass for point in points.tolist()], np.int64)
            drawn = order[np.searchsorted(ends, points, side="right")]
        return numbers[np.sort(drawn)]


class Drawing:
    """What each epoch draws from blocks of these ``masses``: int64, (blocks,), in the order of the files.

    ``num_records``: of an epoch, at least 1. ``most_mass``: of a record. ``of_set``: the number of the set, so that
    sets draw other records. ``is_first``: bool, (blocks,): where those begin that stay together; None: none do.
    """

    def __init__(
        self, masses: Int64s, num_records: int, most_mass: int, of_set: int = 0, is_first: Bools | None = None
    ) -> None:
        self.masses = masses
        self.num_records = num_records
        self.most_mass = most_mass
        self.is_first = is_first
        self._of_set = of_set
        self._total = int(masses.sum())
        self.circle = lru_cache(maxsize=4)(self._circle)
        """The points of an epoch, by the seed and its number; and int64, (blocks,): where each block begins."""

    def _circle(self, seed: int, epoch: int) -> tuple[Circle, Int64s]:
        key, blocks, high, low = (
            key_of("sample", seed, self._of_set, epoch, part) for part in ("records", "blocks", "high", "low")
        )
        turn = (high << 64 | low) % self._total
        if self.is_first is None:
            order = permutation(blocks, len(self.masses))
        else:
            runs = np.cumsum(self.is_first) - self.is_first[0]
            order = np.argsort(permutation(blocks, int(runs[-1]) + 1)[runs], kind="stable")
        begins = np.empty_like(self.masses)
        begins[order] = np.cumsum(self.masses[order]) - self.masses[order]
        return Circle(key, self._total, self.num_records, turn, self.most_mass), begins

    def counts(self, seed: int, epoch: int) -> Int64s:
        """int64, (blocks,): how many records of each block an epoch draws."""
        circle, begins = self.circle(seed, epoch)
        counts: Int64s = circle.before(begins + self.masses) - circle.before(begins)
        return counts

    def block(self, number: int, seed: int, epoch: int, low: int = 0, weights: Codes | None = None) -> BlockDraw:
        """What an epoch draws of a block; ``low``, ``weights``: as in BlockDraw."""
        circle, begins = self.circle(seed, epoch)
        return BlockDraw(circle, number, begins.item(number), self.masses.item(number), low, weights)


def shared_out(masses: Int64s, most: int) -> Int64s:
    """int64, (blocks,): the masses of a member's blocks, lowered in proportion to at most ``most`` together."""
    total = int(masses.sum())
    if total <= most:
        return masses
    ends = [0, *(end * most // total for end in np.cumsum(masses).tolist())]
    return np.array([end - begin for begin, end in pairwise(ends)], np.int64)


def drawing_of(
    sample: Sample, masses: Int64s, of_set: int = 0, is_first: Bools | None = None, most: int | None = None
) -> Drawing | None:
    """What ``sample`` draws from blocks of these masses, at most ``most`` records; None: no record.

    ``of_set``, ``is_first``: as in Drawing.
    """
    num_records = int(masses.sum()) // sample.most_mass
    num_records = num_records if most is None else min(num_records, most)
    return Drawing(masses, num_records, sample.most_mass, of_set, is_first) if num_records else None
