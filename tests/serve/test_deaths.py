"""Who is suspected when a process of the network server dies of a ticket."""

from __future__ import annotations

import threading
from hashlib import sha256

import pytest

from loaderd.serve.deaths import NO_ROW, DeathRecords, Deaths
from loaderd.serve.shared_value import SharedValue

DEADLY, SOUND = b"a ticket of which a process has died", b"another ticket"


def no_check() -> None:
    """The caller still waits."""


@pytest.fixture
def deaths() -> Deaths:
    shared = SharedValue()
    shared.write({"deaths": [(sha256(DEADLY).digest()[:16], NO_ROW)]})
    return Deaths(DeathRecords().fd, 0, shared)


@pytest.mark.parametrize("first", [DEADLY, SOUND])
def test_a_ticket_that_is_suspected_is_made_alone(deaths: Deaths, first: bytes):
    """A ticket beside it would die with it, again and again, and be taken for deadly, too."""
    second = SOUND if first == DEADLY else DEADLY
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        with deaths.watching(second, begun.set) as (died, _):
            assert ended.is_set() and died.total() == (second == DEADLY)

    other = threading.Thread(target=work)
    with deaths.watching(first, no_check):
        other.start()
        assert begun.wait(30)  # it waits, and looks whether its caller still does
        ended.set()
    other.join(30)
    assert not other.is_alive()


def test_who_waits_for_nothing_any_more_lets_others_work(deaths: Deaths):
    def has_gone() -> None:
        raise ConnectionError

    with deaths.watching(SOUND, no_check):
        with pytest.raises(ConnectionError), deaths.watching(DEADLY, has_gone):
            pass
        with deaths.watching(b"a third", no_check):
            pass
