"""Ranges of batches: where each batch lies, and what is left where one is taken out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.batch_range import BatchRange, without
from loaderd.plan.batches import Segment

Place = tuple[int, int]


def batches_of(ranges: list[BatchRange]) -> dict[int, BatchRange]:
    """Each batch, by its step."""
    return {step: one.batch(step) for one in ranges for step in range(one.first, one.stop)}


@given(first=st.integers(0, 9), count=st.integers(1, 5), start=st.integers(0, 9), size=st.integers(1, 4))
def test_batches_of_a_range_lie_one_behind_the_other(first: int, count: int, start: int, size: int):
    several = BatchRange(first, first + count, (Segment(2, start, start + size, 1),))
    found = batches_of([several])
    assert found == {
        first + n: BatchRange(first + n, first + n + 1, (Segment(2, start + n * size, start + (n + 1) * size, 1),))
        for n in range(count)
    }
    places = [one.place_of(row) for one in found.values() for row in range(one.num_rows)]
    assert places == [(2, start + row) for row in range(count * size)]
    assert [step for step in range(20) if several.has(step)] == [*found]


def test_a_batch_of_several_windows_lacks_the_rows_that_are_left_out():
    batch = BatchRange(4, 5, (Segment(7, 10, 15, 1), Segment(8, 0, 3, 0)), (1, 6))
    assert (batch.num_rows, batch.num_records, batch.batch(4)) == (8, 6, batch)
    assert [batch.place_of(row) for row in range(8)] == [*[(7, 10 + n) for n in range(5)], (8, 0), (8, 1), (8, 2)]


@given(step=st.integers(3, 9))
def test_without_a_step_the_others_lie_where_they_lay(step: int):
    split = BatchRange(8, 9, (Segment(1, 30, 33, 1), Segment(2, 0, 2, 0)), (1,))
    ranges = [BatchRange(4, 8, (Segment(1, 10, 15, 1),)), split]
    expected = {number: batch for number, batch in batches_of(ranges).items() if number != step}
    assert batches_of(without(ranges, step)) == expected
