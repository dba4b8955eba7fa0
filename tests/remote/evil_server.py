"""A server that sends whatever a test wants, over a plain socket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator


class EvilServer:
    """Sends ``parts``, ``pause_s`` after one another, to each request, until the caller has gone."""

    def __init__(self, parts: Iterable[bytes], pause_s: float = 0.0) -> None:
        self._parts, self._pause_s = parts, pause_s
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.num_requests = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=self._answer, args=(self._sock.accept()[0],), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.recv(1 << 16)
            self.num_requests += 1
            for part in self._parts:
                sock.sendall(part)
                time.sleep(self._pause_s)

    def close(self) -> None:
        """Take no more connections."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Endless:
    """The same bytes again and again, each time that it is iterated over."""

    def __init__(self, part: bytes, first: bytes = b"") -> None:
        self._part, self._first = part, first

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        while True:
            yield self._part


def answer(*headers: str, body: bytes = b"", status: str = "200 OK") -> bytes:
    """An answer as bytes."""
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body
