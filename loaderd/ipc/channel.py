"""A two-way channel of messages between two processes, over a Unix stream socket that also carries descriptors."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
import struct
from collections import deque
from typing import Any
from weakref import WeakSet

import msgpack

from loaderd.errors import DaemonError, WorkerError
from loaderd.ipc.descriptors import NO_SIGNAL, above_standard, send_fds, socket_above_standard
from loaderd.ipc.messages import UNICODE_ERRORS, Message, decode, encode
from loaderd.machine import MAX_SENT_FILES, remedy

MAX_MESSAGE_BYTES = 256 << 20
_RECEIVE_BYTES = 1 << 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_SENT_FILES * array.array("i").itemsize)
_CUT_SHORT = int(socket.MSG_CTRUNC)  # an int: the enum takes 1 µs
_CREDENTIALS = struct.Struct("3i")  # struct ucred of socket(7): pid, uid, gid


class ChannelClosed(Exception):
    """The process at the other end is gone, or closed its end."""


class Channel:
    """Sends and receives messages. Not for several threads at once, except :meth:`send` of small messages.

    A message below some kilobytes is one write, which the kernel does not mix with another thread's.

    In a fork of the process, its channels are closed. Otherwise the other end would not notice the process's death
    while the fork lives, and garbage collection in the fork would give back slots that the process still reads.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = socket_above_standard(sock)
        self.posted_bytes = 0
        """Bytes that were posted and are not sent yet."""
        _channels.add(self)
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=MAX_MESSAGE_BYTES,
            read_size=_RECEIVE_BYTES,  # its buffer; else that has 1 MiB, of which more and more is used
            unicode_errors=UNICODE_ERRORS,
        )
        self._fds: deque[int] = deque()
        self._own_fds: set[int] = set()
        self._posted: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def _encode(self, message: Message) -> bytes:
        return encode(message)

    def _decode(self, value: Any) -> Message:
        return decode(value)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send all of a message, waiting while the other end is busy; raises ChannelClosed."""
        unsent = memoryview(self._encode(message))
        try:
            if fds:
                unsent = unsent[send_fds(self.socket, unsent, fds) :]
            self.socket.sendall(unsent, NO_SIGNAL)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def post(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send what can be sent without waiting, and leave the rest to :meth:`flush`; raises ChannelClosed.

        For a process that must not wait for the other end, which may be waiting for it. Not to be mixed with
        :meth:`send`.
        """
        encoded = memoryview(self._encode(message))
        self.posted_bytes += len(encoded)
        self._posted.append((encoded, fds))
        if len(self._posted) == 1:
            self.flush()
        if self._posted and self._posted[-1][1]:  # the caller may close its own before these are sent
            self._posted[-1] = encoded, tuple(os.dup(fd) for fd in fds)
            self._own_fds.update(self._posted[-1][1])

    @property
    def has_posted(self) -> bool:
        """Whether something was posted and is not sent yet."""
        return bool(self._posted)

    def flush(self) -> None:
        """Send more of what was posted, without waiting; raises ChannelClosed."""
        while self._posted:
            unsent, fds = self._posted[0]
            try:
                if fds:
                    sent = send_fds(self.socket, unsent, fds, socket.MSG_DONTWAIT)
                else:
                    sent = self.socket.send(unsent, socket.MSG_DONTWAIT | NO_SIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            self.posted_bytes -= sent
            for fd in self._own_fds.intersection(fds):
                self._own_fds.remove(fd)
                os.close(fd)
            if sent == len(unsent):
                self._posted.popleft()
            else:
                self._posted[0] = unsent[sent:], ()

    def receive(self) -> list[Message]:
        """Wait for bytes and return the messages that they complete (maybe none); raises ChannelClosed at the end.

        Raises DaemonError if a descriptor came and this process may not open any more files.
        """
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(_RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(map(above_standard, received))
        if flags & _CUT_SHORT:
            too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise DaemonError(f"cannot take shared memory over: {too_many.strerror}", hint=remedy(too_many))
        if not data:
            raise ChannelClosed("the other end closed")
        self._unpacker.feed(data)
        return [self._decode(values) for values in self._unpacker]

    def take_fd(self) -> int:
        """The next file descriptor that came; the caller owns it. Raises ChannelClosed where there is none."""
        try:
            return self._fds.popleft()
        except IndexError:
            raise ChannelClosed("a descriptor is missing that should have come") from None

    def close(self) -> None:
        """Close both directions; may be called again, and while another thread is at :meth:`take_fd`."""
        with contextlib.suppress(LookupError):
            while True:
                os.close(self._fds.popleft())
        with contextlib.suppress(LookupError):
            while True:
                os.close(self._own_fds.pop())
        with contextlib.suppress(OSError):  # the other end may be gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class WorkerChannel(Channel):
    """Between a daemon and its worker, a fork of its fork: what they say are pickles.

    All that sends and receives raises WorkerError for a message that cannot be pickled, or made of its pickle.
    """

    def _encode(self, message: Message) -> bytes:
        name = type(message).__name__
        try:
            packed: bytes = msgpack.packb((name, pickle.dumps(message)))
        except Exception as error:  # any, of what the message holds
            raise _unusable(name, error) from error
        return packed

    def _decode(self, value: Any) -> Message:
        name, pickled = value
        try:
            message: Message = pickle.loads(pickled)
        except Exception as error:
            raise _unusable(name, error) from error
        return message


def _unusable(name: str, error: Exception) -> WorkerError:
    text = f"{name}, a message between the daemon and a worker, cannot be pickled or read"
    return WorkerError(f"{text}: {type(error).__name__}: {error}", hint=remedy(error))


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end of a Unix socket, when it was connected. Raises OSError."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


_channels: WeakSet[Channel] = WeakSet()


def _leave_channels_to_parent() -> None:
    for channel in _channels:
        channel.socket.close()


os.register_at_fork(after_in_child=_leave_channels_to_parent)
