"""Drawing records: the arithmetic against loops over all records, and the distribution of what is drawn."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import loaderd
from loaderd.errors import OptionError
from loaderd.plan.rows import DatasetRows
from loaderd.plan.sampling import (
    MOST_MASS,
    UNIT,
    BlockDraw,
    Circle,
    Codes,
    Drawing,
    Sample,
    drawing_of,
    masses_of,
    shared_out,
)

weights = st.one_of(st.sampled_from([0.0, 1.0, 6e-8, 65504.0]), st.floats(0, 4, width=16))


def codes_of(values: list[float]) -> Codes:
    return np.array(values, np.float16).view(np.uint16)


def drawn_by(drawing: Drawing, blocks: list[list[float] | int], seed: int, epoch: int) -> list[list[int]]:
    """The numbers that an epoch draws of each block: of its weights, or of so many records."""
    found = []
    for number, of_block in enumerate(blocks):
        size = of_block if isinstance(of_block, int) else len(of_block)
        codes = None if isinstance(of_block, int) else codes_of(of_block)
        found.append(drawing.block(number, seed, epoch, 0, codes).of(np.arange(size)).tolist())
    return found


@given(
    masses=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 1 << 40)), min_size=1, max_size=12),
    data=st.data(),
)
def test_points_are_those_of_a_loop(masses: list[int], data: st.DataObject):
    total = sum(masses)
    assume(total)
    count = data.draw(st.integers(1, min(total, 60)))
    turn = data.draw(st.integers(0, total - 1))
    circle = Circle(0, total, count, turn, UNIT)
    points = sorted((turn + number * (total // count)) % total for number in range(count))
    assert len(set(points)) == count
    ends = list(itertools.accumulate(masses, initial=0))
    expected = [sum(point < end for point in points) for end in ends]
    assert circle.before(np.array(ends)).tolist() == expected == [int(circle.before(end)) for end in ends]
    for begin, end in itertools.pairwise(ends):
        of_block = circle.points(begin, end - begin).tolist()
        assert of_block == [point - begin for point in points if begin <= point < end]


@given(
    blocks=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=4),
    key=st.integers(0, 99),
    data=st.data(),
)
def test_over_all_turns_each_record_is_drawn_as_often_as_its_mass_says(
    blocks: list[list[int]], key: int, data: st.DataObject
):
    """Exactly: n times its mass. The float16 of code k is k times 2**-24, of mass k."""
    total, heaviest = sum(map(sum, blocks)), max(map(max, blocks))
    assume(total)
    count = data.draw(st.integers(1, total // heaviest))
    begins = list(itertools.accumulate(map(sum, blocks), initial=0))
    found = [np.zeros(len(masses), int) for masses in blocks]
    for turn in range(total):
        circle = Circle(key, total, count, turn, heaviest)
        for number, (begin, masses) in enumerate(zip(begins, blocks, strict=False)):
            draw = BlockDraw(circle, number, begin, sum(masses), 0, np.array(masses, np.uint8))
            np.add.at(found[number], draw.of(np.arange(len(masses))), 1)
            assert max(np.bincount(draw.of(np.arange(len(masses))), minlength=1)) <= 1
    assert [each.tolist() for each in found] == [[count * mass for mass in masses] for masses in blocks]


@given(
    blocks=st.lists(st.lists(weights, min_size=1, max_size=30), min_size=1, max_size=6),
    share=st.one_of(st.fractions(Fraction(1, 40), 3), st.sampled_from([0.03, 1 / 3, 1, 0.6])),
    most=st.none() | st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_each_epoch_has_as_many_as_the_probabilities_sum_to(
    blocks: list[list[float]], share: Any, most: int | None, seed: int
):
    """Each block is a member. What is drawn of a block is what its weights allow, in each epoch another choice."""
    sample = Sample(share, "weight", most)
    exact = Fraction(share).limit_denominator(10**9)
    probabilities = [[min(1, exact * Fraction(weight)) for weight in of_block] for of_block in blocks]
    of_blocks = [sum(each, Fraction(0)) if most is None else min(most, sum(each)) for each in probabilities]
    masses = [int(masses_of(codes_of(of_block), sample.most_mass).sum()) for of_block in blocks]
    if most is not None:
        masses = [min(mass, most * sample.most_mass) for mass in masses]
    drawing = drawing_of(sample, np.array(masses))
    if drawing is None:
        assert sum(of_blocks) < 1 + len(blocks) / UNIT
        return
    assert abs(drawing.num_records - sum(of_blocks)) < 1 + Fraction(sum(map(len, blocks)), 1 << 20)
    for epoch in range(3):
        found = drawn_by(drawing, blocks, seed, epoch)  # type: ignore[arg-type]
        assert [len(each) for each in found] == drawing.counts(seed, epoch).tolist()
        assert sum(map(len, found)) == drawing.num_records
        for numbers, of_block, expected in zip(found, blocks, of_blocks, strict=True):
            assert sorted(set(numbers)) == numbers and all(of_block[number] > 0 for number in numbers)
            assert len(numbers) < expected + 1 and (most is None or len(numbers) <= most)


@given(
    blocks=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    share=st.fractions(Fraction(1, 60), 1),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_the_rows_of_an_epoch_are_the_records_that_it_draws(
    blocks: list[int], share: Fraction, shuffle: bool, data: st.DataObject
):
    drawing = drawing_of(Sample(share), np.array(blocks) * Sample(share).unit)
    assume(drawing is not None)
    assert drawing is not None and drawing.num_records == sum(blocks) * share.numerator // share.denominator
    rows = DatasetRows(np.array(blocks), 3, shuffle, drawing)
    cuts = data.draw(st.lists(st.integers(0, rows.num_records), max_size=4).map(sorted))
    epoch = data.draw(st.integers(0, 5))
    parts = [rows.slices(epoch, *cut) for cut in itertools.pairwise([0, *cuts, rows.num_records])]
    counts: Counter[int] = Counter()
    for part in itertools.chain.from_iterable(parts):
        assert part.first == counts[part.block] < part.stop and part.epoch == epoch
        counts[part.block] = part.stop
    assert [counts[block] for block in range(len(blocks))] == drawing.counts(3, epoch).tolist()


def _chi_square(found: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any], epochs: int) -> float:
    """The sum of squared deviations over variances, per record: about 1 if each epoch draws by itself."""
    expected = probabilities * epochs
    variances = expected * (1 - probabilities)
    return float((((found - expected) ** 2)[variances > 0] / variances[variances > 0]).mean())


def test_records_are_drawn_as_often_as_their_probabilities_say():
    """Over 4,000 epochs of 600 records in blocks of 50; the numbers of one seed."""
    values = np.random.default_rng(5).gamma(0.6, 1.0, (12, 50)).astype(np.float16)
    values[3, :10], values[4] = 0, 20
    sample, epochs = Sample(Fraction(1, 10), "weight"), 4000
    blocks: Any = values.astype(float).tolist()
    masses = masses_of(values.view(np.uint16).ravel(), sample.most_mass).reshape(12, 50)
    drawing = drawing_of(sample, masses.sum(axis=1))
    assert drawing is not None
    found = np.zeros((12, 50))
    for epoch in range(epochs):
        for of_block, numbers in zip(found, drawn_by(drawing, blocks, 7, epoch), strict=True):
            of_block[numbers] += 1
    expected = np.minimum(1, values.astype(float) / 10)
    assert found[3, :10].sum() == 0 and (found[4] >= 0.97 * epochs).all(), "none, and (nearly) each time"
    assert abs(found.sum() / epochs - expected.sum()) < 1
    exact = masses * (drawing.num_records / masses.sum())
    assert 0.85 < _chi_square(found, exact, epochs) < 1.15


def test_neighbours_are_drawn_together_as_often_as_others():
    """Of blocks of 40 records of equal weight, a tenth: pairs in them are equally likely, whatever their distance."""
    drawing = drawing_of(Sample(Fraction(1, 10)), np.full(5, 40 * Sample(Fraction(1, 10)).unit))
    assert drawing is not None
    together, epochs = np.zeros((40, 40)), 4000
    for epoch in range(epochs):
        for numbers in drawn_by(drawing, [40] * 5, 1, epoch):
            together[np.ix_(numbers, numbers)] += 1
    by_distance = np.array([np.diagonal(together, distance).mean() for distance in range(1, 40)])
    # 4 of 40 at a time, 5 blocks an epoch.
    expected = 5 * epochs * 4 * 3 / (40 * 39)
    assert np.abs(by_distance[:30] / expected - 1).max() < 0.1
    apart = [sorted(map(tuple, drawn_by(drawing, [40] * 5, 1, epoch))) for epoch in range(200)]
    assert len(set(map(tuple, apart))) == 200, "each epoch draws others"
    small = drawing_of(Sample(Fraction(1, 10)), np.full(100, Sample(Fraction(1, 10)).unit))
    assert small is not None
    counts = [small.counts(1, epoch) for epoch in range(300)]
    assert {int(each.sum()) for each in counts} == {10}
    assert len({each.tobytes() for each in counts}) == 300, "also if each block is one record"
    of_second = drawing_of(Sample(Fraction(1, 10)), small.masses, 1)
    assert of_second is not None
    together = sum((each * of_second.counts(1, epoch)).sum() for epoch, each in enumerate(counts))
    assert 200 < together < 400, "300, as the set beside it draws by itself"


@given(
    members=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=9),
    most=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_blocks_of_a_member_stay_together(members: list[list[int]], most: int, seed: int):
    """So a member gives no more than the sum of its masses, rounded up, however many blocks it has."""
    sizes = [len(member) for member in members]
    is_first = np.concatenate([np.arange(size) == 0 for size in sizes])
    masses = np.array([*itertools.chain.from_iterable(members)])
    assume(masses.sum() >= most)
    drawing = Drawing(masses, int(masses.sum()) // most, most, 0, is_first)
    starts = np.flatnonzero(is_first)
    for epoch in range(3):
        counts = drawing.counts(seed, epoch)
        assert counts.sum() == drawing.num_records
        step = int(masses.sum()) // drawing.num_records
        assert (np.add.reduceat(counts, starts) <= -(-np.add.reduceat(masses, starts) // step)).all()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.integers(1, 2000))
def test_a_member_of_several_blocks_is_lowered_in_proportion(masses: list[int], most: int):
    lowered = shared_out(np.array(masses), most).tolist()
    total = sum(masses)
    assert sum(lowered) == min(total, most)
    assert all(
        abs(after - mass * min(1, most / max(1, total))) <= 1 for mass, after in zip(masses, lowered, strict=True)
    )
    assert all(after <= mass for mass, after in zip(masses, lowered, strict=True))


@pytest.mark.parametrize(("share", "weight"), [(3, 1), (3, 0.5), (1e6, 2**-14), (0.3, 4)])
def test_records_that_always_pass_are_all_drawn(share: float, weight: float):
    sample = Sample(share, "weight")
    masses = masses_of(codes_of([weight] * 100), sample.most_mass)
    for per_member, expected in ((100, 100), (30, 30)):
        drawing = drawing_of(sample, shared_out(masses, per_member * sample.most_mass))
        assert drawing is not None and drawing.num_records == expected


def test_float_shares_are_what_they_are_written_as():
    for share, of, expected in (
        (0.03, 100, 3),
        (0.6, 10, 6),
        (0.7, 10, 7),
        (0.3, 1_000_000_010, 300_000_003),
        (1 / 3, 9, 3),
        (1 / 32, 1000, 31),
        (1e-9, 2 * 10**9, 2),
        (1, 7, 7),
    ):
        sample = Sample(share)
        drawing = drawing_of(sample, np.array([of * sample.unit]))
        assert drawing is not None and drawing.num_records == expected
    assert Sample.of(0.03) == Sample(0.03) and Sample.of(None) is None
    assert pickle.loads(pickle.dumps(Sample(np.float32(0.5), "w", 3))) == Sample(0.5, "w", 3)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
@example(10_000_000, 19_999_999)
@example(4_839_834, 9_679_666)
def test_so_many_records_an_epoch(records: int, total: int):
    sample = pickle.loads(pickle.dumps(Sample(records=records))).of_total(total)
    drawing = drawing_of(sample, np.array([total * sample.unit]), most=records)
    assert drawing is not None and drawing.num_records == min(records, total)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: Sample(0), "the share of sample must be a number above 0"),
        (lambda: Sample(1.5), "and at most 1, got 1.5"),
        (lambda: Sample(True), "the share of sample"),
        (lambda: Sample(0.5, weight=3), "the weight of sample must be the name of a field or feature"),
        (lambda: Sample(0.5, per_member=0), "per_member must be a positive integer or None"),
        (lambda: Sample(records=0), "the records of sample must be a positive integer or None"),
        (lambda: Sample(0.5, records=7), r"the records of sample must be without share and weight, got .*share=0\.5"),
        (lambda: loaderd.Dataset("a", loaderd.schemas.mnist(), sample="1/2"), "sample must be a share"),
    ],
)
def test_what_is_refused(wrong: Any, text: str):
    with pytest.raises(OptionError, match=text):
        wrong()


def test_masses_never_reach_the_largest_integer():
    """The largest weights that are taken: all of MOST_MASS, in one block."""
    drawing = Drawing(np.array([MOST_MASS - 1]), 1000, UNIT)
    circle, _ = drawing.circle(1, 2)
    assert len(circle.points(0, MOST_MASS - 1)) == 1000 == int(circle.before(MOST_MASS - 1))
