"""Questions of the gateway to the daemon beside it, each over a connection of its own."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from loaderd.errors import ServerError, from_wire
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import PROTOCOL, AskStatus, Bye, Failed, Hello, Message, Status, Welcome
from loaderd.schema import Schema
from loaderd.schema.wire import from_wire as schema_from_wire
from loaderd.version import VERSION

_ANSWER_TIMEOUT_S = 10.0


def connect(unix_path: str) -> Channel:
    """A channel to the daemon; raises ConnectionError where there is none at the moment."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_ANSWER_TIMEOUT_S)
    try:
        sock.connect(unix_path)
    except OSError as error:
        sock.close()
        raise ConnectionError(f"the server's daemon is not there at the moment: {error.strerror or error}") from None
    sock.settimeout(None)
    return Channel(sock)


def ask_status(unix_path: str) -> dict[str, Any]:
    """The report of the daemon (``Status``). Raises ServerError, ConnectionError."""
    answer = _ask(unix_path, [Hello(PROTOCOL, VERSION, ""), AskStatus()], Status)
    assert isinstance(answer, Status)
    return answer.report


def ask_schema(unix_path: str, dataset: str) -> Schema:
    """The schema that unpacks the batches of a data set (``schema.packed``). Raises ServerError, ConnectionError."""
    answer = _ask(unix_path, [Hello(PROTOCOL, VERSION, dataset)], Welcome)
    assert isinstance(answer, Welcome)
    return schema_from_wire(answer.dataset["schema"])


def _ask(unix_path: str, questions: list[Message], wanted: type[Message]) -> Message:
    channel = connect(unix_path)
    channel.socket.settimeout(_ANSWER_TIMEOUT_S)
    with contextlib.closing(channel):
        try:
            for question in questions:
                channel.send(question)
            while True:
                for message in channel.receive():
                    if isinstance(message, wanted):
                        return message
                    if isinstance(message, Failed):
                        raise from_wire(message.error)
                    if isinstance(message, Bye):
                        raise ServerError(message.text)
        except ChannelClosed as end:
            raise ConnectionError(f"the server's daemon does not answer: {end}") from None
