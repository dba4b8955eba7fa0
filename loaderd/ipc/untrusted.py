"""What consumers send to a server. They may be of another version, broken, or mean harm: nothing is trusted.

To find the end of a message, its bytes are passed over, which makes no object, however large or deep it claims to be.
It is unpacked only when it has come in full and is small enough. Then each field must have the type that the
message's class names. Everything else raises :class:`MalformedMessage`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import (
    MESSAGES,
    UNICODE_ERRORS,
    AskData,
    AskState,
    AskStatus,
    Bye,
    Hello,
    ListData,
    Message,
    StartPass,
    Subscribe,
    decode,
)

CONSUMER_MESSAGES: tuple[type[Message], ...] = (
    *(Hello, Subscribe, ListData, StartPass),
    *(AskState, AskStatus, AskData, Bye),
)

MAX_MESSAGE_BYTES = 1 << 20
# A position has some hundred characters, a message some ten values. An empty list takes a byte here, 64 in memory.
_MAX_TEXT_BYTES = 1 << 18
_MAX_ITEMS = 1 << 14
_MAX_KEYS = 64
_MAX_CONTAINERS = 1 << 12
_MAX_DEPTH = 5
# Less than in Channel: while many small messages are decoded at once, all other consumers wait.
_RECEIVE_BYTES = 1 << 10

Check = Callable[[Any], bool]


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
        self.fault: MalformedMessage | None = None
        """What was wrong with a message, if anything was."""
        self._is_ignored = False

    def ignore(self) -> None:
        """Take no more messages, and notice only the end."""
        self._is_ignored = True

    def receive(self) -> list[Message]:
        """As in Channel. Also raises MalformedMessage; then the caller must close the channel."""
        try:
            return self._receive()
        except MalformedMessage as fault:
            self.fault = fault
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
        found = []
        while self._pass_over_message():
            num_bytes = self._unpacker.tell() - self._passed_bytes
            found.append(decode_strict(bytes(self._began[:num_bytes])))
            del self._began[:num_bytes]
            self._passed_bytes += num_bytes
        if len(self._began) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"a message must have at most {MAX_MESSAGE_BYTES:,} bytes")
        if not self._began:
            self.unfinished_since = None
        elif found or self.unfinished_since is None:
            self.unfinished_since = time.monotonic()
        return found

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

    Fields have exactly the types that the class names; integers have 64 bits. ``Any`` is None, a bool, an integer,
    text, or lists and dicts of these, at most five deep. Fields at the end may be missing if they have a default.
    Raises MalformedMessage for everything else.
    """
    values = _unpack(data)
    if type(values) is not list or not values:
        raise MalformedMessage("a message must be an array that begins with its number")
    number, *fields = values
    cls = MESSAGES[number] if type(number) is int and 0 <= number < len(MESSAGES) else None
    if cls is None or cls not in CONSUMER_MESSAGES:
        raise MalformedMessage(f"{'a message of unknown number' if cls is None else cls.__name__} must not come here")
    checks, num_required = _FIELDS_OF[cls]
    if not num_required <= len(fields) <= len(checks):
        raise MalformedMessage(f"{cls.__name__} must have {len(checks)} fields, got {len(fields)}")
    for value, (name, kind, is_right) in zip(fields, checks, strict=False):
        if not is_right(value):
            raise MalformedMessage(f"{cls.__name__}.{name} must be a valid {kind}, got {type(value).__name__}")
    return decode(values)


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


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    if type(value) is list:
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(type(key) is str and _is_plain(each, depth - 1) for key, each in value.items())
    return value is None or type(value) in (bool, str) or _is_integer(value)


def _is_text(value: Any) -> bool:
    """Whether it is text that people can read: without characters that move the cursor or that a log cannot take."""
    return type(value) is str and value.isprintable()


def _is_name(value: Any) -> bool:
    """Whether it can be the name of a file: any text."""
    return type(value) is str


def _check_of(kind: Any, is_text: Check = _is_text) -> Check:
    """A function that says whether a value is of the type ``kind``, or can be decoded to it."""
    if kind is Any or kind == dict[str, Any]:
        return lambda value: (kind is Any or type(value) is dict) and _is_plain(value)
    if kind is int:
        return _is_integer
    if kind is str:
        return is_text
    if hasattr(kind, "_fields"):
        return _all_of([_check_of(part, _is_name) for part in get_type_hints(kind).values()])
    origin, args = get_origin(kind), get_args(kind)
    parts = [_check_of(part, _is_name if origin is tuple else is_text) for part in args if part is not ...]
    if origin in (Union, UnionType):
        return lambda value: any(part(value) for part in parts)
    if origin is list or args[1:] == (...,):
        return lambda value: type(value) is list and all(map(parts[0], value))
    return _all_of(parts) if origin is tuple else lambda value: type(value) is kind


def _all_of(checks: list[Check]) -> Check:
    """For a list of as many values as ``checks``, of which each passes its check."""

    def is_right(value: Any) -> bool:
        is_list = type(value) is list and len(value) == len(checks)
        return is_list and all(check(each) for check, each in zip(checks, value, strict=True))

    return is_right


def _fields_of(cls: type[Message]) -> tuple[list[tuple[str, str, Check]], int]:
    """For each field (its name, its type as text, its check); and how many fields have no default."""
    kinds = get_type_hints(cls)
    checks = [(name, _named(kinds[name]), _check_of(kinds[name])) for name in cls._fields]
    return checks, len(cls._fields) - len(cls._field_defaults)


def _named(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


_FIELDS_OF = {cls: _fields_of(cls) for cls in CONSUMER_MESSAGES}
