"""Descriptors of ours stay out of 0, 1 and 2, also where a program has none of its own there.

A service may be started without a standard error. Then the next file that is opened becomes number 2, and whatever
writes to standard error, as TensorFlow's C++ does, writes into it. That must not be one of our sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

_FIRST = 3


def above_standard(fd: int) -> int:
    """``fd``, or where it is 0, 1 or 2, another number for the same; that one is closed. Raises OSError."""
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
    """0, 1 and 2 are taken meanwhile, for what chooses a number by itself, as ``mmap`` does for its duplicate."""
    taken = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]
    while taken[-1] < _FIRST:
        taken.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


def is_open(fd: int) -> bool:
    """Whether this process has a file of that number."""
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True
