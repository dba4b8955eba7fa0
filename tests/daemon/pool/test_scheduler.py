"""Who gets which task, in what order, and what becomes of tasks whose workers die."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.daemon.indexing.index_pass import IndexPass
from loaderd.daemon.pool.tasks import MAX_DEATHS, TASKS_PER_WORKER, Task
from loaderd.errors import LoaderdError, WorkerError
from loaderd.formats.index_cache import IndexCache
from loaderd.ipc.worker_messages import IndexTask, ListTask, LoadTask
from loaderd.plan.epoch import Slice, WindowOrder
from loaderd.storage.shard_file import ShardFile
from tests.daemon.stream_run import OneTask, scheduler_of

_STALL_TIMEOUT_S = 8.0
_STALL_TICKS = 8


def index_pass(name: str, num_files: int) -> IndexPass:
    """A source of ``num_files`` tasks, in the order of the files, none of which is small."""
    files = [ShardFile(f"{name}{i}", 1_000_000 - i, 0) for i in range(num_files)]
    return IndexPass(files, IndexCache("none", 1024))


def shards_of(assigned: list[tuple[int, Task]]) -> list[tuple[int, str]]:
    """(worker, name of the shard) of index tasks."""
    found = []
    for worker, task in assigned:
        assert isinstance(task.source, IndexPass) and isinstance(task.work, IndexTask)
        (file,) = task.work.group
        found.append((worker, file.uri))
    return found


def test_sources_are_asked_in_turn_and_workers_get_two_tasks_each():
    scheduler = scheduler_of(index_pass("a", 9), index_pass("b", 1), workers=2)
    assigned = scheduler.assign()
    assert shards_of(assigned) == [(0, "a0"), (1, "b0"), (0, "a1"), (1, "a2")]
    assert scheduler.assign() == []
    numbers = [task.number for _, task in assigned]
    assert len(set(numbers)) == 4
    scheduler.end_task(1, numbers[1], LoaderdError("b cannot be read"))
    assert shards_of(scheduler.assign()) == [(1, "a3")]


def test_the_tasks_of_a_dead_worker_come_first_and_in_order():
    scheduler = scheduler_of(index_pass("a", 9), workers=2)
    assert shards_of(scheduler.assign()) == [(0, "a0"), (1, "a1"), (0, "a2"), (1, "a3")]
    scheduler.lose_worker(0, "was killed by SIGKILL")
    scheduler.lose_worker(1, "was killed by SIGKILL")
    assert scheduler.assign() == []
    for worker in (2, 3, 4):
        scheduler.add_worker(worker)
        scheduler.ready(worker)
    assert shards_of(scheduler.assign()) == [(2, "a0"), (3, "a2"), (4, "a1"), (2, "a3"), (3, "a4"), (4, "a5")]


def load_of(part: Slice) -> LoadTask:
    return LoadTask(0, 0, 0, 0, WindowOrder(None, 100, 0, 100), (part,), ())


class Loads:
    """A source of loads, each of one part of a block: (block, first, stop)."""

    tasks_per_worker = TASKS_PER_WORKER

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int]] = []

    def next_task(self) -> Task | None:
        return Task(self, load_of(Slice(*self.parts.pop(0), row=0, epoch=0))) if self.parts else None

    def done(self, task: Task, result: Any) -> None:
        """Nothing becomes of it."""

    def retry(self, task: Task) -> bool:
        return True


def test_who_loaded_the_front_of_a_block_goes_on_with_it():
    source = Loads()
    scheduler = scheduler_of(source, workers=3)
    given: list[tuple[int, Task]] = []

    def assign(*parts: tuple[int, int, int]) -> list[int]:
        """Which worker gets each of these."""
        source.parts = list(parts)
        given.extend(new := scheduler.assign())
        return [worker for worker, _ in new]

    assert assign((0, 0, 10), (1, 0, 10), (1, 10, 20), (1, 20, 30), (1, 30, 40), (0, 12, 20)) == [0, 1, 1, 2, 2, 0]
    for worker, task in given:  # 1 had no room for a third part of block 1, and nobody waited for it
        scheduler.end_task(worker, task.number, [])
    assert assign((2, 0, 10), (1, 40, 50), (0, 20, 25), (1, 45, 50)) == [0, 2, 1, 0]
    for _ in range(2):
        scheduler.tick({0: None, 1: None, 2: "stuck"}.get)
    assert assign((1, 50, 60)) == [1], "2 has room, but does not get on"
    scheduler.end_task(0, given[6][1].number, [])
    scheduler.lose_worker(2, "was killed by SIGKILL")
    assert assign() == [0]


@pytest.mark.parametrize("removed_first", [False, True])
def test_a_removed_source_gets_nothing_done_again(removed_first: bool):
    gone = index_pass("gone", 2)
    scheduler = scheduler_of(gone, index_pass("a", 5), workers=1)
    assert shards_of(scheduler.assign()) == [(0, "gone0"), (0, "a0")]
    if removed_first:
        scheduler.remove_source(gone)
    scheduler.lose_worker(0, "was killed by SIGKILL")
    if not removed_first:
        scheduler.remove_source(gone)
    scheduler.add_worker(1)
    scheduler.ready(1)
    assert shards_of(scheduler.assign()) == [(1, "a0"), (1, "a1")]


def test_a_stall_is_counted_in_ticks_in_which_a_worker_stays_where_it_is():
    scheduler = scheduler_of(index_pass("a", 2), workers=2)
    scheduler.add_worker(2)
    (_, task), *_ = scheduler.assign()
    assert shards_of([(0, task)]) == [(0, "a0")]
    at = {0: "a0", 1: "a1", 2: None}

    def tick(times: int) -> None:
        for _ in range(times):
            scheduler.tick(at.get)

    tick(3)  # to see that it stays there takes two
    assert scheduler.stalled(3, 5) == []
    scheduler.advanced(0, task.number, 17)
    tick(1)
    assert scheduler.stalled(3, 5) == [1], "0 gets on; 2 has yet to start"
    tick(1)
    assert scheduler.stalled(3, 5) == [1, 2]
    tick(1)
    assert scheduler.stalled(3, 5) == [0, 1, 2]
    at[1] = "a batch"
    tick(1)
    assert scheduler.stalled(3, 5) == [0, 2] and scheduler.ticks_of(1) == 0, "1 has come to something else"
    scheduler.end_task(0, task.number, LoaderdError("cannot be read"))
    scheduler.ready(2)
    at[0] = None
    tick(9)
    assert scheduler.stalled(3, 5) == [1], "0 and 2 are at nothing"


def test_a_task_that_kills_three_workers_is_given_up_and_nobody_else_is_blamed():
    source = index_pass("a", 3)
    scheduler = scheduler_of(source, workers=0)
    for worker in range(MAX_DEATHS):
        assert not source.indexes
        scheduler.add_worker(worker)
        scheduler.ready(worker)
        assigned = scheduler.assign()
        assert shards_of(assigned) == [(worker, "a0"), (worker, "a1")]
        scheduler.lose_worker(worker, f"was killed by signal {worker}", blamed=assigned[0][1])
    (error,) = [index.error for index in source.indexes.values()]
    assert isinstance(error, WorkerError)
    assert error.message == "3 workers were lost at the index of a0; the last one was killed by signal 2"
    scheduler.add_worker(9)
    scheduler.ready(9)
    assert shards_of(scheduler.assign()) == [(9, "a1"), (9, "a2")], "they are not to blame"


@pytest.mark.parametrize("survives", [False, True])
def test_a_task_that_need_not_survive_a_stall_is_given_up_after_one(survives: bool):
    source = index_pass("a", 1)
    scheduler = scheduler_of(source, workers=1)
    ((_, task),) = scheduler.assign()
    task.survives_stalls = survives
    scheduler.lose_worker(0, "made no progress", stalled=True, blamed=task)
    assert bool(source.indexes) == (not survives)


def test_who_hangs_at_a_stream_that_it_was_told_of_may_not_have_begun_its_task():
    """It takes over the stream first. If another worker stalls at the task, it is the task's fault."""
    listing = OneTask(ListTask([["s3://bucket/*"]], b""), survives_stalls=False)
    scheduler = scheduler_of(listing, workers=1)
    for worker in (0, 1):
        if worker:
            scheduler.add_worker(worker)
            scheduler.ready(worker)
        ((_, task),) = scheduler.assign()
        scheduler.unready(worker)
        assert listing.error is None
        scheduler.lose_worker(worker, "made no progress for 8 s", True, task)
    assert listing.error is not None and "2 workers were lost" in listing.error.message
