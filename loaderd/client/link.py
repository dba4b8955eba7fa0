"""The way to what makes the batches: a channel, and the process at its other end, where that is ours."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import weakref

from loaderd.errors import LoaderdError
from loaderd.protocol.channel import Channel
from loaderd.protocol.process import how_it_ended

_END_TIMEOUT_S = 1.0


class LinkLost(Exception):
    """What makes the batches is gone, or out of reach; it may come back.

    ``failure``: what it said last, if it ended for a reason that would come again.
    """

    def __init__(self, how: str, failure: LoaderdError | None = None) -> None:
        super().__init__(how)
        self.failure = failure


class Link:
    """A socket to ``what``, and its ``process``, if it is a child of ours: that ends with the link."""

    def __init__(self, what: str, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.what = what
        self.channel = Channel(sock)
        self.process = process
        self._end = weakref.finalize(self, _end, self.channel, process, os.getpid())

    def how_it_ended(self) -> str:
        """In words, when nothing more comes; the link is closed then."""
        self.close()
        if self.process is None:
            return f"{self.what} closed the connection"
        return f"{self.what} {'does not end' if self.process.returncode is None else how_it_ended(self.process)}"

    def kill(self) -> str:
        """End it, whatever the other end is at; returns what became of that. Children of a process end with it."""
        if self.process is not None:
            self.process.kill()
        self.close()
        return "was left" if self.process is None else "was killed"

    def close(self) -> None:
        """End it, and wait for a process's end; from any thread. A wait in another one ends, too."""
        if self._end():
            raise KeyboardInterrupt


def _end(channel: Channel, process: subprocess.Popen[bytes] | None, creator: int) -> bool:
    """End the process, and wait for that; returns whether Ctrl-C has cut the wait short.

    It is not raised: at the end of the interpreter it would be printed, and change nothing. A fork of the training
    process inherits this, and must not end its parent's process.
    """
    if os.getpid() != creator:
        return False
    try:
        channel.close()
        if process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
            return False
        process.kill()
        # What hangs in the kernel, in a file system that is gone, ends later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
    except KeyboardInterrupt:
        if process is not None:
            process.kill()
        return True
    return False
