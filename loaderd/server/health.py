"""The health of a server over HTTP: a few pages for monitoring.

It has no thread and never waits: the supervisor's loop calls :meth:`HealthServer.serve` when a socket is ready. A
client that is slow or sends too much loses its connection, and so does the oldest one where there are too many. A
connection carries one request, of which only the first line is read. (``http.server``, and prometheus_client's server
that is made of it, would take a thread for each connection, with no limit to their number or to how long they last.)
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

_MAX_CLIENTS = 32
_MAX_REQUEST_BYTES = 8 << 10
_LIMIT_S = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Page:
    """What is answered: a ``status`` of HTTP, and the ``body``."""

    status: int
    content_type: str
    body: bytes


@dataclass
class _Client:
    sock: socket.socket
    until_s: float
    request: bytes = b""
    answer: bytes = b""


class HealthServer:
    """Listens at ``address``; ``pages`` are made when they are asked for. Raises ServerError."""

    def __init__(self, address: Address, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._listener = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ServerError(f"--health cannot listen at {address}: {error.strerror}") from None
        self._listener.setblocking(False)
        self.address = Address(address.host, self._listener.getsockname()[1])
        """Where it listens, with the port that was free."""
        self._clients: dict[int, _Client] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def fileno(self) -> int:
        """Can be read when :meth:`serve` has something to do."""
        return self._selector.fileno()

    def serve(self) -> None:
        """Do what can be done without waiting."""
        for key, _ in self._selector.select(0):
            key.data()

    def drop_slow(self) -> None:
        """Close connections that are older than 5 s; to be called about once a second."""
        now_s = time.monotonic()
        for client in [client for client in self._clients.values() if client.until_s < now_s]:
            self._drop(client)

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone again; or there may be no more files: then others will end first
            return
        if len(self._clients) >= _MAX_CLIENTS:
            self._drop(next(iter(self._clients.values())))  # the oldest
        sock.setblocking(False)
        client = _Client(sock, time.monotonic() + _LIMIT_S)
        self._clients[sock.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, client))

    def _drop(self, client: _Client) -> None:
        del self._clients[client.sock.fileno()]
        self._selector.unregister(client.sock)
        client.sock.close()

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_MAX_REQUEST_BYTES)
        except OSError:
            data = b""
        client.request += data
        if not data or len(client.request) > _MAX_REQUEST_BYTES:
            self._drop(client)
        elif b"\r\n\r\n" in client.request or b"\n\n" in client.request:
            client.answer = self._answer(client.request.split(b"\n", 1)[0].strip())
            self._selector.modify(client.sock, selectors.EVENT_WRITE, partial(self._write, client))

    def _write(self, client: _Client) -> None:
        try:
            client.answer = client.answer[client.sock.send(client.answer) :]
        except OSError:
            client.answer = b""
        if not client.answer:
            self._drop(client)

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
            return "", _text(400, "this speaks HTTP")
        method, target, _ = words
        make = self._pages.get(target.partition("?")[0])
        if make is None:
            return method, _text(404, f"there is {' and '.join(self._pages)}")
        if method not in ("GET", "HEAD"):
            return method, _text(405, "GET and HEAD only")
        return method, make()


def _text(status: int, text: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def livez(is_stuck: bool) -> Page:
    """Status 200 as long as the server helps itself: whoever starts it anew gains nothing then."""
    return _text(503, "a process hangs, and cannot be ended") if is_stuck else _text(200, "ok")


def readyz(not_ready: Mapping[str, str], report: Mapping[str, Any]) -> Page:
    """Status 200 if there is something to be had; else 503. ``not_ready``: processes and data sets, and why.

    A data set that has failed keeps nobody from the others; one that is on its way is worth waiting for.
    """
    states = {each["name"]: each["state"] for each in report["datasets"]}
    has_failed = {name for name, state in states.items() if state.startswith("failed")}
    is_ready = set(not_ready) <= has_failed and has_failed < set(states)
    found = {"status": "ok" if is_ready else "unavailable", "not_ready": not_ready}
    return Page(200 if is_ready else 503, "application/json", f"{json.dumps(found)}\n".encode())


def healthz(why_not: str, report: Mapping[str, Any]) -> Page:
    """Status 200 if all of it can be served; else 503, with ``why_not``. A short JSON object."""
    found = {
        "status": "unavailable" if why_not else "ok",
        "why": why_not,
        "datasets": {each["name"]: each["state"] for each in report["datasets"]},
        "consumers": len(report["consumers"]),
    }
    return Page(503 if why_not else 200, "application/json", f"{json.dumps(found)}\n".encode())
