"""Requests to one server over HTTP, and what users read when they fail.

A server is not trusted: what it sends has a bounded size, which the request tells, and comes within the time of
the attempt, however slowly it trickles (:class:`_Deadline`). Redirects are not followed, cookies are not kept, and
nothing is inflated.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import select
import socket
import ssl
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode

import msgpack
import numpy as np
import numpy.typing as npt

from loaderd.errors import LoaderdError, ServerError, WorkerError, from_wire
from loaderd.plan.passes import Listing
from loaderd.remote.address import network_address
from loaderd.remote.security import TLS, check_token, ends_tls, speaks_tls, tls_context
from loaderd.remote.source import Settings
from loaderd.remote.tickets import BYTES, CONSUMER, MSGPACK, NUM_FAULT_BYTES, SHAPE, RowFault, RowsTicket
from loaderd.version import VERSION

PackedRows = npt.NDArray[np.uint8]

_MOST_ERROR_BYTES = 256 << 10
_MOST_TABLE_BYTES = 64 << 20
"""Of a million blocks, it has 1.3 MB at most."""
_MOST_FAULT_BYTES = 4096
"""For each row of a request; an error names its record, and says what to do."""
_CONNECT_S = 5.0
_BUSY = (429, 502, 503, 504)
_HINT_CERTIFICATE = "If it asks for a certificate, give one that it trusts: TLS(cert=…, key=…)."
_HINT_IS_IT = "Is it a server of loaderd, of the same version?"
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgpack.UnpackException)


class OutOfReach(Exception):
    """The server is away, too slow, or too busy now: another one may answer, or this one later."""


class OtherData(ServerError):
    """The server has no data of the digest that was asked for."""


class TooMuchAtATime(ServerError):
    """The server has not made the rows of a ticket in the time that it takes for one."""


class ProcessDied(TooMuchAtATime):
    """A process of the server has died while it made the rows."""


class _Received(io.RawIOBase):
    """What comes on a socket, up to ``until_s``: a timeout alone begins anew with each byte."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._until_s = sock, until_s

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._sock.recv_into(view)

    def makefile(self, mode: str) -> io.BufferedReader:
        """For ``HTTPResponse``, which takes it for a socket."""
        return io.BufferedReader(self)


class _Answer(http.client.HTTPResponse):
    """An answer, whose body is not read yet, on the connection ``sock``."""

    def __init__(self, sock: socket.socket, method: str, until_s: float) -> None:
        super().__init__(cast(socket.socket, _Received(sock, until_s)), method=method)
        self.sock = sock


