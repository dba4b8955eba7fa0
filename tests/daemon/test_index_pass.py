"""What there is to index, the table of all blocks, and what is said of damage."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loaderd.daemon.index_pass import BlockTable, IndexPass, damage_error
from loaderd.daemon.tasks import IndexWork, Task
from loaderd.errors import CorruptRecordError, Damage, ShardReadError
from loaderd.plan.epoch import Slice
from loaderd.randomness import key_of
from loaderd.shards.files import ShardFile, list_shards
from loaderd.shards.index import ANCHOR_RECORDS, ShardIndex, build_index
from loaderd.shards.index_cache import IndexCache

Write = Callable[..., list[Path]]


def files_of(paths: list[Path]) -> list[ShardFile]:
    return list_shards([str(path) for path in paths])


def tasks_of(index_pass: IndexPass) -> list[Task]:
    tasks = []
    while (task := index_pass.next_task()) is not None:
        tasks.append(task)
    return tasks


def file_of(task: Task) -> int:
    assert isinstance(task.work, IndexWork)
    return task.work.file


def test_all_shards_are_indexed_the_largest_first(write_numbered: Write):
    files = files_of(write_numbered([10, 50, 0, 30]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    assert (index_pass.num_cached, index_pass.finished) == (0, False)
    assert index_pass.total_bytes == sum(file.size_bytes for file in files)
    tasks = tasks_of(index_pass)
    assert [file_of(task) for task in tasks] == [1, 3, 0, 2]
    for task in reversed(tasks):
        assert not index_pass.finished
        index = build_index(files[file_of(task)], 1024)
        index_pass.done(task, [index.encode(), None])
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert index_pass.error is None and index_pass.unstored is None
    assert [index_pass.indexes[number].num_records for number in range(4)] == [10, 50, 0, 30]


def test_what_the_cache_knows_is_not_made_again(write_numbered: Write, tmp_path: Path):
    files = files_of(write_numbered([10, 50, 20]))
    cache = IndexCache(str(tmp_path / "cache"), 16)
    for number in (0, 2):
        assert cache.store(build_index(files[number], 16)) is None
    index_pass = IndexPass(files, cache)
    assert (index_pass.num_cached, index_pass.total_bytes) == (2, files[1].size_bytes)
    assert [file_of(task) for task in tasks_of(index_pass)] == [1]
    assert IndexPass(files, IndexCache(str(tmp_path / "cache"), 17)).num_cached == 0
    assert IndexPass([files[0], files[2]], cache).finished


def test_an_error_ends_the_pass(write_numbered: Write):
    files = files_of(write_numbered([10, 50, 20]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    first, second = index_pass.next_task(), index_pass.next_task()
    assert first is not None and second is not None
    error = ShardReadError("it cannot be read")
    index_pass.failed(first, error)
    index_pass.failed(second, ShardReadError("neither can this"))
    assert index_pass.finished and index_pass.error is error
    assert index_pass.next_task() is None


def test_that_a_cache_cannot_be_written_is_said_once(write_numbered: Write):
    files = files_of(write_numbered([10, 50]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    for task, unstored in zip(tasks_of(index_pass), ("no space left", None), strict=True):
        index_pass.done(task, [build_index(files[file_of(task)], 1024).encode(), unstored])
    assert index_pass.finished and index_pass.unstored == "no space left"


# -------------------------------------------------------------------------------------------- the table


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
            *place, anchors = table.block(number)
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
    key = key_of("record", 11, 2, "002.tfrecord")
    assert table.slice(Slice(5, 4, 20, 7, epoch=2), seed=11) == [*table.block(5), 4, 20, 7, key]


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


# ----------------------------------------------------------------------------------------------- damage


def test_damage_is_named_but_not_without_end():
    damages = [Damage(f"shard {i // 10}", i, 100 * i, "one thing", "another") for i in range(25)]
    error = damage_error(damages[:1], 7)
    assert isinstance(error, CorruptRecordError) and error.damage == damages[0]
    assert error.message == f"1 damaged record in 1 of 7 shards:\n  {damages[0]}"
    error = damage_error(damages, 7)
    lines = error.message.split("\n")
    assert lines[0] == "25 damaged records in 3 of 7 shards:"
    assert lines[1:] == [f"  {damage}" for damage in damages[:10]] + ["  … and 15 more"]
    assert "skip_record" in error.hint
