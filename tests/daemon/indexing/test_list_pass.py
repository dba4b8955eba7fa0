"""What there is to list, and what becomes of a listing that brings nothing."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.daemon.indexing.list_pass import ListPass
from loaderd.daemon.pool.scheduler import Scheduler
from loaderd.daemon.pool.tasks import Task
from loaderd.errors import ShardReadError, WorkerError
from loaderd.ipc.worker_messages import IndexTask
from loaderd.storage.shard_file import ShardFile


def test_all_sets_are_one_task():
    passing = ListPass(["s3://bucket/*.tfrecord", ["a", "b", "c"]], 120.0)
    task = passing.next_task()
    assert task is not None and passing.next_task() is None
    assert str(task.work) == "the listing of s3://bucket/*.tfrecord and 3 more"
    passing.advanced(task, 310)
    assert passing.num_found == 310 and not passing.finished
    passing.done(task, [[ShardFile("/0", 10, 5)], []])
    assert passing.finished and passing.error is None and passing.files == [[ShardFile("/0", 10, 5)], []]


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


def test_a_task_of_another_kind_survives_stalls():
    assert Task(ListPass([], None), IndexTask((), b"", b"")).survives_stalls
