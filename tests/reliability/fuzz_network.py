"""What no consumer would say to a server's network port: in tickets, in HTTP, and below it."""

from __future__ import annotations

import json
import random
import socket
from typing import Any
from urllib.request import Request, urlopen

import msgpack

from loaderd.remote.tickets import JSON, MAX_ROWS, MAX_TICKET_BYTES, MSGPACK
from tests.reliability import hostile

LIMIT_S = 30.0
_PATHS = ["/v1/train/rows"] * 12 + [
    *("/v1/train", "/v1", "/v1/valid/rows", "/v1/train/0123", "/v2/train/rows", "/readyz", "/metrics", "/"),
    *("/v1/%2e%2e/rows", "//", "/v1/train/rows?x", "/" + "x" * 5000, "*", "http://other/v1", "/v1/tr\u202ein/rows"),
]
_METHODS = ["POST"] * 8 + ["GET", "GET", "PUT", "HEAD", "DELETE", "BREW", "post"]


class Caller:
    """Says one thing in each connection, some with another token than ``token``."""

    def __init__(self, port: int, token: str, rng: random.Random) -> None:
        self._port = port
        self._token = token
        self._rng = rng
        request = Request(f"http://127.0.0.1:{port}/v1/train", headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=LIMIT_S) as answer:
            self._data: str = msgpack.unpackb(answer.read(), strict_map_key=False)["digest"]

    def call(self) -> tuple[str, str]:
        """(what was said, how it ended): the status, "end", "reset", or "timeout"."""
        kind = self._rng.choice([self.ticket, self.ticket, self.http, self.http, self.noise])
        with socket.create_connection(("127.0.0.1", self._port), LIMIT_S) as sock:
            try:
                sock.sendall(kind())
                sock.shutdown(socket.SHUT_WR)
                answer = sock.recv(1 << 16)
                while sock.recv(1 << 16):
                    pass
            except TimeoutError:
                return kind.__name__, "timeout"
            except OSError:
                return kind.__name__, "reset"
        return kind.__name__, answer[9:12].decode("latin-1") or "end"

    def ticket(self) -> bytes:
        """A ticket for rows of which something is wrong, or strange."""
        rng = self._rng
        ticket: dict[str, Any] = {"data": self._data, "rows": [[0, 0, 0, 5]]}
        if rng.random() < 0.6:
            ticket["rows"] = self._ranges()
        for _ in range(rng.choice([0, 1, 1, 2])):
            name = rng.choice(["data", "rows", "listing", "protocol", "more"])
            ticket[name] = rng.choice([hostile.number, hostile.value])(rng)
        kind = rng.choice([JSON, MSGPACK, "text/plain"])
        try:
            body: bytes = msgpack.packb(ticket) if kind == MSGPACK else json.dumps(ticket).encode()
        except (ValueError, OverflowError, TypeError):  # more than 64 bits
            body = json.dumps(ticket).encode()
        body = rng.choice([body] * 8 + [body[: len(body) // 2], b"", b"[" * 10_000, rng.randbytes(100)])
        return self._request("POST", "/v1/train/rows", body, [f"Content-Type: {kind}"])

    def _ranges(self) -> list[list[Any]]:
        rng = self._rng
        kind = rng.randrange(5)
        if kind == 0:
            return [[hostile.number(rng) for _ in range(rng.choice([3, 4, 4, 5]))] for _ in range(rng.randint(1, 5))]
        if kind == 1:
            return [[0, 0, 0, 1]] * rng.choice([1, 100, 1 << 13, 1 << 15])
        if kind == 2:
            return [[0, rng.randrange(250), 0, rng.choice([1, 100, 101, MAX_ROWS, MAX_ROWS + 1])]]
        if kind == 3:
            return [[0, block, record, record + 1] for block in range(100) for record in range(0, 60, 2)]
        return [[hostile.number(rng), rng.randrange(250), rng.randrange(50), rng.randrange(120)]]

    def http(self) -> bytes:
        """A request that is odd as HTTP."""
        rng = self._rng
        headers = [
            rng.choice(
                [
                    "Content-Encoding: gzip",
                    "Transfer-Encoding: chunked",
                    "Content-Length: -1",
                    "Content-Length: 99999999999999",
                    "Content-Length: 3, 4",
                    "Expect: 100-continue",
                    "Upgrade: h2c\r\nConnection: Upgrade",
                    "Connection: keep-alive, close",
                    "Cookie: " + "x" * rng.choice([10, 70_000]),
                    ": no name",
                    "No colon",
                    "Host: other\r\nHost: another",
                    "Loaderd-Consumer: " + "\x1b[2J;" * 50,
                    "\r\n".join(f"X-{number}: y" for number in range(rng.choice([5, 5000]))),
                ]
            )
            for _ in range(rng.randint(1, 3))
        ]
        body = rng.choice([b"", b"x", b"5\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"zz\r\n", bytes(70_000)])
        if rng.random() < 0.05:
            body = bytes(MAX_TICKET_BYTES + rng.choice([-1, 1, 1 << 20]))
        request = self._request(rng.choice(_METHODS), rng.choice(_PATHS), body, headers, rng.random() < 0.5)
        if rng.random() < 0.2:
            request *= rng.choice([2, 50])  # one behind the other
        return request.replace(b"HTTP/1.1", rng.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/9.9", b"HTCPCP/1.0"]))

    def noise(self) -> bytes:
        """Bytes that are no HTTP."""
        rng = self._rng
        return rng.choice(
            [
                hostile.protocol_of_others(rng),
                rng.randbytes(rng.choice([1, 24, 300, 5_000])),
                b"GET / HTTP/1.1\r\nX: " + bytes(rng.choice([10, 100_000])),
                b"\r\n" * 10_000,
            ]
        )

    def _request(self, method: str, path: str, body: bytes, headers: list[str], has_length: bool = True) -> bytes:
        rng = self._rng
        tokens = [self._token] if rng.random() < 0.9 else rng.choice([[], ["x"], [self._token, "x"], ["x" * 5_000]])
        lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
        lines += [f"Authorization: Bearer {token}" for token in tokens]
        lines += [f"Content-Length: {len(body)}"] if has_length else []
        return "\r\n".join(lines).encode(errors="replace") + b"\r\n\r\n" + body