class Calls:
    """Requests to the server at ``address``, from any thread. Raises OptionError.

    Each raises OutOfReach, or the LoaderdError with which the server refuses.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        self.address = address
        host, port, is_secure = network_address(address)
        self._where = host, port
        self._name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._settings = settings
        self._token = settings.read_token()
        self._tls = settings.tls or TLS()
        self._context = tls_context(self._tls) if is_secure else None
        self._is_accepted = False
        """Whether a server has taken our certificate, so that it ends connections for another reason: it is full."""
        self._idle: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._idle)

    def rows(
        self, dataset: str, ticket: RowsTicket, row_bytes: int, timeout_s: float
    ) -> tuple[PackedRows, list[RowFault]]:
        """The rows of a ticket, uint8, (ticket.num_rows, row_bytes); and which of them could not be had.

        Another process has had the table of a server, with the same certificate.
        """
        self._is_accepted = True
        data = np.empty((ticket.num_rows, row_bytes), np.uint8)
        with self._asked("POST", f"{_path(dataset)}/rows", timeout_s, ticket.encode()) as answer:
            shape = f"{ticket.num_rows} x {row_bytes}"
            given = answer.headers.get(SHAPE)
            self._require(given == shape, f"rows of {given!r:.100}", repr(shape))
            fault_bytes = self._count(answer, NUM_FAULT_BYTES, ticket.num_rows * _MOST_FAULT_BYTES)
            row_bytes_sent = self._count(answer, "content-length", data.nbytes + fault_bytes) - fault_bytes
            self._require(row_bytes_sent == data.nbytes, f"{row_bytes_sent} bytes", f"{data.nbytes}")
            self._read(answer, data.reshape(-1).data)
            faults = self._faults(self._take(answer, fault_bytes), ticket.num_rows)
        return data, faults

    def table(self, dataset: str, listing: Listing | None, belongs_to: Mapping[str, Any], timeout_s: float) -> bytes:
        """The table of a data set (``remote.tables``); which one, see ``serve.datasets``."""
        query = {"listing": listing, "belongs_to": belongs_to or None}
        asked = urlencode({name: json.dumps(value) for name, value in query.items() if value is not None})
        return self._get(f"{_path(dataset)}{'?' if asked else ''}{asked}", timeout_s)

    def add_shards(self, dataset: str, digest: str, shards: bytes, timeout_s: float) -> None:
        """Tell the server which shards the data with this digest are of (``Table.shards``)."""
        with self._asked("PUT", f"{_path(dataset)}/{quote(digest, safe='')}", timeout_s, shards, BYTES):
            pass  # the answer is empty

    def status(self, timeout_s: float) -> dict[str, Any]:
        """What the server says of itself: ``serve.app.RowsApp``."""
        try:
            found = json.loads(self._get("/v1", timeout_s))
        except (ValueError, RecursionError):
            found = None
        self._require(isinstance(found, dict), "a status that is no JSON object", "one")
        return dict(found)

    # ------------------------------------------------------------------------------------------ requests

    def _get(self, path: str, timeout_s: float) -> bytes:
        with self._asked("GET", path, timeout_s) as answer:
            return self._take(answer, self._count(answer, "content-length", _MOST_TABLE_BYTES))

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, timeout_s: float, body: bytes = b"", kind: str = MSGPACK
    ) -> Iterator[_Answer]:
        """An answer with status 2xx, of which the body is to be read. Then its connection is kept for another one."""
        until_s = time.monotonic() + timeout_s
        token = self._token
        answer = self._send(method, path, until_s, token, body, kind)
        self._is_accepted = True
        if answer.status == 401 and (renewed := self._settings.read_token()) != token:  # it was rotated
            _end(answer)  # what it says may have no end
            self._token = renewed
            answer = self._send(method, path, until_s, renewed, body, kind)
        try:
            if not 200 <= answer.status < 300:
                raise self._refusal(answer)
            encoding = answer.headers.get("content-encoding", "identity")
            self._require(encoding == "identity", f"an answer in {encoding!r:.40}", "one that is not encoded")
            yield answer
        except BaseException:
            _end(answer)
            raise
        answer.close()
        if answer.will_close:
            answer.sock.close()
        else:
            self._idle.append(answer.sock)

    def _send(self, method: str, path: str, until_s: float, token: str | None, body: bytes, kind: str) -> _Answer:
        headers = {
            "Host": self._name,
            "User-Agent": f"loaderd/{VERSION}",
            "Accept": MSGPACK,
            "Accept-Encoding": "identity",
            CONSUMER: self._settings.consumer.encode(),
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }
        if token is not None:
            headers["Authorization"] = f"Bearer {check_token(token, 'token')}"
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        sock = self._connected(until_s)
        with self._in_words(sock):
            sock.settimeout(max(0.1, until_s - time.monotonic()))
            with contextlib.suppress(BrokenPipeError):  # it may have answered already
                sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            answer = _Answer(sock, method, until_s)
            answer.begin()
        return answer

    def _connected(self, until_s: float) -> socket.socket:
        """A connection that is idle, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                idle = self._idle.pop()
                poll = select.poll()
                poll.register(idle, select.POLLIN)
                if not poll.poll(0):
                    return idle
                idle.close()  # the server has ended it, or says what was not asked for
        try:
            plain = socket.create_connection(self._where, min(_CONNECT_S, max(0.1, until_s - time.monotonic())))
        except OSError as error:
            raise OutOfReach(f"nothing answers at {self._name}: {error.strerror or error}") from None
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return plain
        with self._in_words(plain):
            return self._context.wrap_socket(plain, server_hostname=self._tls.server_name or self._where[0])

    # ------------------------------------------------------------------------------------------ errors

    @contextlib.contextmanager
    def _in_words(self, sock: socket.socket) -> Iterator[None]:
        """Raises OutOfReach where the connection fails; ServerError for what no other attempt would change."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            sock.close()
            raise self._in_error(error) from None

    def _in_error(self, error: Exception) -> ServerError | OutOfReach:
        if isinstance(error, (ConnectionError, ssl.SSLEOFError, http.client.IncompleteRead)):
            return self._why_ended()
        if isinstance(error, ssl.SSLError):
            return self._tls_error(error)
        if isinstance(error, TimeoutError):
            return OutOfReach(f"the server at {self.address} has not answered in time")
        if isinstance(error, OSError):
            return OutOfReach(f"the server at {self.address} has failed: {error!s:.200}")
        return self._broken(f"{type(error).__name__}: {error!s:.200}", "an HTTP answer")

    def _why_ended(self) -> ServerError | OutOfReach:
        """Why the server has ended a connection in the middle of a request."""
        if self._context is None and speaks_tls(*self._where):
            return ServerError(
                f"the server at {self.address} speaks TLS", hint=f"Its address is https://{self._name}."
            )
        context = None if self._is_accepted else self._context
        if context is not None and ends_tls(*self._where, context, self._tls.server_name):
            return ServerError(
                f"{self._name} refuses the connection: it ends each one without a word", hint=_HINT_CERTIFICATE
            )
        return OutOfReach(f"the server at {self.address} ended the connection")

    def _tls_error(self, error: ssl.SSLError) -> ServerError | OutOfReach:
        if isinstance(error, ssl.SSLCertVerificationError):
            tls = self._tls
            return ServerError(
                f"the certificate of {self._name} is not trusted: {error.verify_message}",
                hint=f"It must be valid now, for the name {tls.server_name or self._where[0]!r} (TLS.server_name), "
                f"and signed by {tls.ca or 'one whom this machine trusts'} (TLS.ca).",
            )
        words = str(error.reason or error).lower().replace("_", " ")
        if "alert" in words:
            return ServerError(f"{self._name} refuses the connection: {words}", hint=_HINT_CERTIFICATE)
        if "wrong version" in words or "record layer" in words or "http request" in words:
            return ServerError(f"{self._name} does not speak TLS", hint=f"Its address is http://{self._name}.")
        return OutOfReach(f"the TLS handshake with {self._name} failed: {words}")

    def _refusal(self, answer: _Answer) -> LoaderdError | OutOfReach:
        """What an answer with another status than 2xx means."""
        where, status = f"the server at {self.address}", answer.status
        try:
            body = self._take(answer, self._count(answer, "content-length", _MOST_ERROR_BYTES))
            error = from_wire(msgpack.unpackb(body)["error"])
            why = f"{where}: {error.message}"
        except (ServerError, *_UNREADABLE):  # of a proxy, perhaps
            why = f"{where} answers with status {status}"
            error = ServerError(why, hint=_HINT_IS_IT)
        if status in _BUSY:
            return OutOfReach(why)
        if status == 401:
            return ServerError(
                f"{where} refuses the token",
                hint="Give the one that it was started with: token=…, or in $LOADERD_TOKEN.",
            )
        if status == 409:
            return OtherData(error.message, hint=error.hint)
        if status == 413:
            return (ProcessDied if isinstance(error, WorkerError) else TooMuchAtATime)(error.message)
        if 300 <= status < 400:
            return ServerError(
                f"{where} leads to another address, and is not followed: {answer.headers.get('location')!r:.300}",
                hint="Give that address, if you trust it.",
            )
        return error

    # ------------------------------------------------------------------------------------------ answers

    def _read(self, answer: _Answer, view: memoryview) -> None:
        """Fill ``view`` from the body."""
        done = 0
        while done < len(view):
            with self._in_words(answer.sock):
                got = answer.readinto(view[done:])
            if not got:
                raise OutOfReach(f"the server at {self.address} ended the connection in the middle of an answer")
            done += got

    def _take(self, answer: _Answer, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._read(answer, memoryview(data))
        return bytes(data)

    def _count(self, answer: _Answer, header: str, most: int) -> int:
        text = answer.headers.get(header) or ""
        is_count = text.isascii() and text.isdigit() and len(text) <= 15 and int(text) <= most
        self._require(is_count, f"{header} {text!r:.100}", f"a number up to {most}")
        return int(text)

    def _faults(self, data: bytes, num_rows: int) -> list[RowFault]:
        try:
            faults = [RowFault(list(rows), dict(error)) for rows, error in msgpack.unpackb(data)] if data else []
            for rows, error in faults:
                from_wire(error)
                if not all(isinstance(row, int) and 0 <= row < num_rows for row in rows):
                    raise ValueError("a row that was not asked for")
        except _UNREADABLE as error:
            raise self._broken(f"faults that cannot be read: {error!s:.100}", "a list of rows and errors") from None
        return faults

    def _require(self, condition: bool, found: str, expected: str) -> None:
        if not condition:
            raise self._broken(found, expected)

    def _broken(self, found: str, expected: str) -> ServerError:
        return ServerError(f"the server at {self.address} sent {found}, expected {expected}", hint=_HINT_IS_IT)


def _path(dataset: str) -> str:
    return f"/v1/{quote(dataset, safe='')}"


def _end(answer: _Answer) -> None:
    """End the connection: what comes is not wanted."""
    answer.close()
    answer.sock.close()


def _close_all(idle: list[socket.socket]) -> None:
    for sock in idle:
        sock.close()
