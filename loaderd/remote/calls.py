"""Requests to one server over HTTP, and what users read when they fail.

A server is not trusted: what it sends has a bounded size, which the request tells, and comes within the time of
the attempt, however slowly it trickles (:class:`_Deadline`). Redirects are not followed, cookies are not kept, and
nothing is inflated that does not say how large it becomes.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgpack
import numpy as np
import numpy.typing as npt
import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, SSLError

from loaderd.errors import LoaderdError, ServerError, from_wire
from loaderd.plan.passes import Listing
from loaderd.remote.address import network_address
from loaderd.remote.security import check_token, ends_tls, speaks_tls, tls_context
from loaderd.remote.source import Settings
from loaderd.remote.tickets import (
    BYTES,
    CONSUMER,
    MSGPACK,
    NUM_FAULT_BYTES,
    PACKED_WITH,
    SHAPE,
    RowFault,
    RowsTicket,
    decompress_rows,
)
from loaderd.remote.tls import TLS
from loaderd.version import VERSION

PackedRows = npt.NDArray[np.uint8]

_MOST_ERROR_BYTES = 256 << 10
_MOST_TABLE_BYTES = 64 << 20
"""Of a million blocks, it has 1.3 MB at most."""
_MOST_FAULT_BYTES = 4096
"""For each row of a request; an error names its record, and says what to do."""
_CONNECT_S = 5.0
_CONNECTIONS = 4
_PIECE_BYTES = 1 << 20
_BUSY = (429, 502, 503, 504)
_HINT_CERTIFICATE = "If it asks for a certificate, give one that it trusts: TLS(cert=…, key=…)."
_HINT_IS_IT = "Is it a server of loaderd, of the same version?"


class OutOfReach(Exception):
    """The server is away, too slow, or too busy now: another one may answer, or this one later."""


class OtherData(ServerError):
    """The server has no data of the digest that was asked for."""


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


class _TlsConnection(urllib3.connection.HTTPSConnection):
    def getresponse(self) -> Any:
        return _until_timeout(self, super().getresponse)


class _Connection(urllib3.connection.HTTPConnection):
    def _new_conn(self) -> socket.socket:
        plain = super()._new_conn()
        timeout_s = plain.gettimeout()
        with_deadline = _Socket(fileno=plain.detach())
        with_deadline.settimeout(timeout_s)
        return with_deadline

    def getresponse(self) -> Any:
        return _until_timeout(self, super().getresponse)


def _until_timeout(connection: urllib3.connection.HTTPConnection, receive: Callable[[], Any]) -> Any:
    """What ``receive`` returns; it and the body behind it must come within the connection's timeout."""
    if isinstance(connection.sock, _Deadline) and connection.timeout is not None:
        connection.sock.until_s = time.monotonic() + connection.timeout
    return receive()


