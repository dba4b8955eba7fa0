"""What there is to list, and what becomes of a listing that brings nothing."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.daemon.indexing.list_pass import ListPass
from loaderd.daemon.pool.scheduler import Scheduler
from loaderd.daemon.pool.tasks import Task
from loaderd.errors import NoShardsError, ShardReadError, WorkerError
from loaderd.ipc.worker_messages import IndexTask
from loaderd.storage.shard_file import ShardFile

SETS = ["s3://bucket/*.tfrecord", ["a", "b", "c"], ["d"]]


def test_a_task_for_each_set():
    passing = ListPass(SETS, 120.0)
    tasks = [passing.next_task() for _ in SETS]
    assert passing.next_task() is None
    names = [f"the listing of {name}" for name in ("s3://bucket/*.tfrecord", "a and 2 more", "d")]
    assert [str(task.work) for task in tasks if task is not None] == names
    for number in (2, 0, 1):
        assert not passing.finished
        passing.done(tasks[number], [ShardFile(f"/{number}", 10 + number, 5)])
    assert passing.finished and passing.error is None
    assert [passing.files[number] for number in range(3)] == [[ShardFile(f"/{n}", 10 + n, 5)] for n in range(3)]


def test_it_knows_how_many_shards_were_found_so_far():
    passing = ListPass(SETS, 120.0)
    first, second = passing.next_task(), passing.next_task()
    assert first is not None and second is not None
    passing.advanced(first, 200)
    passing.advanced(second, 1)
    passing.advanced(first, 300)
    assert passing.num_found == 301
    passing.done(first, [ShardFile(f"/{number}", 1, 1) for number in range(310)])
    assert passing.num_found == 311


def test_an_error_is_the_end_of_it():
    passing = ListPass(SETS, 120.0)
    task = passing.next_task()
    first = NoShardsError("no file")
    passing.failed(task, first)
    passing.failed(passing.next_task(), NoShardsError("another"))
    assert passing.finished and passing.error is first


@pytest.mark.parametrize(
    ("deaths", "stalled", "error"),
    [
        ([False], False, None),  # a worker may be killed; another one lists again
        ([False, False], False, None),
        ([False, False, False], False, WorkerError),
        ([True], True, ShardReadError),  # what did not answer once is not asked twice more
        ([False, True], True, ShardReadError),
    ],
)
def test_workers_are_lost_at_it(deaths: list[bool], stalled: bool, error: Any):
    scheduler, passing = Scheduler(), ListPass(["gs://bucket/x"], 9.0)
    scheduler.add_source(passing)
    for number, stall in enumerate(deaths):
        scheduler.add_worker(number)
        scheduler.ready(number)
        ((_, task),) = scheduler.assign()
        scheduler.lose_worker(number, "was killed", stall, blamed=task)
    assert passing.finished == (error is not None)
    assert isinstance(passing.error, error or type(None))
    if stalled:
        assert "gs://bucket/x cannot be listed: the storage has not answered for 9 s" in str(passing.error)


def test_which_task_is_silent():
    """The first of a worker that has started, and not the one that waits behind it."""
    scheduler, passing, other = Scheduler(), ListPass(["a", "b"], None), ListPass([], None)
    scheduler.add_source(passing)
    scheduler.add_source(other)
    scheduler.add_worker(0)

    def tick(times: int) -> None:
        for _ in range(times):
            scheduler.tick(lambda worker: tuple(task.number for task in scheduler.tasks_of(worker)[:1]) or None)

    tick(9)  # it starts: that is not the storage's fault
    assert scheduler.silent(passing, 1) is None
    scheduler.ready(0)
    (_, first), (_, second) = scheduler.assign()
    assert scheduler.silent(passing, 1) is None
    tick(1 + 3)  # the first one sees what it is at
    assert scheduler.silent(passing, 3) is first and scheduler.silent(passing, 4) is None
    assert scheduler.silent(other, 1) is None
    scheduler.advanced(0, first.number, 1)
    assert scheduler.silent(passing, 1) is None
    scheduler.end_task(0, first.number, [])
    tick(1 + 1)
    assert scheduler.silent(passing, 1) is second


def test_a_task_of_another_kind_survives_stalls():
    assert Task(ListPass([], None), IndexTask((), b"", b"")).survives_stalls
