"""Peers that mean harm, or are broken: it costs them their call, and nobody else anything."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import loaderd
from loaderd.processes import pss_bytes
from loaderd.remote.tickets import MAX_ROWS, TABLE
from tests.remote import network_server

TOKEN = "secret"
OPTIONS = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
LOST = (pa.ArrowException, OSError, StopIteration)


@pytest.fixture(scope="module")
def server(start_shared_server):
    return start_shared_server(token=TOKEN)


@pytest.fixture
def consumer(server):
    """A consumer that reads slowly, all through the test, and misses nothing."""
    with loaderd.connect([server.address], "train", batch_size=100, token=TOKEN, workers=1) as loader:
        batches = iter(loader)
        numbers = next(batches)["id"].tolist()
        yield
        for batch in batches:
            numbers += batch["id"].tolist()
        assert sorted(numbers) == list(range(1000))
        assert loader.statistics().daemon_restarts == 0


@pytest.fixture(scope="module")
def digest(server):
    with flight.connect(server.address) as client:
        (result,) = client.do_action(flight.Action(TABLE, b'{"dataset": "train"}'), OPTIONS)
    return msgpack.unpackb(result.body.to_pybytes())["digest"]


WITHOUT_SENSE = [
    ({"rows": [[0, 0, 0]]}, "a range of rows must be"),
    ({"rows": []}, "rows must be a list of 1 to"),
    ({"rows": [[0, 0, 5, 5]]}, "first < stop"),
    ({"rows": [[0, 0, -1, 5]]}, "a range of rows must be"),
    ({"rows": [[0, 0, 0, 5.0]]}, "a range of rows must be"),
    ({"rows": [[10**30, 0, 0, 5]]}, "a range of rows must be"),
    ({"rows": [[0, 10**30, 0, 5]]}, "a range of rows must be"),
    ({"rows": [[0, 7, 0, 17]]}, "asks for record 16 of block 7, which is not in the data"),
    ({"rows": [[0, 0, 0, MAX_ROWS + 1]]}, "of at most"),
    ({"rows": "x"}, "rows must be a list"),
    ({"data": "0"}, "this server has other data"),
    ({"data": 5}, "data must be the digest"),
    ({"dataset": "/etc/passwd"}, "no data set '/etc/passwd'"),
    ({"compression": "gzip"}, "compression must be"),
    ({"compression": []}, "compression must be"),
    ({"listing": 5}, "a listing must be a list"),
    ({"path": "/etc/passwd"}, "a ticket may have"),
]


def refused(server, digest, changed):
    """What is said to who asks with a ticket that is changed so."""
    ticket = {"dataset": "train", "data": digest, "rows": [[0, 0, 0, 5]], **changed}
    with flight.connect(server.address) as client, pytest.raises(pa.ArrowException) as caught:
        client.do_get(flight.Ticket(json.dumps(ticket)), OPTIONS).read_all()
    return str(caught.value)


@pytest.mark.parametrize(("changed", "words"), WITHOUT_SENSE)
def test_tickets_that_make_no_sense(server, digest, changed, words):
    said = refused(server, digest, changed)
    assert re.search(words, said) and "Traceback" not in said and ".py" not in said


def test_tickets_that_make_no_sense_harm_nobody_else(server, consumer, digest):
    for changed, _ in WITHOUT_SENSE:
        refused(server, digest, changed)


def test_a_ticket_for_rows(server, digest):
    """What the others would have been, without the mistake."""
    with flight.connect(server.address) as client:
        ticket = {"dataset": "train", "data": digest, "rows": [[0, 0, 0, 5], [0, 3, 1, 3]]}
        found = client.do_get(flight.Ticket(json.dumps(ticket)), OPTIONS).read_all()
    assert found.num_rows == 7 and found.column_names == ["row"]


@pytest.mark.parametrize("kind", ["rows", TABLE])
def test_a_ticket_that_is_too_long_goes_no_further(server, digest, kind):
    """Answers are kept by their tickets, and makers end where a message is too large."""
    rows = {"data": digest, "rows": [[0, 0, 0, 5]]} if kind == "rows" else {}
    text = json.dumps({"dataset": "train", **rows}).encode() + b" " * (5 << 20)
    with flight.connect(server.address) as client, pytest.raises(pa.ArrowException, match="at most 4,194,304 bytes"):
        if kind == TABLE:
            list(client.do_action(flight.Action(TABLE, text), OPTIONS))
        else:
            client.do_get(flight.Ticket(text), OPTIONS).read_all()


@pytest.mark.slow
def test_answers_are_kept_and_not_their_tickets(start_server):
    server = start_server()
    with flight.connect(server.address) as client:
        (result,) = client.do_action(flight.Action(TABLE, b'{"dataset": "train"}'))
        ticket = {"dataset": "train", "data": msgpack.unpackb(result.body.to_pybytes())["digest"]}
        before = pss_bytes(server.gateway.pid)
        for first in range(60):
            text = json.dumps({**ticket, "rows": [[first, 0, 0, 5]]}).encode() + b" " * (4_000_000)
            assert client.do_get(flight.Ticket(text)).read_all().num_rows == 5
    assert pss_bytes(server.gateway.pid) - before < 120_000_000


@pytest.mark.slow
def test_deaths_are_remembered_and_not_their_tickets(start_server, monkeypatch):
    """Of makers, which a derived field ends."""
    ending = network_server.MODULE.replace("2 * id", "__import__('os')._exit(1)")
    monkeypatch.setattr(network_server, "MODULE", ending)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")  # what is freed, the kernel gets at once
    server = start_server()
    with flight.connect(server.address) as client:
        (result,) = client.do_action(flight.Action(TABLE, b'{"dataset": "train"}'))
        ticket = {"dataset": "train", "data": msgpack.unpackb(result.body.to_pybytes())["digest"]}

        def ask(first):
            text = json.dumps({**ticket, "rows": [[first, 0, 0, 1]]}).encode() + b" " * (4_000_000)
            return client.do_get(flight.Ticket(text)).read_all()

        before = pss_bytes(server.gateway.pid)
        for first in range(12):
            with pytest.raises(flight.FlightUnavailableError, match="the process that made the rows has ended"):
                ask(first)
        assert ask(0).num_rows == 1, "without the record"
    assert pss_bytes(server.gateway.pid) - before < 30_000_000


def test_a_data_set_that_there_is_not_is_not_read(start_server, capfd):
    """The log is told of 256 readers: who names data sets at random would have them all."""
    server = start_server()
    with flight.connect(server.address) as client, pytest.raises(pa.ArrowException, match="no data set 'nothing'"):
        client.do_get(flight.Ticket(b'{"dataset": "nothing", "data": "0", "rows": [[0, 0, 0, 5]]}')).read_all()
    assert "reads nothing" not in capfd.readouterr().err


@pytest.mark.parametrize("options", [flight.FlightCallOptions(), OPTIONS])
def test_a_huge_message_harms_nobody_else(server, consumer, options):
    """gRPC takes messages of any size; what is too much for the process is the end of that call."""
    with flight.connect(server.address) as client, contextlib.suppress(*LOST):
        list(client.do_action(flight.Action("status", bytes(64 << 20)), options))


@pytest.mark.parametrize("call", ["exchange", "put"])
def test_calls_that_there_are_not(server, consumer, call):
    descriptor = flight.FlightDescriptor.for_command(b"x")
    with flight.connect(server.address) as client, pytest.raises(pa.ArrowException):
        if call == "put":
            writer, reader = client.do_put(descriptor, pa.schema([("a", pa.int64())]), OPTIONS)
        else:
            writer, reader = client.do_exchange(descriptor, OPTIONS)
        with writer:
            for _ in range(100):
                writer.write_metadata(bytes(1 << 20))
        reader.read_chunk() if call == "exchange" else reader.read()


def test_who_says_nothing_harms_nobody(server, consumer):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    with loaderd.connect([server.address], "train", batch_size=100, token=TOKEN, workers=1) as loader:
        assert sum(batch.num_records for batch in loader) == 1000
    for sock in silent:
        sock.close()


def test_bytes_at_random(server, consumer):
    rng = random.Random(1)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port)) as sock, contextlib.suppress(OSError):
            preface = rng.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"])
            sock.sendall(preface + rng.randbytes(rng.randrange(2000)))


@pytest.mark.slow
def test_who_does_not_read_takes_no_more_than_his_answer(server, consumer, digest):
    ticket = flight.Ticket(json.dumps({"dataset": "train", "data": digest, "rows": [[0, 0, 0, 16]]}))
    clients = [flight.connect(server.address) for _ in range(20)]
    readers = [client.do_get(ticket, OPTIONS) for client in clients]
    with loaderd.connect([server.address], "train", batch_size=100, token=TOKEN, workers=1) as loader:
        assert sum(batch.num_records for batch in loader) == 1000
    del readers
    for client in clients:
        client.close()


@pytest.mark.slow
def test_bandwidth_is_limited(start_server):
    server = start_server(max_bandwidth=20_000.0, cache=0)
    with loaderd.connect([server.address], "train", batch_size=100, epochs=6, workers=1) as loader:
        began_s = time.monotonic()
        assert sum(batch.num_records for batch in loader) == 6000
    num_bytes = sum(each["bytes"] for each in server.gateway_report()["remote"])
    assert time.monotonic() - began_s > num_bytes / 20_000 - 2


@pytest.mark.slow
def test_calls_whose_callers_have_gone_use_no_bandwidth(start_server):
    """Else those who call again get nothing, as long as more is asked for than may be sent."""
    bytes_per_s = 20_000.0
    server = start_server(max_bandwidth=bytes_per_s, cache=0)
    with flight.connect(server.address) as client:
        (result,) = client.do_action(flight.Action(TABLE, b'{"dataset": "train"}'))
        ticket = {"dataset": "train", "data": msgpack.unpackb(result.body.to_pybytes())["digest"]}

        def get(number, timeout_s):
            rows = [[5 * number + epoch, block, 0, 16] for epoch in range(5) for block in range(18)]
            options = flight.FlightCallOptions(timeout=timeout_s)
            reader = client.do_get(flight.Ticket(json.dumps({**ticket, "rows": rows})), options)
            return reader.read_all().get_total_buffer_size()

        def get_nothing(number):
            with contextlib.suppress(pa.ArrowException):
                return get(number, 0.3)
            return 0

        size = get(0, 60)
        with ThreadPoolExecutor(20) as pool:
            came = [size, *pool.map(get_nothing, range(1, 21))]
        began_s = time.monotonic()
        came.append(get(21, 60))
    assert came.count(0) > 15
    assert time.monotonic() - began_s < 5 * size / bytes_per_s
    (counts,) = server.gateway_report()["remote"]
    assert counts["requests"] <= len(came) - came.count(0) + 1, "one may have timed out while it was sent"
