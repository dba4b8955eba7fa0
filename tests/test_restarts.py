"""Pauses that grow, and processes that are started again, or not."""

from __future__ import annotations

import pytest

from loaderd import restarts
from loaderd.restarts import Backoff, RestartPolicy


def test_pauses_double_up_to_the_most_and_begin_anew():
    pauses = Backoff(0.1, 0.5)
    for _ in range(2):
        for limit_s in (0.1, 0.2, 0.4, 0.5, 0.5):
            assert limit_s / 2 <= pauses.next_s() <= limit_s
        pauses.reset()


def test_too_many_in_a_row_that_achieve_nothing_are_the_end():
    policy = RestartPolicy(3)
    assert [policy.ended_in_vain() for _ in range(2)] == [False, False]
    policy.achieved()
    assert [policy.ended_in_vain() for _ in range(3)] == [False, False, True]
    assert not any(RestartPolicy().ended_in_vain() for _ in range(100))


def test_after_a_long_life_the_first_pause_is_short_again(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now_s)
    policy = RestartPolicy()
    for limit_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        policy.began()
        assert limit_s / 2 <= policy.pause_s() <= limit_s
    policy.began()
    now_s = 61.0
    assert policy.pause_s() <= 0.1
