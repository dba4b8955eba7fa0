"""What becomes of tasks and batches that cannot be done, and of records that workers are lost at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderd.errors import LoaderdError, ShardError, WorkerError
from loaderd.ipc.messages import BatchFailed, RecordsSkipped
from loaderd.ipc.worker_messages import LoadTask, TrialTask
from loaderd.worker.page_producer import Claim
from tests.daemon.page_workers import Delivery
from tests.daemon.stream_run import Run

Deadly = Callable[[Any], bool]
LOST = "3 workers in a row were lost at"
NewRun = Callable[..., Run]


@pytest.fixture
def new_run() -> Iterator[NewRun]:
    """Makes runs, and closes them."""
    runs: list[Run] = []

    def make(*args: Any, **options: Any) -> Run:
        runs.append(Run(*args, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def rows_decoded(work: Any) -> set[tuple[int, int]]:
    """(step, row) of what a claim or a trial decodes."""
    if isinstance(work, Claim):
        num_rows, step, omit = work.batch.num_rows, work.step, work.batch.omit
    elif isinstance(work, TrialTask):
        return {(work.step, row) for row in work.rows}
    else:
        return set()
    return {(step, row) for row in range(num_rows) if row not in omit}


def decodes(step: int) -> Deadly:
    return lambda work: any(one == step for one, _ in rows_decoded(work))


def decodes_rows(*deadly: tuple[int, int]) -> Deadly:
    """Of (step, row)."""
    return lambda work: bool(rows_decoded(work) & set(deadly))


def loads_place(run: Run, window: int, place: int) -> Deadly:
    row = run.plan.order_of(window).places().tolist().index(place)
    return lambda work: (
        isinstance(work, LoadTask)
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


def omitted(sent: list[Any]) -> dict[int, RecordsSkipped]:
    return {item.step: item.omission for item in sent if isinstance(item, Delivery) and item.omission is not None}


def broken(sent: list[Any]) -> dict[int, str]:
    return {item.step: item.error.message for item in sent if isinstance(item, BatchFailed)}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_record_that_workers_are_lost_at_is_found_and_breaks_its_batch(new_run: NewRun, workers: int):
    run = new_run(2000, 100, 1000, workers=workers, slots=20)
    while not any(one.has(13) for one in run.stream.granted):
        run.end_task(run.working[0][1])
    assert any(one.has(13) and one.has(12) for one in run.stream.granted), "it is granted with others"
    sent = run.to_the_end(is_deadly=decodes_rows((13, 41)))
    assert delivered(sent) == {step: 100 for step in range(20) if step != 13}
    lost = f"{LOST} the decoding of 1 record of batch 13; the last one was killed by SIGSEGV"
    assert broken(sent) == {13: f"[{record_at(run, 1, 341)}]: {lost}"}
    assert [item.step for item in sent] == list(range(20)), "in its turn"
    assert run.deaths <= 3 + 6 + 3, "for the batch, for each half, and for the record"


def test_records_that_workers_are_lost_at_are_skipped_if_the_user_chose_so(new_run: NewRun):
    run = new_run(2000, 100, 1000, workers=2, slots=20, skip_damaged=True)
    deadly = [(13, 41), (13, 42), (13, 99), (4, 0)]
    sent = run.to_the_end(is_deadly=decodes_rows(*deadly))
    assert not broken(sent)
    assert delivered(sent) == {step: 100 - {13: 3, 4: 1}.get(step, 0) for step in range(20)}
    skips = omitted(sent)
    assert {step: item.num_records for step, item in skips.items()} == {13: 3, 4: 1}
    named = {error.message.split(":")[0] for item in skips.values() for error in item.errors}
    assert named == {f"[{record_at(run, step // 10, step % 10 * 100 + row)}]" for step, row in deadly}
    whole = [claim for claim in run.claimed if claim.step in (4, 13) and not claim.batch.omit]
    assert len(whole) == 6, "three each, and then it is known what to leave out"


@pytest.mark.parametrize(("most", "stalled"), [(32, False), (3, True)])
def test_more_records_than_are_left_out_break_their_batch(new_run: NewRun, most: int, stalled: bool):
    run = new_run(400, 100, 200, slots=2, skip_damaged=True)
    deadly = decodes_rows(*[(1, 3 * row) for row in range(most)], *[(2, row) for row in range(50, 51 + most)])
    sent = run.to_the_end(is_deadly=deadly, stalled=stalled)
    assert delivered(sent) == {0: 100, 1: 100 - most, 3: 100}
    assert broken(sent)[2].startswith(f"[{record_at(run, 1, 50)}]: workers are lost at {most + 1} records of batch 2")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batches_first", [False, True])
def test_workers_that_are_killed_by_chance_cost_no_record(new_run: NewRun, workers: int, batches_first: bool):
    run = new_run(400, 100, 200, workers=workers, slots=2 * workers, batches_first=batches_first)
    deaths = iter([True] * 7)  # three for the batch, and then for whatever comes
    sent = run.to_the_end(is_deadly=lambda work: decodes(1)(work) and next(deaths, False))
    assert delivered(sent) == dict.fromkeys(range(4), 100)
    assert run.deaths == 7
    assert any(isinstance(task.work, TrialTask) for task in run.assigned)


def test_no_more_than_one_trial_for_a_batch_that_dies_only_as_a_whole(new_run: NewRun):
    run = new_run(400, 100, 200, slots=2, skip_damaged=True)
    whole = decodes(1)
    sent = run.to_the_end(is_deadly=lambda work: whole(work) and not isinstance(work, TrialTask))
    assert delivered(sent) == dict.fromkeys([0, 2, 3], 100)
    assert f"{LOST} the decoding of batch 1; the last one was killed by SIGSEGV" in broken(sent)[1]
    assert run.deaths == 6


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_on_trial_keeps_a_slot_whoever_takes_the_seat(new_run: NewRun, slots: int, skip: bool):
    """Else batches behind it fill all slots, the consumer waits for this one, and there is none to make it in."""
    run = new_run(400, 20, 200, slots=slots, skip_damaged=skip, batches_first=True)
    deaths = iter([True] * 4)  # the fourth at the trial, so that the seat changes hands once more
    sent = run.to_the_end(is_deadly=lambda work: decodes(1)(work) and next(deaths, False))
    assert run.deaths == 4
    assert delivered(sent) == dict.fromkeys(range(20), 20)
    assert [claim.step for claim in run.claimed[:4]] == [0, 1, 1, 1]
    assert [item.slot for item in sent if isinstance(item, Delivery) and item.step == 1] == [run.claimed[3].slot]


@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_of_which_nothing_is_left_is_an_error(new_run: NewRun, skip: bool):
    run = new_run(40, 4, 20, slots=2, skip_damaged=skip)
    sent = run.to_the_end(is_deadly=decodes_rows(*[(3, row) for row in range(4)]))
    (error,) = [item.error for item in sent if isinstance(item, BatchFailed)]
    assert isinstance(error, ShardError if skip else WorkerError)
    assert error.message.startswith("none of the 4 records of batch 3 is left; the first: ") == skip
    assert delivered(sent) == {step: 4 for step in range(10) if step != 3}


@pytest.mark.parametrize("skip", [False, True])
def test_the_record_of_a_stall_is_looked_for_only_if_the_batch_can_do_without(new_run: NewRun, skip: bool):
    run = new_run(2000, 100, 1000, slots=2, skip_damaged=skip)
    sent = run.to_the_end(is_deadly=decodes_rows((13, 41)), stalled=True)
    if skip:
        assert delivered(sent)[13] == 99
    else:
        assert broken(sent)[13].endswith(f"{LOST} the decoding of batch 13; the last one made no progress")
        assert broken(sent)[13].count("(") == 100, "all records of the batch are named"
        assert run.deaths == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_that_cannot_be_decoded_breaks_alone(new_run: NewRun, workers: int):
    run = new_run(200, 10, 100, workers=workers, slots=20)
    error = WorkerError("derived field 'x' raised")
    sent = run.to_the_end(error_at=lambda work: error if decodes(12)(work) else None)
    assert broken(sent) == {12: error.message}
    assert [item.step for item in sent] == list(range(20))
    assert [claim.step for claim in run.claimed].count(12) == 1, "nobody tries it again"


def test_many_batches_that_cannot_be_decoded_cost_no_slots(new_run: NewRun):
    run = new_run(200, 10, 100, slots=2)
    error = WorkerError("derived field 'x' raised")
    sent = run.to_the_end(error_at=lambda work: error if isinstance(work, Claim) and work.step % 3 else None)
    assert broken(sent) == {step: error.message for step in range(20) if step % 3}
    assert delivered(sent) == {step: 10 for step in range(20) if not step % 3}
    assert all(run.floor.page.is_free(slot) for slot in range(2))


def test_an_exception_behind_a_trial_is_that_of_the_batch(new_run: NewRun):
    run = new_run(400, 100, 200, slots=2)
    error = WorkerError("derived field 'x' raised")
    deaths = iter([True] * 3)
    sent = run.to_the_end(
        is_deadly=lambda work: decodes(1)(work) and next(deaths, False),
        error_at=lambda work: error if decodes(1)(work) else None,
    )
    assert broken(sent) == {1: error.message}


RAISED = WorkerError("derived field 'x' raised")
FAULTS = {3: WorkerError("ValueError"), 7: WorkerError("KeyError")}


def raises(step: int, rows: set[int]) -> Any:
    """A function that raises at these rows of a batch."""
    return lambda work: RAISED if rows_decoded(work) & {(step, row) for row in rows} else None


def test_a_record_at_which_a_function_raises_breaks_its_batch_and_is_named(new_run: NewRun):
    run = new_run(200, 10, 100, workers=2, slots=4)
    sent = run.to_the_end(error_at=raises(12, {3, 7}), faults=FAULTS)
    assert broken(sent) == {12: f"[{record_at(run, 1, 23)}]: {RAISED.message}"}
    assert delivered(sent) == {step: 10 for step in range(20) if step != 12}


@pytest.mark.parametrize("slots", [1, 4])
def test_records_at_which_a_function_raises_are_skipped_if_the_user_chose_so(new_run: NewRun, slots: int):
    run = new_run(200, 10, 100, workers=2, slots=slots, skip_damaged=True)
    sent = run.to_the_end(error_at=raises(12, {3, 7}), faults=FAULTS)
    assert not broken(sent) and delivered(sent) == {step: 10 - 2 * (step == 12) for step in range(20)}
    assert omitted(sent)[12].num_records == 2
    said = {error.message for error in omitted(sent)[12].errors}
    assert said == {f"[{record_at(run, 1, 20 + row)}]: {error.message}" for row, error in FAULTS.items()}
    assert [claim.step for claim in run.claimed].count(12) == 2


def test_a_slot_that_is_kept_for_a_batch_is_used_for_it(new_run: NewRun):
    """Whenever the worker looks: if it took a later batch, all slots could be full of batches that are not due."""
    run = new_run(200, 10, 100, slots=1, skip_damaged=True)
    while run.working:
        run.end_task(run.working[0][1])
    hand = run.floor.hands[0]
    claim = run.claims(0)
    assert claim is not None and claim.step == 0
    hand.not_made(RAISED, FAULTS)
    run.floor.hear(0)
    while hand.unread:
        hand.read()
        if (claim := hand.try_claim()) is not None:
            break
    assert claim is not None and (claim.step, claim.batch.omit) == (0, (3, 7))


def test_what_another_worker_says_of_a_batch_that_is_made_without_some_is_passed_over(new_run: NewRun):
    run = new_run(400, 100, 200, workers=2, slots=2, skip_damaged=True)
    while run.working:
        run.end_task(run.working[0][1])
    claim_both(run, 0)
    for hand in run.floor.hands:
        hand.not_made(RAISED, FAULTS)
    for seat in (0, 1):
        run.floor.hear(seat)
    sent = run.to_the_end()
    assert not broken(sent) and delivered(sent) == {0: 98, 1: 100, 2: 100, 3: 100}
    assert omitted(sent)[0].num_records == 2


def test_a_batch_in_which_too_many_fail_is_broken(new_run: NewRun):
    """The first 32 are named, and then there are more; or there were too many at once."""
    faults = {row: WorkerError(f"row {row}") for row in range(33)}
    for all_faults in (True, False):
        run = new_run(400, 100, 200, slots=2, skip_damaged=True)
        given = faults if all_faults else {5: faults[5]}
        sent = run.to_the_end(error_at=raises(1, set(faults)), faults=given, all_faults=all_faults)
        assert broken(sent) == {1: f"[{record_at(run, 0, 100 + min(given))}]: {RAISED.message}"}
        assert delivered(sent) == dict.fromkeys([0, 2, 3], 100)


def test_records_that_kill_and_records_at_which_a_function_raises_are_both_skipped(new_run: NewRun):
    run = new_run(200, 10, 100, slots=2, skip_damaged=True)
    sent = run.to_the_end(is_deadly=decodes_rows((12, 5)), error_at=raises(12, {3, 7}), faults=FAULTS)
    assert not broken(sent) and delivered(sent)[12] == 7 and omitted(sent)[12].num_records == 3


def run_up_to_trial(new_run: NewRun, step: int) -> tuple[Run, TrialTask]:
    """A run that has just begun with the trial of a batch."""
    run = new_run(200, 10, 100, slots=20)
    begun: list[TrialTask] = []

    def stop(work: Any) -> LoaderdError | None:
        if isinstance(work, TrialTask):
            begun.append(work)
            raise StopIteration
        return None

    with pytest.raises(StopIteration):
        deadly = decodes(step)
        run.to_the_end(lambda work: deadly(work) and isinstance(work, Claim), stop)
    return run, begun[0]


@pytest.mark.parametrize("ends", ["done", "failed", "died"])
def test_a_start_ends_a_trial(new_run: NewRun, ends: str):
    run, _ = run_up_to_trial(new_run, 3)
    ((_, task),) = run.working
    run.start(2, 0)
    if ends == "died":
        run.die(0, task)
    else:
        run.end_task(task, WorkerError("derived field 'x' raised") if ends == "failed" else None)
    sent = run.to_the_end()
    assert delivered(sent) == dict.fromkeys(range(20), 10)
    assert all(run.floor.page.is_free(slot) for slot in range(20)), "none is kept for the trial"
    assert not run.floor.page.unfinished(0)


def test_a_batch_on_trial_is_granted_to_nobody(new_run: NewRun):
    run, work = run_up_to_trial(new_run, 3)
    assert work.step == 3
    assert not any(one.has(3) for one in run.stream.granted)
    while (claim := run.claims(0)) is not None:
        assert claim.step != 3
        run.floor.hands[0].made()
    run.take()
    assert [item.step for item in run.sent] == [0, 1, 2]


@pytest.mark.parametrize("skip", [False, True])
def test_a_load_that_kills_workers_costs_the_records_of_one_block(new_run: NewRun, skip: bool):
    run = new_run(200, 10, 100, workers=2, skip_damaged=skip)
    is_deadly = loads_place(run, 1, 55)
    sent = run.to_the_end(is_deadly)
    loads = [task.work for task in run.assigned if isinstance(task.work, LoadTask) and is_deadly(task.work)]
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
        firsts = {message.partition(" (and ")[0] for message in broken(sent).values()}
        assert firsts <= set(messages.values()), "the others are among its damages"
        assert len(sent) == 20


def claim_both(run: Run, step: int) -> None:
    """Workers 0 and 1 claim the same batch, as they may at the same moment."""
    page = run.floor.page
    first = run.claims(0)
    assert first is not None and first.step == step
    page.claim(first.slot, 0)
    second = run.claims(1)
    assert second is not None and second.step == step
    page.claim(first.slot, first.key)


@pytest.mark.parametrize("starts_anew", [False, True])
@pytest.mark.parametrize("is_guilty", [False, True])
def test_what_workers_are_lost_at_may_be_delivered_by_another_one(
    new_run: NewRun, is_guilty: bool, starts_anew: bool
):
    """Two make it at the same time. Its window may be gone before the trial ends, if there is one."""
    run = new_run(400, 100, 100, workers=2, slots=8, skip_damaged=True)
    while run.working:
        run.end_task(run.working[0][1])
    for _ in range(2):
        claim = run.claims(1)
        assert claim is not None and claim.step == 0
        run.die(1)
    claim_both(run, 0)
    run.die(1)
    run.floor.hands[0].made()
    while slots := run.take():  # the consumer goes on
        for slot in slots:
            run.floor.consumer.taker.release(slot)
        if (claim := run.claims(0)) is not None:
            run.floor.hands[0].made()
    if starts_anew:
        run.start(2, 0)
    for task in [task for _, task in run.working if isinstance(task.work, TrialTask)]:
        if is_guilty:
            run.die(run.workers.index(next(worker for worker, other in run.working if other is task)), task)
        else:
            run.end_task(task)
    sent = run.to_the_end()
    assert delivered(sent) == dict.fromkeys(range(4), 100)
    assert not omitted(sent) and not broken(sent)


def test_a_batch_that_one_of_two_cannot_make_is_delivered_or_broken(new_run: NewRun):
    """Both made it; what the one says comes when the consumer has what the other made, and costs no slot."""
    run = new_run(400, 100, 200, workers=2, slots=2)
    while run.working:
        run.end_task(run.working[0][1])
    claim_both(run, 0)
    run.floor.hands[0].not_made(WorkerError("derived field 'x' raised"))
    run.floor.hands[1].made()
    for slot in run.take():
        run.floor.consumer.taker.release(slot)
    run.floor.hear(0)
    sent = run.to_the_end()
    assert delivered(sent) == dict.fromkeys(range(4), 100)
    assert {claim.slot for claim in run.claimed[2:]} == {0, 1}
