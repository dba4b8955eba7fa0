"""Asking again: which failures may pass, and when to ask the next time.

A failure of a disk or a network may pass; what it says of the shard does not. Pauses double, up to 4 s, so that
storage that comes back is noticed soon; each is cut by up to a half at random, so that the workers of all hosts do
not come back in step.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import TypeVar

from loaderd.errors import LoaderdError

_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 4.0

_Answer = TypeVar("_Answer")

_PASSING = {
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EPROTO, errno.ENOLCK, errno.ENOLINK),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EBUSY, errno.EINTR),
    *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN),
    *(errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESHUTDOWN),
}
# Parts of pyarrow's messages about object stores, whose errors have no number. All other errors are tried again: they
# are not known beforehand, and trying in vain costs a minute, while giving up too soon would cost the training.
_REFUSALS = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|MALFORMED"
    r"|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION|PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|NOT_SIGNED_UP"
    r"|HTTP status 40[013]"
)


def may_pass(error: BaseException) -> bool:
    """Whether asking again may help. For an error that loaderd itself has raised, it does not."""
    if isinstance(error, LoaderdError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if isinstance(error, (ValueError, TypeError, LookupError, NotImplementedError, ImportError, PermissionError)):
        return False
    return _REFUSALS.search(str(error)) is None


def insist(ask: Callable[[], _Answer], retry_s: float, on_retry: Callable[[], None]) -> _Answer:
    """What ``ask`` returns. It is called again, for up to ``retry_s``, while it raises errors that may pass.

    Raises its last error. ``on_retry`` is called before each pause.
    """
    until_s, pause_s = time.monotonic() + retry_s, _FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except Exception as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not may_pass(error):
                raise
        on_retry()
        import random

        time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
