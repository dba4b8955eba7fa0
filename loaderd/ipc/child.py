"""What a process of loaderd's does first, and how it ended. ``spawn`` starts it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from loaderd.machine import raise_max_open_files

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def enter_process(name: str) -> tuple[socket.socket, int]:
    """The child's side of ``spawn.start_process``: its end of the socket, and the parent's process number.

    From then on, modules that it imports see the arguments of the parent's program, and where standard output is no
    terminal, a line that is printed is written at once: workers end without a last word.
    """
    _, _, fd, parent, *sys.argv[:] = sys.argv
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    raise_max_open_files()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may ignore it, and then nobody can tell how children end
    name_process(name)
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)  # a program that a user's function starts must not hold the socket open
    return sock, int(parent)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show for this process: at most 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the *thread* that started this process ends: that must be the parent's main one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def how_it_ended(code: int) -> str:
    """How a process ended. ``code``: its status, or minus the number of a signal, as ``subprocess`` has it."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
