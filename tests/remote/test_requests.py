"""What the server on the network is asked, and what it refuses: each request as bytes, at a real server."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest
import urllib3

import loaderd
from loaderd.errors import LoaderdError, OptionError
from loaderd.remote.calls import Calls
from loaderd.remote.source import Settings
from loaderd.remote.tables import Table, table_from_wire
from loaderd.remote.tickets import MAX_TICKET_BYTES, MSGPACK, SHARD_BYTES, RowsTicket
from loaderd.serve.app import RowsApp
from loaderd.serve.datasets import ServedDataset
from tests.helpers.serving import wait_until
from tests.reliability.processes import own_mib
from tests.remote.network_server import NetworkServer

TOKEN, OTHER_TOKEN = "n0t-f0r-everybody", "an0ther-one-for-later"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two tokens."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(f"{TOKEN}\n{OTHER_TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Any, tokens: Path) -> Iterator[NetworkServer]:
    folder = tmp_path_factory.mktemp("server")
    write_numbered_to(folder / "shards", [300, 400, 300])
    started = NetworkServer(folder, "--token-file", str(tokens), "--max-connections", "50")
    yield started
    started.close()


@pytest.fixture(scope="module")
def calls(server: NetworkServer) -> Calls:
    return Calls(server.address, Settings(TOKEN))


@pytest.fixture(scope="module")
def table(calls: Calls) -> Table:
    return table_from_wire(calls.table("train", None, {}, 10.0), "here")


@pytest.fixture(autouse=True)
def consumer(server: NetworkServer) -> Iterator[None]:
    """Reads beside each test, and must notice nothing."""
    over = threading.Event()
    counts: list[int] = []

    def read() -> None:
        while not (over.is_set() and counts):
            with loaderd.connect(server.address, "train", batch_size=100, workers=1, token=TOKEN) as loader:
                counts.append(sum(batch.num_records for batch in loader))

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: len(server.server.processes()) == 2)  # "connect with" comes when the first of them is ready
    before = server.server.processes()
    yield
    over.set()
    thread.join()
    assert set(counts) == {1000}
    assert server.server.processes() == before, "a process was replaced"


def request(server: NetworkServer, method: str, path: str, token: str | None = TOKEN, **options: Any) -> Any:
    headers = {**({} if token is None else {"authorization": f"Bearer {token}"}), **options.pop("headers", {})}
    return urllib3.request(method, server.address + path, headers=headers, retries=False, timeout=20.0, **options)


def says(server: NetworkServer, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What the server answers to bytes, until it ends the connection."""
    with socket.create_connection(("127.0.0.1", server.port), 30.0) as sock:
        with contextlib.suppress(OSError):
            for part in parts:
                sock.sendall(part)
                time.sleep(pause_s)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                answer += data
        return bytes(answer)


def head(method: str, path: str, *lines: str, token: str | None = TOKEN) -> bytes:
    own = [] if token is None else [f"Authorization: Bearer {token}"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *own, *lines, "", ""]).encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("token", [TOKEN, OTHER_TOKEN])
def test_each_of_the_tokens_will_do(server: NetworkServer, token: str):
    assert request(server, "GET", "/v1", token).json()["datasets"][0]["name"] == "train"


@pytest.mark.parametrize("token", [None, "", "wrong", f"{TOKEN}x", TOKEN[:-1]])
def test_without_a_token_nothing_of_the_body_is_read(server: NetworkServer, token: str | None):
    """The answer comes before the body, of which there would be gigabytes."""
    answer = says(server, head("POST", "/v1/train/rows", "Content-Length: 9999999999", token=token))
    assert status_of(answer) == 401 and b"the token is missing, or wrong" in answer


def test_health_tells_strangers_no_paths():
    served = ServedDataset("train", "m:train", Mock(), Mock(), None)
    served.error = LoaderdError("/secret/customers/*.bin matches no file")
    app = RowsApp({"train": served}, [TOKEN], Mock(), Mock(), None, None)
    served.dataset.leaves.return_value = [Mock(schema=Mock(specs={}))]
    assert app.health_pages["/readyz"]().parts == (b"train: failed\n",)


