"""Members that all get every batch, step by step; test_consumers_model.py has what always holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderd.daemon.delivery.consumers import GRACE_S
from loaderd.errors import BusyError
from loaderd.shm.page import HELD, MAX_GENERATION, NEVER, key_of
from tests.daemon.group_run import STEPS, Group

ALL = list(range(STEPS))
NewGroup = Callable[..., Group]


@pytest.fixture
def new_group() -> Iterator[NewGroup]:
    groups: list[Group] = []

    def make(*of: Any, **how: Any) -> Group:
        groups.append(Group(*of, **how))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_all_get_all_and_it_is_made_once(new_group: NewGroup):
    group = new_group(3)
    group.begin(1, 2)
    group.join(3)
    group.go(1, 2, 3)
    assert not group.members[1].got, "one is missing"
    assert "consumer 3" in group.consumers.describe(1)
    group.members[3].start()
    group.go(1, 2, 3)
    assert [member.got for member in group.members.values()] == [ALL] * 3 and group.fills == STEPS


def test_the_fastest_is_no_further_ahead_than_there_are_slots(new_group: NewGroup):
    group = new_group(2, num_slots=4)
    group.begin(1, 2)
    group.go(1)
    one, two = group.members.values()
    assert one.got == [0, 1, 2, 3] and two.got == []
    assert group.consumers.describe(1) == "waits for consumer 2 to take batches, or to give batches back"
    assert group.consumers.has_waiting(2) and not group.consumers.has_waiting(1)
    assert two.take()
    group.go(1)
    assert one.got == [0, 1, 2, 3], "it holds what it took"
    two.release()
    group.go(1)
    assert one.got == [0, 1, 2, 3, 4]
    group.leave(2)
    group.go(1)
    assert one.got == ALL


@pytest.mark.parametrize("step", [1, 3], ids=["back", "ahead"])
def test_once_begun_it_waits_for_nobody_who_has_yet_to_start(new_group: NewGroup, step: int):
    group = new_group(3)
    for number in (1, 2, 3):
        group.join(number).start(2)
    group.leave(3)
    group.join(3)
    for number in (1, 2):
        group.members[number].start(step)
    group.go(1, 2)
    assert group.members[1].got == group.members[2].got == ALL[step:]


def test_nothing_is_loaded_where_nobody_has_asked(new_group: NewGroup):
    group = new_group(2)
    group.begin(1, 2)
    group.leave(2)
    group.join(2)
    group.leave(1)
    assert group.stream.next_task() is None
    group.members[2].start()
    group.go(2)
    assert group.members[2].got == ALL


def test_nobody_waits_for_what_nobody_needs(new_group: NewGroup):
    group = new_group(2)
    group.begin(1, 2)
    group.leave(1)
    group.members[2].start(4)
    group.go(2)
    assert group.members[2].got == [4, 5] and group.fills == 2


def test_the_next_pass_waits_for_all_who_are_there(new_group: NewGroup):
    group = new_group(2)
    group.begin(1, 2)
    group.go(1, 2)
    group.members[1].got.clear()
    group.members[1].start(epoch=1)
    group.consumers.tick(100 * GRACE_S)
    group.go(1, 2)
    assert not group.members[1].got and "waits for consumer 2" in group.consumers.describe(1)
    group.leave(2)
    group.go(1)
    assert group.members[1].got == ALL


def test_after_a_restart_those_who_are_back_go_on_without_the_others(new_group: NewGroup):
    group = new_group(3)
    group.join(1).start(3)
    group.join(2).start(4)
    group.consumers.tick(GRACE_S - 1)
    group.go(1, 2)
    assert not group.members[1].got and "2 of 3" in group.consumers.describe(1)
    group.consumers.tick(1)
    group.go(1, 2)
    assert group.members[1].got == [3, 4, 5] and group.members[2].got == [4, 5]


def test_who_has_no_past_waits_for_the_others(new_group: NewGroup):
    group = new_group(2)
    group.begin(1)
    group.consumers.tick(100 * GRACE_S)
    group.go(1)
    assert not group.members[1].got
    group.begin(2)
    group.go(1, 2)
    assert group.members[1].got == ALL


def test_those_wait_for_storage_who_sleep_for_what_is_made_next(new_group: NewGroup):
    group = new_group(2)
    group.begin(1, 2)
    assert group.consumers.waiting() == []
    group.listen()
    for member in group.members.values():
        assert member.page_consumer.fall_asleep()
    assert group.consumers.waiting() == [(1, 1), (2, 1)]


def test_who_holds_more_than_its_share_is_known(new_group: NewGroup):
    group = new_group(2, num_slots=4)
    group.begin(1, 2)
    group.work()
    for taken in range(4):
        assert group.consumers.holds_too_many(1) == (taken > 2)
        assert group.members[1].take()
    assert group.consumers.held_by(1) == 4 and group.consumers.has_waiting(1)


def test_no_more_is_said_of_damage_than_the_hindmost_reads(new_group: NewGroup):
    """Of shards that have changed, say, no batch is left: what is said of a pass is too much to lie unread."""
    num_steps = 600
    group = new_group(2, num_slots=8, num_steps=num_steps, broken=range(num_steps))
    group.begin(1, 2)
    group.go(1)
    one, two = group.members.values()
    assert one.got == list(range(len(one.got))) and len(two.unread) < 300
    assert len(one.got) < num_steps
    group.go(1, 2)
    assert one.got == two.got == list(range(num_steps))


@pytest.mark.parametrize("number", [NEVER, -1, 1 << 62, key_of(1, 3), key_of(1, 0)])
def test_a_member_that_writes_nonsense_harms_itself_alone(new_group: NewGroup, number: int):
    group = new_group(2)
    group.begin(1, 2)
    group.work(3)
    hostile, other = group.members.values()
    words = group.page.columns[hostile.column]
    for word in range(len(words)):
        words[word] = number
    group.listen()
    for one in (1, 2):
        assert group.consumers.describe(one) and group.consumers.taken_by(one)
    assert group.consumers.holds_too_many(1)
    hostile.kept.clear()
    group.leave(1)
    group.go(2)
    assert other.got == ALL
    group.leave(2)
    group.everything_is_free()


@pytest.mark.parametrize("lies_later", [False, True])
def test_a_member_that_is_sent_away_keeps_no_more_than_its_share(new_group: NewGroup, lies_later: bool):
    """Else it could say that it reads all slots, and never hang up."""
    group = new_group(2, num_slots=4)
    group.begin(1, 2)
    group.work()
    hostile, other = group.members.values()
    own = hostile.memory.data.cast("q")

    def lie() -> None:
        for slot in range(group.num_slots):
            own[HELD + slot] = 1

    lie()
    assert group.consumers.holds_too_many(1)
    if lies_later:
        hostile.page_consumer.release(*range(4))
    group.leave(1, hangs_up=False)
    lie()
    group.go(2)
    assert other.got == ALL
    lie()
    group.hang_up(hostile)
    group.leave(2)
    group.everything_is_free()


def test_a_batch_that_there_is_not_cannot_be_asked_for(new_group: NewGroup):
    group = new_group(1)
    group.join(1)
    for step in (-1, STEPS + 1):
        with pytest.raises(ValueError, match="cannot start"):
            group.members[1].start(step)
    group.members[1].generation = MAX_GENERATION - 1
    group.members[1].start()
    group.go(1)
    assert group.members[1].got == ALL


def test_a_stream_that_has_begun_too_often_ends_with_an_error(new_group: NewGroup):
    group = new_group(2)
    group.begin(1, 2)
    group.stream.generation = MAX_GENERATION - 1
    group.members[1].start()
    assert group.stream.generation == MAX_GENERATION and group.consumers.error is None
    group.members[1].start()
    group.listen()
    assert isinstance(group.consumers.error, BusyError)
    group.leave(1)
    group.leave(2)
    group.everything_is_free()
