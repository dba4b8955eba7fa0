"""When a consumer that takes no batches must go: with a clock that is set by hand."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from loaderd.daemon.server_consumers import Consumer, Limits

LIMITS = Limits(idle_timeout=5.0)


class FakeSession:
    def __init__(self) -> None:
        self.waiting = self.moved = self.holds_more = False
        self.consumers = self

    def holds_too_many(self, member: int) -> bool:
        return self.holds_more

    def has_waiting(self, member: int) -> bool:
        return self.waiting

    def has_moved(self, member: int) -> bool:
        moved, self.moved = self.moved, False
        return moved


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def consumer(session: Any) -> Iterator[Consumer]:
    """One that was heard last at 100 s."""
    ours, theirs = socket.socketpair()
    one = Consumer.accepted(1, ours)
    one.session, one.heard_s = session, 100.0
    yield one
    one.channel.close()
    theirs.close()
    if one.pidfd is not None:
        os.close(one.pidfd)


def test_who_has_waited_for_long_may_take_what_has_come(consumer: Consumer, session: FakeSession):
    assert consumer.overdue(170.0, LIMITS) is None
    session.waiting = True  # it came a moment before this tick, and the consumer has not woken up yet
    assert consumer.overdue(171.0, LIMITS) is None
    assert consumer.overdue(176.0, LIMITS) is None
    assert "left its batches untaken for 6 s" in str(consumer.overdue(177.0, LIMITS))


def test_each_wait_for_the_server_starts_the_clock_anew(consumer: Consumer, session: FakeSession):
    now_s = 100.0
    for _ in range(3):
        for session.waiting in (True, False):
            now_s += 4.0
            assert consumer.overdue(now_s, LIMITS) is None
    assert consumer.offered_s is None


def test_who_takes_a_batch_now_and_then_may_stay(consumer: Consumer, session: FakeSession):
    session.waiting = True
    for now_s in (104.0, 108.0, 112.0, 116.0):
        session.moved = True
        assert consumer.overdue(now_s, LIMITS) is None
    assert "untaken for 6 s" in str(consumer.overdue(122.0, LIMITS))


def test_without_a_limit_nobody_is_idle(consumer: Consumer, session: FakeSession):
    session.waiting = True
    assert consumer.overdue(100.0, Limits()) is consumer.overdue(1e9, Limits()) is None


def test_who_holds_more_than_its_share_must_go(consumer: Consumer, session: FakeSession):
    session.holds_more = True
    assert "more batches than its share" in str(consumer.overdue(101.0, LIMITS))
