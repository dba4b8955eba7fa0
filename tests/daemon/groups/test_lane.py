"""A member's page: what the daemon hands it, and what comes back."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator

import pytest

from loaderd.client.batch_receiver import BatchReceiver
from loaderd.daemon.delivery.events import Delivery
from loaderd.daemon.groups import lane
from loaderd.daemon.groups.lane import Had, Lane
from loaderd.errors import DaemonError
from loaderd.ipc.messages import BatchFailed
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.page import CONSUMER_NEWS, NEVER, Page, new_bell

NUM_SLOTS = 4


class Member:
    """The two ends of a lane, in one process."""

    def __init__(self) -> None:
        self.daemon_bell = new_bell()
        self.lane = Lane(NUM_SLOTS, self.daemon_bell)
        words, *bells = map(os.dup, self.lane.fds)
        memory = SharedMemory(words)
        memory.close_fd()
        self.page = Page(memory.bytes, NUM_SLOTS, 1)
        self.bell = bells[0]
        self.intake = BatchReceiver(self.page, bells)

    def hand(self, slot: int, step: int, generation: int = 1) -> None:
        self.lane.fill(generation, Delivery(step, slot, 10 + step))

    def is_rung(self, bell: int) -> bool:
        return bool(select.select([bell], [], [], 0)[0])

    def close(self) -> None:
        self.intake.close()
        self.lane.close()
        os.close(self.daemon_bell)


def test_a_member_for_whom_there_is_no_bell_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def no_bell() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(lane, "new_bell", no_bell)
    with pytest.raises(DaemonError, match="cannot take a consumer: Too many open files") as caught:
        Lane(NUM_SLOTS, 0)
    assert "ulimit -n" in caught.value.hint


@pytest.fixture
def member() -> Iterator[Member]:
    member = Member()
    member.intake.begin(1, 3)
    yield member
    member.close()


def test_a_batch_comes_and_its_slot_goes_back_once(member: Member):
    assert not member.intake.has_batch and member.lane.take_back() == [] and not member.lane.has_moved()
    member.hand(slot=2, step=3)
    assert member.intake.has_batch and member.intake.take() == (2, 13) and member.intake.step == 3
    assert member.lane.has_moved() and not member.lane.has_moved()
    assert not member.intake.has_batch and member.lane.take_back() == [] and not member.is_rung(member.daemon_bell)
    member.intake.give_back([2])
    assert member.is_rung(member.daemon_bell) and member.lane.take_back() == [2] and member.lane.take_back() == []
    member.hand(slot=2, step=4)
    assert member.intake.has_batch and member.intake.take() == (2, 14) and member.lane.take_back() == []
    assert member.lane.had == Had(2, 27, 5)


def test_what_came_for_an_older_generation_goes_back(member: Member):
    member.hand(slot=0, step=3)
    member.intake.begin(2, 3)
    member.hand(slot=1, step=4)  # the daemon has not heard of the new one yet
    assert not member.intake.has_batch and member.intake.fall_asleep()
    assert sorted(member.lane.take_back()) == [0, 1]
    member.intake.wake_up(0)
    member.hand(slot=1, step=3, generation=2)
    assert member.intake.has_batch and member.intake.take() == (1, 13)


def test_who_sleeps_is_woken_by_a_batch_and_who_does_not_is_not(member: Member):
    assert member.intake.fall_asleep()
    member.hand(slot=0, step=3)
    assert member.is_rung(member.bell)
    member.intake.wake_up(0)
    assert not member.is_rung(member.bell) and not member.intake.fall_asleep()
    member.intake.wake_up(0)
    member.hand(slot=1, step=4)
    assert not member.is_rung(member.bell)


def test_messages_are_announced_before_the_batches_behind_them(member: Member):
    member.lane.announce()
    member.hand(slot=0, step=3)
    assert member.intake.has_batch and member.intake.has_news
    member.intake.noted()
    assert not member.intake.has_news


def test_who_is_past_what_it_was_told_of_damage_wakes_the_daemon():
    member = Member()
    member.intake.begin(1, 3)
    for step in (3, 4):
        member.lane.wake_behind(1, step)
        member.lane.announce()
        member.intake.noted()
        member.intake.broken(BatchFailed(1, step, {}))
    assert isinstance(member.intake.take(), BatchFailed)
    assert member.lane.place == (1, 4) and not member.is_rung(member.daemon_bell)
    assert isinstance(member.intake.take(), BatchFailed)
    assert member.lane.place == (1, 5) and member.is_rung(member.daemon_bell)
    member.close()


def test_a_member_that_writes_nonsense_harms_itself_alone(member: Member):
    member.hand(slot=0, step=3)
    for word in range(len(member.page.words)):
        member.page.words[word] = NEVER
    assert member.lane.take_back() == []
    member.lane.announce()
    member.hand(slot=1, step=4)
    assert member.page.words[CONSUMER_NEWS] == 1
    member.page.release(1)
    assert member.lane.take_back() == [1]
