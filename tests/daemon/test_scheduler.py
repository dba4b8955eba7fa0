"""Who gets which task, in what order, and what becomes of tasks whose workers die."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.scheduler import MAX_DEATHS, Scheduler
from loaderd.daemon.stream import BrokenBatch, Delivery, Outgoing, PassEnd, Skip, Stream
from loaderd.daemon.tasks import FillWork, IndexWork, LoadWork, Task
from loaderd.errors import LoaderdError, WorkerError
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import SetRows
from loaderd.plan.shares import HostShare, Rest
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


def scheduler_of(*sources: Any, workers: int) -> Scheduler:
    scheduler = Scheduler()
    for source in sources:
        scheduler.add_source(source)
    for worker in range(workers):
        scheduler.add_worker(worker)
    return scheduler


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
    scheduler.add_worker(2)
    scheduler.add_worker(3)
    scheduler.add_worker(4)
    assert shards_of(scheduler.assign()) == [(2, "a0"), (3, "a2"), (4, "a1"), (2, "a3"), (3, "a4"), (4, "a5")]


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
    assert shards_of(scheduler.assign()) == [(1, "a0"), (1, "a1")]


def test_a_task_that_kills_three_workers_is_given_up_and_only_the_first_is_blamed():
    source = index_pass("a", 3)
    scheduler = scheduler_of(source, workers=0)
    for worker in range(MAX_DEATHS):
        assert source.error is None
        scheduler.add_worker(worker)
        assert shards_of(scheduler.assign()) == [(worker, "a0"), (worker, "a1")]
        scheduler.lose_worker(worker, f"was killed by signal {worker}")
    assert isinstance(source.error, WorkerError)
    message = "3 workers in a row died at the index of shard 0 (counted from 0); the last one was killed by signal 2"
    assert source.error.message == message
    scheduler.add_worker(9)
    assert shards_of(scheduler.assign()) == [(9, "a1")], "it is not to blame; and nothing new after an error"


# ------------------------------------------------------------------------------------------ with a stream


class Run:
    """A stream, and workers that do their tasks in turn: the one that has waited longest goes first."""

    def __init__(self, num_records: int, batch_size: int, window: int, *, workers: int = 1, slots: int = 8) -> None:
        batches = BatchPlan(HostShare(Rest(num_records), 0, 1, window), batch_size, "short", 1)
        counts = np.full(num_records // 10, 10)
        self.plan = PassPlan(SetRows(counts, 0, True), batches, 0, True, 0)
        self.stream = Stream(
            lambda _: self.plan, num_slots=slots, num_arenas=2, num_workers=workers, skip_damaged=False
        )
        self.scheduler = scheduler_of(self.stream, workers=workers)
        self.next_worker = workers
        self.working: deque[tuple[int, Task]] = deque()
        self.assigned: list[Task] = []
        self.sent: list[Outgoing] = []
        self.stream.start(0, Pass(0, 1), 0)

    def hand_out(self) -> None:
        assigned = self.scheduler.assign()
        self.assigned += [task for _, task in assigned]
        self.working.extend(assigned)
        while self.stream.outbox:
            self.sent.append(self.stream.outbox.popleft())

    def give_back(self) -> None:
        self.stream.release(list(self.stream._lent))

    def die(self) -> None:
        worker = self.working[0][0]
        self.scheduler.lose_worker(worker, "was killed by SIGSEGV")
        self.working = deque(item for item in self.working if item[0] != worker)
        self.scheduler.add_worker(self.next_worker)
        self.next_worker += 1

    def to_the_end(self, is_deadly: Any = lambda work: False, error_at: Any = lambda work: None) -> list[Outgoing]:
        """Do all tasks but those that kill their worker, or fail; what was sent."""
        self.hand_out()
        while PassEnd() not in self.sent:
            worker, task = self.working[0]
            if is_deadly(task.work):
                self.die()
            else:
                self.working.popleft()
                error = error_at(task.work)
                self.scheduler.end_task(worker, task.number, [] if isinstance(task.work, LoadWork) else None, error)
            self.give_back()
            self.hand_out()
        return self.sent


def decodes(step: int) -> Any:
    return lambda work: isinstance(work, FillWork) and step in [batch.step for batch in work.batches]


def loads_place(run: Run, window: int, place: int) -> Any:
    row = run.plan.order_of(window).places().tolist().index(place)
    return lambda work: (
        isinstance(work, LoadWork)
        and work.window == window
        and any(part.row <= row < part.row + part.stop - part.first for part in work.slices)
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_a_batch_that_kills_workers_breaks_alone(workers: int):
    run = Run(200, 10, 100, workers=workers, slots=20)
    sent = run.to_the_end(is_deadly=decodes(3))
    assert max(len(task.work.batches) for task in run.assigned if isinstance(task.work, FillWork)) > 1
    assert [item.step for item in sent if isinstance(item, Delivery)] == [step for step in range(20) if step != 3]
    (broken,) = [item for item in sent if isinstance(item, BrokenBatch)]
    message = "3 workers in a row died at the decoding of batch 3; the last one was killed by SIGSEGV"
    assert broken.step == 3 and isinstance(broken.error, WorkerError) and broken.error.message == message
    assert sent.index(broken) == 3


def test_a_batch_that_cannot_be_decoded_breaks_alone():
    run = Run(200, 10, 100, slots=20)
    error = WorkerError("derived field 'x' raised")
    sent = run.to_the_end(error_at=lambda work: error if decodes(12)(work) else None)
    assert [item for item in sent if isinstance(item, BrokenBatch)] == [BrokenBatch(12, error)]
    assert len(sent) == 21


def test_a_start_takes_back_what_was_to_be_done_alone():
    run = Run(200, 10, 100, slots=20)
    while not run.working or not decodes(3)(run.working[0][1].work):
        run.hand_out()
        worker, task = run.working.popleft()
        run.scheduler.end_task(worker, task.number, [])
    worker, task = run.working.popleft()
    run.scheduler.end_task(worker, task.number, None, WorkerError("derived field 'x' raised"))
    run.stream.start(1, Pass(0, 1), 0)
    run.sent.clear()
    sent = run.to_the_end()
    assert [item.step for item in sent if isinstance(item, Delivery)] == list(range(20))
    run.give_back()
    assert sorted(run.stream._free_slots) == list(range(20))


@pytest.mark.parametrize("skip", [False, True])
def test_a_load_that_kills_workers_costs_its_records(skip: bool):
    run = Run(200, 10, 100, workers=2)
    run.stream._skip_damaged = skip
    is_deadly = loads_place(run, 1, 55)
    sent = run.to_the_end(is_deadly)
    (load,) = {task for task in run.assigned if is_deadly(task.work)}
    places = {
        int(run.plan.order_of(1).places()[part.row + i])
        for part in load.work.slices
        for i in range(part.stop - part.first)
    }
    hit = {10 + place // 10 for place in places}
    what = f"the load of {len(places)} records of window 1"
    message = f"3 workers in a row died at {what}; the last one was killed by SIGSEGV"
    if skip:
        assert {place for item in sent if isinstance(item, Skip) for place in item.fault.places} == places
        assert {item.fault.error.message for item in sent if isinstance(item, Skip)} == {message}
        records = {item.step: item.num_records for item in sent if isinstance(item, Delivery)}
        expected = {step: 10 - sum(step == 10 + place // 10 for place in places) for step in range(20)}
        assert records == expected
    else:
        broken = {item.step: item.error.message for item in sent if isinstance(item, BrokenBatch)}
        assert broken == dict.fromkeys(hit, message)
        assert len(sent) == 21


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
