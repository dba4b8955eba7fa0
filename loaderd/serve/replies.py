"""Answers of both servers over HTTP: what is sent, and the pages for monitoring."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from loaderd.serve.metrics import Sample, page_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Reply(NamedTuple):
    """What is sent. ``parts``: of the body; ``close``: end the connection, whose caller's body may not be read."""

    status: int
    content_type: str
    parts: tuple[bytes | memoryview, ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    close: bool = False


def text_reply(status: int, text: str) -> Reply:
    """A line of text."""
    return Reply(status, "text/plain; charset=utf-8", (f"{text}\n".encode(),))


def health_reply(why_not: str) -> Reply:
    """The answer of /livez and /readyz: 200, or 503 with the reason; "" is none."""
    return text_reply(503 if why_not else 200, why_not or "ok")


def why_not_ready(datasets: Iterable[Mapping[str, Any]]) -> str:
    """Why consumers cannot be served now; "": they can. A data set that failed matters only if all have.

    ``datasets``: as in the reports of both servers.
    """
    states = {each["name"]: each["state"] for each in datasets}
    others = {name: state for name, state in states.items() if not state.startswith("failed")} or states
    return "; ".join(f"{name}: {state}" for name, state in others.items() if state != "ready")


def metrics_reply(samples: Iterable[Sample]) -> Reply:
    """The answer of /metrics."""
    return Reply(200, CONTENT_TYPE_LATEST, (page_of(samples),))


class HealthPages:
    """An ASGI app for operators, without a token. ``pages``: what makes the answer, by path."""

    def __init__(self, pages: Mapping[str, Callable[[], Reply]]) -> None:
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self._pages.get(scope["path"])
        if page is None:
            reply = text_reply(404, f"there is {', '.join(self._pages)}")
        elif scope["method"] not in ("GET", "HEAD"):
            reply = text_reply(405, "only GET and HEAD are served")._replace(close=True)
        else:
            reply = page()
        await send_reply(send, reply)


async def send_reply(send: Send, reply: Reply) -> None:
    """Send it, and wait until little of it is left unsent."""
    headers = [
        (b"content-type", reply.content_type.encode()),
        (b"content-length", str(sum(map(len, reply.parts))).encode()),
        *reply.headers,
        *([(b"connection", b"close")] if reply.close else []),
    ]
    try:
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        for part in reply.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})  # only now uvicorn waits for what it has of the last part
    except RuntimeError:  # uvloop's, where the caller is gone
        await asyncio.sleep(0)  # until uvicorn knows that, too: else it would log an answer that was not finished
