"""The source whose data set a server on this machine has (see ``sources``)."""

from __future__ import annotations

import logging
import os
import socket
import time

from loaderd.client.sources import Source
from loaderd.client.transport import Transport, TransportLost, limit_sending
from loaderd.errors import HOW_TO_GO_ON, BusyError, LoaderdError, NoShardsError, ServerError, StorageError
from loaderd.ipc.channel import peer_of
from loaderd.ipc.messages import PROTOCOL, Hello, Message, Subscribe, Welcome
from loaderd.ipc.subscription import Subscription
from loaderd.remote.address import unix_path
from loaderd.restarts import Backoff
from loaderd.version import VERSION

HOW_TO_START = "Is it running? `loaderd serve mypackage.module:dataset` starts one, and says where it listens."

_CONNECT_TIMEOUT_S = 5.0  # how long we wait if the server's queue of connections is full
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0

_logger = logging.getLogger("loaderd")


class ServedSource(Source):
    """A server on this machine, which is called for ``reconnect_timeout`` seconds when it is away."""

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
        # How many workers there are is the server's business.
        options = subscription.stream_options(workers=1, stall_timeout=stall_timeout, report=report)
        super().__init__(options, f"the server at {address}", dataset)
        self._address = f"unix://{unix_path(address)}"  # the same when the program has changed its working directory
        self._subscription = subscription
        self._timeout_s = reconnect_timeout
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
        super().welcomed(welcome)

    def may_retry(self, failure: LoaderdError) -> bool:
        # A server may notice late that a connection is lost, and count us twice until then. One that was started anew
        # while storage is away cannot find or read the shards, and goes on trying.
        return isinstance(failure, (BusyError, NoShardsError, StorageError)) and self._was_open

    def pause_s(self, lost: TransportLost, fruitful: bool) -> float:
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
        reason = self._reason if lost.failure is None else lost.failure.message
        if not self._away or reason != self._reason:  # and again where it is back, and refuses us
            _logger.warning("%s; calling it for up to %g s", str(lost), self._timeout_s)
        self._away, self._reason = True, reason
        pause_s = self._pauses.next_s()
        self._tried_s += pause_s
        return pause_s

    def is_back(self) -> None:
        self._was_open = True
        if self._away:
            self._away, self._reason = False, ""
            _logger.warning("%s is back", self._what)

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
            hint=f"A server serves its own user and root; this is user {os.geteuid()}.",
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
