"""A connection to a daemon or a server: a channel, and the process at its other end, if that is a child of ours."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import weakref
from collections.abc import Callable

import msgpack

from loaderd.client.shutdown import reap
from loaderd.errors import LoaderdError, ServerError
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.descriptors import NO_SIGNAL
from loaderd.ipc.messages import Bye, Message, encode
from loaderd.ipc.spawn import kill_group, start_process

_MAX_SEND_LIMIT_S = 1e6  # the kernel counts no further than some centuries


class TransportLost(Exception):
    """The daemon or the server is gone, or out of reach; it may come back.

    ``failure``: the error that it reported last, if it ended for a reason that would come again.
    """

    def __init__(self, how: str, failure: LoaderdError | None = None) -> None:
        super().__init__(how)
        self.failure = failure


class Transport:
    """A socket, and the ``process`` behind it if that is a child of ours, which ends with it.

    ``what``: what messages call the other end.
    """

    def __init__(self, what: str, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.what = what
        self.channel = Channel(sock)
        self.process = process
        self.before_end: list[Callable[[], object]] = []
        """Called before the other end can notice that the connection ends, however it ends; maybe several times."""
        self._end = weakref.finalize(self, _end, self.channel, process, os.getpid(), self.before_end)
        self._end.atexit = False  # at exit, client.shutdown ends connections

    def receive(self) -> list[Message]:
        """As ``Channel.receive``. Raises TransportLost at the end, ServerError where what comes is no message."""
        try:
            return self.channel.receive()
        except ChannelClosed:
            raise TransportLost(self._how_it_ended()) from None
        except (TypeError, ValueError, LookupError, msgpack.UnpackException):
            self.kill()
            raise ServerError(
                f"{self.what} sent something that is not a loaderd message",
                hint="Something else listens there, or a server of another version.",
            ) from None

    def _how_it_ended(self) -> str:
        """Close the connection, over which nothing more comes; return how the other end ended, for a message."""
        self.close()
        if self.process is None:
            return f"{self.what} closed the connection"
        if self.process.returncode is None:
            return f"{self.what} does not end"
        from loaderd.ipc.child import how_it_ended  # few daemons die

        return f"{self.what} {how_it_ended(self.process.returncode)}"

    def wake(self) -> None:
        """End waits for the other end, and let it find out that the connection is over. Does not wait for that."""
        _call(self.before_end)
        if self.process is None:
            _say_bye(self.channel)
        with contextlib.suppress(OSError):  # it is closed, or the other end is gone
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def kill(self, bye: str = "") -> str:
        """End it, whatever the other end does; a process of ours and its children die. Returns how it ended.

        ``bye``: why it ends, for a server's log; "": the consumer has ended.
        """
        if self.process is not None:
            kill_group(self.process)
        elif bye:
            _say_bye(self.channel, bye)
        self.close()
        return "was left" if self.process is None else "was killed"

    def close(self) -> None:
        """End it, and wait for the end of our process. From any thread; a wait in another one ends, too."""
        _call(self.before_end)  # also here: if Ctrl-C comes before _end below, _end is never called
        ending = self._end.detach()  # and call it: a finalizer does nothing any more while the interpreter ends
        if ending is None:
            self.channel.close()  # Ctrl-C may have come before it was closed
        elif _end(*ending[2]):
            raise KeyboardInterrupt


def _end(
    channel: Channel,
    process: subprocess.Popen[bytes] | None,
    creator: int,
    before_end: list[Callable[[], object]],
) -> bool:
    """End the process, and wait for its end; return whether Ctrl-C has cut the wait short.

    KeyboardInterrupt is not raised: where garbage is collected, it would be printed, and change nothing. A fork of
    the training process inherits this finalizer, and must not end its parent's process.
    """
    if os.getpid() != creator:
        return False
    try:
        _call(before_end)
        if process is None:
            _say_bye(channel)
        channel.close()
    except KeyboardInterrupt:
        _call(before_end)
        if process is not None:
            kill_group(process)
        return True
    return process is not None and reap([process])


def _call(functions: list[Callable[[], object]]) -> None:
    for function in functions:
        function()


def _say_bye(channel: Channel, why: str = "") -> None:
    """Lets a server tell an end from a crash. Does not wait until the server reads it, which takes the first one."""
    with contextlib.suppress(OSError):  # it was said before, or the other end is gone or busy
        channel.socket.send(encode(Bye(why)), socket.MSG_DONTWAIT | NO_SIGNAL)


def limit_sending(sock: socket.socket, limit_s: float) -> None:
    """Have a connect or a send fail that takes longer than ``limit_s``; 0: it may take for ever."""
    limit_us = int(1e6 * min(limit_s, _MAX_SEND_LIMIT_S)) or (limit_s > 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(limit_us, 1_000_000)))


def connect_to_daemon(path: list[str]) -> Transport:
    """Start a daemon of our own, whose ``sys.path`` is ``path``. Raises DaemonError."""
    process, sock = start_process("loaderd.daemon.private_daemon", path=path)
    return Transport("the daemon process", sock, process)
