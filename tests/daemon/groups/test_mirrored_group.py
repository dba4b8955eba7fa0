"""Who gets which batch where all get every one, step by step; test_mirrored_model.py has what always holds."""

from __future__ import annotations

import pytest

from loaderd.daemon.delivery.events import FailedBatch, PassEnd
from loaderd.daemon.groups.members import GRACE_S
from loaderd.daemon.groups.mirrored_group import Mirrored
from loaderd.plan.passes import Pass
from tests.daemon.group_run import END, STEPS, Run
from tests.daemon.sharing_run import Workshop


def test_all_get_all_and_it_is_decoded_once():
    run = Run(3)
    run.start_all(1, 2)
    run.go(1, 2, 3)
    assert not run.got, "one is missing"
    assert "consumer 3" in run.members.describe(1)
    run.start(3)
    run.go(1, 2, 3)
    assert run.got == {1: [*range(STEPS), END], 2: [*range(STEPS), END], 3: [*range(STEPS), END]}
    assert run.work.fills == STEPS


def test_the_fastest_is_no_further_ahead_than_its_share_of_the_slots():
    run = Run(2)
    run.start_all(1, 2)
    run.go(1)
    assert run.got == {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
    assert run.members.describe(1) == "waits for consumer 2 to give batches back"
    run.members.release(2, run.kept[2][:1])
    del run.kept[2][:1]
    run.go(1)
    assert run.got[1] == [0, 1, 2, 3, 4]
    run.leave(2)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_who_comes_back_soon_gets_what_the_others_still_have():
    run = Run(2)
    run.start_all(1, 2)
    run.go()
    run.members.release(2, run.kept[2][:1])
    run.leave(1)
    run.members.join(1)
    run.start(1, 1)
    run.kept[2] = run.kept[2][1:]
    run.go(1, 2)
    assert run.got == {1: [0, 1, 2, 3, *range(1, STEPS), END], 2: [*range(STEPS), END]}
    assert run.work.fills == STEPS


def test_the_stream_goes_back_for_who_is_behind():
    run = Run(2)
    run.start_all(1, 2)
    run.go()
    run.leave(1)
    run.release(2)
    run.members.join(1)
    run.got.clear()
    run.start(1, 2)
    run.work.work(3)
    assert "waits for consumer 1" in run.members.describe(2)
    run.go(1, 2)
    assert run.got == {1: [2, 3, 4, 5, END], 2: [4, 5, END]}


def test_who_is_behind_gets_on_while_the_others_wait_for_it_with_all_that_they_have():
    run = Run(3, num_slots=2)
    for member in (1, 2, 3):
        run.start(member, 2)
    run.go()
    run.leave(3)
    run.members.join(3)
    run.start(2, 4)
    run.start(3, 0)
    run.got.clear()
    run.go(3)
    assert run.got == {3: [0, 1, 2, 3]}, "to where they are"
    run.release(1)
    run.release(2)
    run.go(1, 2, 3)
    assert run.got == {1: [4, 5, END], 2: [4, 5, END], 3: [*range(STEPS), END]}


def test_nobody_has_more_than_its_share():
    run = Run(3, num_slots=2)
    run.start_all(1, 2, 3)
    run.go()
    run.start(1, 5)
    run.release(2)
    run.release(3)
    run.go()
    assert run.got[2] == [0, 1, 2, 3], "all of which are in slots"
    run.leave(3)
    run.members.join(3)
    run.start(3)
    run.go()
    assert run.members.held_by(3) == 2


def test_who_goes_back_in_its_own_batches_gets_none_in_a_slot_that_it_has():
    run = Run(2)
    run.start_all(1, 2)
    run.go(2)
    assert run.got.pop(1) == [0, 1, 2, 3]
    run.start(1, 1)
    run.go(2)
    assert run.got[1] == []
    run.release(1)
    run.go(1, 2)
    assert run.got[1] == [*range(1, STEPS), END]


def test_what_was_made_before_the_stream_went_back_is_not_handed_on():
    run = Run(3)
    run.start_all(1, 2, 3)
    while len(run.got[3]) < 2:
        run.work.work(1)
        run.listen()
    assert run.got[3] == [0, 1]
    run.start(1)
    run.go()
    assert run.got[1] == [0, 1, 0, 1]
    run.leave(3)
    run.members.join(3)
    run.got.clear()
    run.start(3)
    run.go(1, 2, 3)
    assert run.got[3] == [*range(STEPS), END]


@pytest.mark.parametrize("step", [1, 3], ids=["back", "ahead"])
def test_once_begun_it_waits_for_nobody_who_has_yet_to_start(step: int):
    run = Run(3)
    for member in (1, 2, 3):
        run.start(member, 2)
    run.leave(3)
    run.members.join(3)
    run.start(1, step)
    run.start(2, step)
    run.go(1, 2)
    assert run.got == {1: [*range(step, STEPS), END], 2: [*range(step, STEPS), END]}


def test_a_group_that_all_have_left_waits_for_all_again():
    run = Run(2)
    run.start_all(1, 2)
    run.leave(1)
    run.leave(2)
    run.members.join(1)
    run.start(1)
    run.go(1)
    assert not run.got
    run.leave(1)
    run.work.everything_is_free()


def test_nobody_waits_for_what_nobody_needs():
    run = Run(2)
    run.start_all(1, 2)
    run.leave(1)
    run.start(2, 4)
    run.go(2)
    assert run.got == {2: [4, 5, END]} and run.work.fills == 2


def test_the_next_pass_waits_for_all_who_are_there():
    run = Run(2)
    run.start_all(1, 2)
    run.go(1, 2)
    run.got.clear()
    run.start(1, epoch=1)
    run.members.tick(100 * GRACE_S)
    run.go(1, 2)
    assert not run.got and "consumer 2 to ask" in run.members.describe(1)
    run.leave(2)
    run.go(1)
    assert run.got == {1: [*range(STEPS), END]}


def test_a_member_in_the_next_pass_waits_for_who_is_in_this_one():
    run = Run(2)
    run.start_all(1, 2)
    run.start(1, 2, epoch=1)
    run.go(2)
    assert run.got == {2: [*range(STEPS), END]}
    run.start(2, epoch=1)
    run.go(1, 2)
    assert run.got == {1: [2, 3, 4, 5, END], 2: [*range(STEPS), END, *range(STEPS), END]}


def test_after_a_restart_those_who_are_back_go_on_without_the_others():
    run = Run(3)
    run.leave(3)
    run.start(1, 3)
    run.start(2, 4)
    run.members.tick(GRACE_S - 1)
    run.go(1, 2)
    assert not run.got and "2 of 3" in run.members.describe(1)
    run.members.tick(1)
    run.go(1, 2)
    assert run.got == {1: [3, 4, 5, END], 2: [4, 5, END]}


def test_who_has_no_past_waits_for_the_others():
    run = Run(2)
    run.leave(2)
    run.start(1)
    run.members.tick(100 * GRACE_S)
    run.go(1)
    assert not run.got
    run.members.join(2)
    run.start(2)
    run.go(1, 2)
    assert run.got[1] == [*range(STEPS), END]


def test_a_broken_batch_is_told_to_all():
    run = Run(2, broken=(1, 2))
    run.start_all(1, 2)
    run.go(1, 2)
    assert run.got == {1: [*range(STEPS), END], 2: [*range(STEPS), END]}
    assert run.work.fills == STEPS - 2


def test_those_wait_for_storage_who_have_been_handed_all_there_is():
    run = Run(2, num_slots=2)
    run.start(1)
    assert run.members.waiting() == []
    run.start(2)
    assert run.members.waiting() == [(1, 1), (2, 1)]
    run.go()
    run.release(1)
    run.go()
    assert run.members.waiting() == [], "more is there, and one has to give something back"


def test_no_more_is_said_of_damage_than_the_members_read():
    """Of shards that have changed, say, no batch is left: what is said of a pass is too much to lie unread."""
    num_steps = 3000
    work = Workshop(num_steps, 8, range(num_steps))
    members = Mirrored(work.feed, 2)
    got: dict[int, list[int]] = {1: [], 2: []}
    for member in got:
        members.join(member)
        members.start(member, 1, Pass(0, 1), 0)

    def listen() -> None:
        while True:
            work.work()
            handed = [one for one in work.hand_over(members) if not isinstance(one.item, PassEnd)]
            for one in handed:
                assert isinstance(one.item, FailedBatch)
                got[one.member].append(one.item.step)
            if not handed and not work.feed.collect():
                return

    listen()
    assert got[1] == got[2] == list(range(len(got[1]))) and 8 < len(got[1]) < 300
    assert members.has_waiting(1) and len(work.feed.outbox) <= 8
    members.reached(1, 1, len(got[1]))
    members.reached(2, 7, len(got[2]))  # of another generation: it says nothing
    listen()
    assert len(got[1]) < 300, "the other one has read nothing"
    while len(got[2]) < num_steps:
        for member, steps in got.items():
            members.reached(member, 1, len(steps))
        before = len(got[2])
        listen()
        assert before < len(got[2]) < before + 300
    assert got[1] == got[2] == list(range(num_steps))