def test_health_needs_no_token_and_everything_else_does(server: NetworkServer):
    for path in ("/livez", "/readyz"):
        assert request(server, "GET", path, None).status == 200
    for path in ("/v1", "/v1/train", "/metrics", "/v1/nothing", "/"):
        assert request(server, "GET", path, None).status == 401
    for path, status in (("/livez", 200), ("/readyz", 200), ("/metrics", 200), ("/v1", 404), ("/v1/train", 404)):
        assert urllib3.request("GET", f"{server.server.health}{path}", retries=False).status == status


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Content-Length: 262145"], 413),
        (["Content-Length: 9999999999999"], 413),
        (["Content-Encoding: gzip", "Content-Length: 5"], 415),
        (["Content-Encoding: zstd", "Content-Length: 5"], 415),
    ],
)
def test_bodies_that_are_not_read(server: NetworkServer, lines: list[str], status: int):
    assert status_of(says(server, head("POST", "/v1/train/rows", *lines))) == status


def test_a_body_that_grows_is_cut(server: NetworkServer):
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    answer = says(server, head("POST", "/v1/train/rows", "Transfer-Encoding: chunked"), *[chunk] * 10)
    assert not answer or status_of(answer) == 413  # it may be reset while it is still sent


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": []}, "rows must be"),
        ({"rows": [[0, 0, 0, 1]] * 8193}, "rows must be"),
        ({"rows": [[0, 0, 1, 1]]}, "rows must be"),
        ({"rows": [[0, 0, 0, 1 << 61]]}, "65536 records"),
        ({"rows": [[0, 0, 0, 5], [0, 0, 4, 6]]}, "record 4 of block 0 twice"),
        ({"rows": [[0, 9999, 0, 1]]}, "record 0 of block 9999, which is not in the data"),
        ({"rows": [[0, 0, 0, 17]]}, "record 16 of block 0, which is not in the data"),
        ({"rows": "all"}, "rows must be"),
        ({"protocol": 1}, "speaks protocol 2, and the consumer 1"),
        ({"more": 1}, "a ticket may have"),
    ],
)
def test_tickets_that_are_none(server: NetworkServer, table: Table, changed: dict[str, Any], words: str):
    ticket = {"data": table.digest, "rows": [[0, 0, 0, 5]], **changed}
    for kind, body in ((MSGPACK, msgpack.packb(ticket)), ("application/json", json.dumps(ticket).encode())):
        answer = request(server, "POST", "/v1/train/rows", body=body, headers={"content-type": kind})
        error = (msgpack.unpackb(answer.data) if kind == MSGPACK else answer.json())["error"]
        assert answer.status == 400 and error["class"] == "OptionError" and words in error["message"], error


@pytest.mark.parametrize("protocol", [1, 3])
def test_a_consumer_of_another_protocol_is_told(calls: Calls, table: Table, protocol: int):
    """Of the one before, and of the one after."""
    ticket = RowsTicket(table.digest, np.array([[0, 0, 0, 5]]), protocol=protocol)
    with pytest.raises(OptionError, match=f"this server speaks protocol 2, and the consumer {protocol}") as caught:
        calls.rows("train", ticket, table.schema.row_bytes, 20.0)
    assert "the same version of loaderd on both sides" in caught.value.hint


def test_a_ticket_of_other_data(server: NetworkServer):
    body = json.dumps({"data": "of-others", "rows": [[0, 0, 0, 5]]})
    answer = request(server, "POST", "/v1/train/rows", body=body)
    assert answer.status == 409 and "other data 'train' than are asked for" in answer.json()["error"]["message"]


def test_a_table_that_has_not_changed_is_not_sent_again(server: NetworkServer):
    first = request(server, "GET", "/v1/train")
    again = request(server, "GET", "/v1/train", headers={"if-none-match": first.headers["etag"]})
    assert (first.status, again.status, again.data) == (200, 304, b"")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v2/train", 404),
        ("GET", "/", 404),
        ("GET", "/v1/train/rows", 405),
        ("POST", "/v1/train", 405),
        ("DELETE", "/v1", 405),
        ("POST", "/readyz", 405),
        ("PUT", "/v1/train/x", 400),
    ],
)
def test_what_there_is_not(server: NetworkServer, method: str, path: str, status: int):
    answer = request(server, method, path)
    assert answer.status == status and answer.json()["error"]["message"]


def test_shards_that_the_server_does_not_have(server: NetworkServer):
    answer = request(server, "PUT", "/v1/train/x", body=bytes(SHARD_BYTES))
    assert answer.status == 409 and "are gone" in answer.json()["error"]["message"]


