"""Keeps loaderd's descriptors away from 0, 1 and 2, even if the program has nothing open there.

A service may be started without a standard error. Then the next file that is opened becomes number 2, and whatever
writes to standard error, as TensorFlow's C++ does, writes into that file. It must not be a socket of loaderd's.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence

_FIRST = 3
NO_SIGNAL = int(socket.MSG_NOSIGNAL)  # a program may have SIGPIPE end it, as those of pipelines do


def above_standard(fd: int) -> int:
    """``fd``; if it is 0, 1 or 2, a duplicate with a higher number, and ``fd`` is closed. Raises OSError."""
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)


def socket_above_standard(sock: socket.socket) -> socket.socket:
    """The same for a socket."""
    return sock if sock.fileno() >= _FIRST else socket.socket(fileno=above_standard(sock.detach()))


@contextlib.contextmanager
def standard_is_taken() -> Iterator[None]:
    """Keep 0, 1 and 2 in use while code runs that chooses a number itself, as ``mmap`` does when it duplicates."""
    taken = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]
    while taken[-1] < _FIRST:
        taken.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


def is_open(fd: int) -> bool:
    """Whether this process has a file open with that number."""
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def send_fds(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int], flags: int = 0) -> int:
    """As ``socket.send_fds``, which ignores its flags, and never with SIGPIPE. Raises OSError."""
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))], flags | NO_SIGNAL)
