"""The sources whose data set a server has: on this machine, or elsewhere. See ``sources``."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from loaderd.client.discovery import Discovery
from loaderd.client.sources import EmbeddedSource, Source
from loaderd.client.transport import Transport, TransportLost, limit_sending
from loaderd.errors import HOW_TO_GO_ON, BusyError, LoaderdError, NoShardsError, ServerError, StorageError
from loaderd.ipc.channel import ChannelClosed, peer_of
from loaderd.ipc.messages import PROTOCOL, Bye, Failed, Hello, Message, Subscribe, UseServers, Welcome
from loaderd.ipc.subscription import Subscription
from loaderd.options import Shuffle
from loaderd.pickling import pickled
from loaderd.remote.address import unix_path
from loaderd.remote.source import RemoteStream
from loaderd.restarts import Backoff
from loaderd.schema.wire import from_wire
from loaderd.version import VERSION

HOW_TO_START = "Is it running? `loaderd serve mypackage.module:dataset` starts one, and says where it listens."

Answer = TypeVar("Answer", bound=Message)

_CONNECT_TIMEOUT_S = 5.0  # how long we wait if the server's queue of connections is full
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0

_logger = logging.getLogger("loaderd")


class RemoteSource(EmbeddedSource):
    """Servers elsewhere, which our daemon's workers ask for rows. ``ask`` says, again and again, which there are."""

    def __init__(self, wanted: RemoteStream, ask: Callable[[], Sequence[str]] | None) -> None:
        super().__init__(wanted)
        self._wanted = wanted
        self._discovery = None if ask is None else Discovery(ask)
        self._announced: dict[str, Any] = {}

    def welcomed(self, welcome: Welcome) -> None:
        servers = ", ".join(self._wanted.of.addresses[:3])
        _take_over(self, self._announced, welcome.dataset, f"the servers at {servers}", self._wanted.of.name)
        self._use(replace(self._wanted, has_begun=True))

    def may_retry(self, failure: LoaderdError) -> bool:
        return isinstance(failure, ServerError) and bool(self._announced)

    def pause_s(self, lost: TransportLost, fruitful: bool, at: str) -> float:
        if lost.failure is not None:  # the workers have tried long enough; the next call has them try again
            raise lost.failure
        return super().pause_s(lost, fruitful, at)

    def news(self) -> Message | None:
        addresses = () if self._discovery is None else self._discovery.news()
        if not addresses or addresses == self._wanted.of.addresses:
            return None
        self._use(replace(self._wanted, of=replace(self._wanted.of, addresses=addresses)))
        return UseServers(list(addresses))

    def _use(self, wanted: RemoteStream) -> None:
        """For the next daemon."""
        self._wanted = wanted
        self._pickled = pickled(wanted)


def _take_over(source: Source, known: dict[str, Any], dataset: dict[str, Any], server: str, name: str) -> None:
    """Set up ``source`` with what ``server`` (for messages) says of ``dataset``, and keep that in ``known``.

    Raises ServerError where it differs from what is known already; OptionError for options that do not suit it.
    """
    if not known:
        known.update(dataset)
    differing = [key for key, value in known.items() if dataset.get(key) != value]
    if differing:
        raise ServerError(
            f"{server} has another data set {name!r} now: another {', '.join(differing)}",
            hint="Connect anew to use that; or have the server started with what it had.",
        )
    shuffle = dataset["shuffle"]
    source.schema = from_wire(dataset["schema"])
    source.row_bytes = dataset["row_bytes"]
    source.grows = dataset["grows"]
    if source.grows:
        source.options.check_growing()
    source.options = replace(
        source.options,
        shuffle=shuffle if isinstance(shuffle, bool) else Shuffle(*shuffle),
        seed=dataset["seed"],
        on_corrupt=dataset["on_corrupt"],
    )


