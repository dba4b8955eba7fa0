"""Finds out which servers there are: calls a function of the user's again and again.

The function may ask DNS, or a registry, and so be slow, or fail. ``connect`` waits for the first addresses. Each
later call has a daemon thread of its own, so neither a batch nor the end of the program waits for it. The thread that
takes batches picks up the answer, or logs a failure.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from loaderd.errors import ServerError
from loaderd.remote.address import checked_addresses, listed_addresses

_ASK_AGAIN_S = 2.0
_FIRST_PAUSE_S = 0.5

_logger = logging.getLogger("loaderd")


def first_addresses(ask: Callable[[], Sequence[str]], limit_s: float) -> tuple[str, ...]:
    """The addresses that ``ask`` returns. While it fails or names no server, it is called again: they may come later.

    Raises ServerError if that is so for ``limit_s`` seconds, and OptionError for what are no addresses.
    """
    until_s = time.monotonic() + limit_s
    is_first = True
    while True:
        cause: Exception | None = None
        try:
            answer = ask()
        except Exception as error:
            cause, failure = error, f"failed: {_text_of(error)}"
        else:
            addresses = listed_addresses(answer)
            if addresses:
                return addresses
            failure = "returned no address"
        if time.monotonic() >= until_s:
            raise ServerError(
                f"the function given as address has named no server for {limit_s:g} s; the last time, it {failure}",
                hint="Do the servers run, and does it find them? For how long it is called: reconnect_timeout.",
            ) from cause
        if is_first:
            _logger.warning("the function given as address %s; calling it for up to %g s", failure, limit_s)
        is_first = False
        time.sleep(_FIRST_PAUSE_S)


class Discovery:
    """``ask``: the user's function, which the caller has just called."""

    def __init__(self, ask: Callable[[], Sequence[str]]) -> None:
        self._ask = ask
        self._asked_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._fails = False
        self._answers: deque[tuple[str, ...] | str] = deque()  # addresses, or why there are none

    def news(self) -> tuple[str, ...]:
        """The addresses in an answer that has come since the last call; (): none has, or it failed. Does not wait."""
        is_asking = self._thread is not None and self._thread.is_alive()
        if not self._answers:
            if not is_asking and time.monotonic() - self._asked_s >= _ASK_AGAIN_S:
                self._begin()
            return ()
        answer = self._answers.popleft()
        failed = isinstance(answer, str)
        if failed and not self._fails:
            _logger.warning("the function given as address failed; still using the servers known before: %s", answer)
        self._fails = failed
        return () if isinstance(answer, str) else answer

    def _begin(self) -> None:
        self._asked_s = time.monotonic()
        self._thread = threading.Thread(target=self._find, name="loaderd-discovery", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many threads
            self._answers.append(_text_of(error))

    def _find(self) -> None:
        try:
            addresses = self._ask()
            self._answers.append(checked_addresses(addresses) if addresses else ())
        except BaseException as error:  # SystemExit would end the thread in silence
            self._answers.append(_text_of(error))


def _text_of(error: BaseException) -> str:
    """The text alone: what the exception's frames hold need not live on."""
    return "".join(traceback.format_exception_only(error)).strip()