class Calls:
    """Requests to the server at ``address``, from any thread. Raises OptionError.

    Each raises OutOfReach, or the LoaderdError with which the server refuses.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        self.address = address
        host, port, is_secure = network_address(address)
        self._where = host, port
        self._settings = settings
        self._token = settings.read_token()
        options: dict[str, Any] = {"maxsize": _CONNECTIONS, "retries": False, "timeout": _CONNECT_S}
        self._pool: urllib3.HTTPConnectionPool
        self._context: ssl.SSLContext | None = None
        if is_secure:
            tls = settings.tls or TLS()
            name = tls.server_name
            self._context = context = tls_context(tls)
            context.sslsocket_class = _TlsSocket
            self._pool = urllib3.HTTPSConnectionPool(host, port, ssl_context=context, server_hostname=name, **options)
            self._pool.ConnectionCls = _TlsConnection
        else:
            self._pool = urllib3.HTTPConnectionPool(host, port, **options)
            self._pool.ConnectionCls = _Connection

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
        packed_with = answer.headers.get(PACKED_WITH)
        self._require(packed_with in (None, ticket.compression), f"rows in {packed_with!r:.40}", "what was asked for")
        most_bytes = num_bytes if packed_with is None else num_bytes + num_bytes // 8 + 1024
        sent_bytes = self._count(answer, "content-length", most_bytes + fault_bytes) - fault_bytes
        self._require(packed_with is not None or sent_bytes == num_bytes, f"{sent_bytes} bytes", f"{num_bytes}")
        data = np.empty(max(0, sent_bytes), np.uint8)
        self._read(answer, data.data)
        faults = self._faults(self._take(answer, fault_bytes), ticket.num_rows)
        answer.release_conn()
        if packed_with is not None:
            try:
                data = np.frombuffer(decompress_rows(data.data, packed_with, num_bytes), np.uint8)
            except ValueError as error:
                raise self._broken(str(error), "the rows that were asked for") from None
        return data.reshape(ticket.num_rows, row_bytes), faults

    def table(self, dataset: str, listing: Listing | None, of: Mapping[str, Any], timeout_s: float) -> bytes:
        """The table of a data set (``remote.tables``); which one, see ``serve.datasets``."""
        until_s = time.monotonic() + timeout_s
        query = {"listing": None if listing is None else json.dumps(listing), "of": json.dumps(of) if of else None}
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        answer = self._request("GET", f"/v1/{quote(dataset, safe='')}{'?' if asked else ''}{asked}", until_s)
        found = self._take(answer, self._count(answer, "content-length", _MOST_TABLE_BYTES))
        answer.release_conn()
        return found

    def add_shards(self, dataset: str, digest: str, shards: bytes, timeout_s: float) -> None:
        """Tell the server which shards the data with this digest are of (``Table.shards``)."""
        path = f"/v1/{quote(dataset, safe='')}/{quote(digest, safe='')}"
        self._request("PUT", path, time.monotonic() + timeout_s, body=shards, kind=BYTES).release_conn()

    def status(self, timeout_s: float) -> dict[str, Any]:
        """What the server says of itself: ``serve.app.RowsApp.report``."""
        until_s = time.monotonic() + timeout_s
        answer = self._request("GET", "/v1", until_s)
        text = self._take(answer, self._count(answer, "content-length", _MOST_TABLE_BYTES))
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        self._require(isinstance(found, dict), "a status that is no JSON object", "one")
        answer.release_conn()
        return dict(found)

    # ------------------------------------------------------------------------------------------ requests

    def _request(
        self, method: str, path: str, until_s: float, body: bytes = b"", kind: str = MSGPACK
    ) -> urllib3.BaseHTTPResponse:
        """An answer with status 2xx, of which the body is not read yet."""
        token = self._token
        answer = self._send(method, path, until_s, token, body, kind)
        if answer.status == 401 and (renewed := self._settings.read_token()) != token:  # it was rotated
            answer.close()  # what it says may have no end
            self._token = renewed
            answer = self._send(method, path, until_s, renewed, body, kind)
        if 200 <= answer.status < 300:
            encoding = answer.headers.get("content-encoding", "identity")
            self._require(encoding == "identity", f"an answer in {encoding!r:.40}", "one that is not encoded")
            return answer
        raise self._refusal(answer)

    def _send(
        self, method: str, path: str, until_s: float, token: str | None, body: bytes, kind: str
    ) -> urllib3.BaseHTTPResponse:
        headers = {
            "content-type": kind,
            "accept": MSGPACK,
            "user-agent": f"loaderd/{VERSION}",
            "accept-encoding": "identity",
            CONSUMER: self._settings.consumer.encode(),
        }
        if token is not None:
            headers["authorization"] = f"Bearer {check_token(token, 'token')}"
        left_s = max(0.1, until_s - time.monotonic())
        timeout = urllib3.Timeout(connect=min(_CONNECT_S, left_s), read=left_s)
        answer: urllib3.BaseHTTPResponse = self._in_words(
            lambda: self._pool.urlopen(
                method,
                path,
                body or None,
                headers,
                redirect=False,
                timeout=timeout,
                preload_content=False,
                decode_content=False,
            )
        )
        return answer

    def _in_words(self, request: Callable[[], Any]) -> Any:
        """What ``request`` returns. Raises OutOfReach; ServerError for what no other attempt would change."""
        try:
            return request()
        except SSLError as error:
            raise self._tls_error(error) from None
        except ProtocolError as error:
            cause = error.args[-1]
            if isinstance(cause, ssl.SSLError):
                raise self._tls_error(cause) from None
            if isinstance(cause, (OSError, http.client.IncompleteRead)) or "RemoteDisconnected" in repr(cause):
                if not self.address.startswith("https") and speaks_tls(*self._where):
                    raise ServerError(
                        f"the server at {self.address} speaks TLS", hint=f"Its address is https://{self._name}."
                    ) from None
                tls = self._settings.tls or TLS()
                if self._context is not None and ends_tls(*self._where, self._context, tls.server_name):
                    raise ServerError(
                        f"{self._name} refuses the connection: it ends each one without a word",
                        hint=_HINT_CERTIFICATE,
                    ) from None
                raise OutOfReach(f"the server at {self.address} ended the connection") from None
            raise self._broken(f"{error!s:.200}", "an HTTP answer") from None
        except NewConnectionError as error:
            raise OutOfReach(f"nothing answers at {self._name}: {_cause_of(error)}") from None
        except TimeoutError:
            raise OutOfReach(f"the server at {self.address} has not answered in time") from None
        except HTTPError as error:
            kind = type(error).__name__
            slow = "Timeout" in kind
            why = "has not answered in time" if slow else f"has failed: {kind}: {error!s:.200}"
            raise OutOfReach(f"the server at {self.address} {why}") from None

    @property
    def _name(self) -> str:
        host, port = self._where
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _tls_error(self, error: Exception) -> ServerError | OutOfReach:
        cause = (
            error
            if isinstance(error, ssl.SSLError)
            else next((each for each in error.args if isinstance(each, ssl.SSLError)), error)
        )
        tls = self._settings.tls or TLS()
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ServerError(
                f"the certificate of {self._name} is not trusted: {cause.verify_message}",
                hint=f"It must be valid now, for the name {tls.server_name or self._where[0]!r} (TLS.server_name), "
                f"and signed by {tls.ca or 'one whom this machine trusts'} (TLS.ca).",
            )
        words = str(getattr(cause, "reason", None) or cause).lower().replace("_", " ")
        if "alert" in words:
            return ServerError(
                f"{self._name} refuses the connection: {words}",
                hint=_HINT_CERTIFICATE,
            )
        if "wrong version" in words or "record layer" in words or "http request" in words:
            return ServerError(f"{self._name} does not speak TLS", hint=f"Its address is http://{self._name}.")
        return OutOfReach(f"the TLS handshake with {self._name} failed: {words}")

    def _refusal(self, answer: urllib3.BaseHTTPResponse) -> LoaderdError | OutOfReach:
        """What an answer with another status than 2xx means."""
        where = f"the server at {self.address}"
        try:
            size = self._count(answer, "content-length", _MOST_ERROR_BYTES)
            wire: Any = msgpack.unpackb(self._take(answer, size))
            error = from_wire(wire["error"])
            answer.release_conn()
        except (ServerError, ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException):
            answer.close()  # of a proxy, perhaps
            error = ServerError(f"{where} answers with status {answer.status}", hint=_HINT_IS_IT)
        if answer.status in _BUSY:
            return OutOfReach(f"{where}: {error.message}")
        if answer.status == 401:
            return ServerError(
                f"{where} refuses the token",
                hint="Give the one that it was started with: token=…, or in $LOADERD_TOKEN.",
            )
        if answer.status == 409:
            return OtherData(error.message, hint=error.hint)
        if 300 <= answer.status < 400:
            return ServerError(
                f"{where} leads to another address, and is not followed: {answer.headers.get('location')!r:.300}",
                hint="Give that address, if you trust it.",
            )
        return error

    # ------------------------------------------------------------------------------------------ answers

    def _read(self, answer: urllib3.BaseHTTPResponse, view: memoryview) -> None:
        """Fill ``view`` from the body."""
        done = 0
        while done < len(view):
            got = self._in_words(lambda: answer.readinto(view[done : done + _PIECE_BYTES]))  # noqa: B023
            if not got:
                answer.close()
                raise OutOfReach(f"the server at {self.address} ended the connection in the middle of an answer")
            done += got

    def _take(self, answer: urllib3.BaseHTTPResponse, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._read(answer, memoryview(data))
        return bytes(data)

    def _count(self, answer: urllib3.BaseHTTPResponse, header: str, most: int) -> int:
        text = answer.headers.get(header) or ""
        is_count = text.isascii() and text.isdigit() and len(text) <= 15 and int(text) <= most
        if not is_count:
            answer.close()
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


def _cause_of(error: NewConnectionError) -> str:
    cause = error.__cause__
    return str(getattr(cause, "strerror", None) or cause or error)[:200]