class ServedSource(Source):
    """A server on this machine."""

    knows_earlier_shards = True

    def __init__(
        self,
        address: str,
        dataset: str,
        subscription: Subscription,
        *,
        stall_timeout: float | None,
        report: str | None,
        reconnect_timeout: float,
    ) -> None:
        """``reconnect_timeout``: seconds. Raises OptionError."""
        self.what = f"the server at {address}"
        # How many workers there are is the server's business.
        self.options = subscription.stream_options(workers=1, stall_timeout=stall_timeout, report=report)
        self._address = f"unix://{unix_path(address)}"  # the same when the program has changed its working directory
        self._dataset = dataset
        self._subscription = subscription
        self._timeout_s = reconnect_timeout
        self._announced: dict[str, Any] = {}
        self._was_open = self._away = False
        self._reason = ""
        """Why the server refused us last, of what was said of this outage."""
        self._pauses = Backoff(_MIN_PAUSE_S, _MAX_PAUSE_S)
        self._tried_s = 0.0
        self._called_s: float | None = None

    def connect(self) -> Transport:
        self._called_s = time.monotonic()
        return connect_to_server(self._address)

    def greeting(self, start: str) -> list[Message]:
        return [Hello(PROTOCOL, VERSION, self._dataset), Subscribe(self._subscription.to_wire(), start)]

    def welcomed(self, welcome: Welcome) -> None:
        self._called_s = None
        _take_over(self, self._announced, welcome.dataset, self.what, self._dataset)

    def may_retry(self, failure: LoaderdError) -> bool:
        # A server may notice late that a connection is lost, and count us twice until then. One that was started anew
        # while storage is away cannot find or read the shards, and goes on trying.
        return isinstance(failure, (BusyError, NoShardsError, StorageError)) and self._was_open

    def pause_s(self, lost: TransportLost, fruitful: bool, at: str) -> float:
        if not self._announced:
            raise ServerError(str(lost), hint=HOW_TO_START)
        if fruitful:
            self._end_outage()
        if self._called_s is not None:  # in vain: no Welcome came
            self._tried_s += time.monotonic() - self._called_s
            self._called_s = None
        if self._tried_s >= self._timeout_s:
            self._end_outage()
            why = "" if lost.failure is None else lost.failure.hint
            raise ServerError(
                f"{lost}; it was called for {self._timeout_s:g} s, and no batch came",
                hint=f"{why} {HOW_TO_GO_ON}".lstrip(),
            )
        self._say(lost, at)
        pause_s = self._pauses.next_s()
        self._tried_s += pause_s
        return pause_s

    def _say(self, lost: TransportLost, at: str) -> None:
        """Tell the user of an outage once, and again where a server that is back refuses us for another reason."""
        reason = self._reason if lost.failure is None else lost.failure.message
        if not self._away or reason != self._reason:
            _logger.warning("%s; calling it for up to %g s, to go on at %s", str(lost), self._timeout_s, at)
        self._away, self._reason = True, reason

    def is_back(self, at: str) -> None:
        self._was_open = True
        if self._away:
            self._away, self._reason = False, ""
            _logger.warning("%s is back; going on at %s", self.what, at)

    def _end_outage(self) -> None:
        self._pauses.reset()
        self._tried_s = 0.0


def connect_to_server(address: str) -> Transport:
    """Connect to a server on this machine.

    Raises TransportLost where nobody listens, ServerError where it is another user's.
    """
    what, path = f"the server at {address}", unix_path(address)
    assert path is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        limit_sending(sock, _CONNECT_TIMEOUT_S)
        sock.connect(path)
        limit_sending(sock, 0.0)
        _, user = peer_of(sock)
    except PermissionError as error:
        sock.close()
        raise ServerError(
            f"{what} cannot be reached: {error.strerror}",
            hint=f"A server serves its own user{_owner_of(path)} and root; this is user {os.geteuid()}.",
        ) from None
    except OSError as error:
        sock.close()
        raise TransportLost(f"{what} cannot be reached: {error.strerror or error}") from None
    if user not in (os.geteuid(), 0):
        sock.close()
        raise ServerError(
            f"{what} runs as user {user}, and this is user {os.geteuid()}",
            hint="Who listens there could give you any data. Run the server as the same user, or as root.",
        )
    return Transport(what, sock)


def _owner_of(path: str) -> str:
    """Which user's socket it is, in words; "" where its folder does not let us see."""
    try:
        return f" ({os.stat(path).st_uid})"
    except OSError:
        return ""


def ask_server(
    address: str, kind: type[Answer], *questions: Message, timeout_s: float = 10.0
) -> tuple[Answer, int | None]:
    """Send ``questions``; return the answer of type ``kind``, and the descriptor that came with it, or None.

    The caller owns the descriptor. Raises the error with which the server refuses; TransportLost where it is away,
    ends, or says nothing for ``timeout_s`` seconds; ServerError where it is no server of this user's.
    """
    transport = connect_to_server(address)
    with contextlib.closing(transport):
        poll = select.poll()
        poll.register(transport.channel, select.POLLIN)
        with contextlib.suppress(ChannelClosed):  # what it said before it closed is still to be read
            for message in (Hello(PROTOCOL, VERSION, ""), *questions):
                transport.channel.send(message)
        while poll.poll(1000 * timeout_s):
            for message in transport.receive():
                if isinstance(message, kind):
                    return message, transport.channel.take_fd() if transport.channel.has_fd else None
                if isinstance(message, Failed):
                    raise message.error
                if isinstance(message, Bye):
                    raise TransportLost(f"{transport.what} ends: {message.text}")
        raise TransportLost(f"{transport.what} said nothing for {timeout_s:g} s")
