"""Whether requests to storage, or to servers, are answered; and if not, since when, and why not.

An outage begins with the first request that is made after the last answer, and ends with the next answer. Requests
that are refused, that fail, and that get no answer at all look alike here: the records do not come.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from loaderd.errors import LoaderdError
from loaderd.redaction import redacted
from loaderd.snapshots import Outage
from loaderd.storage.retries import may_pass

_Answer = TypeVar("_Answer")

_NOTICEABLE_S = 1.0
_QUERY = re.compile(r"\?\S+")  # of a URI; it says how storage is reached, and is long


class OutageTracker:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s: float | None = None
        """When the first request since the last answer was made; None: there is none."""
        self._failures = 0
        self._error = ""

    def watch(self, place: str, request: Callable[[], _Answer]) -> _Answer:
        """What ``request`` returns or raises. ``place``: what it asks for.

        An error that says something of the file that is asked for (it is gone, it is another one, this user may not
        read it) is an answer.
        """
        try:
            answer = request()
        except Exception as error:
            has_reason = isinstance(error, OSError) and error.errno is not None and not may_pass(error)
            if has_reason or isinstance(error, (LoaderdError, FileNotFoundError)):
                self.answered()
            else:
                self.failed(f"{_QUERY.sub('', place)}: {str(error).rstrip('.') or type(error).__name__}")
            raise
        if self._since_s is not None:
            self.answered()
        return answer

    def begin(self) -> None:
        """A request is made. (Where a request blocks the caller until it is over, this is not needed.)"""
        with self._lock:
            if self._since_s is None:
                self._since_s = time.monotonic()

    def answered(self) -> None:
        with self._lock:
            self._since_s, self._failures, self._error = None, 0, ""

    def failed(self, error: str) -> None:
        self.begin()
        with self._lock:
            self._failures += 1
            self._error = redacted(error)

    @property
    def outage(self) -> Outage | None:
        """The outage there is now; None: requests are answered, or the first of them is not a second old."""
        since_s = self._since_s
        if since_s is None:
            return None
        with self._lock:
            for_s = time.monotonic() - since_s
            return Outage(for_s, self._failures, self._error) if for_s >= _NOTICEABLE_S else None
