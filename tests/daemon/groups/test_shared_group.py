"""Who gets which batch where each goes to one, step by step; test_shared_model.py has what always holds."""

from __future__ import annotations

import time

from group_run import END, STEPS, Run
from sharing_run import Workshop

from loaderd.daemon.delivery.outgoing import BrokenBatch
from loaderd.daemon.groups.members import GRACE_S
from loaderd.daemon.groups.shared_group import Shared, _Pass
from loaderd.plan.passes import Pass


def test_each_batch_goes_to_who_asks():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.go()
    assert not run.got
    assert [run.ask(1), run.ask(2), run.ask(2), run.ask(1)] == [[0], [1], [2], [3]]
    run.release(1)
    run.release(2)
    assert [run.ask(1, 2), run.ask(2)] == [[4, 5], []]
    assert "consumer 1 to use the last batches" in run.members.describe(2)
    run.members.want(1, 1)
    run.go()
    assert run.got == {1: [0, 3, 4, 5, END], 2: [1, 2, END]}


def test_those_who_wait_get_a_batch_in_turn():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.members.want(1, 10)
    run.members.want(2, 10)
    run.go()
    assert run.got == {1: [0, 2], 2: [1, 3]}


def test_what_a_member_had_that_died_comes_again_and_first():
    run = Run(Shared, 3)
    run.start_all(1, 2)
    assert [run.ask(1), run.ask(1), run.ask(2), run.ask(1)] == [[0], [1], [2], [3]]
    run.members.release(1, run.kept[1][:1])
    run.leave(1)
    assert [run.ask(2), run.ask(2), run.ask(2), run.ask(2)] == [[1], [3], [4], []]
    run.release(2)
    run.go()
    assert run.got[2][-1] == 5
    assert run.work.fills == STEPS, "they are where they were, in their slots"


def test_a_pass_is_not_over_while_a_batch_may_come_again():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    assert run.ask(1) == [0]
    for _ in range(STEPS - 1):
        run.ask(2)
        run.release(2)
    assert run.ask(2) == []
    run.leave(1)
    run.go()
    assert run.got[2] == [1, 2, 3, 4, 5, 0]
    assert run.ask(2) == [END]


def test_who_asks_when_the_pass_is_over_is_told():
    run = Run(Shared, 3)
    run.start_all(1, 2, 3)
    while END not in run.ask(1):
        run.release(1)
    assert run.ask(2) == [END]
    run.start(1, epoch=1)
    assert run.ask(1) == [0]
    assert run.ask(3) == [END], "of the pass that it was in"
    run.start(3, epoch=1)
    assert run.ask(3) == [1]


def test_who_holds_a_batch_of_a_pass_that_is_over_keeps_nobody_waiting():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    for step in range(STEPS):
        run.release(1)
        assert run.ask(1) == [step]
        assert run.members.has_waiting(1) and not run.members.has_waiting(2)
    assert run.ask(1) == [END] and run.members.held_by(1)
    assert not run.members.has_waiting(1)
    run.start(1, epoch=1)
    assert run.ask(1) == [0] and run.members.has_waiting(1)


def test_a_broken_batch_is_told_to_one_and_used_up():
    run = Run(Shared, 2, broken=(0, 1))
    run.start_all(1, 2)
    assert [run.ask(1), run.ask(2), run.ask(1)] == [[0], [1], [2]]
    assert run.lows == {1: 2, 2: 1}


def test_members_are_told_up_to_where_all_is_used():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.go()
    assert run.lows == {1: 0, 2: 0}
    assert [run.ask(1), run.ask(2)] == [[0], [1]]
    run.release(2)
    assert run.ask(2) == [2] and run.lows[2] == 0
    run.release(1)
    assert run.ask(1) == [3] and run.lows[1] == 2


def test_who_comes_late_joins_the_pass_where_it_is():
    run = Run(Shared, 2)
    run.start(1)
    assert [run.ask(1), run.ask(1)] == [[0], [1]]
    run.release(1)
    run.start(2)
    assert run.ask(2) == [2] and run.lows[2] == 2


def test_who_starts_anew_gives_back_what_it_has_not_taken():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    assert [run.ask(1), run.ask(1)] == [[0], [1]]
    slots = run.kept[1]
    run.start(1, taken=[0])
    assert run.ask(1) == [2], "it has the slot of batch 1 still"
    run.members.release(1, slots[1:2])
    assert run.ask(1) == [1]
    run.members.release(1, slots[:1])
    assert run.ask(2) == [3]


def test_who_gives_back_a_batch_that_is_another_ones_now_has_not_used_it():
    run = Run(Shared, 3)
    run.start_all(1, 2)
    assert run.ask(1) == [0]
    run.start(1)
    assert run.ask(2) == [0]
    run.release(1)
    run.leave(2)
    assert run.ask(1) == [0]


