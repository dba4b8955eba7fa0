"""The order of one epoch: what every version must keep, and what no data set may break."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.epoch import Slice, WindowOrder, window_key
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare, evenly_before, split_evenly


def order_of(seed: int, epoch: int, start: int, size: int) -> WindowOrder:
    return WindowOrder(window_key(seed, epoch, start), size, 0, size)


def test_the_order_of_an_epoch_never_changes():
    """A position that was saved by one version must mean the same batch in the next."""
    counts = np.array([4, 1, 7, 3, 5])
    rows = DatasetRows(counts, seed=1, shuffle=True)
    assert [part.block for part in rows.slices(2, 0, 20)] == [1, 0, 4, 3, 2]
    assert rows.slices(2, 3, 12) == [Slice(0, 2, 4, 0, epoch=2), Slice(4, 0, 5, 2, 2), Slice(3, 0, 2, 7, 2)]
    assert order_of(1, 2, 3, 9).places().tolist() == [8, 0, 3, 6, 1, 2, 7, 5, 4]


def test_an_epoch_without_records():
    for counts in (np.zeros(0, dtype=np.int64), np.zeros(3, dtype=np.int64)):
        for shuffle in (True, False):
            assert DatasetRows(counts, 0, shuffle).slices(0, 0, 0) == []
    assert order_of(0, 0, 0, 0).places().tolist() == []


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=12), data=st.data())
def test_without_shuffle_records_come_as_they_lie_and_empty_blocks_do_not(counts: list[int], data: st.DataObject):
    rows = DatasetRows(np.array(counts), 5, shuffle=False)
    every = [(block, number) for block, count in enumerate(counts) for number in range(count)]
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    found = [(p.block, number) for p in rows.slices(5, start, stop) for number in range(p.first, p.stop)]
    assert found == every[start:stop]


@given(seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40), count=st.integers(0, 60))
def test_any_seed_orders_blocks_by_a_permutation(seed: int, epoch: int, count: int):
    rows = DatasetRows(np.ones(count, dtype=np.int64), seed, True)
    assert sorted(part.block for part in rows.slices(epoch, 0, count)) == list(range(count))
    assert sorted(order_of(seed, epoch, 7, count).places().tolist()) == list(range(count))


def test_each_block_is_as_often_first_as_another():
    counts = np.ones(8, dtype=np.int64)
    first = [
        DatasetRows(counts, seed, True).slices(epoch, 0, 1)[0].block for seed in range(40) for epoch in range(100)
    ]
    expected = len(first) / len(counts)
    chi_square = float(((np.bincount(first, minlength=8) - expected) ** 2 / expected).sum())
    assert chi_square < 24.3, "one chance in a thousand, with 7 degrees of freedom"


@given(total=st.integers(0, 10_000), parts=st.integers(1, 50))
def test_even_parts(total: int, parts: int):
    sizes = [split_evenly(total, parts, index) for index in range(parts)]
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [evenly_before(total, parts, index) for index in range(parts + 1)] == np.cumsum([0, *sizes]).tolist()


@pytest.mark.parametrize("num_hosts", [1, 3, 1000])
def test_billions_of_records_are_arithmetic(num_hosts: int):
    shares = [HostShare(EpochRemainder(10**12 + 7), host, num_hosts, 262_144) for host in (0, num_hosts - 1)]
    for share in shares:
        last = share.num_windows - 1
        assert share.begin_of(last) + share.size_of(last) == share.size
        assert share.find(share.size - 1)[0] == last
        assert share.largest_window <= 262_145
    assert shares[-1].window(last).start + shares[-1].size_of(last) == 10**12 + 7
