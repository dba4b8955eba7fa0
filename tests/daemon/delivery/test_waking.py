"""How often a stream has its daemon woken."""

from __future__ import annotations

from typing import Any

from loaderd.shm.page import NEVER, POSITION, WAKE_DAEMON_AT, key_of
from tests.daemon.stream_run import Run


def test_the_consumer_wakes_the_daemon_once_a_window():
    """As soon as an arena comes free that another window waits for; then all goes on."""
    with Run(400, 10, 50, slots=3) as run:
        while run.working:
            run.end_task(run.working[0][1])
        assert run.floor.page.words[WAKE_DAEMON_AT] == key_of(1, 5), "behind the first window's last batch"
        says: list[int] = []
        say = run.floor.say
        run.floor.say = lambda: (says.append(run.floor.consumer.taker.step), say())[1]  # type: ignore[method-assign]
        assert [item.step for item in run.to_the_end()] == list(range(40))
        assert len(set(says)) <= 7, "of eight windows, two need not be waited for"
        assert run.floor.page.words[WAKE_DAEMON_AT] == NEVER


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
    with Run(400, 10, 50, slots=3) as run:
        while run.working:
            run.end_task(run.working[0][1])
        page, words = run.floor.page, run.floor.page.words
        page.words = Restless(words, range(key_of(2, 6), key_of(2, 100)))  # type: ignore[assignment]
        run.stream.look()
        page.words = words
