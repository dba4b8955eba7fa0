"""A process of a conversion: it gets one unit after the other, and writes its shards.

::

    loaderd convert ──(task, claims), then a Lot at a time──► this process
                    ◄──── News: what is done ───────────────
                    ◄──── None: the unit is done; or the exception for which it is not

All are pickles on a socket that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from loaderd.convert.shard_job import Claims, News, ShardJob, run_unit
from loaderd.convert.work_units import WorkUnit
from loaderd.errors import LoaderdError, WorkerError
from loaderd.ipc.child import die_with_parent, enter_process
from loaderd.ipc.spawn import kill_group, start_process


class JobProcess:
    """The process, as the one that started it sees it. Raises DaemonError if it cannot be started."""

    def __init__(self, task: ShardJob, claims: Claims) -> None:
        self._process, sock = start_process("loaderd.convert.job_process")
        self.connection: Connection[Any, Any] = Connection(sock.detach())
        self._send((task, claims))

    def give(self, unit: WorkUnit) -> None:
        """Have it write a unit, once it has written the one before."""
        self._send(unit)

    def _send(self, value: Any) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended, which `receive` shows
            self.connection.send(value)

    def receive(self) -> News | None:
        """What it did next; None: the unit is done. Raises the exception for which it is not, and EOFError."""
        try:
            message = self.connection.recv()
        except ConnectionResetError:
            raise EOFError from None
        if isinstance(message, Exception):
            raise message
        news: News | None = message
        return news

    def kill(self) -> None:
        """End the process. Shards that it has begun still have temporary names."""
        kill_group(self._process)
        self._process.wait()
        self.connection.close()


def main() -> None:
    """Entry point of the process: see ``ipc.spawn.start_process``."""
    sock, parent = enter_process("loaderd-convert")
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(sock.detach())
    with contextlib.suppress(EOFError):
        task, claims = connection.recv()  # once, and not with each unit: a task may have a million files
        while True:
            connection.send(_write(connection, task, connection.recv(), claims))


def _write(connection: Connection[Any, Any], task: ShardJob, unit: WorkUnit, claims: Claims) -> Exception | None:
    try:
        for news in run_unit(task, unit, claims):
            connection.send(news)
    except (LoaderdError, OSError) as error:
        return error
    except Exception as error:
        text = f"a process of the conversion failed: {type(error).__name__}: {error}"
        return WorkerError(text, traceback=traceback.format_exc())
    return None
