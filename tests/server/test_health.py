"""The HTTP pages: what they answer, and that nobody can keep them from others."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from loaderd.errors import ServerError
from loaderd.server import health
from loaderd.server.health import HealthServer, Page, healthz
from loaderd.server.settings import Address

_REPORT = {"datasets": [{"name": "train", "state": "ready"}], "consumers": [{}, {}]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HealthServer]:
    """Serves in a thread, as the supervisor's loop would; nobody is slow, unless a test has little patience."""
    monkeypatch.setattr(health, "_LIMIT_S", 1000.0)
    pages = {"/healthz": lambda: healthz("", _REPORT), "/large": lambda: Page(200, "text/plain", b"x" * (8 << 20))}
    server = HealthServer(Address("127.0.0.1", 0), pages)
    stopped = threading.Event()

    def loop() -> None:
        while not stopped.is_set():
            server.serve()
            server.drop_slow()
            stopped.wait(0.001)

    thread = threading.Thread(target=loop)
    thread.start()
    yield server
    stopped.set()
    thread.join()
    server.close()


def connect(server: HealthServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=30)


def get(server: HealthServer, target: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=30)
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_pages(server: HealthServer):
    status, body = get(server, "/healthz?verbose=1")
    assert (status, json.loads(body)) == (
        200,
        {"status": "ok", "why": "", "datasets": {"train": "ready"}, "consumers": 2},
    )
    assert get(server, "/healthz", "HEAD") == (200, b"")
    assert get(server, "/") == (404, b"there is /healthz and /large\n")
    assert get(server, "/healthz", "POST")[0] == 405
    assert get(server, "/large") == (200, b"x" * (8 << 20))


def test_a_server_that_is_not_well_says_why():
    page = healthz("train: indexing 41 %", _REPORT)
    assert page.status == 503
    assert json.loads(page.body)["why"] == "train: indexing 41 %"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /healthz HTTP/1.0\n\n", b"HTTP/1.1 200 OK"),
        (b"GET /healthz\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"GET /healthz HTTP/1.1\r\n", b""),  # and nothing more: it was slow
        (b"", b""),
    ],
)
def test_what_may_come(server: HealthServer, monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes):
    if not answer:
        monkeypatch.setattr(health, "_LIMIT_S", 0.5)
    with connect(server) as client:
        client.sendall(sent)
        got = client.makefile("rb").read()
    monkeypatch.setattr(health, "_LIMIT_S", 1000.0)
    assert got.split(b"\r\n")[0] == answer
    assert get(server, "/healthz")[0] == 200


def test_noise(server: HealthServer):
    rng = random.Random(0)
    for _ in range(300):
        with connect(server) as client:
            client.sendall(rng.randbytes(rng.randrange(200)) + rng.choice([b"", b"\r\n\r\n"]))
    assert get(server, "/healthz")[0] == 200


def test_of_many_that_say_nothing_the_first_have_to_go(server: HealthServer):
    silent = [connect(server) for _ in range(100)]
    assert get(server, "/healthz")[0] == 200
    for client in silent[:50]:
        assert client.recv(1) == b""
    for client in silent:
        client.close()


def test_the_oldest_may_speak_in_the_moment_in_which_it_has_to_go():
    with contextlib.ExitStack() as stack:
        pages = {"/healthz": lambda: healthz("", _REPORT)}
        server = stack.enter_context(contextlib.closing(HealthServer(Address("127.0.0.1", 0), pages)))
        oldest, *_ = [stack.enter_context(connect(server)) for _ in range(32)]
        for _ in range(32):
            server.serve()
        newest = stack.enter_context(connect(server))
        oldest.sendall(b"x")
        server.serve()
        newest.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        while not select.select([newest], [], [], 0)[0]:
            server.serve()
        assert newest.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_one_who_says_too_much_has_to_go(server: HealthServer):
    with connect(server) as client, contextlib.suppress(ConnectionError):  # it is closed with something unread
        client.sendall(b"x" * 20_000)
        assert client.recv(1) == b""


def test_one_who_does_not_read_keeps_nobody_waiting(server: HealthServer):
    with connect(server) as client:
        client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert get(server, "/healthz")[0] == 200


def test_a_port_that_is_taken(server: HealthServer):
    with pytest.raises(ServerError, match=rf"--health cannot listen at 127\.0\.0\.1:{server.address.port}: Address"):
        HealthServer(server.address, {})
