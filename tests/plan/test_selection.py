"""Selections of record numbers: parts of a split cover all and are stable; what is counted is what is found."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.errors import OptionError
from loaderd.plan import selection
from loaderd.plan.selection import HASHES, HashSplit, PowerLaw, Range, counts_that, numbers_that


def part(start: float, stop: float, seed: int = 0, level: int = 0) -> HashSplit:
    return HashSplit("record", seed, level, round(start * HASHES), round(stop * HASHES))


def test_a_record_never_changes_its_side():
    """A model's validation set must be the same with the next version."""
    assert numbers_that([part(0, 0.25).condition("a.tfrecord")], 0, 30).tolist() == [7, 9, 16, 23, 29]
    assert [part(0, 0.5).condition(name)[0] for name in ("a", "\udcff")] == [
        2322048940108304459,
        11758080865653214607,
    ]


@given(
    low=st.integers(0, 1 << 40),
    count=st.integers(0, 300),
    edges=st.lists(st.integers(0, HASHES), max_size=3),
    seed=st.integers(-5, 1 << 70),
)
def test_parts_are_disjoint_and_cover(low: int, count: int, edges: list[int], seed: int):
    edges = [0, *sorted(edges), HASHES]
    parts = [HashSplit("record", seed, 0, start, stop).condition("x") for start, stop in pairwise(edges)]
    found = [number for condition in parts for number in numbers_that([condition], low, low + count).tolist()]
    assert sorted(found) == list(range(low, low + count))
    middle = low + count // 3
    for condition in parts:
        whole = numbers_that([condition], low, low + count).tolist()
        halves = [numbers_that([condition], *ends).tolist() for ends in ((low, middle), (middle, low + count))]
        assert whole == halves[0] + halves[1], "a record's hash does not depend on what else is asked"


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=12),
    chunk=st.sampled_from([1, 7, 64, 1000]),
    start=st.integers(0, 1 << 33),
    edges=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_what_is_counted_is_what_is_found(lengths: list[tuple[int, int]], chunk: int, start: int, edges: list[float]):
    """Ranges of record numbers, some empty, with gaps between some, and chunks that end anywhere in them."""
    conditions = [part(*sorted(edges[:2])).condition("x"), part(*sorted(edges[2:]), level=1).condition("x")]
    lows, highs = [], []
    for length, gap in lengths:
        lows.append(start)
        highs.append(start + length)
        start += length + gap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_CHUNK_RECORDS", chunk)
        counts = counts_that(conditions, np.array(lows, dtype=np.int64), np.array(highs, dtype=np.int64))
    expected = [
        len(set.intersection(*({*numbers_that([one], low, high).tolist()} for one in conditions)))
        for low, high in zip(lows, highs, strict=True)
    ]
    assert counts.tolist() == expected
    assert [len(numbers_that(conditions, *ends)) for ends in zip(lows, highs, strict=True)] == expected


def test_the_sizes_are_near_the_fractions_and_shards_and_levels_differ():
    one, other, deeper = (
        set(numbers_that([of.condition(shard)], 0, 100_000).tolist())
        for of, shard in ((part(0, 0.3), "a"), (part(0, 0.3), "b"), (part(0, 0.3, level=1), "a"))
    )
    for found in (one, other, deeper):
        assert len(found) == pytest.approx(30_000, abs=5 * (100_000 * 0.3 * 0.7) ** 0.5)
    for pair in ((one, other), (one, deeper)):
        assert len(set.intersection(*pair)) == pytest.approx(9_000, abs=5 * (100_000 * 0.09 * 0.91) ** 0.5)


def test_whole_shards_are_on_a_side():
    names = [f"{number:03}.tfrecord" for number in range(2000)]
    sides = [HashSplit("shard", 7, 0, *ends) for ends in ((0, HASHES // 4), (HASHES // 4, HASHES))]
    of_each = [[side.has_shard(name) for side in sides] for name in names]
    assert all(sum(has) == 1 for has in of_each)
    assert sum(has[0] for has in of_each) == pytest.approx(500, abs=5 * (2000 * 3 / 16) ** 0.5)


@given(total=st.integers(0, 30), count=st.integers(0, 40))
def test_take_skip_and_last_are_slices(total: int, count: int):
    records = list(range(total))
    for operation, expected in (
        (Range("take", count), records[:count]),
        (Range("skip", count), records[count:]),
        (Range("newest", count), records[total - count :] if count < total else records),
    ):
        start, stop = operation.range_of(total)
        assert records[start:stop] == expected and 0 <= start <= stop <= total


@settings(max_examples=500)
@given(
    total=st.integers(0, 10**11),
    exponent=st.sampled_from([1.0, 0.675, 0.65, 0.3]),
    per_row=st.sampled_from([0.0, 0.4, 1.0, 2.5]),
    min_rows=st.integers(1, 10**7),
    max_rows=st.none() | st.integers(1, 10**9),
)
def test_a_window_by_a_power_law(total: int, exponent: float, per_row: float, min_rows: int, max_rows: int | None):
    """As ``python shuffle.py --help`` of lightvector/KataGo says it."""
    law = PowerLaw(exponent, per_row, min_rows, max_rows)
    expected = min_rows
    if total > min_rows:
        scaled = (total**exponent - min_rows**exponent) / (exponent * min_rows ** (exponent - 1))
        expected = int(scaled * per_row + min_rows)
    assert law(total) == (expected if max_rows is None else min(expected, max_rows))
    assert law(2 * total) >= law(total), "it grows"
    start, stop = Range("newest", law).range_of(total)
    assert (total - start, stop) == (min(law(total), total), total)
    for added in (total // 3, -total // 3):  # deleted ones, and ones that do not count
        shifted = PowerLaw(exponent, per_row, min_rows, max_rows, None, added)
        assert total < min_rows or shifted(total - added) == law(total)


def test_a_law_that_is_none():
    for wrong in (
        {"exponent": 0},
        {"exponent": 1.1},
        {"per_row": -1},
        {"min_rows": 0},
        {"max_rows": 0},
        {"scale": 0},
        {"scale": 1e-320},
        {"exponent": 1e-320},
        {"per_row": 1e300},
        {"added": 0.5},
        {"per_row": float("nan")},
    ):
        with pytest.raises(OptionError, match=f"{next(iter(wrong))} of PowerLaw must be"):
            PowerLaw(**wrong)  # type: ignore[arg-type]
    for function, said in ((lambda total: -1, "at least 0, got -1"), (lambda total: 1 / 0, "ZeroDivisionError")):
        with pytest.raises(OptionError, match=f"of newest must .*{said}"):
            Range("newest", function).range_of(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["take", "skip", "newest"])
@pytest.mark.parametrize("count", [-1, 1.5, "3", True, None])
def test_a_number_of_records_is_one(kind: Literal["take", "skip", "newest"], count: object):
    with pytest.raises(OptionError, match=f"of {kind} must be an integer of at least 0, got"):
        Range(kind, count)  # type: ignore[arg-type]
