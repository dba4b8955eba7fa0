"""An object store far away, on this machine: moto's S3 server, and in front of it a proxy that has trouble.

The proxy adds ``delay_s`` to each answer, answers "slow down" (503) at random with the chance ``failing`` and to what
is more than ``most_per_s`` requests a second, and refuses whoever does not have one of ``keys``, as ``refusal`` says.
For as long as somebody says so, it is ``away`` and drops each connection, or is ``refusing`` each request. It keeps
each object that it has fetched once, so that what is measured is not how slow moto is.

Usage: with DistantS3(delay_s=0.04) as store: store.put("a.tfrecord", data); store.uri("a.tfrecord")
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from types import TracebackType

BUCKET = "shards"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_FIRST_ATTEMPT = re.compile(r"(?i)^amz-sdk-request: attempt=1\b", re.MULTILINE)
_KEY = re.compile(r"(?i)^authorization: .*Credential=([^/]+)/", re.MULTILINE)
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class DistantS3:
    """See the module's docstring. What is changed of its settings holds from then on."""

    def __init__(self, delay_s: float = 0.0, failing: float = 0.0, seed: int = 0) -> None:
        self.delay_s, self.failing = delay_s, failing
        self.away = self.refusing = False
        self.most_per_s: float | None = None
        self.keys: set[str] | None = None
        """Access keys that are taken; None: all."""
        self.refusal = (403, "AccessDenied", "Access Denied")
        """Status, S3's code, and message."""
        self.asked: Counter[str] = Counter()
        """Requests by method, without those that a client repeats by itself; and as "failed", "refused" and "away"
        what was."""
        self.refused: Counter[str] = Counter()
        """Requests that were refused, by access key."""
        self.most_at_once = 0
        """How many requests waited for ``delay_s`` at the same time, at most."""
        self._waiting = 0
        self._tokens, self._tokens_s = 0.0, time.monotonic()
        self._random = random.Random(seed)
        self._objects: dict[str, tuple[dict[str, str], bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="distant-s3")

    def __enter__(self) -> DistantS3:
        self._moto = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
        )
        assert self._moto.stdout is not None
        self._moto_url = f"http://127.0.0.1:{int(self._moto.stdout.readline())}"
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        self._ask("PUT", f"/{BUCKET}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._moto.kill()
        self._moto.communicate()

    def put(self, name: str, data: bytes) -> None:
        """Make an object, or replace it, behind the proxy's back."""
        self._ask("PUT", f"/{BUCKET}/{name}", data)
        self._objects.pop(f"/{BUCKET}/{name}", None)

    def uri(self, address: str, user: str = "", query: str = "") -> str:
        """The URI of an object, or of a glob."""
        return f"s3://{user}{BUCKET}/{address}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1{query}"

    def _ask(self, method: str, path: str, data: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        # moto takes any signature; without one, it would not let anonymous users write
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=someone/20260101/us-east-1/s3/aws4_request"}
        headers["Content-Type"] = "application/octet-stream"
        request = urllib.request.Request(self._moto_url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    # ------------------------------------------------------------------------------------------- the proxy

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                if self.away:
                    self.asked["away"] += 1
                    break
                self.asked[method] += _FIRST_ATTEMPT.search(head) is not None
                self._waiting += 1
                self.most_at_once = max(self.most_at_once, self._waiting)
                await asyncio.sleep(self.delay_s)
                self._waiting -= 1
                if (key := self._refused_key(head)) is not None:
                    self.asked["refused"] += 1
                    self.refused[key] += 1
                    status, code, text = self.refusal
                    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
                    self._answer(writer, status, {"Content-Type": "application/xml"}, body, method)
                elif self._is_too_much() or self._random.random() < self.failing:
                    self.asked["failed"] += 1
                    self._answer(writer, 503, {"Content-Type": "application/xml"}, _SLOW_DOWN, method)
                else:
                    found = re.search(r"(?i)^range: bytes=(\d+)-(\d+)", head, re.MULTILINE)
                    self._answer(writer, *await self._get(method, path, found), method)
                await writer.drain()
        writer.close()

    def _refused_key(self, head: str) -> str | None:
        """The access key of a request, if it is not taken."""
        found = _KEY.search(head)
        key = found[1] if found else ""
        return key if self.refusing or (self.keys is not None and key not in self.keys) else None

    def _is_too_much(self) -> bool:
        """Whether a request is one more than ``most_per_s``; a tenth of a second's worth may come at once."""
        if self.most_per_s is None:
            return False
        now_s = time.monotonic()
        self._tokens += (now_s - self._tokens_s) * self.most_per_s
        self._tokens, self._tokens_s = min(self._tokens, max(1.0, self.most_per_s / 10)), now_s
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False

    async def _get(self, method: str, path: str, wanted: re.Match[str] | None) -> tuple[int, dict[str, str], bytes]:
        if "?" in path or path.count("/") < 2:
            return await asyncio.to_thread(self._ask, method, path)
        if path not in self._objects:
            status, headers, body = await asyncio.to_thread(self._ask, "GET", path)
            if status != 200:
                return status, headers, body
            self._objects[path] = headers, body
        headers, body = self._objects[path]
        if wanted is None:
            return 200, headers, body
        first, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        return 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"}, body[first : last + 1]

    def _answer(
        self, writer: asyncio.StreamWriter, status: int, headers: dict[str, str], body: bytes, method: str
    ) -> None:
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date")
        }
        lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *(f"{n}: {v}" for n, v in kept.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if method != "HEAD":
            writer.write(body)
