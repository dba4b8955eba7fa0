"""HTTP by uvicorn, with bounds to what it leaves open: how many connections there are, how long a request may take to
come, how large it may be, and how long an answer may stay unread."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from loaderd.remote.tickets import MAX_SHARDS_BYTES

_MAX_HEAD_BYTES = 64 << 10
_MAX_REQUEST_BYTES = MAX_SHARDS_BYTES + _MAX_HEAD_BYTES
_HEAD_LIMIT_S = 10.0
_READ_LIMIT_S = 60.0
_FULL = "the server has too many connections"
_FULL_ANSWER = (
    "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    f"Content-Type: text/plain\r\nContent-Length: {len(_FULL) + 1}\r\n\r\n{_FULL}\n"
).encode()
_CLOSE_LIMIT_S = 1.0


class GuardedHttp(HttpToolsProtocol):
    """A connection, whose requests must come in time and be of a bounded size.

    Where there are as many connections as there may be, the one that has been idle longest makes room; if none is
    idle, the new one is told so, and closed.
    """

    max_connections = 1024
    on_refused: Any = staticmethod(lambda host, why: None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = self._request_bytes = 0
        self._limit = self.loop.call_later(_HEAD_LIMIT_S, self._too_slow)
        self._read_limit: asyncio.TimerHandle | None = None
        self.idle_since_s = self.loop.time()
        if len(self.connections) > self.max_connections:
            idle = [each for each in self.connections if isinstance(each, GuardedHttp) and each.is_idle]
            oldest = min(idle, key=lambda each: each.idle_since_s, default=self)
            if oldest is not self:
                oldest.drop(_FULL)
                return
            self._note_refused(_FULL)
            transport.write(_FULL_ANSWER)
            transport.close()
            self.loop.call_later(_CLOSE_LIMIT_S, transport.abort)  # TLS waits for the other end

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        why = f"it did not read its answer within {_READ_LIMIT_S:g} s"  # whose memory, and place, it would keep
        self._read_limit = self.loop.call_later(_READ_LIMIT_S, self.drop, why)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_limit is not None:
            self._read_limit.cancel()

    def drop(self, why: str) -> None:
        """End the connection."""
        self._note_refused(why)
        self._limit.cancel()
        self.transport.abort()

    def _too_slow(self) -> None:
        self.drop(f"no whole request came within {_HEAD_LIMIT_S:g} s")

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.cancel()
        if self._read_limit is not None:
            self._read_limit.cancel()
        super().connection_lost(exc)
        self.pipeline.clear()
        self._forget_request()

    def _forget_request(self) -> None:
        """It refers to this connection, and would stay until the garbage collector looks at the oldest objects."""
        if self.is_idle:
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._request_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > _MAX_HEAD_BYTES or self._request_bytes > _MAX_REQUEST_BYTES:
            self.drop("its request is too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._request_bytes = 0
        self._limit.cancel()
        self._limit = self.loop.call_later(_HEAD_LIMIT_S, self._too_slow)

    def on_headers_complete(self) -> None:
        self._limit.cancel()
        self._head_bytes = -_MAX_REQUEST_BYTES  # what comes now is the body, which the app limits
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self.idle_since_s = self.loop.time()
        self._head_bytes = 0
        super().on_response_complete()
        if self.parser is None:  # the connection was lost before
            self._forget_request()

    def send_400_response(self, msg: str) -> None:
        self._note_refused("it is no HTTP request")
        super().send_400_response(msg)

    def _note_refused(self, why: str) -> None:
        self.on_refused(self.client[0] if self.client else "somewhere", why)


async def serve_pages(app: Any, sock: socket.socket) -> None:
    """Serve an ASGI app at a socket that listens, without TLS, as long as the event loop runs."""
    config = uvicorn.Config(app, http=GuardedHttp, ws="none", lifespan="off", interface="asgi3", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    state = ServerState()
    await loop.create_server(
        lambda: GuardedHttp(config=config, server_state=state, app_state={}, _loop=loop), sock=sock
    )
