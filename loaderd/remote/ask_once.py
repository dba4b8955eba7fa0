"""Asking servers for something once, from a process that must show meanwhile that it is alive."""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from loaderd.ipc.worker_messages import AskTask
from loaderd.options import StreamOptions
from loaderd.plan.positions import compare, compare_listings, order_of
from loaderd.remote.calls import Calls
from loaderd.remote.servers import Servers
from loaderd.remote.source import RemoteStream
from loaderd.remote.tables import Table, table_from_wire

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


def ask_table(task: AskTask, tell: Callable[[int], None], say: Callable[[str], None]) -> bytes:
    """The encoded table of a data set (``remote.tables``), from one of its servers.

    Raises as ``Servers.ask``; OptionError if all of them have other data than are wanted.
    """
    stream: RemoteStream = pickle.loads(task.stream)
    of = stream.of
    servers = Servers(of.addresses, of.settings, say, stream.has_begun)

    def call(calls: Calls, timeout_s: float) -> bytes:
        found = calls.table(of.name, task.listing, task.belongs_to, timeout_s)
        table = table_from_wire(found, calls.address)
        compare_listings(task.listing, table.listing)
        if task.belongs_to:
            _compare_order(task.belongs_to, table, stream.options)
        return found

    pool = futures.ThreadPoolExecutor(1)
    try:
        return wait_telling(pool.submit(servers.ask, call, of.limit_s), tell)
    finally:
        pool.shutdown(wait=False)


def _compare_order(belongs_to: Mapping[str, Any], table: Table, options: StreamOptions) -> None:
    """Raise OptionError if the servers of a position had other data, or another order of them, than the table."""
    options = table.ordered(options)
    decided = {name: value for name, value in belongs_to.items() if name != "remainder"}  # that is the consumer's
    compare(decided, {**table.of, **order_of(options, options.window_records(table.row_bytes))})
