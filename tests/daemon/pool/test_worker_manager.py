"""Loads, batches and workers of one stream together: what is done when, and which stalls are seen."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.daemon.pool.tasks import MAX_DEATHS
from loaderd.errors import WorkerError
from loaderd.ipc.worker_messages import IndexTask, LoadTask
from loaderd.plan.passes import Pass
from loaderd.shm.page import POSITION, Counter, split_key
from loaderd.storage.shard_file import ShardFile
from loaderd.worker.page_producer import Claim
from tests.daemon.line_run import STALL_TICKS, at_a_batch
from tests.daemon.page_workers import answer_to
from tests.daemon.stream_run import OneTask


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_next_window_is_loaded_while_this_one_is_decoded(line_of: Any, workers: int):
    line = line_of(20_000, 20, 5000, workers=workers, slots=12)
    rows_per_load, rows_in_flight = 5000 // (2 * workers), 12 * 20
    loaded, decoded = [0] * 5, [0] * 4
    for what in line.work():
        if isinstance(what, LoadTask):
            loaded[what.window] += what.num_rows
            continue
        (segment,) = line.plan.segments_of(what.step)
        decoded[segment.window] += what.batch.num_records
        if segment.window < 3:
            # The arena of the next window is free when what was in it is taken.
            assert loaded[segment.window + 1] >= segment.start - rows_in_flight, "loads keep pace with batches"
        if segment.window > 0:  # while the first window is loaded there is nothing else to do
            most = segment.start + rows_per_load + rows_in_flight
            assert loaded[segment.window + 1] <= most, "and are not in their way"
    assert loaded == [5000] * 4 + [0] and decoded == [5000] * 4
    assert line.ended and [item.step for item in line.taken] == list(range(1000))


def test_a_consumer_that_gives_nothing_back_does_not_stop_the_loads(line_of: Any):
    line = line_of(400, 10, 100, slots=3)
    line.keeps = True
    assert all(True for _ in line.work())
    assert [item.step for item in line.taken] == [0, 1, 2]
    assert sum(what.num_rows for what in line.begun if isinstance(what, LoadTask)) == 200, "as there are arenas for"
    slot = line.taken[1].slot
    line.taker.consumer.release(slot)
    more = list(line.work())
    assert [(what.step, what.slot) for what in more if isinstance(what, Claim)] == [(3, slot)]


@pytest.mark.parametrize("batch_size", [10, 700, 20_000])
def test_all_that_a_window_has_is_granted_at_once(line_of: Any, batch_size: int):
    """A message to each worker is for a window, not for a batch; but for the last one, which may be smaller."""
    line = line_of(20_000, batch_size, 20_000)
    while line.stream.plan and not line.stream.granted:
        next(line.work())
    grants = line.stream.granted
    num_steps = line.plan.num_steps
    assert num_steps == -(-20_000 // batch_size)
    assert [(one.first, one.stop) for one in grants] in (
        [(0, num_steps)],
        [(0, num_steps - 1), (num_steps - 1, num_steps)],
    )


# -------------------------------------------------------------------------- stalls that the worker manager must see


def test_a_worker_that_hangs_at_a_batch_is_replaced_and_another_one_makes_it(line_of: Any):
    line = line_of(400, 10, 100)
    hand = at_a_batch(line)
    assert line.tick(STALL_TICKS) == []
    seat = line.crew.pool.seat_of(hand.number)
    line.stream.page.count(seat, Counter.FILL_NS, 1)  # as while it looks for bad rows
    assert line.tick(STALL_TICKS) == []
    line.stream.page.say_row(seat, 7)  # as while it tries suspects
    assert line.tick(STALL_TICKS) == [] and line.tick(1) == [hand.number]
    (warning,) = line.crew.warnings
    assert "made no progress for 8 s at the decoding of batch 0; another one" in warning
    (new,) = line.crew.hands.values()
    new.start()
    assert [what.step for what in line.work() if isinstance(what, Claim)] == list(range(40)) and line.ended


def test_a_load_that_waits_for_its_time_is_no_stall(line_of: Any):
    """It waits with a worker that makes batches; each of them is progress."""
    line = line_of(4000, 10, 2000)
    hand = at_a_batch(line)
    while (
        line.crew.worker_manager.scheduler.tasks_of(hand.number)
        and split_key(line.stream.page.words[POSITION])[1] < 30
    ):
        assert line.tick(STALL_TICKS // 2) == []
        if hand.job is not None:
            hand.end()
        line.listen()
        line.begin(hand)
    assert len(line.taken) == 30 and not line.crew.warnings


def test_a_worker_that_hangs_at_a_batch_that_nobody_wants_any_more_is_replaced(line_of: Any):
    """The consumer has gone elsewhere: now it waits for what this worker should do next."""
    line = line_of(400, 10, 100)
    hand = at_a_batch(line)
    line.taker.start(2, Pass(0, 1), 20)
    line.listen()
    assert hand.number in line.tick(3 * STALL_TICKS)


def test_a_worker_that_was_stopped_while_it_had_nothing_to_do_is_replaced(line_of: Any):
    """It is given a load, and never begins with it; nobody else would."""
    line = line_of(400, 10, 100)
    (hand,) = line.crew.hands.values()
    assert hand.job is None and line.crew.worker_manager.scheduler.tasks_of(hand.number)
    assert hand.number in line.tick(3 * STALL_TICKS)


def test_a_worker_that_was_stopped_just_behind_its_claim_is_replaced(line_of: Any):
    """It has not said yet that it makes the batch, and nobody else may claim it."""
    line = line_of(100, 10, 100)
    hand = at_a_batch(line)
    (filler,) = hand.fillers.values()
    filler.page.say_makes(filler.seat, 0)
    assert not line.crew.worker_manager.scheduler.tasks_of(hand.number)
    assert hand.number in line.tick(3 * STALL_TICKS)


def test_an_index_is_blamed_and_not_a_load_before_it_that_waits(line_of: Any):
    """What a load reads is still on its way; and what is behind it is done meanwhile."""
    line = line_of(400, 10, 100)
    worker_manager, indexing = line.crew.worker_manager, OneTask(IndexTask((ShardFile("/a", 1, 1),), b"", b""))
    (worker,) = line.crew.hands
    load, other = worker_manager.scheduler.tasks_of(worker)
    worker_manager.scheduler.end_task(worker, other.number, answer_to(other))
    line.crew.add_source(indexing)
    worker_manager.scheduler._sources.rotate(1)  # it is its turn
    line.crew.assign()
    for _ in range(MAX_DEATHS):
        assert indexing.task in worker_manager.scheduler.tasks_of(worker)
        assert worker_manager.doing(worker) == "the index of /a"
        assert worker_manager.scheduler.silent(indexing, 0) is indexing.task
        line.crew.kill(worker)
        ((worker, hand),) = line.crew.hands.items()
        hand.start()
        line.listen()
    assert load.deaths == 0 and indexing.error is not None
    assert "3 workers were lost at the index of /a" in indexing.error.message


def test_what_indexes_are_made_with_is_sent_to_a_worker_once(line_of: Any):
    line = line_of(400, 10, 100)
    scheduler = line.crew.worker_manager.scheduler
    ((worker, hand),) = line.crew.hands.items()
    for task in scheduler.tasks_of(worker):
        scheduler.end_task(worker, task.number, answer_to(task))
    scheduler._sources.clear()
    hand.inbox.clear()
    values, of_another = b"large", b"other"
    for sent, comes in ((values, values), (values, None), (of_another, of_another), (values, values)):
        line.crew.add_source(source := OneTask(IndexTask((ShardFile("/a", 1, 1),), b"", b"", sent)))
        line.crew.assign()
        assert hand.inbox.pop().values == comes
        scheduler.end_task(worker, source.task.number, WorkerError("it is of no account"))


def test_the_load_that_a_worker_has_begun_is_blamed_and_not_one_that_stands_before_it(line_of: Any):
    """Loads of what is far away wait for their data, and others are done meanwhile."""
    line = line_of(400, 10, 100)
    worker_manager = line.crew.worker_manager
    (worker,) = line.crew.hands
    first, guilty = worker_manager.scheduler.tasks_of(worker)
    for _ in range(MAX_DEATHS):
        line.stream.page.say_task(line.crew.pool.seat_of(worker), guilty.number)
        assert worker_manager.doing(worker) == str(guilty.work)
        line.crew.kill(worker)
        ((worker, hand),) = line.crew.hands.items()
        hand.start()
        line.listen()
    assert (first.deaths, guilty.deaths) == (0, MAX_DEATHS)
    assert guilty not in worker_manager.scheduler.tasks_of(worker), "its slices are tried one by one"
