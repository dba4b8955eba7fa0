"""Which rows are asked for in one request."""

from __future__ import annotations

import pytest

from loaderd.plan.epoch import Slice
from loaderd.remote import row_fetcher
from loaderd.remote.row_fetcher import requests_of

EPOCH = 7


def ranges(slices: list[tuple[int, int, int]], most_rows: int) -> list[list[tuple[int, int, int]]]:
    """Of each request; ``slices``: (block, first, stop)."""
    wanted = [Slice(block, first, stop, 0, EPOCH) for block, first, stop in slices]
    found = list(requests_of(wanted, most_rows))
    for request in found:
        assert request.num_rows == sum(stop - first for _, _, first, stop in request.ranges) <= most_rows
        assert {epoch for epoch, *_ in request.ranges} == {EPOCH}
    return [[(block, first, stop) for _, block, first, stop in request.ranges] for request in found]


def test_blocks_are_not_cut_where_they_fit():
    blocks = [(number, 0, 1000) for number in range(8)]
    assert ranges(blocks, 3500) == [blocks[:3], blocks[3:6], blocks[6:]]
    assert ranges(blocks, 1000) == [[block] for block in blocks]
    assert ranges(blocks, 8000) == [blocks]


def test_what_is_too_large_is_cut():
    assert ranges([(4, 10, 60), (5, 0, 30), (6, 0, 5)], 20) == [
        [(4, 10, 30)],
        [(4, 30, 50)],
        [(4, 50, 60)],
        [(5, 0, 20)],
        [(5, 20, 30), (6, 0, 5)],
    ]


def test_nothing_is_asked_for_nothing():
    assert ranges([], 10) == ranges([(1, 5, 5)], 10) == []


def test_a_request_has_not_too_many_ranges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_fetcher, "_MOST_RANGES_A_REQUEST", 2)
    single = [(number, 0, 1) for number in range(5)]
    assert ranges(single, 100) == [single[:2], single[2:4], single[4:]]
