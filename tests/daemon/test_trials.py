"""What becomes of tasks that cannot be done, and of records that workers are lost at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stream_run import Run

from loaderd.daemon.outgoing import BrokenBatch, Delivery
from loaderd.daemon.tasks import FillBatch, FillWork, LoadWork, TrialWork
from loaderd.errors import ShardError, WorkerError
from loaderd.plan.passes import Pass

Deadly = Callable[[Any], bool]
LOST = "3 workers in a row were lost at"


def decodes(step: int) -> Deadly:
    return lambda work: isinstance(work, FillWork) and step in [batch.step for batch in work.batches]


def decodes_rows(*deadly: tuple[int, int]) -> Deadly:
    """Of (step, row)."""

    def rows_of(batch: FillBatch) -> set[tuple[int, int]]:
        return {(batch.step, row) for row in range(batch.num_records + len(batch.omit)) if row not in batch.omit}

    return lambda work: isinstance(work, FillWork) and any(rows_of(batch) & set(deadly) for batch in work.batches)


def loads_place(run: Run, window: int, place: int) -> Deadly:
    row = run.plan.order_of(window).places().tolist().index(place)
    return lambda work: (
        isinstance(work, LoadWork)
        and work.window == window
        and any(part.row <= row < part.row + part.stop - part.first for part in work.slices)
    )


def record_at(run: Run, window: int, place: int) -> tuple[int, int]:
    """(block, number) of what lies at a place."""
    row = run.plan.order_of(window).places().tolist().index(place)
    (part,) = [p for p in run.plan.slices_of(window) if p.row <= row < p.row + p.stop - p.first]
    return part.block, part.first + row - part.row


def delivered(sent: list[Any]) -> dict[int, int]:
    return {item.step: item.num_records for item in sent if isinstance(item, Delivery)}


def broken(sent: list[Any]) -> dict[int, str]:
    return {item.step: item.error.message for item in sent if isinstance(item, BrokenBatch)}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_record_that_workers_are_lost_at_is_found_and_breaks_its_batch(workers: int):
    run = Run(2000, 100, 1000, workers=workers, slots=20)
    sent = run.to_the_end(is_deadly=decodes_rows((13, 41)))
    assert max(len(task.work.batches) for task in run.assigned if isinstance(task.work, FillWork)) > 1
    assert delivered(sent) == {step: 100 for step in range(20) if step != 13}
    lost = f"{LOST} the decoding of 1 records of batch 13; the last one was killed by SIGSEGV"
    assert broken(sent) == {13: f"[{record_at(run, 1, 341)}]: {lost}"}
    assert [item.step for item in sent[:-1]] == list(range(20)), "in its turn"
    # Three for the task of several batches, one for the batch, one for each half, three for the record.
    assert run.deaths <= 3 + 1 + 6 + 3


def test_records_that_workers_are_lost_at_are_skipped_if_the_user_chose_so():
    run = Run(2000, 100, 1000, workers=2, slots=20, skip_damaged=True)
    deadly = [(13, 41), (13, 42), (13, 99), (4, 0)]
    sent = run.to_the_end(is_deadly=decodes_rows(*deadly))
    assert not broken(sent)
    assert delivered(sent) == {step: 100 - {13: 3, 4: 1}.get(step, 0) for step in range(20)}
    skips = {item.step: item for item in sent if isinstance(item, Delivery) and item.num_skipped}
    assert {step: item.num_skipped for step, item in skips.items()} == {13: 3, 4: 1}
    named = {error.message.split(":")[0] for item in skips.values() for error in item.errors}
    assert named == {f"[{record_at(run, step // 10, step % 10 * 100 + row)}]" for step, row in deadly}


def test_workers_that_are_killed_by_chance_cost_no_record():
    run = Run(400, 100, 200, slots=2)
    deaths = iter([True] * 7)  # three for the batch, and then for whatever comes
    sent = run.to_the_end(is_deadly=lambda work: decodes(1)(work) and next(deaths, False))
    assert delivered(sent) == dict.fromkeys(range(4), 100)
    assert run.deaths == 7
    assert any(isinstance(task.work, TrialWork) for task in run.assigned)


def test_no_more_than_one_trial_for_a_batch_that_dies_only_as_a_whole():
    run = Run(400, 100, 200, slots=2, skip_damaged=True)
    whole = decodes(1)
    sent = run.to_the_end(is_deadly=lambda work: whole(work) and not isinstance(work, TrialWork))
    assert delivered(sent) == dict.fromkeys([0, 2, 3], 100)
    assert f"{LOST} the decoding of batch 1; the last one was killed by SIGSEGV" in broken(sent)[1]


@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_of_which_nothing_is_left_is_an_error(skip: bool):
    run = Run(40, 4, 20, slots=2, skip_damaged=skip)
    sent = run.to_the_end(is_deadly=decodes_rows(*[(3, row) for row in range(4)]))
    (error,) = [item.error for item in sent if isinstance(item, BrokenBatch)]
    assert isinstance(error, ShardError if skip else WorkerError)
    assert error.message.startswith("none of the 4 records of batch 3 is left; the first: ") == skip
    assert delivered(sent) == {step: 4 for step in range(10) if step != 3}


@pytest.mark.parametrize("skip", [False, True])
def test_the_record_of_a_stall_is_looked_for_only_if_the_batch_can_do_without(skip: bool):
    run = Run(2000, 100, 1000, slots=2, skip_damaged=skip)
    sent = run.to_the_end(is_deadly=decodes_rows((13, 41)), stalled=True)
    if skip:
        assert delivered(sent)[13] == 99
    else:
        assert broken(sent)[13].endswith(f"{LOST} the decoding of batch 13; the last one made no progress")
        assert broken(sent)[13].count("(") == 100, "all records of the batch are named"
        assert run.deaths == 3


def test_a_batch_that_cannot_be_decoded_breaks_alone():
    run = Run(200, 10, 100, slots=20)
    error = WorkerError("derived field 'x' raised")
    sent = run.to_the_end(error_at=lambda work: error if decodes(12)(work) else None)
    assert [item for item in sent if isinstance(item, BrokenBatch)] == [BrokenBatch(12, error)]
    assert len(sent) == 21


def test_an_exception_in_a_trial_is_that_of_the_batch():
    run = Run(400, 100, 200, slots=2)
    error = WorkerError("derived field 'x' raised")
    deaths = iter([True] * 3)
    sent = run.to_the_end(
        is_deadly=lambda work: decodes(1)(work) and next(deaths, False),
        error_at=lambda work: error if decodes(1)(work) else None,
    )
    assert [item for item in sent if isinstance(item, BrokenBatch)] == [BrokenBatch(1, error)]


@pytest.mark.parametrize("in_trial", [False, True])
def test_a_start_takes_back_what_was_to_be_done_alone(in_trial: bool):
    run = Run(200, 10, 100, slots=20)
    while not run.working or not decodes(3)(run.working[0][1].work):
        run.hand_out()
        worker, task = run.working.popleft()
        run.scheduler.end_task(worker, task.number, [])
    if in_trial:
        while not isinstance(run.working[0][1].work, TrialWork):
            run.die()
            run.hand_out()
    else:
        worker, task = run.working.popleft()
        run.scheduler.end_task(worker, task.number, None, WorkerError("derived field 'x' raised"))
    run.stream.start(1, Pass(0, 1), 0)
    run.sent.clear()
    sent = run.to_the_end()
    assert [item.step for item in sent if isinstance(item, Delivery)] == list(range(20))
    run.give_back()
    assert sorted(run.stream._free_slots) == list(range(20))


@pytest.mark.parametrize("skip", [False, True])
def test_a_load_that_kills_workers_costs_the_records_of_one_block(skip: bool):
    run = Run(200, 10, 100, workers=2, skip_damaged=skip)
    is_deadly = loads_place(run, 1, 55)
    sent = run.to_the_end(is_deadly)
    loads = [task.work for task in run.assigned if isinstance(task.work, LoadWork) and is_deadly(task.work)]
    (part,) = loads[-1].slices
    places = run.plan.order_of(1).places(part.row, part.row + part.stop - part.first).tolist()
    lost = f"{LOST} the load of {len(places)} records of window 1; the last one was killed by SIGSEGV"
    messages = {place: f"[{(part.block, part.first + number)}]: {lost}" for number, place in enumerate(places)}
    hit = {10 + place // 10 for place in places}
    if skip:
        assert delivered(sent) == {step: 10 - sum(step == 10 + place // 10 for place in places) for step in range(20)}
        errors = [error.message for item in sent if isinstance(item, Delivery) for error in item.errors]
        assert sorted(errors) == sorted(messages.values()), "each is named once, with the batch that lacks it"
    else:
        assert broken(sent).keys() == hit
        firsts = {message.partition(" (and ")[0] for message in broken(sent).values()}
        assert firsts <= set(messages.values()), "the others are among its damages"
        assert len(sent) == 21
