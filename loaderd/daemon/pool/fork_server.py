"""The process that workers are forks of: it has imported all that they need, so a worker starts in milliseconds.

::

    daemon ──fork──► fork server ──fork──► worker, worker, …       each is killed when the one before it dies
           ──"start", sys.path, the worker's end of a socket──►
           ◄──its pid, and a descriptor that can be read when it is dead──
           ──"end", its pid──►
           ◄──how it ended──

Importing numpy and loaderd takes most of a fresh worker's start. The daemon has imported them when it forks the fork
server, which is the first thing that it does: it has one thread, and has opened, mapped and imported nothing for a
user yet. So a worker has what a fresh process has, and nothing that the daemon gets later on.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack

from loaderd.errors import DaemonError
from loaderd.ipc.child import die_with_parent, how_it_ended, name_process
from loaderd.ipc.descriptors import above_standard, send_fds, socket_above_standard
from loaderd.ipc.messages import UNICODE_ERRORS
from loaderd.kernels.table import compile_kernels
from loaderd.machine import remedy

# A worker that is killed while it waits for a disk dies when the disk answers, if ever.
_DEATH_TIMEOUT_S = 0.5
_START, _END = "start", "end"
_MESSAGE_BYTES = 1 << 20  # at most


class ForkServer:
    """See the module's docstring. Make it before anything else. ``main`` is what a worker runs."""

    def __init__(self, main: Callable[[socket.socket], None], leave: socket.socket) -> None:
        """``leave``: the daemon's socket, which the fork server and the workers close."""
        self._failure: OSError | None = None
        self._pid = 0
        try:
            self._socket, theirs = map(
                socket_above_standard, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            daemon = os.getpid()
            self._pid = os.fork()
        except OSError as error:  # raised when the first worker is wanted: by then there is somebody to tell
            self._failure = error
            return
        if self._pid == 0:
            self._socket.close()
            leave.close()
            die_with_parent(daemon)
            name_process("loaderd-forks")
            compile_kernels()  # once, so that not each worker has to
            gc.freeze()  # the collector would write to these objects, and so copy their pages in each worker
            sock = _serve(theirs)
            name_process("loaderd-worker")
            main(sock)
            sys.exit()
        theirs.close()

    def start(self) -> tuple[socket.socket, int, int]:
        """Start a worker; returns our end of a socket, its pid, and a descriptor that can be read when it is dead.

        Raises DaemonError where the machine lets us have no more processes or files.
        """
        ours = None
        try:
            if self._failure is not None:
                raise self._failure
            ours, theirs = map(socket_above_standard, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
            with theirs:
                # A user's module that the daemon has imported may have changed sys.path.
                pid, fds = self._ask([_START, [path for path in sys.path if isinstance(path, str)]], theirs.fileno())
            return ours, pid, above_standard(fds[0])
        except OSError as error:
            if ours is not None:
                ours.close()
            raise DaemonError(f"cannot start a worker: {error.strerror}", hint=remedy(error)) from None

    def end(self, pid: int) -> str:
        """Kill a worker, if it is not dead; returns how it ended, in words."""
        code, _ = self._ask([_END, pid])
        return "does not die" if code is None else how_it_ended(code)

    def _ask(self, request: list[Any], *fds: int) -> tuple[Any, list[int]]:
        """Send a request, return the answer. Raises SystemExit if the fork server is dead, and so all workers."""
        try:
            _send(self._socket, request, *fds)
            reply, received, flags, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        except (BrokenPipeError, ConnectionResetError):
            reply, flags = b"", 0
        if not reply:
            raise SystemExit(1)
        number, value = msgpack.unpackb(reply)
        if flags & socket.MSG_CTRUNC:
            if not number:
                self._ask([_END, value])  # the new worker: without its descriptor nobody would ever end it
            number = errno.EMFILE
        if number:
            raise OSError(number, os.strerror(number))
        return value, received

    def close(self) -> None:
        """End all workers, and wait for that, but not for long; may be called again."""
        if self._pid:
            self._socket.close()
            os.waitpid(self._pid, 0)
            self._pid = 0


def _send(sock: socket.socket, message: list[Any], *fds: int) -> None:
    send_fds(sock, msgpack.packb(message, unicode_errors=UNICODE_ERRORS), fds)


def _answer(sock: socket.socket, message: list[Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the daemon was killed: the next request says so
        _send(sock, message)


def _serve(sock: socket.socket) -> socket.socket:
    """Answer requests until the daemon closes its end. Returns only in a new worker: its end of its own socket.

    A request is [what, with what], an answer [an error's number or 0, the rest].
    """
    server = os.getpid()
    alive: list[int] = []  # or dead without the daemon knowing: until it knows, their pids are not used again
    dying: list[int] = []
    while True:
        try:
            request, fds, flags, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
        except ConnectionResetError:  # the daemon was killed, and had an answer to read
            request = b""
        dying = [pid for pid in dying if not os.waitpid(pid, os.WNOHANG)[0]]
        if not request:
            _end(alive)
            os._exit(0)
        what, value = msgpack.unpackb(request, unicode_errors=UNICODE_ERRORS)
        if what == _END:
            alive.remove(value)
            code = _end([value])
            if code is None:
                dying.append(value)
            _answer(sock, [0, code])
            continue
        pid = None
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = os.fork()
            if pid:
                fds.append(os.pidfd_open(pid))
                _send(sock, [0, pid], fds[-1])
                alive.append(pid)
        except OSError as error:
            if pid:
                _end([pid])
            _answer(sock, [error.errno, None])
        if pid == 0:
            sock.close()
            die_with_parent(server)
            sys.path[:] = value
            return socket_above_standard(socket.socket(fileno=fds[0]))
        for fd in fds:
            os.close(fd)


def _end(workers: list[int]) -> int | None:
    """Kill workers; returns the exit code of the last one, as ``subprocess`` has it; None: it does not die."""
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    code, until_s = None, time.monotonic() + _DEATH_TIMEOUT_S
    for pid in workers:
        while True:
            dead, status = os.waitpid(pid, os.WNOHANG)
            if dead or time.monotonic() > until_s:
                break
            time.sleep(0.001)
        code = os.waitstatus_to_exitcode(status) if dead else None
    return code
