"""The order as arithmetic: epochs, hosts, windows and batches together deliver every row once, in one order."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.plan.batches import BatchPlan
from loaderd.plan.epoch import EpochOrder, HostShare, window_places
from loaderd.plan.passes import PassPlan

counts_of_blocks = st.lists(st.integers(1, 20), min_size=1, max_size=20).map(np.array)


@given(counts=counts_of_blocks, seed=st.integers(0, 99), epoch=st.integers(0, 99), data=st.data())
def test_slices_of_any_stretch_of_an_epoch(counts: np.ndarray, seed: int, epoch: int, data: st.DataObject):
    order = EpochOrder(counts, seed, epoch, shuffle=True)
    assert order.num_records == counts.sum()
    cuts = sorted(data.draw(st.sets(st.integers(0, order.num_records), max_size=6)) | {0, order.num_records})
    seen = []
    for start, stop in itertools.pairwise(cuts):
        row = 0
        for part in order.slices(start, stop):
            assert part.row == row and 0 <= part.first < part.stop <= counts[part.block]
            row += part.stop - part.first
            seen += [(part.block, number) for number in range(part.first, part.stop)]
        assert row == stop - start
    assert Counter(seen) == {(block, n): 1 for block, count in enumerate(counts) for n in range(count)}
    whole = [p.block for p in order.slices(0, order.num_records)]
    assert [p.block for p in EpochOrder(counts, seed, epoch, shuffle=True).slices(0, order.num_records)] == whole
    assert len(set(whole)) == len(whole), "a block comes whole"


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_files():
    counts = np.full(50, 10)
    orders = [
        tuple(p.block for p in EpochOrder(counts, s, e, True).slices(0, 500)) for s in range(3) for e in range(3)
    ]
    assert len(set(orders)) == 9
    assert [p.block for p in EpochOrder(counts, 0, 0, False).slices(0, 500)] == list(range(50))
    assert np.array_equal(window_places(0, 0, 0, 30, shuffle=False), np.arange(30))
    assert not np.array_equal(window_places(0, 0, 0, 30, True), window_places(0, 0, 30, 30, True))


@given(num_records=st.integers(0, 300), num_hosts=st.integers(1, 7), window=st.integers(1, 60))
def test_hosts_cut_an_epoch_into_windows_side_by_side(num_records: int, num_hosts: int, window: int):
    shares = [HostShare(num_records, host, num_hosts, window) for host in range(num_hosts)]
    assert sum(share.size for share in shares) == num_records
    assert max(s.size for s in shares) - min(s.size for s in shares) <= 1
    row = 0
    for number in range(shares[0].num_windows):
        for share in shares:
            assert share.num_windows == shares[0].num_windows
            size = share.size_of(number)
            assert size <= share.largest_window <= window + 1
            if num_records >= num_hosts:
                assert share.largest_window - size <= 1 and size > 0
            assert share.epoch_row_of(number) == row, "the hosts' windows of a round lie side by side"
            begin = share.begin_of(number)
            assert all(share.window_of(r) == number for r in range(begin, begin + size))
            row += size
    assert row == num_records


batch_plans = st.builds(
    lambda records, hosts, host, window, batch, remainder, epochs: BatchPlan(
        HostShare(records, host % hosts, hosts, max(window, batch)), batch, remainder, epochs
    ),
    st.integers(1, 200),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 80),
    st.integers(1, 70),
    st.sampled_from(["drop", "short", "carry"]),
    st.integers(1, 4),
)


@settings(max_examples=300)
@given(plan=batch_plans)
def test_batches_take_each_row_of_each_epoch_once(plan: BatchPlan):
    size, epochs = plan.share.size, plan.epochs
    assert epochs is not None and plan.num_steps is not None
    rows: list[int] = []
    last_reader: dict[int, int] = {}
    for step in range(plan.num_steps):
        start, stop = plan.rows_of(step)
        assert 0 < stop - start <= plan.batch_size
        rows += range(start, stop)
        segments = plan.segments(step)
        assert segments[-1].window - segments[0].window < plan.max_windows_of_a_batch
        found = []
        for segment in segments:
            epoch, window = divmod(segment.window, plan.share.num_windows)
            base = epoch * size + plan.share.begin_of(window)
            assert 0 <= segment.start < segment.stop <= plan.share.size_of(window)
            found += range(base + segment.start, base + segment.stop)
            last_reader[segment.window] = step
        assert found == list(range(start, stop))
        epoch, batch = plan.place_of(step)
        assert plan.step_at(epoch, batch) == step and batch >= 0
        assert start // size == epoch, "a batch belongs to the epoch in which it begins"
    assert rows == sorted(set(rows))
    if plan.remainder == "drop":
        assert len(rows) == epochs * (plan.share.smallest_size // plan.batch_size) * plan.batch_size
        assert all(r % size < plan.share.smallest_size // plan.batch_size * plan.batch_size for r in rows)
    else:
        assert len(rows) == epochs * size
    for window, step in last_reader.items():
        assert plan.last_step_in(window) == step


@pytest.mark.parametrize("remainder", ["drop", "short", "carry"])
def test_an_endless_plan_begins_like_a_long_one(remainder: str):
    share = HostShare(103, 0, 1, 40)
    endless = BatchPlan(share, 10, remainder, None)  # type: ignore[arg-type]
    long = BatchPlan(share, 10, remainder, 50)  # type: ignore[arg-type]
    assert endless.num_steps is None and long.num_steps is not None
    for step in range(long.num_steps - 1):
        assert endless.segments(step) == long.segments(step)
        assert endless.place_of(step) == long.place_of(step)


def test_what_is_too_small_has_no_batches():
    assert BatchPlan(HostShare(9, 0, 1, 10), 10, "drop", None).num_steps == 0
    assert BatchPlan(HostShare(9, 0, 1, 10), 10, "drop", 5).num_steps == 0
    assert BatchPlan(HostShare(0, 0, 1, 10), 10, "short", None).num_steps == 0
    assert BatchPlan(HostShare(2, 2, 3, 10), 10, "carry", None).num_steps == 0
    assert BatchPlan(HostShare(9, 0, 1, 10), 10, "short", 1).num_steps == 1


@given(
    counts=counts_of_blocks,
    batch=st.integers(1, 40),
    window=st.integers(1, 60),
    hosts=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_a_pass_gives_all_hosts_together_every_record_once(
    counts: np.ndarray, batch: int, window: int, hosts: int, seed: int
):
    delivered = []
    for host in range(hosts):
        share = HostShare(int(counts.sum()), host, hosts, max(window, batch))
        plan = PassPlan(counts, BatchPlan(share, batch, "short", 1), seed, True, first_epoch=3)
        content: dict[int, list[tuple[int, int]]] = {}
        assert plan.num_steps is not None
        for step in range(plan.num_steps):
            for segment in plan.segments_of(step):
                if segment.window not in content:
                    rows = [(p.block, n) for p in plan.slices_of(segment.window) for n in range(p.first, p.stop)]
                    assert len(rows) == plan.size_of(segment.window)
                    placed: list[tuple[int, int]] = [(-1, -1)] * len(rows)
                    for row, place in zip(rows, plan.places_of(segment.window), strict=True):
                        placed[place] = row
                    content[segment.window] = placed
                delivered += content[segment.window][segment.start : segment.stop]
    assert Counter(delivered) == {(block, n): 1 for block, count in enumerate(counts) for n in range(count)}
