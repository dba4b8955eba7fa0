"""What consumers send to a server. They may be of another version, broken, or mean harm: nothing is trusted.

To find the end of a message, its bytes are passed over, which makes no object, however large or deep it claims to be.
It is unpacked only when it has come in full and is small enough. Then each field must have the type that the
message's class names. Everything else raises :class:`MalformedMessage`.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import msgpack

from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.codec import Malformed, message_of
from loaderd.ipc.messages import (
    CLASS_OF,
    UNICODE_ERRORS,
    AskState,
    AskStatus,
    Bye,
    Hello,
    ListData,
    Message,
    StartPass,
    Subscribe,
)

CONSUMER_MESSAGES: tuple[type[Message], ...] = (
    *(Hello, Subscribe, ListData, StartPass),
    *(AskState, AskStatus, Bye),
)

MAX_MESSAGE_BYTES = 1 << 20
# A position has some hundred characters, a message some ten values. An empty list takes a byte here, 64 in memory.
_MAX_TEXT_BYTES = 1 << 18
_MAX_ITEMS = 1 << 14
_MAX_KEYS = 64
_MAX_CONTAINERS = 1 << 12
# Less than in Channel: while many small messages are decoded at once, all other consumers wait.
_RECEIVE_BYTES = 1 << 10


class MalformedMessage(ChannelClosed):
    """What came is no message that a consumer may send. The connection must be closed.

    The text is short, and holds nothing of what came.
    """


class UntrustedChannel(Channel):
    """A server's end of a channel to a consumer: takes only ``CONSUMER_MESSAGES``, and no descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._began = bytearray()
        self._passed_bytes = 0
        self.unfinished_since: float | None = None
        """Since when a message is there in part, in seconds of ``time.monotonic``; None: none is."""
        self.fault = ""
        """What was wrong with a message. Text: the exception holds the frames, which hold this channel."""
        self._is_ignored = False

    def ignore(self) -> None:
        """Take no more messages, and notice only the end."""
        self._is_ignored = True

    def receive(self) -> list[Message]:
        """As in Channel. Also raises MalformedMessage; then the caller must close the channel."""
        try:
            return self._receive()
        except MalformedMessage as fault:
            self.fault = str(fault)
            raise

    def _receive(self) -> list[Message]:
        try:
            # No room for descriptors: the kernel closes them, and says that it did.
            data, _, flags, _ = self.socket.recvmsg(_RECEIVE_BYTES)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("the other end closed")
        if self._is_ignored:
            return []
        if flags & socket.MSG_CTRUNC:
            raise MalformedMessage("file descriptors came, which no message has here")
        return self._messages_of(data)

    def _messages_of(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes."""
        self._unpacker.feed(data)
        self._began += data
        messages = []
        while self._pass_over_message():
            num_bytes = self._unpacker.tell() - self._passed_bytes
            messages.append(decode_strict(bytes(self._began[:num_bytes])))
            del self._began[:num_bytes]
            self._passed_bytes += num_bytes
        if len(self._began) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"a message must have at most {MAX_MESSAGE_BYTES:,} bytes")
        if not self._began:
            self.unfinished_since = None
        elif messages or self.unfinished_since is None:
            self.unfinished_since = time.monotonic()
        return messages

    def _pass_over_message(self) -> bool:
        """Pass over the next message if it has come in full; returns whether it has. No byte is looked at twice."""
        try:
            self._unpacker.skip()
        except msgpack.OutOfData:
            return False
        except (ValueError, msgpack.UnpackException) as error:
            raise MalformedMessage(f"bytes that are no message: {type(error).__name__}") from None
        return True


def decode_strict(data: bytes) -> Message:
    """The message of a consumer (``CONSUMER_MESSAGES``) in ``data``, which must hold nothing else.

    Fields have exactly the types that the class names (see ``codec``). Raises MalformedMessage for everything else.
    """
    values = _unpack(data)
    if type(values) is not list or not values:
        raise MalformedMessage("a message must be an array that begins with its number")
    number, *fields = values
    cls = CLASS_OF.get(number) if type(number) is int else None
    if cls is None or cls not in CONSUMER_MESSAGES:
        raise MalformedMessage(f"{'a message of unknown number' if cls is None else cls.__name__} must not come here")
    try:
        message: Message = message_of(cls, fields, strict=True)
    except Malformed as error:
        raise MalformedMessage(str(error)) from None
    return message


def _unpack(data: bytes) -> Any:
    num_containers = 0

    def count(container: Any) -> Any:
        nonlocal num_containers
        num_containers += 1
        if num_containers > _MAX_CONTAINERS:
            raise MalformedMessage(f"a message must hold at most {_MAX_CONTAINERS:,} lists and dicts")
        return container

    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a message must have at most {MAX_MESSAGE_BYTES:,} bytes, got {len(data):,}")
    try:
        return msgpack.unpackb(
            data,
            unicode_errors=UNICODE_ERRORS,
            strict_map_key=True,
            list_hook=count,
            object_hook=count,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_KEYS,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"bytes that are no message: {type(error).__name__}: {error!s:.200}") from None
