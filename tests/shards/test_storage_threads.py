"""Threads that ask storage, and are given up while it does not answer."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from loaderd.shards.storage_threads import Askers

LONG_S = 60.0


def test_threads_that_come_back_do_not_count_for_the_new_ones():
    """Else the new ones are thought to be idle, and what is asked is answered by nobody."""
    askers, storage = Askers(4), threading.Event()
    old = [askers.ask(storage.wait) for _ in range(4)]
    behind = askers.ask(threading.current_thread)
    askers.abandon()
    storage.set()
    assert all(answer.result(LONG_S) for answer in old)
    thread = behind.result(LONG_S)  # what they were asked before, they do
    thread.join(LONG_S)
    assert not thread.is_alive(), "and end"
    for _ in range(2):
        assert askers.ask(lambda: "answer").result(LONG_S) == "answer"


def test_idle_threads_end_when_they_are_given_up():
    askers, together = Askers(2), threading.Barrier(2)

    def meet() -> threading.Thread:
        together.wait()
        return threading.current_thread()

    answers: list[Future[threading.Thread]] = [askers.ask(meet) for _ in range(2)]
    threads = [answer.result(LONG_S) for answer in answers]
    askers.abandon()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
