"""Rows of mixes and of sets in a row: every set is used up evenly, whatever the windows."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.rows import ConcatRows, DatasetRows, MixRows, RowSequence, rows_of_each

counts = st.lists(st.integers(1, 6), min_size=1, max_size=5)
weights = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


def exact(parts: list[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(part, sum(parts)) for part in parts)


def records(rows: RowSequence, epoch: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(block, record, epoch of its set) of each row."""
    slices = rows.slices(epoch, start, stop)
    found = [(part.block, number, part.epoch) for part in slices for number in range(part.first, part.stop)]
    begins = np.cumsum([0, *[part.stop - part.first for part in slices]]).tolist()
    assert [part.row for part in slices] == begins[:-1] and len(found) == stop - start
    return found


@given(parts=weights, rows=st.integers(0, 500), more=st.integers(0, 50))
def test_shares_are_exact_and_only_grow(parts: list[int], rows: int, more: int):
    weights = exact(parts)
    found, later = rows_of_each(weights, rows), rows_of_each(weights, rows + more)
    assert sum(found) == rows
    assert all(before <= behind for before, behind in zip(found, later, strict=True))
    for share, part in zip(found, exact(parts), strict=True):
        assert abs(share - rows * part) < len(parts)


@given(
    sizes=st.lists(counts, min_size=3, max_size=3),
    schedule=st.dictionaries(st.integers(1, 5), st.lists(st.integers(0, 7), min_size=3, max_size=3).filter(any)),
    first=st.lists(st.integers(0, 7), min_size=3, max_size=3).filter(any),
    num_records=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    epochs=st.permutations(range(6)),
)
def test_a_mix_takes_each_set_in_its_own_order(
    sizes: list[list[int]],
    schedule: dict[int, list[int]],
    first: list[int],
    num_records: int,
    cuts: list[int],
    epochs: list[int],
):
    """Windows may be cut anywhere and asked for in any order: together they are stretches of each set's stream."""
    sets = [DatasetRows(np.array(of_set), 7, True) for of_set in sizes]
    schedule = {0: first, **schedule}
    mix = MixRows(sets, num_records, {epoch: exact(parts) for epoch, parts in schedule.items()}, [False] * 3)
    edges = sorted({0, num_records, *[cut % (num_records + 1) for cut in cuts]})
    blocks = np.cumsum([0, *map(len, sizes)]).tolist()
    by_epoch = {}
    for epoch in epochs:
        by_epoch[epoch] = [row for start, stop in pairwise(edges) for row in records(mix, epoch, start, stop)]
    for number, one in enumerate(sets):
        found = [
            (block - blocks[number], record, of_set)
            for epoch in sorted(by_epoch)
            for block, record, of_set in by_epoch[epoch]
            if blocks[number] <= block < blocks[number + 1]
        ]
        stream = [
            row
            for epoch in range(len(found) // one.num_records + 1)
            for row in records(one, epoch, 0, one.num_records)
        ]
        assert found == stream[: len(found)]
    for epoch, rows in by_epoch.items():
        parts = exact(schedule[max(begun for begun in schedule if begun <= epoch)])
        of_sets = Counter(int(np.searchsorted(blocks, block, side="right")) - 1 for block, _, _ in rows)
        assert all(abs(of_sets[number] - num_records * part) < 3 for number, part in enumerate(parts))


def test_a_set_that_begins_anew_has_an_order_of_its_own_in_each_epoch():
    sets = [DatasetRows(np.full(10, 5), 7, True), DatasetRows(np.full(15, 1), 7, True)]
    mix = MixRows(sets, 40, {0: exact([1, 1])}, [False, True])
    rows = [[row for row in records(mix, epoch, 0, 40) if row[0] >= 10] for epoch in range(3)]
    assert all(len(of_epoch) == 20 for of_epoch in rows), "of 15 records: one epoch, and a third of another"
    assert len({epoch for of_epoch in rows for _, _, epoch in of_epoch}) == 6
    orders = [[row[:2] for row in of_epoch[:15]] for of_epoch in rows]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2]) and orders[0] != orders[1] != orders[2]


@given(sizes=st.lists(counts, min_size=1, max_size=4), data=st.data())
def test_sets_in_a_row(sizes: list[list[int]], data: st.DataObject):
    sets = [DatasetRows(np.array(of_set), 7, True) for of_set in sizes]
    row = ConcatRows([*sets[:1], ConcatRows(sets[1:])])
    blocks = np.cumsum([0, *map(len, sizes)]).tolist()
    every = [
        (block + blocks[number], record, epoch)
        for number, one in enumerate(sets)
        for block, record, epoch in records(one, 3, 0, one.num_records)
    ]
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    assert records(row, 3, start, stop) == every[start:stop]
    assert (row.num_records, row.num_blocks) == (len(every), blocks[-1])
