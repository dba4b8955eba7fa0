"""What becomes of tasks and batches that cannot be done, and of records that workers are lost at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loaderd.daemon.pool.tasks import MAX_DEATHS
from loaderd.errors import ShardError, WorkerError
from loaderd.ipc.messages import BatchFailed, RecordsSkipped
from loaderd.ipc.worker_messages import LoadTask
from loaderd.plan.batch_range import BatchRange
from loaderd.shm.page import key_of
from tests.daemon.page_workers import Delivery
from tests.daemon.stream_run import REASON, Alone, Run

Deadly = Callable[[Any], bool]
LOST = "3 workers were lost at"
RAISED = WorkerError("derived field 'x' raised")
FAULTS = {3: WorkerError("ValueError"), 7: WorkerError("KeyError")}


def rows_decoded(work: Any) -> set[tuple[int, int]]:
    """(step, row) of what a batch, or a part of its suspects, decodes."""
    if isinstance(work, BatchRange):
        return {(work.first, row) for row in range(work.num_rows) if row not in work.omit}
    return {(work.step, work.row + i) for i in range(work.num_rows)} if isinstance(work, Alone) else set()


def decodes(step: int) -> Deadly:
    return lambda work: any(one == step for one, _ in rows_decoded(work))


def decodes_rows(*deadly: tuple[int, int]) -> Deadly:
    """Of (step, row)."""
    return lambda work: bool(rows_decoded(work) & set(deadly))


def raises(step: int, rows: set[int]) -> Any:
    """A function that raises at these rows of a batch."""
    return lambda work: RAISED if rows_decoded(work) & {(step, row) for row in rows} else None


def row_of(run: Run, window: int, place: int) -> int:
    row: int = run.plan.order_of(window).places().tolist().index(place)
    return row


def loads_place(run: Run, window: int, place: int) -> Deadly:
    row = row_of(run, window, place)
    return lambda work: (
        isinstance(work, LoadTask)
        and work.window == window
        and any(part.row <= row < part.row + part.stop - part.first for part in work.slices)
    )


def record_at(run: Run, window: int, place: int) -> tuple[int, int]:
    """(block, number) of what lies at a place."""
    row = row_of(run, window, place)
    (part,) = [p for p in run.plan.slices_of(window) if p.row <= row < p.row + p.stop - p.first]
    return part.block, part.first + row - part.row


def delivered(sent: list[Any]) -> dict[int, int]:
    return {item.step: item.num_records for item in sent if isinstance(item, Delivery)}


def omitted(sent: list[Any]) -> dict[int, RecordsSkipped]:
    return {item.step: item.omission for item in sent if isinstance(item, Delivery) and item.omission is not None}


def broken(sent: list[Any]) -> dict[int, str]:
    return {item.step: item.error.message for item in sent if isinstance(item, BatchFailed)}


def test_a_record_that_workers_are_lost_at_is_found_and_breaks_its_batch():
    run = Run(2000, 100, 1000)
    sent = run.to_the_end(is_deadly=decodes_rows((13, 41)))
    assert delivered(sent) == {step: 100 for step in range(20) if step != 13}
    lost = f"{LOST} the decoding of 1 record of batch 13; the last one was killed by SIGSEGV"
    assert broken(sent) == {13: f"[{record_at(run, 1, 341)}]: {lost}"}
    assert [item.step for item in sent] == list(range(20)), "in its turn"
    assert run.deaths == 3 + 1 + 3, "for the batch, for a part of it, and for the record"
    parts, rows = [Alone(13, row, 10) for row in range(0, 50, 10)], [Alone(13, row) for row in (40, 41, 41, 41)]
    assert run.alone == [*parts, *rows], "none again that was survived"


def test_a_large_batch_is_searched_with_few_calls():
    run = Run(8000, 8000, 8000, skip_damaged=True)
    run.to_the_end(is_deadly=decodes_rows((0, 7900)))
    assert len(run.alone) < 2 * 8000**0.5 + 10


def test_records_that_workers_are_lost_at_are_skipped_if_the_user_chose_so():
    run = Run(2000, 100, 1000, skip_damaged=True)
    deadly = [(13, 41), (13, 42), (13, 99), (4, 0)]
    sent = run.to_the_end(is_deadly=decodes_rows(*deadly))
    assert not broken(sent)
    assert delivered(sent) == {step: 100 - {13: 3, 4: 1}.get(step, 0) for step in range(20)}
    skips = omitted(sent)
    assert {step: item.num_records for step, item in skips.items()} == {13: 3, 4: 1}
    named = {error.message.split(":")[0] for item in skips.values() for error in item.errors}
    assert named == {f"[{record_at(run, step // 10, step % 10 * 100 + row)}]" for step, row in deadly}
    whole = [batch for batch in run.made if batch.first in (4, 13) and not batch.omit]
    assert len(whole) == 6, "three each, and then it is known what to leave out"


@pytest.mark.parametrize(("most", "stalled"), [(32, False), (3, True)])
def test_more_records_than_are_left_out_break_their_batch(most: int, stalled: bool):
    run = Run(400, 100, 200, skip_damaged=True)
    deadly = decodes_rows(*[(1, 3 * row) for row in range(most)], *[(2, row) for row in range(50, 51 + most)])
    sent = run.to_the_end(is_deadly=deadly, stalled=stalled)
    assert delivered(sent) == {0: 100, 1: 100 - most, 3: 100}
    assert broken(sent)[2].startswith(f"[{record_at(run, 1, 50)}]: workers are lost at {most + 1} records of batch 2")


def test_workers_that_are_killed_by_chance_cost_no_record():
    run = Run(400, 100, 200)
    deaths = iter([*[True] * 5, False, True, False, True, True])  # three for the batch, and then at whatever comes
    sent = run.to_the_end(is_deadly=lambda work: decodes(1)(work) and next(deaths, False))
    assert delivered(sent) == dict.fromkeys(range(4), 100)
    assert run.deaths == 8 and {row for one in run.alone for _, row in rows_decoded(one)} == set(range(100))


def test_a_batch_that_kills_only_as_a_whole_is_broken():
    run = Run(400, 100, 200, skip_damaged=True)
    sent = run.to_the_end(is_deadly=lambda work: decodes(1)(work) and not isinstance(work, Alone))
    assert delivered(sent) == dict.fromkeys([0, 2, 3], 100)
    assert f"{LOST} the decoding of batch 1; the last one was killed by SIGSEGV" in broken(sent)[1]
    assert run.deaths == 6


@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_of_which_nothing_is_left_is_an_error(skip: bool):
    run = Run(40, 4, 20, skip_damaged=skip)
    sent = run.to_the_end(is_deadly=decodes_rows(*[(3, row) for row in range(4)]))
    (error,) = [item.error for item in sent if isinstance(item, BatchFailed)]
    assert isinstance(error, ShardError if skip else WorkerError)
    assert error.message.startswith("none of the 4 records of batch 3 is left; the first: ") == skip
    assert delivered(sent) == {step: 4 for step in range(10) if step != 3}


@pytest.mark.parametrize("skip", [False, True])
def test_the_record_of_a_stall_is_looked_for_only_if_the_batch_can_do_without(skip: bool):
    run = Run(2000, 100, 1000, skip_damaged=skip)
    sent = run.to_the_end(is_deadly=decodes_rows((13, 41)), stalled=True)
    if skip:
        assert delivered(sent)[13] == 99
    else:
        assert broken(sent)[13].endswith(f"{LOST} the decoding of batch 13; the last one made no progress")
        assert broken(sent)[13].count("(") == 100, "all records of the batch are named"
        assert run.deaths == 3


def test_batches_that_cannot_be_decoded_break_alone():
    run = Run(200, 10, 100)
    sent = run.to_the_end(error_at=lambda work: RAISED if any(step % 3 for step, _ in rows_decoded(work)) else None)
    assert broken(sent) == {step: RAISED.message for step in range(20) if step % 3}
    assert delivered(sent) == {step: 10 for step in range(20) if not step % 3}
    assert [batch.first for batch in run.made] == list(range(20)), "nobody tries them again"


def test_a_record_at_which_a_function_raises_breaks_its_batch_and_is_named():
    run = Run(200, 10, 100)
    sent = run.to_the_end(error_at=raises(12, {3, 7}), faults=FAULTS)
    assert broken(sent) == {12: f"[{record_at(run, 1, 23)}]: {RAISED.message}"}
    assert delivered(sent) == {step: 10 for step in range(20) if step != 12}


def test_records_at_which_a_function_raises_are_skipped_if_the_user_chose_so():
    run = Run(200, 10, 100, skip_damaged=True)
    sent = run.to_the_end(error_at=raises(12, {3, 7}), faults=FAULTS)
    assert not broken(sent) and delivered(sent) == {step: 10 - 2 * (step == 12) for step in range(20)}
    assert omitted(sent)[12].num_records == 2
    said = {error.message for error in omitted(sent)[12].errors}
    assert said == {f"[{record_at(run, 1, 20 + row)}]: {error.message}" for row, error in FAULTS.items()}
    assert [batch.first for batch in run.made].count(12) == 2


def test_what_another_worker_says_of_a_batch_that_is_made_without_some_is_passed_over():
    run = Run(400, 100, 200, skip_damaged=True)
    run.load_all()
    for _ in range(2):
        run.not_made(RAISED, FAULTS)
    sent = run.to_the_end()
    assert not broken(sent) and delivered(sent) == {0: 98, 1: 100, 2: 100, 3: 100}
    assert omitted(sent)[0].num_records == 2


@pytest.mark.parametrize("all_faults", [True, False])
def test_a_batch_in_which_too_many_fail_is_broken(all_faults: bool):
    """The first 32 are named, and then there are more; or there were too many at once."""
    run = Run(400, 100, 200, skip_damaged=True)
    faults = {row: WorkerError(f"row {row}") for row in (range(33) if all_faults else [5])}
    sent = run.to_the_end(error_at=raises(1, set(range(33))), faults=faults, all_faults=all_faults)
    assert broken(sent) == {1: f"[{record_at(run, 0, 100 + min(faults))}]: {RAISED.message}"}
    assert delivered(sent) == dict.fromkeys([0, 2, 3], 100)


def test_records_that_kill_and_records_at_which_a_function_raises_are_both_skipped():
    run = Run(200, 10, 100, skip_damaged=True)
    sent = run.to_the_end(is_deadly=decodes_rows((12, 5)), error_at=raises(12, {3, 7}), faults=FAULTS)
    assert not broken(sent) and delivered(sent)[12] == 7 and omitted(sent)[12].num_records == 3


def test_a_start_clears_all_suspects():
    run = Run(200, 10, 100)
    run.to_the_end(is_deadly=decodes(3), until=lambda: bool(run.alone))
    run.start(2, 0)
    run.alone.clear()
    assert delivered(run.to_the_end()) == dict.fromkeys(range(20), 10) and not run.alone


@pytest.mark.parametrize("skip", [False, True])
def test_a_load_that_kills_workers_costs_the_records_of_one_block(skip: bool):
    run = Run(200, 10, 100, skip_damaged=skip)
    is_deadly = loads_place(run, 1, 55)
    sent = run.to_the_end(is_deadly)
    loads = [task.work for task in run.tasks if isinstance(task.work, LoadTask) and is_deadly(task.work)]
    (part,) = loads[-1].slices
    places = run.plan.order_of(1).places(part.row, part.row + part.stop - part.first).tolist()
    lost = f"{LOST} the load of {len(places)} records of window 1; the last one was killed by SIGSEGV"
    messages = {place: f"[{(part.block, part.first + number)}]: {lost}" for number, place in enumerate(places)}
    hit = {10 + place // 10 for place in places}
    if skip:
        assert delivered(sent) == {step: 10 - sum(step == 10 + place // 10 for place in places) for step in range(20)}
        errors = [error.message for item in omitted(sent).values() for error in item.errors]
        assert sorted(errors) == sorted(messages.values()), "each is named once, with the batch that lacks it"
    else:
        assert broken(sent).keys() == hit
        firsts = {message.rpartition(" (")[0] or message for message in broken(sent).values()}
        assert firsts <= set(messages.values()), "the others are among its damages"
        assert len(sent) == 20


def test_a_batch_that_another_worker_makes_at_the_same_time_has_no_suspects():
    run = Run(400, 100, 100)
    run.load_all()
    for slot in (0, 1):
        run.page.claim(slot, key_of(1, 0))
    for _ in range(2 * MAX_DEATHS):
        run.stream.lost_at(key_of(1, 0), -1, REASON, False)
    assert not any(one.suspects for one in run.stream.granted)


def test_workers_that_are_lost_at_a_batch_that_another_one_has_delivered_blame_no_record():
    """Two made it at the same time, and its window is gone."""
    run = Run(400, 100, 100, skip_damaged=True)
    run.load_all()
    for _ in range(MAX_DEATHS):
        run.lose_at_batch()
    run.come_to(1)
    run.stream.look()
    for _ in range(MAX_DEATHS):
        run.stream.lost_at(key_of(1, 0), 5, REASON, False)
    sent = run.to_the_end()
    assert delivered(sent) == dict.fromkeys(range(1, 4), 100) and not omitted(sent) and not broken(sent)


@pytest.mark.parametrize("row", [-7, 41, 100, (1 << 63) - 2])
def test_a_row_that_a_consumer_has_written_on_the_page_is_not_believed(row: int):
    run = Run(400, 100, 200, skip_damaged=True)
    run.to_the_end(is_deadly=decodes_rows((0, 41)), until=lambda: any(one.omit for one in run.stream.granted))
    for _ in range(MAX_DEATHS):
        run.lose_at_batch(row=row)
    assert broken(run.to_the_end())[0].endswith(f"{LOST} the decoding of batch 0; the last one {REASON}")


def test_what_a_worker_says_of_a_batch_that_another_one_has_delivered_is_passed_over():
    run = Run(400, 100, 200)
    run.load_all()
    run.come_to(1)
    run.stream.look()
    run.step = 0
    run.not_made(RAISED, {})
    run.step = 1
    assert delivered(run.to_the_end()) == dict.fromkeys(range(1, 4), 100)
