"""The HTTP server's app: rows of data sets for consumers on other machines (``remote.tickets`` has the requests).

::

    request ──► token? ──► size? ──► admitted? ──► body ──► a thread makes the rows ──► sent
                 401         413      503: full              the caller goes, or 30 s are over: stopped

Nothing of a request's body is read before its token is right, and no body is inflated. Each process of the server
answers any request, and keeps nothing that could be lost: an answer follows from its ticket. A process that dies, or
whose rows make no progress for a minute, is replaced by the supervisor; its callers ask again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs

import msgpack

from loaderd.errors import BusyError, LoaderdError, OptionError, ServerError, StorageError, to_wire
from loaderd.remote.tickets import (
    BYTES,
    CONSUMER,
    JSON,
    MAX_SHARDS_BYTES,
    MAX_TICKET_BYTES,
    MSGPACK,
    NUM_FAULT_BYTES,
    SHAPE,
    SHARD_BYTES,
    ConsumerName,
    RowFault,
    RowsTicket,
    checked_listing,
    decode_map,
    encode_faults,
)
from loaderd.serve.bandwidth import Bandwidth
from loaderd.serve.counters import Counters, RateLimitedLog
from loaderd.serve.datasets import NotReady, OtherData, ServedDataset, ServedListing
from loaderd.serve.deaths import STUCK_STATUS, Deaths
from loaderd.serve.metrics import Sample
from loaderd.serve.replies import Receive, Reply, Scope, Send, health_reply, send_reply
from loaderd.serve.row_maker import Rows
from loaderd.version import VERSION

MAKERS = 2
"""Threads of a process that make rows: while one waits for storage, another computes."""
_MOST_WAITING = 32
_MOST_UNSENT_BYTES = 256 << 20
"""Of answers that a process has made, and that their callers have not read yet."""
_MAKE_LIMIT_S = 30.0
_STUCK_S = 60.0
_BODY_LIMIT_S = 10.0

_Made = tuple[Rows, list[RowFault]]

_logger = logging.getLogger("loaderd")


class _Refused(Exception):
    def __init__(self, status: int, error: LoaderdError, *headers: tuple[bytes, bytes], close: bool = False) -> None:
        super().__init__(str(error))
        self.status, self.error, self.headers, self.close = status, error, headers, close


class _Gone(Exception):
    """Nobody waits for the answer any more."""


class _TooLong(Exception):
    """The rows of a ticket take too long."""


class RowsApp:
    """The app of one process. ``tokens``: any of these will do; none: none is needed."""

    def __init__(
        self,
        datasets: dict[str, ServedDataset],
        tokens: list[str],
        counters: Counters,
        deaths: Deaths,
        bandwidth: Bandwidth | None,
    ) -> None:
        self._datasets = datasets
        self._tokens = [f"Bearer {token}".encode() for token in tokens]
        self._counters = counters
        self._deaths = deaths
        self._bandwidth = bandwidth
        self._say_failed = RateLimitedLog()
        self._makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="rows")
        self._waiting = self._unsent_bytes = 0
        self._busy: dict[int, float] = {}
        """Of each thread that makes rows: when it last made progress."""
        self.pages = {
            "/livez": lambda: health_reply(""),
            "/readyz": lambda: health_reply(self.why_not()),
            "/metrics": self._metrics,
            "/v1": self._report_page,
        }
        """For ``HealthPages``."""
        self.expires_s: float | None = None
        """When its certificate expires, as a Unix time; None: it has none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            reply = await self._answer(scope, receive)
        except _Gone:
            return
        except _Refused as refused:
            reply = self._refusal(scope, refused)
        except Exception as error:
            self._say_failed("a request failed: " + "".join(traceback.format_exception(error)).rstrip())
            lacks_threads = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
            may_pass = lacks_threads or isinstance(error, (MemoryError, OSError))  # or it is another's fault
            status = 503 if may_pass else 500
            reply = self._refusal(scope, _Refused(status, ServerError(f"the request failed: {type(error).__name__}")))
        num_bytes = sum(map(len, reply.parts))
        self._unsent_bytes += num_bytes
        try:
            await send_reply(send, reply)
        finally:
            self._unsent_bytes -= num_bytes

    def _refusal(self, scope: Scope, refused: _Refused) -> Reply:
        """An error as the caller's kind of map."""
        if refused.status in (401, 413, 415):
            self._counters.refused(_host(scope), refused.error.message)
        wire = {"error": to_wire(refused.error)}
        wants_msgpack = _header(scope, b"accept") == MSGPACK.encode() or (
            _header(scope, b"content-type") == MSGPACK.encode()
        )
        body: bytes = msgpack.packb(wire) if wants_msgpack else f"{json.dumps(wire)}\n".encode()
        return Reply(refused.status, MSGPACK if wants_msgpack else JSON, (body,), refused.headers, refused.close)

    # ------------------------------------------------------------------------------------------ requests

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        method, path = scope["method"], scope["path"]
        if path in ("/livez", "/readyz"):  # they need no token, and tell nothing else
            _require_method(method, "GET")
            return self.pages[path]()
        self._check_token(scope)
        if path == "/metrics":
            return self._metrics()
        words = path.strip("/").split("/")
        if words[0] != "v1":
            raise _Refused(404, ServerError("there is /v1, /livez, /readyz and /metrics", hint=_OTHER_VERSION))
        if len(words) == 1:
            _require_method(method, "GET")
            return self._report_page()
        dataset = self._datasets.get(words[1])
        if dataset is None:
            names = ", ".join(self._datasets)
            raise _Refused(404, ServerError(f"there is no data set {words[1][:100]!r}; this server has: {names}"))
        try:
            if len(words) == 2:
                _require_method(method, "GET")
                return await self._table(scope, dataset)
            if len(words) == 3 and words[2] == "rows":
                _require_method(method, "POST")
                return await self._rows(scope, receive, dataset)
            if len(words) == 3:
                _require_method(method, "PUT")
                shards = await _body(scope, receive, MAX_SHARDS_BYTES)
                if not shards or len(shards) % SHARD_BYTES:
                    raise OptionError(f"the shards of a table have {SHARD_BYTES} bytes each, got {len(shards)} bytes")
                await dataset.add(words[2], shards)
                return Reply(204, BYTES)
            raise _Refused(404, ServerError(f"there is nothing at {path[:200]!r}", hint=_OTHER_VERSION))
        except NotReady as error:
            raise _Refused(503, BusyError(str(error)), (b"retry-after", b"1")) from None
        except OtherData as error:
            raise _Refused(409, error) from None
        except OptionError as error:
            raise _Refused(400, error) from None
        except LoaderdError as error:
            error.traceback = ""  # it would tell a consumer where files are
            raise _Refused(503 if isinstance(error, StorageError) else 500, error) from None

    def _check_token(self, scope: Scope) -> None:
        """All tokens are compared, whichever is right, and in a time that tells nothing of them."""
        if not self._tokens:
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        value = shown[0] if len(shown) == 1 else b""
        if not any([hmac.compare_digest(value, token) for token in self._tokens]):
            error = ServerError("the token is missing, or wrong", hint="Authorization: Bearer TOKEN")
            raise _Refused(401, error, (b"www-authenticate", b"Bearer"), close=True)

    def why_not(self) -> str:
        """Why consumers cannot be served now; "": they can. A data set that failed matters only if all have."""
        preparing = [name for name, each in self._datasets.items() if each.current is None and each.error is None]
        if preparing:
            return f"being prepared: {', '.join(preparing)}"
        if all(each.current is None for each in self._datasets.values()):
            return "no data set can be served"
        is_expired = self.expires_s is not None and self.expires_s <= time.time()
        return "the certificate has expired" if is_expired else ""

    async def _table(self, scope: Scope, dataset: ServedDataset) -> Reply:
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        listing, belongs_to = None, {}
        if "listing" in query:
            listing = checked_listing(_json(query["listing"], "listing"))
        if "belongs_to" in query:
            belongs_to = decode_map(query["belongs_to"].encode(), JSON, "belongs_to")
        found = await dataset.of_position(listing, belongs_to)
        tag = f'"{hashlib.sha256(found.table).hexdigest()[:32]}"'.encode()
        headers = ((b"etag", tag), (b"cache-control", b"no-cache"))
        if _header(scope, b"if-none-match") == tag:
            return Reply(304, MSGPACK, (), headers)
        return Reply(200, MSGPACK, (found.table,), headers)

    async def _rows(self, scope: Scope, receive: Receive, dataset: ServedDataset) -> Reply:
        if self._waiting >= _MOST_WAITING or self._unsent_bytes > _MOST_UNSENT_BYTES:
            raise NotReady("the server is full")
        self._waiting += 1
        try:
            body = await _body(scope, receive, MAX_TICKET_BYTES)
            ticket = RowsTicket.decode(body, _header(scope, b"content-type").decode("latin-1"))
            served = await dataset.of_ticket(ticket)
            served.check(ticket)
            rows, faults = await self._unless_gone(receive, self._make(served, ticket))
        finally:
            self._waiting -= 1
        behind = encode_faults(faults)
        consumer = ConsumerName.decode(_header(scope, CONSUMER.encode()).decode("latin-1"))
        consumer = _with_host(consumer, scope)
        self._counters.answered(dataset.name, consumer, len(rows), rows.nbytes + len(behind), faults)
        shape = f"{rows.shape[0]} x {rows.shape[1]}"
        headers = [
            (name.encode(), value.encode()) for name, value in ((SHAPE, shape), (NUM_FAULT_BYTES, str(len(behind))))
        ]
        return Reply(200, BYTES, (rows.reshape(-1).data, behind), tuple(headers))

    async def _unless_gone(self, receive: Receive, making: Coroutine[Any, Any, _Made]) -> _Made:
        """What ``making`` returns. Raises _Gone, and cancels it, where the caller goes meanwhile."""
        made, going = asyncio.ensure_future(making), asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({made, going}, return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                raise _Gone
            return made.result()
        finally:
            made.cancel()
            going.cancel()

    async def _make(self, served: ServedListing, ticket: RowsTicket) -> _Made:
        """The rows of a ticket, and what of it could not be had. If it is cancelled, the thread stops soon."""
        if self._bandwidth is not None:
            await self._bandwidth.wait(ticket.num_rows * served.row_bytes)
        stop = threading.Event()
        until_s = most_waited_s = 0.0

        def check(waited_s: float = 0.0) -> None:
            nonlocal most_waited_s
            self._busy[threading.get_ident()] = now_s = time.monotonic()
            most_waited_s = max(most_waited_s, waited_s)
            if stop.is_set():
                raise _Gone
            if now_s > until_s and most_waited_s > _MAKE_LIMIT_S / 3:  # it would take as long for fewer rows
                raise NotReady("storage, or rows that must be made first, take long")
            if now_s > until_s:
                raise _TooLong

        def make() -> _Made:
            nonlocal until_s
            until_s = time.monotonic() + _MAKE_LIMIT_S
            try:
                check()
                return served.make(ticket, check, self._deaths)
            finally:
                self._busy.pop(threading.get_ident(), None)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._makers, make)
        except _TooLong:
            text = f"the rows of a ticket took more than {_MAKE_LIMIT_S:g} s: ask for fewer at a time"
            raise _Refused(413, ServerError(text)) from None
        finally:
            stop.set()

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows: plain values."""
        datasets = [each.report() for each in self._datasets.values()]
        return {**self._counters.report(), "pid": os.getppid(), "datasets": datasets}

    def _report_page(self) -> Reply:
        return Reply(200, JSON, (f"{json.dumps(self.report())}\n".encode(),))

    def _metrics(self) -> Reply:
        gauges: list[Sample] = [("ready", "1 if consumers can be served, else 0", {}, float(not self.why_not()))]
        gauges.append(("build_info", "Always 1; the version is its label", {"version": VERSION}, 1.0))
        if self.expires_s is not None:
            about = "When the certificate expires, as a Unix time"
            gauges.append(("certificate_expires_seconds", about, {}, self.expires_s))
        for each in self._datasets.values():
            report, labels = each.report(), {"dataset": each.name}
            gauges.append(
                ("dataset_ready", "1 if the data set can be served", labels, float(report["state"] == "ready"))
            )
            gauges.append(("dataset_shards", "Shards of the data set", labels, report["num_shards"]))
            gauges.append(("dataset_records", "Records of an epoch of the data set", labels, report["num_records"]))
        return Reply(200, self._counters.content_type, (self._counters.page(gauges),))

    def tick(self) -> None:
        """To be called about once a second. Ends this process where rows make no progress: it is replaced."""
        for each in self._datasets.values():
            if each.current is not None:
                self._counters.asked_storage(each.name, each.current.opened.access.take_counts())
        now_s = time.monotonic()
        if any(now_s - since_s > _STUCK_S for since_s in list(self._busy.values())):
            _logger.critical(
                "rows have made no progress for %g s: storage hangs, or a derived field never ends. This process is "
                "replaced",
                _STUCK_S,
            )
            os._exit(STUCK_STATUS)


_OTHER_VERSION = "Is it a server of loaderd, of the same version?"


def _require_method(method: str, wanted: str) -> None:
    if method != wanted and not (method == "HEAD" and wanted == "GET"):
        raise _Refused(405, ServerError(f"this is for {wanted}"), (b"allow", wanted.encode()), close=True)


def _header(scope: Scope, name: bytes) -> bytes:
    """The value of a header; b"" where there is none, or there are several."""
    values = [value for each, value in scope["headers"] if each == name]
    return values[0] if len(values) == 1 else b""


def _host(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "somewhere"


def _with_host(consumer: ConsumerName, scope: Scope) -> ConsumerName:
    return consumer if consumer.host else consumer._replace(name=consumer.name or "(no name)", host=_host(scope))


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise OptionError(f"{what} must be JSON, got {text[:100]!r}") from None


async def _body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The body of a request. Raises _Refused where it is too large, encoded or slow."""
    if _header(scope, b"content-encoding") not in (b"", b"identity"):
        error = ServerError("a request's body must not be compressed: it would have to be inflated")
        raise _Refused(415, error, close=True)
    too_large = ServerError(f"a request's body must have at most {most_bytes:,} bytes")
    length = _header(scope, b"content-length") or b"0"
    if not length.isdigit() or len(length) > 12 or int(length) > most_bytes:
        raise _Refused(413, too_large, close=True)
    body = bytearray()

    async def read() -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body.extend(message.get("body", b""))
            if len(body) > most_bytes:
                raise _Refused(413, too_large, close=True)
            if not message.get("more_body"):
                return

    try:
        await asyncio.wait_for(read(), _BODY_LIMIT_S)
    except asyncio.TimeoutError:
        error = ServerError(f"the request's body did not come within {_BODY_LIMIT_S:g} s")
        raise _Refused(408, error, close=True) from None
    return bytes(body)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
