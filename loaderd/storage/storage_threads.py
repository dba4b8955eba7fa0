"""Threads that ask storage, so that a worker need not wait for one answer before it asks the next question.

They are daemon threads, and no pool of ``concurrent.futures``: a process that ends waits for the threads of such a
pool, and storage may let a thread wait for ever.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    _Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

_Answer = TypeVar("_Answer")

_LOOK_EVERY_S = 0.2


class RequestThreads:
    """Up to ``most`` threads, started as they are needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._queue: _Queue = SimpleQueue()
        self._num_threads = self._num_open = 0
        self._answered_s = 0.0

    def ask(self, question: Callable[[], _Answer]) -> Future[_Answer]:
        """Have ``question`` called in one of the threads, after those that were asked before.

        Where no thread can be started, the answer is an OSError (EAGAIN), which nothing else gives as it is.
        """
        from concurrent.futures import Future  # needed only for shards that are far away

        answer: Future[_Answer] = Future()
        with self._lock:
            if self._num_open >= self._num_threads and self._num_threads < self._most:
                try:
                    work = partial(self._work, self._queue)
                    threading.Thread(target=work, name="loaderd-storage", daemon=True).start()
                    self._num_threads += 1
                except RuntimeError as error:  # the machine lets us have no more: those that there are do it all
                    if not self._num_threads:
                        answer.set_exception(OSError(errno.EAGAIN, str(error)))
                        return answer
            self._num_open += 1
            self._queue.put((answer, question))
        return answer

    def wait(self, answer: Future[_Answer], on_wait: Callable[[], None], limit_s: float) -> _Answer:
        """The answer, or what its question raised; ``on_wait`` is called now and then.

        Raises TimeoutError where a thread is at the question for ``limit_s``; before a thread takes it up, where the
        others are answered nothing for as long.
        """
        from concurrent.futures import wait

        since_s = time.monotonic()
        while not answer.done():
            if not answer.running():
                since_s = max(since_s, self._answered_s)
            left_s = since_s + limit_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            on_wait()
            wait([answer], min(left_s, _LOOK_EVERY_S))
        return answer.result()

    def abandon(self) -> None:
        """Leave all threads with what they were asked; new threads take what is asked from now on."""
        with self._lock:
            for _ in range(self._num_threads):  # each ends once all that was asked before has been taken
                self._queue.put(None)
            self._begin()

    def _work(self, queue: _Queue) -> None:
        while (asked := queue.get()) is not None:
            answer, question = asked
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                    if queue is self._queue:
                        self._answered_s = time.monotonic()
                except BaseException as error:
                    answer.set_exception(error)
            answer, question, asked = None, None, None  # type: ignore[assignment]  # or kept until the next question
            with self._lock:
                self._num_open -= queue is self._queue
