"""How often a stream has its daemon woken."""

from __future__ import annotations

from stream_run import Run

from loaderd.memory.page import NEVER, WAKE_DAEMON_AT, key_of


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
