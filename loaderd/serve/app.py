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
import math
import os
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs

import msgpack

from loaderd.errors import BusyError, LoaderdError, OptionError, ServerError, StorageError, WorkerError, to_wire
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
from loaderd.serve.counters import Counters, RateLimitedLog
from loaderd.serve.datasets import NotReady, OtherData, ServedDataset, ServedListing
from loaderd.serve.deaths import MAX_DEATHS, STUCK_STATUS, Deaths
from loaderd.serve.metrics import Sample, samples_of_datasets, samples_of_totals
from loaderd.serve.replies import Receive, Reply, Scope, Send, health_reply, metrics_reply, send_reply, why_not_ready
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
_MOST_BANDWIDTH_WAIT_S = 5.0
_OTHER_VERSION = "Is it a server of loaderd, of the same version?"

_Made = tuple[Rows, list[RowFault]]

_logger = logging.getLogger("loaderd")


class _Refused(Exception):
    def __init__(self, status: int, error: LoaderdError, *headers: tuple[bytes, bytes], close: bool = False) -> None:
        super().__init__(str(error))
        self.status, self.error, self.headers, self.close = status, error, headers, close


class _Gone(Exception):
    """Nobody waits for the answer any more."""


class RowsApp:
    """The app of one process. ``tokens``: any of these will do; none: none is needed.

    ``bytes_per_s``: of rows; None: no limit. ``expires_s``: when its certificate expires, as a Unix time; None: it
    has none.
    """

    def __init__(
        self,
        datasets: dict[str, ServedDataset],
        tokens: list[str],
        counters: Counters,
        deaths: Deaths,
        bytes_per_s: float | None,
        expires_s: float | None,
    ) -> None:
        self._datasets = datasets
        self._tokens = [f"Bearer {token}".encode() for token in tokens]
        self._counters = counters
        self._deaths = deaths
        self._bytes_per_s = bytes_per_s
        self._next_s = 0.0
        """When the next answer may go: it is in the past while bytes are left over."""
        self._expires_s = expires_s
        self._say_failed = RateLimitedLog()
        self._makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="rows")
        self._waiting = self._unsent_bytes = 0
        self._busy: dict[int, float] = {}
        """Of each thread that makes rows: when it last made progress."""
        self.health_pages = {
            "/livez": lambda: health_reply(""),
            "/readyz": lambda: health_reply(self._why_not_ready()),
            "/metrics": lambda: metrics_reply(self._samples()),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        if refused.close:
            self._counters.refused(_host(scope), refused.error.message)
        wire = {"error": to_wire(refused.error)}
        if MSGPACK in (_header(scope, "accept"), _header(scope, "content-type")):
            return Reply(refused.status, MSGPACK, (msgpack.packb(wire),), refused.headers, refused.close)
        return _json_reply(wire, refused.status)._replace(headers=refused.headers, close=refused.close)

    # ------------------------------------------------------------------------------------------ requests

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        method, path = scope["method"], scope["path"]
        if path in ("/livez", "/readyz"):  # they need no token, and tell nothing else
            _require_method(method, "GET")
            return self.health_pages[path]()
        self._check_token(scope)
        if path == "/metrics":
            return self.health_pages[path]()
        version, *words = path.strip("/").split("/")
        if version != "v1" or len(words) > 2:
            error = ServerError("there is /v1, /livez, /readyz and /metrics", hint=_OTHER_VERSION)
            raise _Refused(404, error)
        if not words:
            _require_method(method, "GET")
            return _json_reply(self._report())
        dataset = self._datasets.get(words[0])
        if dataset is None:
            names = ", ".join(self._datasets)
            raise _Refused(404, ServerError(f"there is no data set {words[0][:100]!r}; this server has: {names}"))
        try:
            if len(words) == 1:
                _require_method(method, "GET")
                return await self._table(scope, dataset)
            if words[1] == "rows":
                _require_method(method, "POST")
                return await self._rows(scope, receive, dataset)
            _require_method(method, "PUT")
            shards = await _body(scope, receive, MAX_SHARDS_BYTES)
            if not shards or len(shards) % SHARD_BYTES:
                raise OptionError(f"the shards of a table have {SHARD_BYTES} bytes each, got {len(shards)} bytes")
            await dataset.add(words[1], shards)
            return Reply(204, BYTES)
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
        shown = _header(scope, "authorization").encode("latin-1")
        if self._tokens and not any([hmac.compare_digest(shown, token) for token in self._tokens]):
            error = ServerError("the token is missing, or wrong", hint="Authorization: Bearer TOKEN")
            raise _Refused(401, error, (b"www-authenticate", b"Bearer"), close=True)

    async def _table(self, scope: Scope, dataset: ServedDataset) -> Reply:
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        listing = checked_listing(_json(query["listing"])) if "listing" in query else None
        belongs_to = decode_map(query["belongs_to"].encode(), JSON, "belongs_to") if "belongs_to" in query else {}
        found = await dataset.of_position(listing, belongs_to)
        tag = f'"{hashlib.sha256(found.table).hexdigest()[:32]}"'
        headers = ((b"etag", tag.encode()), (b"cache-control", b"no-cache"))
        if _header(scope, "if-none-match") == tag:
            return Reply(304, MSGPACK, (), headers)
        return Reply(200, MSGPACK, (found.table,), headers)

    async def _rows(self, scope: Scope, receive: Receive, dataset: ServedDataset) -> Reply:
        if self._waiting >= _MOST_WAITING or self._unsent_bytes > _MOST_UNSENT_BYTES:
            raise NotReady("the server is full")
        self._waiting += 1
        try:
            body = await _body(scope, receive, MAX_TICKET_BYTES)
            ticket = RowsTicket.decode(body, _header(scope, "content-type"))
            served = await dataset.of_ticket(ticket)
            served.check_size(ticket)
            rows, faults = await _unless_gone(receive, self._make(dataset.name, served, ticket))
        finally:
            self._waiting -= 1
        behind = encode_faults(faults)
        consumer = ConsumerName.decode(_header(scope, CONSUMER))
        if not consumer.host:
            consumer = consumer._replace(name=consumer.name or "(no name)", host=_host(scope))
        self._counters.answered(dataset.name, consumer, len(rows), rows.nbytes + len(behind), faults)
        shape = f"{rows.shape[0]} x {rows.shape[1]}"
        headers = ((SHAPE.encode(), shape.encode()), (NUM_FAULT_BYTES.encode(), str(len(behind)).encode()))
        return Reply(200, BYTES, (rows.reshape(-1).data, behind), headers)

    async def _make(self, name: str, served: ServedListing, ticket: RowsTicket) -> _Made:
        """The rows of a ticket, and what of it could not be had. If it is cancelled, the thread stops soon."""
        await self._wait_for_bandwidth(ticket.num_rows * served.row_bytes)
        is_one = ticket.num_rows == 1
        key = _record_key(name, ticket) if is_one else ticket.encode()
        died, died_alone = self._deaths.of(key)
        is_lost = is_one and died_alone >= MAX_DEATHS
        if died and not is_one:
            error = WorkerError("a process of the server died while it made these rows: ask for fewer at a time")
            raise _Refused(413, error)
        stop = threading.Event()

        def make() -> _Made:
            until_s = math.inf

            def check() -> None:
                self._busy[threading.get_ident()] = now_s = time.monotonic()
                if stop.is_set():
                    raise _Gone
                if now_s > until_s and served.opened.access.outages.outage:  # it would take as long for fewer rows
                    raise NotReady("storage does not answer")
                if now_s > until_s:
                    text = f"the rows of a ticket took more than {_MAKE_LIMIT_S:g} s: ask for fewer at a time"
                    raise _Refused(413, ServerError(text))

            try:
                check()
                with self._deaths.working_at(key, check, alone=died > 0 and not is_lost):
                    until_s = time.monotonic() + _MAKE_LIMIT_S
                    return served.make(ticket, check, is_lost)
            finally:
                self._busy.pop(threading.get_ident(), None)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._makers, make)
        finally:
            stop.set()

    async def _wait_for_bandwidth(self, num_bytes: int) -> None:
        """Those of one second may go at once. Answers that wait here are not made yet, so they take no memory."""
        if self._bytes_per_s is None:
            return
        now_s = time.monotonic()
        begin_s = max(self._next_s, now_s - 1.0)
        if begin_s > now_s + _MOST_BANDWIDTH_WAIT_S:
            raise NotReady("the bandwidth is used up")
        self._next_s = begin_s + num_bytes / self._bytes_per_s
        await asyncio.sleep(begin_s - now_s)

    # ---------------------------------------------------------------------------------------- monitoring

    def _why_not_ready(self) -> str:
        if self._expires_s is not None and self._expires_s <= time.time():
            return "the certificate has expired"
        reports = [each.report() for each in self._datasets.values()]
        # Strangers read it: no error, which may name files.
        return why_not_ready({**each, "state": each["state"].partition(":")[0]} for each in reports)

    def _report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows: plain values."""
        datasets = [each.report() for each in self._datasets.values()]
        return {**self._counters.report(), "pid": os.getppid(), "datasets": datasets}

    def _samples(self) -> list[Sample]:
        report = self._report()
        found: list[Sample] = [
            ("ready", "1 if consumers can be served, else 0", {}, float(not self._why_not_ready())),
            ("build_info", "Always 1; the version is its label", {"version": VERSION}, 1.0),
        ]
        if self._expires_s is not None:
            about = "When the certificate expires, as a Unix time"
            found.append(("certificate_expires_seconds", about, {}, self._expires_s))
        return [*found, *samples_of_datasets(report["datasets"]), *samples_of_totals(report["totals"])]

    def tick(self) -> None:
        """To be called about once a second. Ends this process where rows make no progress: it is replaced."""
        for each in self._datasets.values():
            if each.current is not None:
                counts = each.current.opened.access.take_counts()
                self._counters.asked_storage(each.name, counts.requests, counts.retries)
        now_s = time.monotonic()
        if any(now_s - since_s > _STUCK_S for since_s in list(self._busy.values())):
            _logger.critical(
                "rows have made no progress for %g s: storage hangs, or a derived field never ends. This process is "
                "replaced",
                _STUCK_S,
            )
            os._exit(STUCK_STATUS)


def _require_method(method: str, wanted: str) -> None:
    if method != wanted and not (method == "HEAD" and wanted == "GET"):
        raise _Refused(405, ServerError(f"this is for {wanted}"), (b"allow", wanted.encode()), close=True)


def _header(scope: Scope, name: str) -> str:
    """The value of a header; "" where there is none, or there are several."""
    values = [value for each, value in scope["headers"] if each == name.encode()]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _record_key(name: str, ticket: RowsTicket) -> bytes:
    """Of a ticket for one row. It has no epoch: a record that kills processes does so in each."""
    _, block, record, _ = ticket.rows[0].tolist()
    return repr((name, ticket.data, block, record)).encode()


def _host(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "somewhere"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise OptionError(f"listing must be JSON, got {text[:100]!r}") from None


def _json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, JSON, (f"{json.dumps(value)}\n".encode(),))


async def _body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The body of a request. Raises _Refused where it is too large, encoded or slow."""
    if _header(scope, "content-encoding") not in ("", "identity"):
        error = ServerError("a request's body must not be compressed: it would have to be inflated")
        raise _Refused(415, error, close=True)
    too_large = ServerError(f"a request's body must have at most {most_bytes:,} bytes")
    length = _header(scope, "content-length") or "0"
    if not (length.isascii() and length.isdigit()) or len(length) > 12 or int(length) > most_bytes:
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


async def _unless_gone(receive: Receive, making: Coroutine[Any, Any, _Made]) -> _Made:
    """What ``making`` returns. Raises _Gone, and cancels it, where the caller goes meanwhile."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    made, going = asyncio.ensure_future(making), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({made, going}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise _Gone
        return made.result()
    finally:
        made.cancel()
        going.cancel()
