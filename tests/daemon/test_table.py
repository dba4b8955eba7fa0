"""The table of all blocks: what indexes hold, less what a selection leaves out; and the digest of that."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.daemon.table import BlockTable
from loaderd.errors import NoShardsError
from loaderd.plan.epoch import Slice
from loaderd.plan.selection import HASHES, Hashed, Last, Operation, Skip, Take, numbers_that
from loaderd.shards.files import ShardFile, list_shards
from loaderd.shards.index import ANCHOR_RECORDS, ShardIndex, build_index, shrunk

Write = Callable[..., list[Path]]


def files_of(paths: list[Path]) -> list[ShardFile]:
    return list_shards([str(path) for path in paths])


@pytest.fixture
def indexes(write_numbered: Write) -> list[ShardIndex]:
    """Of 100 records, none, 40 of which number 13 is damaged, and 70; in blocks of up to 33."""
    paths = write_numbered([100, 0, 40, 70])
    data = bytearray(paths[2].read_bytes())
    offset = 0
    for _ in range(13):
        offset += int.from_bytes(data[offset : offset + 8], "little") + 16
    data[offset + 20] ^= 1
    paths[2].write_bytes(data)
    return [build_index(file, 33) for file in files_of(paths)]


def check_table(table: BlockTable, indexes: list[ShardIndex], kept: list[int]) -> None:
    """Each block of the table is that of an index, in order, with the anchors of its own records."""
    number = 0
    for shard in kept:
        index = indexes[shard]
        data = Path(index.file.uri).read_bytes()
        for offset, num_bytes, count, first in zip(
            index.offsets, index.num_bytes, index.counts, index.first_records, strict=True
        ):
            *place, anchors, left = table.block(number)
            assert left is None
            assert place == [shard, offset, num_bytes, count, first]
            assert all(type(value) is int for value in place), "as msgpack wants it"
            starts = [int(offset)]
            for _ in range(count):
                starts.append(starts[-1] + int.from_bytes(data[starts[-1] : starts[-1] + 8], "little") + 16)
            assert starts[-1] == offset + num_bytes
            expected = [start - offset for start in starts[:-1:ANCHOR_RECORDS]]
            assert np.frombuffer(anchors, "<u4").tolist() == expected
            number += 1
    assert number == len(table.counts)


def test_the_table_holds_the_blocks_of_all_shards(indexes: list[ShardIndex]):
    table = BlockTable(indexes, "skip_record")
    assert table.counts.tolist() == [33, 33, 33, 1, 13, 26, 33, 33, 4]
    assert table.num_records == 209 and table.compressions == ["none"] * 4
    check_table(table, indexes, [0, 1, 2, 3])
    assert table.slice(Slice(5, 4, 20, 7, epoch=0)) == [*table.block(5), 4, 20, 7]


def test_damaged_shards_can_be_left_out_whole(indexes: list[ShardIndex]):
    table = BlockTable(indexes, "skip_shard")
    assert table.num_records == 170 and len(table.compressions) == 4
    check_table(table, indexes, [0, 1, 3])
    nothing = BlockTable(indexes[2:3], "skip_shard")
    assert nothing.num_records == 0 and len(nothing.counts) == 0


def test_a_compressed_shard_between_plain_ones_has_no_anchors(indexes: list[ShardIndex], tmp_path: Path):
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(Path(indexes[0].file.uri).read_bytes()))
    (file,) = files_of([packed])
    table = BlockTable([indexes[0], build_index(file, 33), indexes[3]], "raise")
    assert table.compressions == ["none", "gzip", "none"]
    assert table.counts.tolist() == [33, 33, 33, 1, 100, 33, 33, 4]
    assert [len(table.block(number)[5]) // 4 for number in range(8)] == [2, 2, 2, 1, 0, 2, 2, 1]
    plain = BlockTable([indexes[0], indexes[3]], "raise")
    assert [table.block(number)[1:] for number in (5, 6, 7)] == [plain.block(number)[1:] for number in (4, 5, 6)]


