"""Threads that ask storage, so that a worker need not wait for one answer before it asks the next question.

They are daemon threads, and no pool of ``concurrent.futures``: that one's are waited for when a process ends, and
storage may let a thread wait for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

_Answer = TypeVar("_Answer")

_LOOK_EVERY_S = 0.2


class Askers:
    """Up to ``most`` threads, started as they are needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()

    def _begin(self) -> None:
        self._questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = self._open = 0
        self._lock = threading.Lock()

    def ask(self, question: Callable[[], _Answer]) -> Future[_Answer]:
        """Have ``question`` called in one of the threads, after those that were there before."""
        from concurrent.futures import Future  # for those whose shards are far away

        answer: Future[_Answer] = Future()
        with self._lock:
            self._open += 1
            starts = self._open > self._threads and self._threads < self._most
            self._threads += starts
        self._questions.put((answer, question))
        if starts:
            threading.Thread(target=self._work, args=(self._questions,), name="loaderd-storage", daemon=True).start()
        return answer

    def _work(self, questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
        while True:
            answer, question = questions.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except BaseException as error:
                    answer.set_exception(error)
            answer, question = None, None  # type: ignore[assignment]  # or it is kept until the next one comes
            with self._lock:
                self._open -= 1

    def abandon(self) -> None:
        """Forget all threads, and what they were asked: new threads take what is asked from now on."""
        self._begin()


def wait_for(answer: Future[_Answer], on_wait: Callable[[], None], limit_s: float) -> _Answer:
    """The answer, or what its question raised; ``on_wait`` is called now and then. Raises TimeoutError."""
    until_s = time.monotonic() + limit_s
    while not answer.done():
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        on_wait()
        # It is looked at again, and its own TimeoutError is not taken for ours.
        with contextlib.suppress(TimeoutError):
            answer.exception(timeout=min(left_s, _LOOK_EVERY_S))
    return answer.result()
