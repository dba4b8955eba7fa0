"""Workers that are lost: whether they have failed, and what becomes of the stream if nobody takes their places."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.errors import DaemonError
from loaderd.shm.page import POSITION
from loaderd.worker.page_producer import Claim
from tests.daemon.line_run import STALL_TIMEOUT_S, at_a_batch


def test_a_worker_that_dies_has_failed_unless_it_was_at_a_batch_or_had_nothing_to_do(line_of: Any):
    line = line_of(400, 10, 100)
    crew, page = line.crew, line.stream.page
    crew.kill(at_a_batch(line).number)
    (hand,) = crew.hands.values()
    crew.kill(hand.number)
    assert crew.pool.excused == [True, False], "at a batch, and before it had started"
    (hand,) = crew.hands.values()
    hand.start()
    line.listen()
    assert page.keys().count(page.words[POSITION]) == 0
    crew.kill(hand.number)
    assert crew.pool.excused.pop() is False, "it could have made the batch that is wanted"
    (hand,) = crew.hands.values()
    hand.start()
    line.keeps = True
    assert all(True for _ in line.work())
    crew.kill(hand.number)
    (hand,) = crew.hands.values()
    hand.start()
    line.listen()
    crew.kill(hand.number)
    assert crew.pool.excused[-2:] == [True, True], "the consumer gives no slot back"


# --------------------------------------------------------------------- workers that the machine lets us not have


def test_where_a_lost_worker_cannot_be_replaced_the_others_go_on_and_it_is_tried_again(line_of: Any):
    line = line_of(400, 10, 100, workers=3)
    crew = line.crew
    first, *others = crew.hands
    crew.pool.refuses = True
    crew.kill(first)
    assert list(crew.hands) == others
    lost, short = crew.warnings
    assert lost.startswith(f"worker process {first} was killed by SIGKILL")
    assert short == "cannot start a worker: no memory. Have more. Those that are left (2) go on; it is tried again"
    assert line.tick(3) == [] and len(crew.warnings) == 2, "it is said once"
    crew.worker_manager.start(3)
    assert list(crew.hands) == others, "what is tried again counts as started"
    crew.pool.refuses = False
    line.tick(1)
    assert len(crew.hands) == 3
    for hand in crew.hands.values():
        hand.start()
    line.listen()
    assert all(True for _ in line.work()) and line.ended
    crew.pool.refuses = True
    crew.kill(others[0])
    assert len(crew.warnings) == 4 and len(crew.hands) == 2, "now it is news again"


def test_a_worker_that_sleeps_is_told_of_a_batch_that_nobody_makes_any_more(line_of: Any):
    """Nobody takes the seat of the one that is lost at it."""
    line = line_of(100, 10, 100, workers=2, slots=4)
    for what in line.work():
        if isinstance(what, Claim) and what.step == 9:
            break
    (victim,) = [hand for hand in line.crew.hands.values() if hand.job and hand.job.claim is what]
    (other,) = [hand for hand in line.crew.hands.values() if hand is not victim]
    while not other.sleeps:
        if other.job is not None:
            other.end()
            line.listen()
        line.begin(other)
    line.crew.pool.refuses = True
    line.crew.kill(victim.number)
    line.listen()
    assert [what.step for what in line.work() if isinstance(what, Claim)] == [9] and line.ended


def test_where_no_worker_is_left_and_none_can_be_started_the_daemon_gives_up(line_of: Any):
    line = line_of(400, 10, 100, workers=2)
    first, second = line.crew.hands
    line.crew.pool.refuses = True
    line.crew.kill(first)
    with pytest.raises(DaemonError, match="cannot start a worker: no memory"):
        line.crew.kill(second)
    assert f"worker process {second} was killed by SIGKILL" in line.crew.warnings[-1]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_stream_does_not_wait_for_ever_for_the_slots_of_a_worker_that_is_missing(line_of: Any, comes_back: bool):
    """The consumer holds all the others."""
    line = line_of(400, 10, 100, workers=2, slots=6)
    first, _ = line.crew.hands
    line.keeps = line.crew.pool.refuses = True
    line.crew.kill(first)
    assert all(True for _ in line.work())
    assert len(line.taken) == 3, "the slots of one of two seats"
    assert line.stream.granted, "the batch that the consumer sleeps for may be made"
    for do in (line.taker.consumer.fall_asleep, line.taker.consumer.wake_up, line.taker.consumer.fall_asleep):
        do()
        line.opened.tick(STALL_TIMEOUT_S - 1)
    assert line.opened.error is None, "it is not waited for all the time"
    if comes_back:
        line.crew.pool.refuses = False
        line.tick(1)
        line.opened.tick(STALL_TIMEOUT_S)
        assert line.opened.error is None
        return
    line.opened.tick(1)
    assert line.opened.error is not None
    assert (line.opened.error.message, line.opened.error.hint) == (
        "cannot start a worker: no memory",
        "Have more.",
    )


def test_a_stream_whose_consumer_holds_all_slots_waits_for_it(line_of: Any):
    line = line_of(400, 10, 100, workers=2, slots=6)
    line.keeps = line.crew.pool.refuses = True
    assert all(True for _ in line.work())
    line.crew.kill(next(iter(line.crew.hands)))
    assert len(line.taken) == 6
    line.opened.tick(2 * STALL_TIMEOUT_S)
    assert line.opened.error is None
