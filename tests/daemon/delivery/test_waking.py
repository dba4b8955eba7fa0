"""How often a stream has its daemon woken."""

from __future__ import annotations

from typing import Any

from loaderd.shm.page import NEVER, POSITION, WAKE_DAEMON_AT, key_of
from tests.daemon.stream_run import Run


def test_the_consumer_wakes_the_daemon_once_a_window():
    """As soon as an arena comes free that another window waits for; then all goes on."""
    run = Run(400, 10, 50)
    run.load_all()
    words = run.page.words
    assert words[WAKE_DAEMON_AT] == key_of(1, 5), "behind the first window's last batch"
    times = 0
    for step in range(40):
        assert step < run.stream.next
        run.come_to(step + 1)
        if words[POSITION] >= words[WAKE_DAEMON_AT]:
            times += 1
            run.stream.look()
            run.load_all()
    assert times <= 7 and words[WAKE_DAEMON_AT] == NEVER, "of eight windows, two need not be waited for"


class Restless:
    """The words of a page, of which a hostile consumer changes POSITION all the time."""

    def __init__(self, words: memoryview, positions: Any) -> None:
        self._words = words
        self._positions = iter(positions)

    def __getitem__(self, word: Any) -> Any:
        return next(self._positions) if word == POSITION else self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value


def test_a_position_that_never_rests_does_not_keep_the_daemon():
    run = Run(400, 10, 50)
    run.load_all()
    run.page.words = Restless(run.page.words, range(key_of(2, 6), key_of(2, 100)))  # type: ignore[assignment]
    run.stream.look()
