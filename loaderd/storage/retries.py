"""Asking again: which failures may pass, when to ask the next time, and how much to ask of a store in trouble.

A failure of a disk or a network may pass; what it says of the shard does not. A request that failed is made again
after a pause that grows each time (``restarts.Backoff``).

**A store is left alone as a whole**, not by each request for itself (:class:`RateLimiter`). How many requests are
under way follows AIMD, as in TCP: a failure takes three tenths of them away, at most once in a round trip, and each
round of answers gives two back. (With one, a store that fails at random, whatever it is asked, is asked too little.)
While no request at all is answered, only one at a time is made, and the pause before it doubles, up to 4 s: so
storage that comes back is noticed soon. Each pause is cut by up to a half at random, so that the workers of all hosts
do not come back in step.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from loaderd.errors import LoaderdError
from loaderd.restarts import Backoff

_MOST_PAUSE_S = 4.0
_FIRST_PAUSE_S = 0.1
"""Before the next request to a store that has answered none."""
_REQUEST_PAUSE_S = 0.02
"""Before a failed request is made again, at first. It need not be long: the store's pace is what spares it."""
_MOST_REQUEST_PAUSE_S = 1.0
_LEAST_PATIENCE_S = 1.0
_KEPT_AFTER_FAILURE = 0.7
_MORE_IN_A_ROUND = 2.0

_Answer = TypeVar("_Answer")

_PASSING = {
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EPROTO, errno.ENOLCK, errno.ENOLINK),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EBUSY, errno.EINTR),
    *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN),
    *(errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESHUTDOWN),
}
# Parts of pyarrow's messages about object stores, whose errors have no number. All other errors are tried again: they
# are not known beforehand, and trying in vain costs a minute, while giving up too soon would cost the training.
_OF_CREDENTIALS = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|REQUEST_TIME_TOO_SKEWED"
    r"|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION|NOT_SIGNED_UP|REQUEST_EXPIRED|PERMISSION_DENIED|UNAUTHENTICATED"
    r"|HTTP status 40[013]|Could not create a OAuth2 access token|AuthenticationException"
)
_FINAL = re.compile(r"NO_SUCH_BUCKET|MALFORMED|INVALID_ARGUMENT|HTTP status 301|load libhdfs|load libjvm")


def is_of_credentials(error: BaseException) -> bool:
    """Whether storage refuses whoever asks: other credentials may help."""
    if isinstance(error, OSError) and error.errno is not None:
        return isinstance(error, PermissionError)
    return isinstance(error, PermissionError) or _OF_CREDENTIALS.search(str(error)) is not None


def may_pass(error: BaseException) -> bool:
    """Whether asking again may help. For an error that loaderd itself has raised, it does not."""
    if isinstance(error, LoaderdError) or is_of_credentials(error):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if isinstance(error, (ValueError, TypeError, LookupError, NotImplementedError, ImportError)):
        return False
    return _FINAL.search(str(error)) is None


class RateLimiter:
    """How many requests a store gets at a time, and when: see the module's docstring. Any thread may use it."""

    def __init__(self, most: int = 1) -> None:
        self._most = self._limit = self._threshold = float(most)
        """How many may be under way: at most; now; and up to which number each answer brings one more."""
        self._under_way = 0
        self._turns = threading.Condition()
        self._cut_s = self._answered_s = self._failed_s = self._resume_s = 0.0
        """When the limit was last cut, when the last answer and failure came, and until when no request is made."""
        self._answers = 0
        """Answers since the last cut."""
        self._pauses = Backoff(_FIRST_PAUSE_S, _MOST_PAUSE_S)
        self._error: Exception | None = None
        """The last failure, if no answer has come since."""

    def call(self, ask: Callable[[], _Answer], since_s: float, retry_s: float) -> _Answer:
        """What ``ask`` returns or raises, which is called when one more request may be made.

        The caller wants it since ``since_s``, and asks again for ``retry_s`` while the failure may pass.
        """
        began_s = self._begin(since_s, retry_s)
        try:
            answer = ask()
        except BaseException as error:
            if isinstance(error, Exception) and (may_pass(error) or is_of_credentials(error)):
                self._failed(began_s, error, retry_s)
            else:
                self._answered()
            raise
        self._answered()
        return answer

    def _begin(self, since_s: float, retry_s: float) -> float:
        """Wait until one more request may be made, for a caller who wants it since ``since_s``; returns the time.

        Raises the store's last failure where it has answered nobody for ``retry_s`` (and a second), and failed since.
        """
        with self._turns:
            while True:
                now_s = time.monotonic()
                pause_s = self._resume_s - now_s
                if pause_s <= 0 and self._under_way < int(self._limit):
                    self._under_way += 1
                    return now_s
                wait_s = pause_s if pause_s > 0 else _MOST_PAUSE_S
                if self._error is not None and self._failed_s >= since_s:
                    left_s = max(since_s, self._answered_s) + max(retry_s, _LEAST_PATIENCE_S) - now_s
                    if left_s <= 0:
                        raise self._error
                    wait_s = min(wait_s, left_s)
                self._turns.wait(wait_s)

    def _answered(self) -> None:
        with self._turns:
            self._under_way -= 1
            self._answers += 1
            self._pauses.reset()
            self._error = None
            self._answered_s = time.monotonic()
            if self._limit < self._most:
                more = 1.0 if self._limit < self._threshold else _MORE_IN_A_ROUND / self._limit
                self._limit = min(self._limit + more, self._most)
            self._turns.notify(2)

    def _failed(self, began_s: float, error: Exception, retry_s: float) -> None:
        """A request that was made at ``began_s`` has failed; it may be made again for ``retry_s`` in all."""
        with self._turns:
            self._under_way -= 1
            self._error, self._failed_s = error, time.monotonic()
            if began_s >= self._cut_s:  # else it was of the round for which the limit was cut
                self._cut_s = self._failed_s
                if self._answers:
                    self._limit = self._threshold = max(1.0, _KEPT_AFTER_FAILURE * self._limit)
                else:
                    self._limit = 1.0
                    self._resume_s = self._cut_s + min(self._pauses.next_s(), retry_s / 2)
                self._answers = 0
            self._turns.notify_all()


def call_with_retries(
    ask: Callable[[], _Answer],
    retry_s: float,
    on_retry: Callable[[], None],
    pace: RateLimiter | None = None,
    renew: Callable[[Exception], bool] = lambda error: False,
) -> _Answer:
    """What ``ask`` returns. It is called again, for up to ``retry_s``, while it raises errors that may pass.

    So it is after errors that do not pass if ``renew`` says that something has changed since it was called. Raises
    the last error. ``on_retry`` is called before each pause. ``pace``: of the store that is asked, if many ask it.
    """
    since_s, pauses = time.monotonic(), Backoff(_REQUEST_PAUSE_S, _MOST_REQUEST_PAUSE_S)
    while True:
        try:
            return ask() if pace is None else pace.call(ask, since_s, retry_s)
        except Exception as error:
            left_s = since_s + retry_s - time.monotonic()
            if (not may_pass(error) and not renew(error)) or left_s <= 0:
                raise
        on_retry()
        time.sleep(min(left_s, pauses.next_s()))
