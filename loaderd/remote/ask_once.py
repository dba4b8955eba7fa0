"""Asking servers for something once, from a process that must show meanwhile that it is alive."""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
from collections.abc import Callable
from typing import TypeVar

from loaderd.plan.passes import Listing
from loaderd.remote.servers import Servers
from loaderd.remote.source import RemoteSet
from loaderd.remote.tickets import TABLE, TableRequest, to_json

_TELL_EVERY_S = 0.5

_Answer = TypeVar("_Answer")


def wait_telling(answer: futures.Future[_Answer], tell: Callable[[int], None]) -> _Answer:
    """Wait for the answer; return it, or raise its error. Meanwhile, ``tell`` is called twice a second."""
    while True:
        with contextlib.suppress(futures.TimeoutError):
            return answer.result(_TELL_EVERY_S)
        if answer.done():  # its own error is a TimeoutError
            return answer.result()
        tell(0)


def ask_table(
    of: RemoteSet,
    listing: Listing | None,
    tell: Callable[[int], None],
    say: Callable[[str], None],
) -> bytes:
    """The encoded table of a data set (``remote.tables``), from one of its servers. Raises as ``Servers.ask``."""
    servers = Servers(of.addresses, of.settings, say)
    body = to_json(TableRequest(of.name, listing))
    pool = futures.ThreadPoolExecutor(1)
    try:
        answer: futures.Future[bytes] = pool.submit(
            servers.ask, lambda calls, timeout_s: calls.act(TABLE, body, timeout_s), of.limit_s
        )
        return wait_telling(answer, tell)
    finally:
        pool.shutdown(wait=False)
