"""Requests to one server over HTTP, and what users read when they fail.

A server is not trusted: what it sends has a bounded size, which the request tells, and comes within the time of
the attempt, however slowly it trickles (:class:`_Deadline`). Redirects are not followed, cookies are not kept, and
nothing is inflated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import select
import socket
import ssl
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgpack
import numpy as np
import numpy.typing as npt

from loaderd.errors import LoaderdError, ServerError, from_wire
from loaderd.plan.passes import Listing
from loaderd.remote.address import network_address
from loaderd.remote.security import check_token, ends_tls, speaks_tls, tls_context
from loaderd.remote.source import Settings
from loaderd.remote.tickets import BYTES, CONSUMER, MSGPACK, NUM_FAULT_BYTES, SHAPE, RowFault, RowsTicket
from loaderd.remote.tls import TLS
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


class OutOfReach(Exception):
    """The server is away, too slow, or too busy now: another one may answer, or this one later."""


class OtherData(ServerError):
    """The server has no data of the digest that was asked for."""


class TooMuchAtATime(ServerError):
    """The server has not made the rows of a ticket in the time that it takes for one."""


class _Deadline:
    """A socket on which nothing is received after ``until_s``: a timeout alone begins anew with each byte."""

    until_s = math.inf

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < math.inf:
            self.settimeout(left_s)  # type: ignore[attr-defined]
        return super().recv_into(*arguments, **options)  # type: ignore[misc,no-any-return]


class _Socket(_Deadline, socket.socket):
    pass


class _TlsSocket(_Deadline, ssl.SSLSocket):
    pass


class _Answer(http.client.HTTPResponse):
    """An answer, whose body is not read yet, on the connection ``sock``."""

    def __init__(self, sock: _Socket | _TlsSocket, method: str) -> None:
        super().__init__(sock, method=method)
        self.sock = sock

    def end(self) -> None:
        """End the connection: what comes is not wanted."""
        self.close()
        self.sock.close()


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
        self._context: ssl.SSLContext | None = None
        if is_secure:
            self._context = tls_context(self._tls)
            self._context.sslsocket_class = _TlsSocket
        self._idle: list[_Socket | _TlsSocket] = []
        weakref.finalize(self, _close_all, self._idle)

    def rows(
        self, dataset: str, ticket: RowsTicket, row_bytes: int, timeout_s: float
    ) -> tuple[PackedRows, list[RowFault]]:
        """The rows of a ticket, uint8, (ticket.num_rows, row_bytes); and which of them could not be had."""
        until_s = time.monotonic() + timeout_s
        path = f"/v1/{quote(dataset, safe='')}/rows"
        answer = self._request("POST", path, until_s, body=ticket.encode())
        shape = f"{ticket.num_rows} x {row_bytes}"
        self._require(answer.headers.get(SHAPE) == shape, f"rows of {answer.headers.get(SHAPE)!r:.100}", f"{shape!r}")
        num_bytes, most_fault_bytes = ticket.num_rows * row_bytes, ticket.num_rows * _MOST_FAULT_BYTES
        fault_bytes = self._count(answer, NUM_FAULT_BYTES, most_fault_bytes)
        sent_bytes = self._count(answer, "content-length", num_bytes + fault_bytes) - fault_bytes
        self._require(sent_bytes == num_bytes, f"{sent_bytes} bytes", f"{num_bytes}")
        data = np.empty((ticket.num_rows, row_bytes), np.uint8)
        self._read(answer, data.reshape(-1).data)
        faults = self._faults(self._take(answer, fault_bytes), ticket.num_rows)
        self._keep(answer)
        return data, faults

    def table(self, dataset: str, listing: Listing | None, belongs_to: Mapping[str, Any], timeout_s: float) -> bytes:
        """The table of a data set (``remote.tables``); which one, see ``serve.datasets``."""
        query = {"listing": listing, "belongs_to": belongs_to or None}
        asked = urlencode({name: json.dumps(value) for name, value in query.items() if value is not None})
        return self._get(f"/v1/{quote(dataset, safe='')}{'?' if asked else ''}{asked}", timeout_s)

    def add_shards(self, dataset: str, digest: str, shards: bytes, timeout_s: float) -> None:
        """Tell the server which shards the data with this digest are of (``Table.shards``)."""
        path = f"/v1/{quote(dataset, safe='')}/{quote(digest, safe='')}"
        self._keep(self._request("PUT", path, time.monotonic() + timeout_s, body=shards, kind=BYTES))

    def status(self, timeout_s: float) -> dict[str, Any]:
        """What the server says of itself: ``serve.app.RowsApp.report``."""
        try:
            found = json.loads(self._get("/v1", timeout_s))
        except (ValueError, RecursionError):
            found = None
        self._require(isinstance(found, dict), "a status that is no JSON object", "one")
        return dict(found)

    # ------------------------------------------------------------------------------------------ requests

    def _get(self, path: str, timeout_s: float) -> bytes:
        """The body of an answer."""
        answer = self._request("GET", path, time.monotonic() + timeout_s)
        body = self._take(answer, self._count(answer, "content-length", _MOST_TABLE_BYTES))
        self._keep(answer)
        return body

    def _request(self, method: str, path: str, until_s: float, body: bytes = b"", kind: str = MSGPACK) -> _Answer:
        """An answer with status 2xx, of which the body is not read yet."""
        token = self._token
        answer = self._send(method, path, until_s, token, body, kind)
        if answer.status == 401 and (renewed := self._settings.read_token()) != token:  # it was rotated
            answer.end()  # what it says may have no end
            self._token = renewed
            answer = self._send(method, path, until_s, renewed, body, kind)
        if 200 <= answer.status < 300:
            encoding = answer.headers.get("content-encoding", "identity")
            self._require(encoding == "identity", f"an answer in {encoding!r:.40}", "one that is not encoded")
            return answer
        raise self._refusal(answer)

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
            sock.until_s = until_s
            sock.settimeout(max(0.1, until_s - time.monotonic()))
            with contextlib.suppress(BrokenPipeError):  # it may have answered already
                sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            answer = _Answer(sock, method)
            answer.begin()
        return answer

    def _connected(self, until_s: float) -> _Socket | _TlsSocket:
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
            return _Socket(fileno=plain.detach())
        with self._in_words(plain):
            secure = self._context.wrap_socket(plain, server_hostname=self._tls.server_name or self._where[0])
            assert isinstance(secure, _TlsSocket)
            return secure

    def _keep(self, answer: _Answer) -> None:
        """Keep the connection of an answer that was read for another request."""
        answer.close()
        if answer.will_close:
            answer.sock.close()
        else:
            self._idle.append(answer.sock)

    @contextlib.contextmanager
    def _in_words(self, sock: socket.socket | ssl.SSLSocket) -> Iterator[None]:
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
        if self._context is not None and ends_tls(*self._where, self._context, self._tls.server_name):
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
            size = self._count(answer, "content-length", _MOST_ERROR_BYTES)
            wire: Any = msgpack.unpackb(self._take(answer, size))
            error = from_wire(wire["error"])
            self._keep(answer)
        except (ServerError, ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException):
            answer.end()  # of a proxy, perhaps
            error = ServerError(f"it answers with status {status}", hint=_HINT_IS_IT)
            if status not in _BUSY:
                error = ServerError(f"{where} answers with status {status}", hint=_HINT_IS_IT)
        if status in _BUSY:
            return OutOfReach(f"{where}: {error.message}")
        if status == 401:
            return ServerError(
                f"{where} refuses the token",
                hint="Give the one that it was started with: token=…, or in $LOADERD_TOKEN.",
            )
        if status in (409, 413):
            return (OtherData if status == 409 else TooMuchAtATime)(error.message, hint=error.hint)
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
                answer.end()
                raise OutOfReach(f"the server at {self.address} ended the connection in the middle of an answer")
            done += got

    def _take(self, answer: _Answer, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._read(answer, memoryview(data))
        return bytes(data)

    def _count(self, answer: _Answer, header: str, most: int) -> int:
        text = answer.headers.get(header) or ""
        is_count = text.isascii() and text.isdigit() and len(text) <= 15 and int(text) <= most
        if not is_count:
            answer.end()
        self._require(is_count, f"{header} {text!r:.100}", f"a number up to {most}")
        return int(text)

    def _faults(self, data: bytes, num_rows: int) -> list[RowFault]:
        try:
            faults = [RowFault(list(rows), dict(error)) for rows, error in msgpack.unpackb(data)] if data else []
            for rows, error in faults:
                from_wire(error)
                if not all(isinstance(row, int) and 0 <= row < num_rows for row in rows):
                    raise ValueError("a row that was not asked for")
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise self._broken(f"faults that cannot be read: {error!s:.100}", "a list of rows and errors") from None
        return faults

    def _require(self, condition: bool, found: str, expected: str) -> None:
        if not condition:
            raise self._broken(found, expected)

    def _broken(self, found: str, expected: str) -> ServerError:
        return ServerError(f"the server at {self.address} sent {found}, expected {expected}", hint=_HINT_IS_IT)


def _close_all(idle: list[_Socket | _TlsSocket]) -> None:
    for sock in idle:
        sock.close()
