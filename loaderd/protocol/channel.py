"""A two-way channel of messages between two processes, over a Unix stream socket that also carries descriptors."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque

import msgpack

from loaderd.protocol.messages import Message, decode, encode

MAX_MESSAGE_BYTES = 256 << 20
_RECEIVE_BYTES = 1 << 16
_MAX_FDS = 4
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


class ChannelClosed(Exception):
    """The process at the other end is gone, or closed its end."""


class Channel:
    """Sends and receives messages. Not for several threads at once, but for :meth:`send` of small messages.

    A message below some kilobytes is one write, which the kernel does not mix with another's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES)
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send all of it, waiting while the other end is busy; raises ChannelClosed."""
        data = encode(message)
        try:
            sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            if sent < len(data):
                self.socket.sendall(memoryview(data)[sent:])
        except (BrokenPipeError, ConnectionError, OSError) as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> list[Message]:
        """Wait for bytes and return the messages that they complete (maybe none); raises ChannelClosed at the end."""
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (ConnectionError, OSError) as error:
            raise ChannelClosed(str(error)) from None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(received)
        if not data:
            raise ChannelClosed("the other end closed")
        self._unpacker.feed(data)
        return [decode(values) for values in self._unpacker]

    def take_fd(self) -> int:
        """The next file descriptor that came; the caller owns it."""
        return self._fds.popleft()

    def close(self) -> None:
        """Close both directions, also for processes that inherited the socket by a fork."""
        while self._fds:
            os.close(self._fds.popleft())
        with contextlib.suppress(OSError):  # the other end may be gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
