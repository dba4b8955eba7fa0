"""How long a consumer waits, when it asks, and when it says so."""

from __future__ import annotations

from loaderd.client.stream_client import StallTimer


def test_patience_asks_then_gives_up():
    stall_timer = StallTimer(120.0)
    asked = []
    for second in range(1, 121):
        assert not stall_timer.is_over
        stall_timer.tick()
        if stall_timer.must_ask():
            asked.append(second)
    assert stall_timer.is_over and asked == [30, 60, 90, 120]


def test_patience_ends_with_the_last_sign_of_life():
    stall_timer = StallTimer(2.0)
    for _ in range(100):
        stall_timer.tick()
        assert stall_timer.tick_s == 1.0 and stall_timer.must_ask()
        stall_timer.heard()
    assert not stall_timer.is_over
    stall_timer.tick(), stall_timer.tick()
    assert stall_timer.is_over


def test_patience_reports_ever_more_seldom():
    stall_timer = StallTimer(None)
    reported = []
    for second in range(1, 1000):
        stall_timer.tick()
        stall_timer.heard()
        if stall_timer.must_report():
            reported.append(second)
    assert reported == [30, 60, 120, 240, 480, 960] and not stall_timer.is_over
