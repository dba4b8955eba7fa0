"""What gateway and relay agree on: how a stream of messages and batches lies in a Flight exchange.

::

    exchange    descriptor: a command, COMMAND and a JSON object {"compression": null, "lz4" or "zstd"}
    header      authorization: Bearer TOKEN
    up          app_metadata: a message of a consumer (``protocol.messages``)
    down        app_metadata: a message of the server; Ready carries one batch, which is the chunk's data
"""

from __future__ import annotations

import json
from typing import Any, Literal, cast

import msgpack
import pyarrow as pa

from loaderd.errors import OptionError, ServerError
from loaderd.options import require
from loaderd.protocol.messages import UNICODE_ERRORS, Message, decode

Compression = Literal["lz4", "zstd"] | None

COMMAND = b"loaderd"
AUTHORIZATION = "authorization"
_COMPRESSIONS = (None, "lz4", "zstd")


def exchange_command(compression: Compression) -> bytes:
    """What a consumer asks the exchange for."""
    return COMMAND + json.dumps({"compression": check_compression(compression)}).encode()


def parse_command(command: bytes | None) -> Compression:
    """The way back; of anybody. Raises OptionError."""
    if command is None or not command.startswith(COMMAND):
        raise OptionError(f"an exchange is for consumers of loaderd, whose command begins with {COMMAND!r}")
    options = parse_object(command[len(COMMAND) :], "the command of an exchange")
    require(
        set(options) == {"compression"}, "the command of an exchange", "an object with compression", list(options)
    )
    return check_compression(options["compression"])


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object; raises OptionError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"{what} must be a JSON object, got {text[:100]!r}")
    return found


def check_compression(value: Any) -> Compression:
    """``value``, if it is one; else raises OptionError."""
    require(value in _COMPRESSIONS, "compression", 'None, "lz4" or "zstd"', value)
    return cast(Compression, value)


def write_options(compression: Compression) -> pa.ipc.IpcWriteOptions:
    """How a stream of batches is to be written."""
    return pa.ipc.IpcWriteOptions(compression=compression)


def decode_from_server(data: bytes) -> Message:
    """A message that a server sent. Raises ServerError if it is none of this version."""
    try:
        return decode(msgpack.unpackb(data, unicode_errors=UNICODE_ERRORS))
    except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
        raise ServerError(f"the server sent what is no message: {type(error).__name__}: {error!s:.200}") from None
