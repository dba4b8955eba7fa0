"""The health of a server over HTTP: a few pages for monitoring.

It has no thread and never waits: the supervisor's loop calls :meth:`HealthServer.serve` when a socket is ready. A
connection carries one request, of which only the first line matters. A connection is closed if it is slow, or if its
request is too long; if there are too many connections, the oldest one is closed. (``http.server``, on which that of
prometheus_client builds, takes a thread for each connection, and limits neither their number nor their time.)
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from loaderd.errors import ServerError
from loaderd.server.settings import Address

_MAX_CONNECTIONS = 32
_MAX_REQUEST_BYTES = 8 << 10
_LIMIT_S = 5.0
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    501: "Not Implemented",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Page:
    """An answer: the HTTP ``status`` and the ``body``."""

    status: int
    content_type: str
    body: bytes


@dataclass
class _Connection:
    sock: socket.socket
    until_s: float
    request: bytes = b""
    answer: bytes = b""


class HealthServer:
    """Listens at ``address``. ``pages``: functions that make them, by path. Raises ServerError if it cannot."""

    def __init__(self, address: Address, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._listener = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ServerError(f"--health cannot listen at {address}: {error.strerror}") from None
        self._listener.setblocking(False)
        self.address = Address(address.host, self._listener.getsockname()[1])
        """Where it listens, with the actual port if that was given as 0."""
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def fileno(self) -> int:
        """A file descriptor that becomes readable when :meth:`serve` has something to do."""
        return self._selector.fileno()

    def serve(self) -> None:
        """Do what can be done without waiting."""
        for key, _ in self._selector.select(0):
            key.data()

    def drop_slow(self) -> None:
        """Close connections that are older than 5 s; to be called about once a second."""
        now_s = time.monotonic()
        for connection in [one for one in self._connections.values() if one.until_s < now_s]:
            self._drop(connection)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the caller is gone already; or too many files are open, and it is accepted later
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._drop(next(iter(self._connections.values())))  # the oldest
        sock.setblocking(False)
        connection = _Connection(sock, time.monotonic() + _LIMIT_S)
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, connection))

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is None:  # it was dropped earlier in the same round
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_MAX_REQUEST_BYTES)
        except OSError:
            data = b""
        connection.request += data
        if not data or len(connection.request) > _MAX_REQUEST_BYTES:
            self._drop(connection)
        elif b"\r\n\r\n" in connection.request or b"\n\n" in connection.request:
            connection.answer = self._answer(connection.request.split(b"\n", 1)[0].strip())
            self._selector.modify(connection.sock, selectors.EVENT_WRITE, partial(self._write, connection))

    def _write(self, connection: _Connection) -> None:
        try:
            connection.answer = connection.answer[connection.sock.send(connection.answer) :]
        except OSError:
            connection.answer = b""
        if not connection.answer:
            self._drop(connection)

    def _answer(self, line: bytes) -> bytes:
        method, page = self._page_of(line)
        head = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else page.body)

    def _page_of(self, line: bytes) -> tuple[str, Page]:
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return "", _text(400, "expected an HTTP request")
        method, target, _ = words
        make = self._pages.get(target.partition("?")[0])
        if make is None:
            return method, _text(404, f"there is {' and '.join(self._pages)}")
        if method not in ("GET", "HEAD"):
            return method, _text(405, "only GET and HEAD are served")
        return method, make()


def _text(status: int, text: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def livez(is_stuck: bool) -> Page:
    """Status 200 while the server can recover by itself, and a restart from outside would not help; else 503."""
    return _text(503, "a process hangs and cannot be killed") if is_stuck else _text(200, "ok")


def readyz(not_ready: Mapping[str, str], report: Mapping[str, Any]) -> Page:
    """Status 200 if consumers can be served; else 503. ``not_ready``: processes and data sets that are not, and why.

    Data sets that have failed are ignored, unless all have failed. While one is being prepared, the status is 503.
    """
    states = {each["name"]: each["state"] for each in report["datasets"]}
    has_failed = {name for name, state in states.items() if state.startswith("failed")}
    is_ready = set(not_ready) <= has_failed and has_failed < set(states)
    found = {"status": "ok" if is_ready else "unavailable", "not_ready": not_ready}
    return Page(200 if is_ready else 503, "application/json", f"{json.dumps(found)}\n".encode())


def healthz(why_not: str, report: Mapping[str, Any]) -> Page:
    """A short JSON object: status 200 if everything can be served; else 503, with ``why_not``."""
    found = {
        "status": "unavailable" if why_not else "ok",
        "why": why_not,
        "datasets": {each["name"]: each["state"] for each in report["datasets"]},
        "consumers": len(report["consumers"]),
    }
    return Page(503 if why_not else 200, "application/json", f"{json.dumps(found)}\n".encode())
