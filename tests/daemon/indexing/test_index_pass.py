"""What there is to index, and what is said of damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loaderd.daemon.indexing.index_pass import IndexPass, damage_error
from loaderd.daemon.pool.tasks import MAX_DEATHS, Task
from loaderd.errors import CorruptRecordError, Damage, ShardReadError, WorkerError
from loaderd.formats import index_cache
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import build_index, encode_indexes
from loaderd.ipc.worker_messages import IndexResult, IndexTask
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile

Write = Callable[..., list[Path]]


def files_of(paths: list[Path]) -> list[ShardFile]:
    return list_shards([str(path) for path in paths])


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard is so small that it is indexed with others."""
    monkeypatch.setattr(index_cache, "_SMALL_BYTES", -1)


def tasks_of(index_pass: IndexPass) -> list[Task]:
    tasks = []
    while (task := index_pass.next_task()) is not None:
        tasks.append(task)
    return tasks


def group_of(task: Task) -> tuple[ShardFile, ...]:
    assert isinstance(task.work, IndexTask)
    return task.work.group


def done(index_pass: IndexPass, task: Task, unstored: str | None = None) -> None:
    """A worker has done the task."""
    encoded = encode_indexes([build_index(file, 1024) for file in group_of(task)])
    index_pass.done(task, IndexResult(encoded, unstored, [0] * 5))


@pytest.mark.usefixtures("each_alone")
def test_all_shards_are_indexed_the_largest_first(write_numbered: Write):
    files = files_of(write_numbered([10, 50, 0, 30]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    assert (index_pass.num_cached, index_pass.finished) == (0, False)
    assert index_pass.total_bytes == sum(file.size_bytes for file in files)
    tasks = tasks_of(index_pass)
    assert [group_of(task) for task in tasks] == [(files[number],) for number in (1, 3, 0, 2)]
    for task in reversed(tasks):
        assert not index_pass.finished
        done(index_pass, task)
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert index_pass.unstored is None
    assert [index_pass.indexes[file].num_records for file in files] == [10, 50, 0, 30]


@pytest.mark.usefixtures("each_alone")
def test_what_the_cache_knows_is_not_made_again(write_numbered: Write, tmp_path: Path):
    files = files_of(write_numbered([10, 50, 20]))
    cache = IndexCache(str(tmp_path / "cache"), 16)
    for number in (0, 2):
        assert cache.store(files[number : number + 1], encode_indexes([build_index(files[number], 16)])) is None
    index_pass = IndexPass(files, cache)
    assert (index_pass.num_cached, index_pass.total_bytes) == (2, files[1].size_bytes)
    assert [group_of(task) for task in tasks_of(index_pass)] == [(files[1],)]
    assert IndexPass(files, IndexCache(str(tmp_path / "cache"), 17)).num_cached == 0
    assert IndexPass([files[0], files[2]], cache).finished


@pytest.mark.usefixtures("each_alone")
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
    done(index_pass, third)
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert [index_pass.indexes[file].num_records for file in files] == [10, 0, 0]
    assert [index_pass.indexes[file].error for file in files] == [None, unreadable, lost]
    assert index_pass.indexes[files[1]].damages == (damage,)
    (stands_in,) = index_pass.indexes[files[2]].damages
    assert (stands_in.shard, stands_in.record, stands_in.found, stands_in.lost_bytes) == (
        files[2].uri,
        0,
        lost.message,
        -1,
    )
    again = IndexPass(files, IndexCache("none", 1024), index_pass.indexes)
    assert [group_of(task) for task in tasks_of(again)] == [(files[1],), (files[2],)], (
        "they are tried again when they are listed again"
    )


# ------------------------------------------------------------------------------------------ small shards


def test_small_shards_are_one_task_and_one_file(write_numbered: Write, tmp_path: Path):
    files = files_of(write_numbered([3, 0, 2]))
    cache = IndexCache(str(tmp_path / "cache"), 1024)
    index_pass = IndexPass(files, cache)
    (task,) = tasks_of(index_pass)
    assert group_of(task) == tuple(files) and str(task.work) == f"the index of {files[0].uri} and 2 more"
    index_pass.advanced(task, 10)
    assert index_pass.done_bytes == 10
    done(index_pass, task)
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert [index_pass.indexes[file].num_records for file in files] == [3, 0, 2]
    assert cache.store(files, encode_indexes([build_index(file, 1024) for file in files])) is None
    again = IndexPass(files, cache)
    assert again.finished and again.num_cached == 3 and again.indexes[files[0]].file is files[0]


def test_who_of_a_group_cannot_be_indexed_is_found_one_by_one(write_numbered: Write):
    files = files_of(write_numbered([3, 4, 2]))
    index_pass = IndexPass(files, IndexCache("none", 1024))
    (task,) = tasks_of(index_pass)
    assert task.most_deaths == 1, "the next one may be the one that kills workers"
    index_pass.given_up(task, WorkerError("a worker was lost at it"), stalled=False)
    assert not index_pass.finished and index_pass.done_bytes == 0
    first, second, third = tasks_of(index_pass)
    assert [group_of(each) for each in (first, second, third)] == [(file,) for file in files]
    assert second.most_deaths == MAX_DEATHS
    done(index_pass, first)
    done(index_pass, third)
    index_pass.failed(second, ShardReadError("it cannot be read"))
    assert index_pass.finished and index_pass.done_bytes == index_pass.total_bytes
    assert [index_pass.indexes[file].num_records for file in files] == [3, 0, 2]


def test_a_group_with_a_new_shard_is_indexed_as_a_whole(write_numbered: Write):
    files = files_of(write_numbered([3, 4, 2]))
    index_pass = IndexPass(files[:2], IndexCache("none", 1024))
    (task,) = tasks_of(index_pass)
    done(index_pass, task)
    assert IndexPass(files[:2], IndexCache("none", 1024), index_pass.indexes).finished
    (task,) = tasks_of(IndexPass(files, IndexCache("none", 1024), index_pass.indexes))
    assert group_of(task) == tuple(files), "so that its indexes are kept in one file"


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