def test_records_one_by_one_are_those_of_whole_blocks(calls: Calls, table: Table):
    """In any order; and the work is that of a few blocks, not of a thousand."""
    row_bytes, blocks = table.schema.row_bytes, len(table.counts[0])
    whole = np.array([[0, block, 0, count] for block, count in enumerate(table.counts[0].tolist())])
    expected, faults = calls.rows("train", RowsTicket(table.digest, whole), row_bytes, 20.0)
    ends = np.cumsum(table.counts[0])
    single = np.array(
        [[0, block, record, record + 1] for block in range(blocks) for record in range(int(table.counts[0][block]))]
    )
    order = np.random.default_rng(0).permutation(len(single))
    rows, more = calls.rows("train", RowsTicket(table.digest, single[order]), row_bytes, 20.0)
    assert not faults and not more and ends[-1] == 1000
    assert np.array_equal(rows, expected[order])


# ------------------------------------------------------------------------------------ those who only cost


def test_idle_connections_shut_nobody_out(server: NetworkServer):
    """Of more than there may be, the oldest that are idle are closed."""
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        for _ in range(5):
            assert request(server, "GET", "/v1").status == 200
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "said", [b"", b"GET /v1 HTTP/1.1\r\nHost:", head("POST", "/v1/train/rows", "Content-Length: 9")]
)
def test_who_says_too_little_is_cut_off(server: NetworkServer, said: bytes):
    began_s = time.monotonic()
    answer = says(server, said)
    assert 8 < time.monotonic() - began_s < 20 and (not answer or status_of(answer) == 408)


def test_huge_headers_are_cut_off(server: NetworkServer):
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 60) for number in range(3000))
    assert not says(server, b"GET /v1 HTTP/1.1\r\n", lines, b"X: ", b"y" * 200_000)


def test_requests_in_one_piece_and_of_an_old_version(server: NetworkServer):
    three = says(server, head("GET", "/v1") * 2 + head("GET", "/v1", "Connection: close"))
    assert three.count(b"HTTP/1.1 200 OK") == 3
    assert status_of(says(server, head("GET", "/v1").replace(b"HTTP/1.1", b"HTTP/1.0"))) == 200


def test_bytes_at_random(server: NetworkServer):
    rng = random.Random(1)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port)) as sock, contextlib.suppress(OSError):
            preface = rng.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"POST / HTTP/1.1\r\n"])
            sock.sendall(preface + rng.randbytes(rng.randrange(2000)))


def test_callers_that_are_gone_are_no_errors(server: NetworkServer, table: Table):
    """A connection of several requests is reset while the answers are made: the log says nothing of that."""
    rows = [[0, block, 0, count] for block, count in enumerate(table.counts[0].tolist())]
    body = msgpack.packb({"data": table.digest, "rows": rows})
    asked = head("POST", "/v1/train/rows", f"Content-Type: {MSGPACK}", f"Content-Length: {len(body)}") + body
    for number in range(300):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(asked * 5)
            time.sleep(number / 30_000)
    assert request(server, "GET", "/v1").status == 200
    assert not [line for line in server.server.log if "Exception" in line or "Traceback" in line]


def test_a_body_that_is_as_large_as_it_may_be(server: NetworkServer):
    body = b"[" * MAX_TICKET_BYTES
    answer = request(server, "POST", "/v1/train/rows", body=body)
    assert answer.status == 400 and "a ticket must be a JSON object" in answer.json()["error"]["message"]


def test_refused_calls_are_counted_and_named_at_times(server: NetworkServer):
    def refused() -> float:
        page = request(server, "GET", "/metrics").data.decode()
        found = [line for line in page.splitlines() if line.startswith('loaderd_refused_total{way="network"}')]
        return float(found[0].split()[1]) if found else 0.0

    before = refused()
    for _ in range(50):
        request(server, "GET", "/v1", None)
    wait_until(lambda: refused() >= before + 50)  # it is added up once a second
    assert server.server.wait_line("a call from 127.0.0.1 was refused")


def test_requests_behind_each_other_leave_no_memory(server):
    """Neither those that a caller without a token sends before it goes."""

    def call() -> None:
        headers = "".join(f"X-{number}: y\r\n" for number in range(4_000))
        with socket.create_connection(("127.0.0.1", server.port)) as sock, contextlib.suppress(OSError):
            sock.sendall(f"GET /readyz HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode() * 50)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

    for _ in range(20):
        call()
    before = sum(map(own_mib, server.server.processes()))
    for _ in range(30):
        call()
    assert (
        sum(map(own_mib, server.server.processes())) - before < 100
    )  # 300 to 500, were each connection kept until the collector finds it
