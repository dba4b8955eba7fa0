"""How long a consumer waits, when it asks, and when it says so."""

from __future__ import annotations

from loaderd.client.stall_timer import StallTimer


def test_patience_asks_then_gives_up():
    patience = StallTimer(120.0)
    asked = []
    for second in range(1, 121):
        assert not patience.is_over
        patience.tick()
        if patience.must_ask():
            asked.append(second)
    assert patience.is_over and asked == [30, 60, 90, 120]


def test_patience_ends_with_the_last_sign_of_life():
    patience = StallTimer(2.0)
    for _ in range(100):
        patience.tick()
        assert patience.tick_s == 1.0 and patience.must_ask()
        patience.heard()
    assert not patience.is_over
    patience.tick(), patience.tick()
    assert patience.is_over


def test_patience_reports_ever_more_seldom():
    patience = StallTimer(None)
    reported = []
    for second in range(1, 1000):
        patience.tick()
        patience.heard()
        if patience.must_report():
            reported.append(second)
    assert reported == [30, 60, 120, 240, 480, 960] and not patience.is_over
