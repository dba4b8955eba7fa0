"""Batches at the edges: before the first, behind the last, larger than an epoch, and far out."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loaderd.options import Remainder, StreamOptions
from loaderd.plan.batches import BatchPlan
from loaderd.plan.shares import EpochRemainder, HostShare

plans = st.builds(
    lambda records, hosts, host, window, batch, remainder, epochs: BatchPlan(
        HostShare(EpochRemainder(records), host % hosts, hosts, window),
        min(batch, records // hosts),
        remainder,
        epochs,
    ),
    st.integers(4, 100),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 60),
    st.integers(1, 150),
    st.sampled_from(get_args(Remainder)),
    st.one_of(st.none(), st.integers(1, 4)),
)


def steps_of(plan: BatchPlan) -> range:
    """All steps of a pass, or the first of one that has no end."""
    return range(40 if plan.num_steps is None else plan.num_steps)


@given(plan=plans)
def test_windows_smaller_than_batches(plan: BatchPlan):
    """As many windows as the bound says are enough, and rows are those of the plan, whatever the sizes."""
    following = 0
    for step in steps_of(plan):
        start, stop = plan.rows_of(step)
        assert start < stop <= start + plan.batch_size or (plan.batch_size == 1 and start == stop)
        segments = plan.segments(step)
        assert sum(segment.stop - segment.start for segment in segments) == stop - start
        windows = [segment.window for segment in segments] or [0]
        assert windows[-1] - windows[0] + 1 <= plan.max_windows_of_a_batch
        if plan.remainder == "carry":
            assert start == following
        following = stop
        for segment in segments:
            assert plan.last_step_in(segment.window) >= step
        if windows[0]:
            assert plan.last_step_in(windows[0] - 1) < step


@given(plan=plans)
def test_a_place_is_a_step(plan: BatchPlan):
    places = [plan.place_of(step) for step in steps_of(plan)]
    assert places == sorted(set(places))
    assert [plan.step_at(*place) for place in places] == list(steps_of(plan))
    for step, (epoch, batch) in enumerate(places):
        assert plan.first.num_hosts > 1 or plan.rows_of(step)[0] // plan.first.size == epoch
        assert batch == sum(other == epoch for other, _ in places[:step])


@given(plan=plans)
def test_the_place_behind_a_pass_is_the_next_epoch(plan: BatchPlan):
    assume(plan.num_steps and plan.epochs is not None)
    assert plan.num_steps is not None and plan.epochs is not None
    assert plan.place_of(plan.num_steps) == (plan.epochs, 0)
    assert plan.step_at(plan.epochs, 0) == plan.num_steps


@given(records=st.integers(1, 60), batch=st.integers(1, 20), epochs=st.one_of(st.none(), st.integers(1, 3)))
def test_carry_has_one_short_batch_at_most(records: int, batch: int, epochs: int | None):
    plan = BatchPlan(HostShare(EpochRemainder(records), 0, 1, 16), batch, "carry", epochs)
    sizes = [stop - start for start, stop in map(plan.rows_of, steps_of(plan))]
    assert all(size == batch for size in sizes[:-1])
    if epochs is not None:
        assert sum(sizes) == epochs * records
    else:
        assert sizes[-1] == batch


@pytest.mark.parametrize("remainder", get_args(Remainder))
def test_far_out_is_as_near_as_the_start(remainder: Remainder):
    plan = BatchPlan(HostShare(EpochRemainder(10**9 + 7), 3, 8, 262_144), 512, remainder, None)
    step = 10**13
    (segment, *rest) = plan.segments(step)
    assert sum(part.stop - part.start for part in (segment, *rest)) <= 512
    epoch, batch = plan.place_of(step)
    assert plan.step_at(epoch, batch) == step
    assert segment.window // plan.first.num_windows == epoch
    assert step <= plan.last_step_in(segment.window) <= step + 262_145 // 512 + 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_window_of_large_rows_is_bounded_by_its_bytes(shuffle: bool):
    options = StreamOptions(8, shuffle=shuffle)
    assert options.window_records(150_528) == (256 << 20) // 150_528
    assert StreamOptions(4096, shuffle=shuffle).window_records(150_528) == 4096, "and holds a batch"
