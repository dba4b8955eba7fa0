"""Who gets which task, in what order, and what becomes of tasks whose workers die."""

from __future__ import annotations

import pytest
from stream_run import Run, scheduler_of

from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.outgoing import PassEnd
from loaderd.daemon.tasks import MAX_DEATHS, FillWork, IndexWork, LoadWork, Task
from loaderd.errors import LoaderdError, WorkerError
from loaderd.plan.passes import Pass
from loaderd.shards.files import ShardFile
from loaderd.shards.index_cache import IndexCache


def index_pass(name: str, num_files: int) -> IndexPass:
    """A source of ``num_files`` tasks, in the order of the files."""
    files = [ShardFile(f"{name}{i}", 100 - i, 0) for i in range(num_files)]
    return IndexPass(files, IndexCache("none", 1024))


def shards_of(assigned: list[tuple[int, Task]]) -> list[tuple[int, str]]:
    """(worker, name of the shard) of index tasks."""
    found = []
    for worker, task in assigned:
        assert isinstance(task.source, IndexPass) and isinstance(task.work, IndexWork)
        found.append((worker, task.source.files[task.work.file].uri))
    return found


def test_sources_are_asked_in_turn_and_workers_get_two_tasks_each():
    scheduler = scheduler_of(index_pass("a", 9), index_pass("b", 1), workers=2)
    assigned = scheduler.assign()
    assert shards_of(assigned) == [(0, "a0"), (1, "b0"), (0, "a1"), (1, "a2")]
    assert scheduler.assign() == []
    numbers = [task.number for _, task in assigned]
    assert len(set(numbers)) == 4
    assert [scheduler.work_of(number) for number in numbers] == [task.work for _, task in assigned]
    scheduler.end_task(1, numbers[1], None, LoaderdError("b cannot be read"))
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


def test_who_has_yet_to_start_gets_no_task():
    scheduler = scheduler_of(index_pass("a", 9), workers=1)
    scheduler.add_worker(1)
    assert shards_of(scheduler.assign()) == [(0, "a0"), (0, "a1")]
    scheduler.ready(1)
    assert shards_of(scheduler.assign()) == [(1, "a2"), (1, "a3")]


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


def test_a_stall_is_counted_in_ticks_without_a_sign_of_life():
    scheduler = scheduler_of(index_pass("a", 2), workers=2)
    scheduler.add_worker(2)
    (_, task), *_ = scheduler.assign()
    assert shards_of([(0, task)]) == [(0, "a0")]
    for _ in range(2):
        scheduler.tick()
    assert scheduler.stalled(3, 5) == []
    scheduler.advanced(0, task.number, 17)
    scheduler.tick()
    assert scheduler.stalled(3, 5) == [1], "0 gets on; 2 has yet to start"
    scheduler.tick()
    scheduler.tick()
    assert scheduler.stalled(3, 5) == [0, 1, 2]
    scheduler.end_task(0, task.number, None, LoaderdError("cannot be read"))
    scheduler.ready(2)
    for _ in range(9):
        scheduler.tick()
    assert 0 not in scheduler.stalled(3, 5), "it has nothing to do"


def test_a_task_that_kills_three_workers_is_given_up_and_only_the_first_is_blamed():
    source = index_pass("a", 3)
    scheduler = scheduler_of(source, workers=0)
    for worker in range(MAX_DEATHS):
        assert not source.indexes
        scheduler.add_worker(worker)
        scheduler.ready(worker)
        assert shards_of(scheduler.assign()) == [(worker, "a0"), (worker, "a1")]
        scheduler.lose_worker(worker, f"was killed by signal {worker}")
    error = source.indexes[0].error
    assert isinstance(error, WorkerError)
    message = (
        "3 workers in a row were lost at the index of shard 0 (counted from 0); the last one was killed by signal 2"
    )
    assert error.message == message
    scheduler.add_worker(9)
    scheduler.ready(9)
    assert shards_of(scheduler.assign()) == [(9, "a1"), (9, "a2")], "they are not to blame"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_next_window_is_loaded_while_this_one_is_decoded(workers: int):
    run = Run(20_000, 20, 5000, workers=workers, slots=12)
    run.to_the_end()
    rows_per_load, rows_in_flight = 5000 // (2 * workers), 12 * 20
    loaded, decoded = [0] * 5, [0] * 4
    for task in run.assigned:
        if isinstance(task.work, LoadWork):
            loaded[task.work.window] += task.work.num_rows
            continue
        assert isinstance(task.work, FillWork)
        for batch in task.work.batches:
            decoded[batch.segments[0].window] += batch.num_records
        segment = task.work.batches[0].segments[0]
        if segment.window < 3:
            # The arena of the next window is free when what was in it is decoded.
            assert loaded[segment.window + 1] >= segment.start - rows_in_flight, "loads keep pace with fills"
        if segment.window > 0:  # while the first window is loaded there is nothing else to do
            assert loaded[segment.window + 1] <= segment.start + rows_per_load, "and are not in their way"
    assert loaded == [5000] * 4 + [0] and decoded == [5000] * 4


def test_a_consumer_that_gives_nothing_back_does_not_stop_the_loads():
    run = Run(400, 10, 100, slots=3)
    run.hand_out()
    while run.working:
        worker, task = run.working.popleft()
        run.scheduler.end_task(worker, task.number, [])
        run.hand_out()
    assert len(run.sent) == 3
    loaded = sum(task.work.num_rows for task in run.assigned if isinstance(task.work, LoadWork))
    assert loaded == 200, "as much as there are arenas for"
    run.stream.release([run.sent[1].slot])
    run.hand_out()
    ((_, task),) = run.working
    assert [batch.slot for batch in task.work.batches] == [run.sent[1].slot]
    with pytest.raises(ValueError, match="is not lent"):
        run.stream.release([run.sent[1].slot])


@pytest.mark.parametrize(("batch_size", "batches_each"), [(10, 4), (700, 3), (1024, 2), (2048, 1), (3000, 1)])
def test_a_fill_is_worth_its_messages_and_leaves_slots_to_others(batch_size: int, batches_each: int):
    run = Run(20_000, batch_size, 20_000, slots=8)
    run.to_the_end()
    first = next(task.work for task in run.assigned if isinstance(task.work, FillWork))
    assert len(first.batches) == batches_each


def test_a_pass_that_begins_at_its_end_is_over_at_once():
    run = Run(400, 10, 100)
    run.hand_out()
    run.stream.start(1, Pass(0, 1), 40)
    assert list(run.stream.outbox) == [PassEnd()]
    assert run.stream.next_task() is None
