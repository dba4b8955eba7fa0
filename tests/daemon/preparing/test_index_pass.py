"""What there is to index, and what is said of damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loaderd.daemon.pool.tasks import IndexWork, Task
from loaderd.daemon.preparing.index_pass import IndexPass, damage_error
from loaderd.errors import CorruptRecordError, Damage, ShardReadError, WorkerError
from loaderd.protocol.worker_messages import Indexed
from loaderd.shards.files import list_shards
from loaderd.shards.index_cache import IndexCache
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import build_index

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
        index_pass.done(task, Indexed(task.number, index.encode(), None, [0] * 5))
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert index_pass.unstored is None
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


def test_shards_that_cannot_be_indexed_do_not_end_the_pass(write_numbered: Write):
    files = files_of(write_numbered([10, 50, 20]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    first, second, third = tasks_of(index_pass)
    damage = Damage(files[1].uri, 0, 0, "a file that can be read", "Permission denied", -1)
    unreadable = ShardReadError("it cannot be read", damage=damage)
    index_pass.failed(first, unreadable)
    lost = WorkerError("3 workers in a row were lost at it")
    index_pass.given_up(second, lost, stalled=True)
    assert not index_pass.finished
    index_pass.done(third, Indexed(third.number, build_index(files[file_of(third)], 1024).encode(), None, [0] * 5))
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert [index_pass.indexes[number].num_records for number in range(3)] == [10, 0, 0]
    assert [index_pass.indexes[number].error for number in range(3)] == [None, unreadable, lost]
    assert index_pass.indexes[1].damages == (damage,)
    (stands_in,) = index_pass.indexes[2].damages
    assert (stands_in.shard, stands_in.record, stands_in.found, stands_in.lost_bytes) == (
        files[2].uri,
        0,
        lost.message,
        -1,
    )
    known = {file: index_pass.indexes[number] for number, file in enumerate(files)}
    again = IndexPass(files, IndexCache("none", 1024), known)
    assert [file_of(task) for task in tasks_of(again)] == [1, 2], "they are tried again when they are listed again"


def test_that_a_cache_cannot_be_written_is_said_once(write_numbered: Write):
    files = files_of(write_numbered([10, 50]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    for task, unstored in zip(tasks_of(index_pass), ("no space left", None), strict=True):
        index_pass.done(
            task, Indexed(task.number, build_index(files[file_of(task)], 1024).encode(), unstored, [0] * 5)
        )
    assert index_pass.finished and index_pass.unstored == "no space left"


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
    assert error.damages == tuple(damages)
    assert len(damage_error(damages, 7, most=3).damages) == 3


def test_every_shard_that_cannot_be_read_is_named():
    damages = [Damage(f"shard {i}", 0, 0, "a file that can be read", "Permission denied", -1) for i in range(12)]
    errors = [ShardReadError(f"{damage.shard}: no", hint="Look.", damage=damage) for damage in damages]
    error = damage_error(damages, 20, errors)
    assert isinstance(error, ShardReadError) and error.damages == tuple(damages)
    lines = error.message.split("\n")
    assert lines[0] == "12 of 20 shards cannot be indexed:"
    assert lines[1:] == [f"  shard {i}: no" for i in range(10)] + ["  … and 2 more"]
    assert error.hint.startswith('Look. Or pass on_corrupt="skip_record"')
    assert damage_error(damages[:1], 1, [ShardReadError("no")]).hint.startswith('Pass on_corrupt="skip_record"')
    assert damage_error(damages[:1], 1, errors[:1]).message == "shard 0: no"
