"""Threads that ask storage, and are given up while it does not answer."""

from __future__ import annotations

import concurrent.futures._base
import errno
import threading
import time

import pytest

from loaderd.storage.storage_threads import RequestThreads

LONG_S = 60.0


def test_threads_that_come_back_do_not_count_for_the_new_ones():
    """Else the new ones are thought to be idle, and what is asked is answered by nobody."""
    askers, storage = RequestThreads(4), threading.Event()
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


def test_an_answer_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """In Python 3.10, a future's TimeoutError is not the built-in one."""
    monkeypatch.setattr(concurrent.futures._base, "TimeoutError", type("TimeoutError", (Exception,), {}))
    askers, storage, waits = RequestThreads(1), threading.Event(), list[float]()
    answer = askers.ask(lambda: storage.wait(LONG_S))

    def on_wait() -> None:
        waits.append(time.monotonic())
        if len(waits) == 3:
            storage.set()

    assert askers.wait(answer, on_wait, LONG_S)
    assert len(waits) >= 3
    never = askers.ask(threading.Event().wait)
    with pytest.raises(TimeoutError):
        askers.wait(never, waits.clear, 0.5)


def test_a_question_that_waits_for_others_is_given_up_only_when_they_are_not_answered():
    askers, answers = RequestThreads(1), 0

    def answer() -> None:
        nonlocal answers
        time.sleep(0.1)
        answers += 1

    for _ in range(10):
        askers.ask(answer)
    askers.wait(askers.ask(lambda: None), lambda: None, 0.5)
    assert answers == 10, "which took longer than 0.5 s"
    askers.ask(threading.Event().wait)
    with pytest.raises(TimeoutError):
        askers.wait(askers.ask(lambda: None), lambda: None, 0.5)


def test_threads_that_cannot_be_started_leave_it_to_those_there_are(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    askers, storage = RequestThreads(3), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread") as caught:
            askers.ask(threading.get_ident).result(LONG_S)
    assert caught.value.errno == errno.EAGAIN
    first = askers.ask(storage.wait)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        behind = [askers.ask(threading.get_ident) for _ in range(3)]
        storage.set()
        assert first.result(LONG_S) and len({answer.result(LONG_S) for answer in behind}) == 1
    together = threading.Barrier(3)
    assert len([answer.result(LONG_S) for answer in [askers.ask(together.wait) for _ in range(3)]]) == 3
