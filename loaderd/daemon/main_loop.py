"""The loop that every daemon runs, whoever its consumers are.

::

    wait ──► messages of the parent, of consumers, of workers ──► tick ──► sessions go on ──► assign
      ▲                                                                                         │
      └─────────────────────────────────────────────────────────────────────────────────────────┘

The **parent** is the process that started the daemon: the only consumer of a private daemon (``private_daemon``), or
the supervisor of a server's (``server_daemon``). The daemon has one thread, which waits only in ``select``. It ends
when the parent is gone, and on an error of its own, which it sends to the parent as Failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod

from loaderd.daemon.pool.fork_server import ForkServer
from loaderd.daemon.pool.worker_manager import BELL, WorkerManager
from loaderd.daemon.pool.worker_pool import FIRST_WORKER, WorkerPool
from loaderd.daemon.session import Session
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.channel import Channel
from loaderd.ipc.child import enter_process
from loaderd.ipc.event_loop import EventLoop
from loaderd.ipc.messages import Failed, Message
from loaderd.machine import remedy
from loaderd.redaction import printable
from loaderd.worker.worker import main as work

PARENT = -1
_MOST_DESCRIBED = 16


class Daemon(ABC):
    """Runs the loop until the end. The constructor raises ProcessLookupError if the parent is gone already."""

    def __init__(self, parent: Channel, parent_pid: int, pool: WorkerPool) -> None:
        self._parent_fd = os.pidfd_open(parent_pid)
        self._event_loop = EventLoop()
        self._event_loop.add(PARENT, parent, self._parent_fd)
        self._worker_manager = WorkerManager(self._event_loop, pool, None, self._warn)
        self._sessions: dict[int, Session] = {}
        self._over = self.is_orphan = False
        self._ticked_s = time.monotonic()

    def run(self) -> None:
        """Serve until the end; then close all channels, and end the workers."""
        try:
            while not self._over:
                self._round()
        except Exception as error:
            self._fail(as_loaderd_error(error))
        finally:
            if not self.is_orphan:
                self._event_loop.finish(PARENT)
            self._event_loop.close()
            self._worker_manager.pool.close()
            os.close(self._parent_fd)

    def _round(self) -> None:
        for number, messages in self._event_loop.wait(self._worker_manager.tick_s):
            self._received(number, messages)
            if self._over:
                return
        self._go_on()

    def _received(self, number: int, messages: list[Message] | None) -> None:
        """Handle the messages from ``number``; None: the other end is gone."""
        if number == BELL or number >= FIRST_WORKER:
            self._worker_manager.received(number, messages)
        elif number == PARENT and messages is None:
            self.is_orphan = True
            self._parent_is_gone()
        elif number == PARENT:
            for message in messages or ():
                self._from_parent(message)

    def _go_on(self) -> None:
        now_s = time.monotonic()
        passed_s, tick_s = now_s - self._ticked_s, self._worker_manager.tick_s
        if passed_s >= tick_s:
            self._ticked_s = now_s
            self._worker_manager.tick()
            self._tick(now_s, min(passed_s, 2 * tick_s))  # a suspension of this process does not count
        self._prepare()
        for session in list(self._sessions.values()):
            try:
                session.go_on()
            except Exception as error:
                session.error = as_loaderd_error(error).with_traceback(None)  # its frames hold the session
            if session.error is not None:
                self._session_failed(session, session.error)
        self._worker_manager.assign()

    def _fail(self, error: LoaderdError) -> None:
        """The daemon cannot go on."""
        self._event_loop.post(PARENT, Failed(error))

    def _parent_is_gone(self) -> None:
        self._over = True

    @abstractmethod
    def _from_parent(self, message: Message) -> None:
        """Do what the parent says. An exception raised here ends the daemon."""

    @abstractmethod
    def _prepare(self) -> None:
        """Go on with preparations that no session takes care of."""

    @abstractmethod
    def _session_failed(self, session: Session, error: LoaderdError) -> None:
        """A stream cannot go on."""

    @abstractmethod
    def _warn(self, text: str) -> None:
        """Pass on what a worker says, or that a worker is replaced."""

    def _tick(self, now_s: float, passed_s: float) -> None:
        for session in self._sessions.values():
            session.tick(passed_s)

    def describe(self, *sessions: Session) -> str:
        """What each process waits for: lines of text for each stream, and one for each worker."""
        manager, pool = self._worker_manager, self._worker_manager.pool
        lines = [f"daemon {os.getpid()}: {pool.restarts} workers were replaced so far"]
        for session in sessions or self._sessions.values():
            lines += [f"  {line}" for line in session.describe()]
        for worker in pool.numbers[:_MOST_DESCRIBED]:
            silent = f"nothing came of it for {manager.scheduler.ticks_of(worker) * manager.tick_s:.0f} s"
            doing = f"is at {doing}; {silent}" if (doing := manager.doing(worker)) else "is idle"
            if not manager.scheduler.is_ready(worker):
                doing = f"starts; {silent}"
            lines.append(f"  worker     {pool.pid_of(worker)} {doing}")
        if len(pool.numbers) > _MOST_DESCRIBED:
            lines.append(f"  … and {len(pool.numbers) - _MOST_DESCRIBED} more")
        return "\n".join(lines)


def as_loaderd_error(error: Exception) -> LoaderdError:
    """``error``, or a DaemonError that describes it if it is of another class."""
    if isinstance(error, LoaderdError):
        return error
    text = f"the daemon failed: {type(error).__name__}: {error}"
    return DaemonError(text, hint=remedy(error), traceback=traceback.format_exc())


def run_daemon(name: str, kind: type[Daemon]) -> None:
    """Run a daemon as the process ``name``, which ``ipc.spawn.start_process`` has started."""

    def explain(*_: object) -> None:
        # The terminal may be gone; and the signal may come while what is described is half made, or not there yet.
        with contextlib.suppress(Exception):
            print(printable(daemon.describe()), file=sys.stderr, flush=True)

    signal.signal(signal.SIGUSR1, explain)  # before it has the name by which people send it
    sock, parent = enter_process(name)
    pool = WorkerPool(ForkServer(work, leave=sock))
    try:
        daemon = kind(Channel(sock), parent, pool)
    except ProcessLookupError:  # the parent was killed while this process started
        return
    try:
        daemon.run()
    finally:
        if daemon.is_orphan:  # else the parent kills what is left, before it waits for this process
            os.killpg(os.getpid(), signal.SIGKILL)
