"""A pass: the same windows and batches whoever asks, in whatever order, from whatever epoch on."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.options import Remainder
from loaderd.plan.batches import BatchPlan, Segment
from loaderd.plan.passes import PassPlan
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare

COUNTS = np.array([5, 9, 1, 4, 8, 8, 3, 7])


def plan_of(first_epoch: int = 0, epochs: int | None = 4, seed: int = 3, **changes: Any) -> PassPlan:
    share = HostShare(EpochRemainder(int(COUNTS.sum())), changes.get("host", 1), 2, changes.get("window", 8))
    shuffle = changes.get("shuffle", True)
    rows = DatasetRows(COUNTS, seed, shuffle)
    batches = BatchPlan(share, changes.get("batch", 6), changes.get("remainder", "carry"), epochs)
    return PassPlan(rows, batches, seed, shuffle, first_epoch)


def window(plan: PassPlan, number: int) -> list[tuple[int, int]]:
    """(block, record) by place."""
    rows = [(part.block, record) for part in plan.slices_of(number) for record in range(part.first, part.stop)]
    places = plan.order_of(number).places()
    assert len(rows) == len(places)
    assert [part.row for part in plan.slices_of(number)] == [
        sum(other.stop - other.first for other in plan.slices_of(number)[:index])
        for index in range(len(plan.slices_of(number)))
    ]
    by_place = [(-1, -1)] * len(rows)
    for row, place in zip(rows, places.tolist(), strict=True):
        by_place[place] = row
    return by_place


def batch(plan: PassPlan, step: int) -> list[tuple[int, int]]:
    return [row for part in plan.segments_of(step) for row in window(plan, part.window)[part.start : part.stop]]


ALL_STEPS = range(-(-4 * 22 // 6))


IN_ORDER = [batch(plan_of(), step) for step in ALL_STEPS]
"""Each of a plan that was asked nothing else."""


@given(order=st.permutations(list(ALL_STEPS)))
def test_the_order_of_asking_does_not_matter(order: list[int]):
    plan = plan_of()
    assert plan.num_steps == len(ALL_STEPS)
    assert [batch(plan, step) for step in order] == [IN_ORDER[step] for step in order]


@pytest.mark.parametrize("remainder", ["drop", "short"])
def test_a_pass_that_begins_later_goes_on_as_the_first_did(remainder: str):
    long = plan_of(remainder=remainder)
    per_epoch = long.batches.steps_per_epoch
    late = plan_of(first_epoch=2, epochs=2, remainder=remainder)
    assert late.num_steps == 2 * per_epoch
    for step in range(2 * per_epoch):
        assert batch(late, step) == batch(long, 2 * per_epoch + step)
        assert late.last_step_in(late.segments_of(step)[0].window) >= step


def test_epochs_seeds_and_hosts_differ():
    first = window(plan_of(), 0)
    for other in (plan_of(first_epoch=1), plan_of(seed=4), plan_of(host=0)):
        assert window(other, 0) != first
    short = {"remainder": "short"}
    assert window(plan_of(**short), plan_of().batches.first.num_windows) == window(plan_of(first_epoch=1, **short), 0)


def test_without_shuffle_every_epoch_is_the_files_order():
    plan = plan_of(shuffle=False, host=0, remainder="short")
    per_epoch = plan.batches.first.num_windows
    for number in range(per_epoch):
        rows = window(plan, number)
        assert rows == sorted(rows) == window(plan, number + per_epoch)


def test_the_order_of_a_pass_never_changes():
    """A position that was saved by one version must mean the same batch in the next."""
    assert batch(plan_of(), 0) == [(0, 4), (1, 2), (0, 2), (0, 3), (1, 3), (0, 1)]
    assert batch(plan_of(), 3) == [(5, 3), (5, 7), (5, 5), (5, 1), (1, 5), (1, 3)], "of two epochs"


@given(
    batch=st.integers(1, 9),
    window=st.integers(1, 30),
    shuffle=st.booleans(),
    remainder=st.sampled_from(get_args(Remainder)),
)
def test_a_run_is_all_batches_that_lie_one_behind_the_other(batch: int, window: int, shuffle: bool, remainder: str):
    """But the last one that reads from the window; or the one batch, where not all of these are of one size."""
    plan = plan_of(batch=batch, window=window, shuffle=shuffle, remainder=remainder)
    assert plan.num_steps is not None
    for step in range(plan.num_steps):
        if len(plan.segments_of(step)) != 1:
            continue
        ((number, start, stop, _),) = plan.segments_of(step)
        last = plan.last_step_in(number)
        shifts = [(other - step) * (stop - start) for other in range(step, last)]
        are_alike = [
            plan.segments_of(step + i) == [Segment(number, start + s, stop + s)] for i, s in enumerate(shifts)
        ]
        assert plan.stop_of_run(step) == (last if shifts and all(are_alike) else step + 1)
