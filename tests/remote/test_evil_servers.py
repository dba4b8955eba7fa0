"""What a server may send that is broken, or wants to harm: an error that names it, in bounded time and memory."""

from __future__ import annotations

import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

import loaderd
from loaderd.errors import (
    LoaderdError,
    NoShardsError,
    ServerError,
    ShardReadError,
    StorageError,
    WorkerError,
    to_wire,
)
from loaderd.remote.calls import Calls
from loaderd.remote.servers import Servers
from loaderd.remote.source import Settings
from loaderd.remote.tables import table_from_wire
from loaderd.remote.tickets import RowsTicket
from tests.remote.evil_server import Endless, EvilServer, answer

ROW_BYTES = 100
TICKET = RowsTicket("digest", np.array([[0, 0, 0, 8]]))
ROWS = f"loaderd-rows: 8 x {ROW_BYTES}"
NO_FAULTS = "loaderd-fault-bytes: 0"
BODY = bytes(8 * ROW_BYTES)
LENGTH = f"content-length: {len(BODY)}"
MOST_MEMORY = 32 << 20

Start = Callable[..., EvilServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an EvilServer."""
    servers: list[EvilServer] = []

    def start(parts: Iterable[bytes], pause_s: float = 0.0) -> EvilServer:
        servers.append(EvilServer(parts, pause_s))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def fault(*rows: Any) -> bytes:
    return msgpack.packb([[list(rows), to_wire(ShardReadError("gone"))]])


def with_faults(data: bytes) -> bytes:
    return answer(ROWS, f"loaderd-fault-bytes: {len(data)}", f"content-length: {800 + len(data)}", body=BODY + data)


def refused(server: EvilServer, ask: Callable[[Calls, float], Any]) -> ServerError:
    """The error of a request that no later attempt would change, within a few seconds and some memory."""
    servers = Servers((server.address,), Settings(), lambda text: None)
    tracemalloc.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(ServerError) as caught:
            servers.ask(ask, 300.0)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began_s < 10 and server.num_requests == 1
    assert server.address in str(caught.value)
    return caught.value


def rows(calls: Calls, timeout_s: float) -> Any:
    return calls.rows("train", TICKET, ROW_BYTES, timeout_s)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([answer(LENGTH, NO_FAULTS, body=BODY)], "sent rows of None, expected '8 x 100'"),
        ([answer("loaderd-rows: 8 x 0", NO_FAULTS, "content-length: 0")], "sent rows of '8 x 0'"),
        ([answer("loaderd-rows: all of them", NO_FAULTS, LENGTH, body=BODY)], "rows of 'all of them'"),
        ([answer(ROWS, NO_FAULTS, "content-length: 99999999999")], "content-length '99999999999'"),
        ([answer(ROWS, NO_FAULTS, "content-length: many", body=BODY)], "content-length 'many'"),
        ([answer(ROWS, NO_FAULTS, "content-length: -1", body=BODY)], "content-length '-1'"),
        ([answer(ROWS, NO_FAULTS, "content-length: 799", body=BODY)], "sent 799 bytes, expected 800"),
        ([answer(ROWS, NO_FAULTS, body=BODY)], "content-length ''"),
        ([answer(ROWS, LENGTH, body=BODY)], "loaderd-fault-bytes ''"),
        ([answer(ROWS, "loaderd-fault-bytes: 801", LENGTH, body=BODY)], "bytes, expected 800"),
        ([answer(ROWS, "loaderd-fault-bytes: 99999999", LENGTH, body=BODY)], "loaderd-fault-bytes '99999999'"),
        ([answer(ROWS, NO_FAULTS, LENGTH, "content-encoding: gzip", body=BODY)], "an answer in 'gzip'"),
        ([answer(ROWS, NO_FAULTS, "transfer-encoding: chunked", body=b"ffffffff\r\n")], "content-length ''"),
        ([answer(NO_FAULTS, "content-type: text/html", "content-length: 5", body=b"hello")], "rows of None"),
        ([answer("content-length: 5", body=b"hello", status="404 Not Found")], "answers with status 404"),
        ([answer("content-length: 9999999999", status="404 Not Found")], "answers with status 404"),
        ([answer("content-length: 0", "location: http://elsewhere:1/", status="302 Found")], "leads to another"),
        ([answer("content-length: 0", "location: /v1/train/rows", status="308 Permanent")], "leads to another"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "expected an HTTP answer"),
        ([b"HTTP/1.1 abc def\r\n\r\n"], "expected an HTTP answer"),
        (Endless(b"x" * 65536), "expected an HTTP answer"),
        (Endless(b"x" * 65536, b"HTTP/1.1 200 OK\r\nName: "), "expected an HTTP answer"),
        (Endless(b"Name: value\r\n" * 100, b"HTTP/1.1 200 OK\r\n"), "expected an HTTP answer"),
        ([with_faults(b"\xc1")], "faults that cannot be read"),
        ([with_faults(fault("one"))], "a row that was not asked for"),
        ([with_faults(fault(8))], "a row that was not asked for"),
        ([with_faults(fault(-1))], "a row that was not asked for"),
        ([with_faults(msgpack.packb([[[1], "no error"]]))], "faults that cannot be read"),
        ([with_faults(b"\x91" * 2000)], "faults that cannot be read"),
        ([with_faults(b"\xdd\xff\xff\xff\xff")], "faults that cannot be read"),
    ],
)  # fmt: skip
def test_rows_that_are_none_are_refused_once(start: Start, parts: Iterable[bytes], words: str):
    error = refused(start(parts), rows)
    assert words in error.message and error.hint


@pytest.mark.parametrize(
    ("parts", "pause_s"),
    [
        ([answer(ROWS, NO_FAULTS, LENGTH, body=BODY[:-1])], 0.0),  # it ends too early
        ([b""], 0.0),
        (Endless(b"", answer(ROWS, NO_FAULTS, LENGTH)), 0.1),  # nothing more comes
        (Endless(b"x", answer(ROWS, NO_FAULTS, LENGTH)), 0.1),  # it trickles
        (Endless(b"x", b"HTTP/1.1 200 OK\r\nName: "), 0.1),
        (Endless(b"HTTP/1.1 100 Continue\r\n\r\n"), 0.01),
    ],
)
def test_an_answer_that_does_not_come_in_time_is_that_of_a_server_that_is_away(
    start: Start, parts: Iterable[bytes], pause_s: float
):
    """Another one is asked, or this one again; an attempt ends in its time, however little comes at a time."""
    server = start(parts, pause_s)
    servers = Servers((server.address,), Settings(), lambda text: None)
    began_s = time.monotonic()
    with pytest.raises(ServerError, match=r"no server has answered for 1 s; the last attempt: .*127\.0\.0\.1"):
        servers.ask(lambda calls, timeout_s: rows(calls, 1.0), 1.0)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("status", "error", "has_begun", "raised"),
    [
        (500, WorkerError("3 processes died"), True, WorkerError),
        (500, ServerError("its shards are gone"), True, ServerError),
        (500, NoShardsError("it matches no file"), False, NoShardsError),
        (500, NoShardsError("it matches no file"), True, None),
        (503, StorageError("the bucket does not answer"), False, None),
    ],
)
def test_errors_of_a_server_are_raised_at_once_unless_they_may_pass(
    start: Start, status: int, error: LoaderdError, has_begun: bool, raised: type[LoaderdError] | None
):
    body = msgpack.packb({"error": to_wire(error)})
    server = start([answer(f"content-length: {len(body)}", body=body, status=f"{status} x")])
    servers = Servers((server.address,), Settings(), lambda text: None, has_begun)
    words = error.message if raised else f"no server has answered for 1 s; the last attempt: .*{error.message}"
    with pytest.raises(raised or ServerError, match=words):
        servers.ask(rows, 1.0)
    assert (server.num_requests == 1) == bool(raised)


def test_cookies_are_not_kept(start: Start):
    seen: list[bytes] = []

    class Noting(EvilServer):
        def _answer(self, sock: Any) -> None:
            with sock:
                for _ in range(2):
                    seen.append(sock.recv(1 << 16))
                    sock.sendall(answer("set-cookie: who=you", "content-length: 2", body=b"{}"))

    server = Noting([])
    calls = Calls(server.address, Settings())
    assert calls.status(5.0) == calls.status(5.0) == {}
    server.close()
    assert len(seen) == 2 and not any(b"ookie" in each for each in seen)


@pytest.fixture(scope="module")
def table(server: Any) -> dict[str, Any]:
    """What an honest server says of its data set."""
    return dict(
        msgpack.unpackb(Calls(server.address, Settings()).table("train", None, {}, 20.0), strict_map_key=False)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"row_bytes": 0},
        {"row_bytes": -1},
        {"row_bytes": 1 << 62},
        {"row_bytes": "many"},
        {"counts": []},
        {"counts": [[0, zlib.compress(bytes(64 << 20))]]},
        {"counts": [[1 << 40, zlib.compress(bytes(64 << 20))]]},
        {"counts": [[1 << 26, zlib.compress(bytes(1 << 20))]] * 1000},
        {"counts": [[-1, b""]]},
        {"counts": [["one", b""]]},
        {"counts": [[1, b"no zlib"]]},
        {"num_shards": "some"},
        {"of": 7},
        {"listing": "all"},
        {"damages": [{"shard": "x"}]},
        {"digest": None, "shards": 1 << 50},
        {"schema": {}},
        {"schema": None},
        {"tree": {"concat": []}},
        {"tree": {"mix": {}, "weights": [[0, {"a": [1, 0]}]], "epoch_records": 1}},
        {"tree": None},
    ],
)
def test_tables_that_are_none_are_refused(table: dict[str, Any], changed: dict[str, Any]):
    assert table_from_wire(msgpack.packb(table), "here")
    tracemalloc.start()
    try:
        with pytest.raises(ServerError, match="the description of the data set from http://evil cannot be read"):
            table_from_wire(msgpack.packb({**table, **changed}), "http://evil")
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("numbers", [(1, 1), (2.5, 1), (True, 1), (1, 0), (1, 2.0), (1, 1 << 63)])
def test_drawings_that_are_none_are_refused(table: dict[str, Any], numbers: tuple[Any, Any]):
    ((num_blocks, _),) = table["counts"]
    masses = zlib.compress(np.ones(num_blocks, "<i8").tobytes())
    wire = msgpack.packb({**table, "drawings": [[*numbers, masses, None]]})
    if numbers == (1, 1) and type(numbers[0]) is int:
        assert table_from_wire(wire, "here").drawings[0]
    else:
        with pytest.raises(ServerError, match="cannot be read"):
            table_from_wire(wire, "here")


def test_a_table_without_end_is_not_read(start: Start):
    for sent in (answer("content-length: 99999999999"), answer("transfer-encoding: chunked")):
        error = refused(start(Endless(b"x" * 65536, sent)), lambda calls, s: calls.table("train", None, {}, s))
        assert "content-length" in error.message


@pytest.mark.parametrize(
    "parts",
    [[answer("content-length: 5", body=b"hello")], [b"220 mail.example ESMTP\r\n"], [answer("content-length: 0")]],
)
def test_a_training_ends_at_once_at_a_server_that_is_none_of_ours(start: Start, parts: Iterable[bytes]):
    server = start(parts)
    began_s = time.monotonic()
    with pytest.raises(ServerError, match=r"127\.0\.0\.1"):
        loaderd.connect(server.address, "train", batch_size=8, workers=1)
    assert time.monotonic() - began_s < 30