def test_nobody_ends_the_pass_of_the_others():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.go()
    run.start(1, epoch=1)
    assert [run.ask(1), run.ask(2)] == [[0], [1]]
    run.release(1)
    run.release(2)
    assert run.ask(2, 4) == [2, 3, 4, 5]


def test_after_a_restart_nothing_that_was_had_comes_again():
    run = Run(Shared, 3)
    run.leave(3)
    run.start(1, 1, taken=[2])
    run.start(2, 2, taken=[3, 5])
    run.members.want(1, 9)
    run.members.tick(GRACE_S - 1)
    run.go(1)
    assert not run.got and "2 of 3" in run.members.describe(1)
    run.members.tick(1)
    run.go(1)
    assert run.got[1] == [4, END] and run.lows == {1: 4, 2: 4}


def test_when_all_are_back_nobody_waits():
    run = Run(Shared, 2)
    run.start(1, 3, taken=[3])
    run.start(2, epoch=1)
    assert run.ask(1) == [0] and run.ask(2) == [1], "the pass of the one is over, for the other is behind it"


def test_who_was_further_takes_those_along_who_began_anew():
    run = Run(Shared, 3)
    run.start(1)
    assert run.ask(1) == [0], "nobody who knows more is there"
    run.start(2, epoch=1, step=2, taken=[3])
    assert run.ask(2) == [2]
    run.release(1)
    assert run.ask(1) == [END]
    run.start(1, epoch=1)
    assert [run.ask(1), run.ask(2)] == [[4], [5]]
    run.start(3, epoch=5)
    assert run.ask(3) == [], "the group knows where it is: it waits for those who have batches"


def test_what_a_late_one_knows_to_be_used_is_not_delivered_any_more():
    run = Run(Shared, 2)
    run.start(1)
    assert run.ask(1) == [0]
    run.start(2, 3, taken=[4])
    assert run.ask(2) == [3] and run.lows[2] == 3
    assert run.ask(2) == [5]


def test_what_is_used_is_not_made_only_to_be_dropped():
    run = Run(Shared, 2, num_slots=1)
    run.start(1)
    run.go()
    run.start(2, 5)
    assert run.ask(2) == [5] and run.work.fills == 2


def test_a_group_that_all_have_left_begins_anew():
    run = Run(Shared, 1)
    run.start(1)
    assert [run.ask(1), run.ask(1)] == [[0], [1]]
    run.leave(1)
    run.members.join(1)
    run.start(1)
    assert run.ask(1) == [0]
    run.release(1)
    run.leave(1)
    run.work.everything_is_free()


def test_a_batch_costs_the_same_however_many_are_used_behind_the_mark():
    at = _Pass(Pass(0, 1), 1, 0, set())
    began_s = time.process_time()
    for step in range(1, 200_000):
        at.use(step)
    assert time.process_time() - began_s < 10
    assert at.low == 0 and not at.is_used(0) and at.is_used(199_999) and not at.is_used(200_000)
    at.use(0)
    assert at.low == 200_000 and not at.used


def test_those_wait_for_storage_who_have_asked_and_for_whom_nothing_is_there():
    run = Run(Shared, 2, num_slots=2)
    run.start_all(1, 2)
    assert run.members.waiting() == []
    run.members.want(1, 2)
    assert run.members.waiting() == [(1, 1)]
    run.members.want(2, 1)
    run.go()
    assert run.got == {1: [0], 2: [1]} and run.members.waiting() == [(1, 1)]
    run.release(2)
    run.go()
    assert run.got == {1: [0, 2], 2: [1]} and run.members.waiting() == []


def test_broken_batches_are_kept_for_nobody_by_the_thousand():
    """Nobody has asked for them yet; each says what is wrong with all of its records."""
    num_steps = 500
    work = Workshop(num_steps, 8, range(num_steps))
    shared = Shared(work.feed, 1)
    shared.join(1)
    shared.start(1, 1, Pass(0, 1), 0, [])
    got: list[int] = []

    def listen() -> None:
        while True:
            work.work()
            handed = [one.item for one in work.hand_over(shared) if isinstance(one.item, BrokenBatch)]
            got.extend(item.step for item in handed)
            assert len(work.feed.outbox) <= 8 and shared._at is not None and len(shared._at.ready) <= 8
            if not handed and not work.feed.collect():
                return

    listen()
    assert got == []
    shared.want(1, 100)
    listen()
    assert got == list(range(100))
    shared.want(1, num_steps)
    listen()
    assert got == list(range(num_steps))
