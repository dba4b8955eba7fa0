"""Which records go into which shard: each once, in order, and shards in a compressed block to one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderd.convert.work_units import plan_units
from loaderd.formats.shard_index import ShardIndex
from loaderd.storage.shard_file import ShardFile

SOURCES = st.lists(
    st.tuples(st.sampled_from(["none", "gzip", "tar", "npz"]), st.lists(st.integers(1, 40), max_size=5)), max_size=5
)


def index_of(number: int, compression: Any, counts: list[int]) -> ShardIndex:
    many = np.array(counts, dtype=np.int64)
    firsts = np.cumsum(many) - many
    none = np.zeros(0, np.uint8)
    return ShardIndex(ShardFile(f"{number}", 1, 1), compression, 0, (), firsts, many, many, firsts, none)


@given(sources=SOURCES, records_per_shard=st.integers(1, 60))
def test_each_record_is_in_one_shard_in_order(sources: list[tuple[str, list[int]]], records_per_shard: int):
    indexes = [index_of(number, *source) for number, source in enumerate(sources)]
    units = list(plan_units(indexes, records_per_shard))
    expected = [(number, record) for number, (_, counts) in enumerate(sources) for record in range(sum(counts))]
    spans = [span for unit in units for span in unit.parts]
    found = [
        (span.block.shard, span.block.first_record + record)
        for span in spans
        for record in range(span.first, span.stop)
    ]
    assert found == expected
    sizes = [size for unit in units for size in unit.sizes]
    assert sum(filter(None, sizes)) == len(expected) and set(sizes[:-1]) <= {records_per_shard}
    assert [unit.first_shard for unit in units] == [
        sum(len(unit.sizes) for unit in units[:n]) for n in range(len(units))
    ]
    for unit in units:
        size = sum(span.stop - span.first for span in unit.parts)
        assert size == sum(filter(None, unit.sizes))
    inflated = Counter[tuple[int, int]]()
    for unit in units:
        parts = [span for span in unit.parts]
        inflated.update((span.block.shard, span.block.first_record) for span in parts)
        assert parts[0].stop - parts[0].first >= records_per_shard * (len(unit.sizes) - 1), "in one block"
    assert all(times <= 2 for (shard, _), times in inflated.items() if sources[shard][0] != "none")
