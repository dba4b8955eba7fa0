"""Who gets which batch, followed step by step. ``test_sharing_model.py`` has what holds whatever happens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from sharing_run import NUM_WORKERS, Workshop

from loaderd.daemon.delivery.outgoing import BrokenBatch, Delivery, PassEnd
from loaderd.daemon.groups.members import GRACE_S, Handed, Members, PageReader, Progressed
from loaderd.daemon.groups.mirrored_group import Mirrored
from loaderd.daemon.groups.shared_group import Shared
from loaderd.errors import ServerError
from loaderd.memory.page import MAX_GENERATION
from loaderd.memory.taking import Taker
from loaderd.plan.passes import Pass

END = "end"
STEPS = 6


class Run:
    """Members 1 to ``num_members``, who have joined, and all that they get, but for low marks: steps, and END."""

    def __init__(self, way: Any, num_members: int, *, num_slots: int = 4, broken: Collection[int] = ()) -> None:
        """``num_slots``: the most that a member can have."""
        self.work = Workshop(STEPS, num_slots * num_members if way is Mirrored else num_slots, broken)
        self.members: Members = way(self.work.feed, num_members)
        self.got: dict[int, list[Any]] = defaultdict(list)
        self.lows: dict[int, int] = {}
        self.kept: dict[int, list[int]] = defaultdict(list)
        self.generations: dict[int, int] = defaultdict(int)
        for member in range(1, num_members + 1):
            self.members.join(member)

    def start(self, member: int, step: int = 0, *, epoch: int = 0, taken: Sequence[int] = ()) -> None:
        self.generations[member] += 1
        self.members.start(member, self.generations[member], Pass(epoch, 1), step, taken)

    def start_all(self, *members: int) -> None:
        for member in members:
            self.start(member)

    def leave(self, member: int) -> None:
        self.members.leave(member)
        self.kept.pop(member, None)

    def release(self, member: int) -> None:
        self.members.release(member, self.kept.pop(member, []))

    def go(self, *releasing: int) -> None:
        """Until nothing more comes; members in ``releasing`` give back what they get."""
        while True:
            self.work.work()
            handed = self.listen()
            for member in releasing:
                self.release(member)
            if not handed:
                return

    def listen(self) -> list[Handed]:
        """Take what there is."""
        handed = self.work.hand_over(self.members)
        for one in handed:
            self.hear(one)
        return handed

    def hear(self, handed: Handed) -> None:
        member, item = handed.member, handed.item
        assert handed.generation == self.generations[member]
        if isinstance(item, Progressed):
            self.lows[member] = item.step
        elif isinstance(item, PassEnd):
            self.got[member].append(END)
        else:
            self.got[member].append(item.step)
            if isinstance(item, Delivery):
                self.kept[member].append(item.slot)

    def ask(self, member: int, count: int = 1) -> Any:
        """What a member of a shared stream gets that asks for one more."""
        self.members.want(member, count)
        before = len(self.got[member])
        self.go()
        return self.got[member][before:]


# ------------------------------------------------------------------------------------------------- alone


def test_one_alone_gets_all():
    run = Run(Mirrored, 1)
    run.start(1)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_alone_a_generation_may_have_the_number_of_another():
    run = Run(Mirrored, 1)
    run.start(1)
    run.work.work(5)
    run.generations[1] = 0
    run.start(1)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_nothing_is_done_for_one_who_has_left():
    run = Run(Mirrored, 1)
    run.start(1)
    run.leave(1)
    assert run.work.is_idle()


def test_what_an_older_start_has_brought_is_lent_until_it_is_given_back():
    run = Run(Mirrored, 1)
    run.start(1)
    run.go()
    assert run.got.pop(1) == [0, 1, 2, 3] and run.members.held_by(1) == 4
    run.start(1)
    run.go()
    assert run.got[1] == []
    run.go(1)
    assert run.got[1] == []
    run.release(1)
    run.go(1)
    assert run.got[1] == [*range(STEPS), END]


def test_nothing_more_is_made_for_one_who_has_left():
    """But what was begun; else workers would fill all slots with what nobody takes."""
    run = Run(Mirrored, 1)
    run.start(1)
    while run.work.fills < 2:
        run.work.work(1)
    run.leave(1)
    run.work.work()
    assert run.work.fills <= 2 + NUM_WORKERS - 1


@pytest.mark.parametrize("way", [Mirrored, Shared])
def test_nobody_gives_back_what_it_does_not_have(way: Any):
    run = Run(way, 1)
    run.start(1)
    if way is Shared:
        run.members.want(1, 1)
    run.work.work()
    with pytest.raises(ValueError, match="is not lent"):
        run.members.release(1, [3])  # it is made, but nobody was told
    run.go()
    slot = run.kept[1][0]
    run.members.release(1, [slot])
    with pytest.raises(ValueError, match=f"slot {slot} is not lent to consumer 1"):
        run.members.release(1, [slot])


@pytest.mark.parametrize("way", [Mirrored, Shared])
def test_a_batch_that_there_is_not_cannot_be_asked_for(way: Any):
    run = Run(way, 1)
    for step in (-1, STEPS + 1):
        with pytest.raises(ValueError, match="cannot start"):
            run.start(1, step)


def test_who_gets_batches_anyway_must_not_ask_for_them():
    with pytest.raises(ValueError, match="without being asked"):
        Run(Mirrored, 1).members.want(1, 1)


def test_one_who_reads_the_page_is_told_only_what_the_page_does_not_say():
    work = Workshop(STEPS, 4, broken=(1,))
    reader = PageReader(work.stream)
    reader.join(7)
    taker = Taker(work.page, work.bell, work.bells)
    taker.begin(3, 0)
    reader.start(7, 3, Pass(0, 1), 0, [])
    work.work(collects=False)
    (handed,) = reader.take()
    assert (handed.member, handed.generation) == (7, 3) and isinstance(handed.item, BrokenBatch)
    assert handed.item.step == 1 and reader.take() == []
    assert reader.held_by(7) == 4 and "has all of the 4" in reader.describe(7)
    got = []
    while taker.step < STEPS:
        if taker.step == 1:
            taker.skip()
        assert taker.has_batch()
        got.append(taker.step)
        taker.release(taker.take()[0])
        work.work(collects=False)
    assert got == [0, 2, 3, 4, 5] and reader.held_by(7) == 0
    with pytest.raises(ValueError, match="in its page"):
        reader.release(7, [0])
    with pytest.raises(ValueError, match="without being asked"):
        reader.want(7, 1)
    for generation in (3, MAX_GENERATION + 1):
        with pytest.raises(ValueError, match="does not come after generation 3"):
            reader.start(7, generation, Pass(0, 1), 0, [])
    with pytest.raises(ValueError, match="cannot start"):
        reader.start(7, 4, Pass(0, 1), STEPS + 1, [])
    reader.stop(7)
    assert reader.describe(7) == "has asked for no batches"


@pytest.mark.parametrize("way", [Mirrored, Shared])
def test_a_group_that_is_full_takes_nobody(way: Any):
    run = Run(way, 2)
    with pytest.raises(ServerError, match="has its 2 consumers"):
        run.members.join(3)
    run.leave(1)
    run.members.join(3)


# ---------------------------------------------------------------------------------------------- mirrored


def test_mirrored_all_get_all_and_it_is_decoded_once():
    run = Run(Mirrored, 3)
    run.start_all(1, 2)
    run.go(1, 2, 3)
    assert not run.got, "one is missing"
    assert "consumer 3" in run.members.describe(1)
    run.start(3)
    run.go(1, 2, 3)
    assert run.got == {1: [*range(STEPS), END], 2: [*range(STEPS), END], 3: [*range(STEPS), END]}
    assert run.work.fills == STEPS


def test_mirrored_the_fastest_is_no_further_ahead_than_its_share_of_the_slots():
    run = Run(Mirrored, 2)
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


def test_mirrored_who_comes_back_soon_gets_what_the_others_still_have():
    run = Run(Mirrored, 2)
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


def test_mirrored_the_stream_goes_back_for_who_is_behind():
    run = Run(Mirrored, 2)
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


def test_mirrored_who_is_behind_gets_on_while_the_others_wait_for_it_with_all_that_they_have():
    run = Run(Mirrored, 3, num_slots=2)
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


def test_mirrored_nobody_has_more_than_its_share():
    run = Run(Mirrored, 3, num_slots=2)
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


def test_mirrored_who_goes_back_in_its_own_batches_gets_none_in_a_slot_that_it_has():
    run = Run(Mirrored, 2)
    run.start_all(1, 2)
    run.go(2)
    assert run.got.pop(1) == [0, 1, 2, 3]
    run.start(1, 1)
    run.go(2)
    assert run.got[1] == []
    run.release(1)
    run.go(1, 2)
    assert run.got[1] == [*range(1, STEPS), END]


def test_mirrored_what_was_made_before_the_stream_went_back_is_not_handed_on():
    run = Run(Mirrored, 3)
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
def test_mirrored_once_begun_it_waits_for_nobody_who_has_yet_to_start(step: int):
    run = Run(Mirrored, 3)
    for member in (1, 2, 3):
        run.start(member, 2)
    run.leave(3)
    run.members.join(3)
    run.start(1, step)
    run.start(2, step)
    run.go(1, 2)
    assert run.got == {1: [*range(step, STEPS), END], 2: [*range(step, STEPS), END]}


def test_mirrored_a_group_that_all_have_left_waits_for_all_again():
    run = Run(Mirrored, 2)
    run.start_all(1, 2)
    run.leave(1)
    run.leave(2)
    run.members.join(1)
    run.start(1)
    run.go(1)
    assert not run.got
    run.leave(1)
    run.work.everything_is_free()


def test_mirrored_nobody_waits_for_what_nobody_needs():
    run = Run(Mirrored, 2)
    run.start_all(1, 2)
    run.leave(1)
    run.start(2, 4)
    run.go(2)
    assert run.got == {2: [4, 5, END]} and run.work.fills == 2


def test_mirrored_the_next_pass_waits_for_all_who_are_there():
    run = Run(Mirrored, 2)
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


def test_mirrored_a_member_in_the_next_pass_waits_for_who_is_in_this_one():
    run = Run(Mirrored, 2)
    run.start_all(1, 2)
    run.start(1, 2, epoch=1)
    run.go(2)
    assert run.got == {2: [*range(STEPS), END]}
    run.start(2, epoch=1)
    run.go(1, 2)
    assert run.got == {1: [2, 3, 4, 5, END], 2: [*range(STEPS), END, *range(STEPS), END]}


def test_mirrored_after_a_restart_those_who_are_back_go_on_without_the_others():
    run = Run(Mirrored, 3)
    run.leave(3)
    run.start(1, 3)
    run.start(2, 4)
    run.members.tick(GRACE_S - 1)
    run.go(1, 2)
    assert not run.got and "2 of 3" in run.members.describe(1)
    run.members.tick(1)
    run.go(1, 2)
    assert run.got == {1: [3, 4, 5, END], 2: [4, 5, END]}


def test_mirrored_who_has_no_past_waits_for_the_others():
    run = Run(Mirrored, 2)
    run.leave(2)
    run.start(1)
    run.members.tick(100 * GRACE_S)
    run.go(1)
    assert not run.got
    run.members.join(2)
    run.start(2)
    run.go(1, 2)
    assert run.got[1] == [*range(STEPS), END]


def test_mirrored_a_broken_batch_is_told_to_all():
    run = Run(Mirrored, 2, broken=(1, 2))
    run.start_all(1, 2)
    run.go(1, 2)
    assert run.got == {1: [*range(STEPS), END], 2: [*range(STEPS), END]}
    assert run.work.fills == STEPS - 2


# ------------------------------------------------------------------------------------------------ shared


def test_shared_each_batch_goes_to_who_asks():
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


def test_shared_those_who_wait_get_a_batch_in_turn():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.members.want(1, 10)
    run.members.want(2, 10)
    run.go()
    assert run.got == {1: [0, 2], 2: [1, 3]}


def test_shared_what_a_member_had_that_died_comes_again_and_first():
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


def test_shared_a_pass_is_not_over_while_a_batch_may_come_again():
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


def test_shared_who_asks_when_the_pass_is_over_is_told():
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


def test_shared_a_broken_batch_is_told_to_one_and_used_up():
    run = Run(Shared, 2, broken=(0, 1))
    run.start_all(1, 2)
    assert [run.ask(1), run.ask(2), run.ask(1)] == [[0], [1], [2]]
    assert run.lows == {1: 2, 2: 1}


def test_shared_members_are_told_up_to_where_all_is_used():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.go()
    assert run.lows == {1: 0, 2: 0}
    assert [run.ask(1), run.ask(2)] == [[0], [1]]
    run.release(2)
    assert run.ask(2) == [2] and run.lows[2] == 0
    run.release(1)
    assert run.ask(1) == [3] and run.lows[1] == 2


def test_shared_who_comes_late_joins_the_pass_where_it_is():
    run = Run(Shared, 2)
    run.start(1)
    assert [run.ask(1), run.ask(1)] == [[0], [1]]
    run.release(1)
    run.start(2)
    assert run.ask(2) == [2] and run.lows[2] == 2


def test_shared_who_starts_anew_gives_back_what_it_has_not_taken():
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


def test_shared_who_gives_back_a_batch_that_is_another_ones_now_has_not_used_it():
    run = Run(Shared, 3)
    run.start_all(1, 2)
    assert run.ask(1) == [0]
    run.start(1)
    assert run.ask(2) == [0]
    run.release(1)
    run.leave(2)
    assert run.ask(1) == [0]


def test_shared_nobody_ends_the_pass_of_the_others():
    run = Run(Shared, 2)
    run.start_all(1, 2)
    run.go()
    run.start(1, epoch=1)
    assert [run.ask(1), run.ask(2)] == [[0], [1]]
    run.release(1)
    run.release(2)
    assert run.ask(2, 4) == [2, 3, 4, 5]


def test_shared_after_a_restart_nothing_that_was_had_comes_again():
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


def test_shared_when_all_are_back_nobody_waits():
    run = Run(Shared, 2)
    run.start(1, 3, taken=[3])
    run.start(2, epoch=1)
    assert run.ask(1) == [0] and run.ask(2) == [1], "the pass of the one is over, for the other is behind it"


def test_shared_what_a_late_one_knows_to_be_used_is_not_delivered_any_more():
    run = Run(Shared, 2)
    run.start(1)
    assert run.ask(1) == [0]
    run.start(2, 3, taken=[4])
    assert run.ask(2) == [3] and run.lows[2] == 3
    assert run.ask(2) == [5]


def test_shared_what_is_used_is_not_made_only_to_be_dropped():
    run = Run(Shared, 2, num_slots=1)
    run.start(1)
    run.go()
    run.start(2, 5)
    assert run.ask(2) == [5] and run.work.fills == 2


def test_shared_a_group_that_all_have_left_begins_anew():
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
