"""Peers that mean harm, or are broken: it costs them their connection, and nobody else anything."""

from __future__ import annotations

import contextlib
import random
import socket
import time

import msgpack
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from network_server import wait_until

import loaderd
from loaderd.client.connect import ask_status
from loaderd.protocol.messages import (
    PROTOCOL,
    Failed,
    Gateway,
    Hello,
    Open,
    Opened,
    Release,
    Start,
    Stop,
    Subscribe,
    encode,
)
from loaderd.remote.watch import TRUSTED_BYTES, UNKNOWN_BYTES, UNKNOWN_S
from loaderd.remote.wire import decode_from_server, exchange_command
from loaderd.subscription import Subscription

TOKEN = "secret"
OPTIONS = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
LOST = (pa.ArrowException, OSError, StopIteration)


@pytest.fixture(scope="module")
def server(start_shared_server):
    return start_shared_server(token=TOKEN)


@pytest.fixture
def consumer(server):
    """A consumer that reads slowly, all through the test, and misses nothing."""
    with loaderd.connect(server.address, dataset="train", batch_size=100, token=TOKEN) as loader:
        batches = iter(loader)
        numbers = next(batches)["id"].tolist()
        yield
        for batch in batches:
            numbers += batch["id"].tolist()
        assert sorted(numbers) == list(range(1000))
        assert loader.statistics().daemon_restarts == 0


def exchange(client, command=None):
    return client.do_exchange(flight.FlightDescriptor.for_command(command or exchange_command(None)), OPTIONS)


def how_it_ends(reader):
    """The error in which an exchange ends, read to its end."""
    try:
        while True:
            reader.read_chunk()
    except LOST as error:
        return str(error)


HELLO = encode(Hello(PROTOCOL, "1", "train"))
MALFORMED = [
    b"\x00",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
    msgpack.packb([]),
    msgpack.packb([10**6]),
    msgpack.packb([-1, 1]),
    msgpack.packb([0, "1", "1", "train"]),
    msgpack.packb([0, 1, "1", "train", 5]),
    encode(Hello(PROTOCOL, "1", "train")) + b"\x00",
    encode(Hello(PROTOCOL, "x" * 300_000, "train")),
    encode(Open(b"cos\nsystem\n(S'touch /tmp/harm'\ntR.", None)),
    encode(Gateway({})),
    encode(Stop("now")),
    encode(Release(list(range(20_000)))),
]


@pytest.mark.parametrize("message", MALFORMED)
@pytest.mark.parametrize("first", [False, True])
def test_a_malformed_message_ends_the_exchange(server, consumer, message, first):
    with flight.connect(server.address) as client:
        writer, reader = exchange(client)
        for each in ([] if first else [HELLO]) + [message]:
            writer.write_metadata(each)
        assert "what the consumer sent is refused" in how_it_ends(reader)


@pytest.mark.parametrize(
    "messages",
    [
        [encode(Subscribe(Subscription(64).to_wire(), None))],
        [HELLO, HELLO],
        [HELLO, encode(Subscribe({"batch_size": 64, "evil": 1}, None))],
        [HELLO, encode(Subscribe({}, None))],
        [HELLO, encode(Subscribe(Subscription(64).to_wire(), "no position"))],
        [HELLO, encode(Start(1, [], -5))],
        [HELLO, encode(Subscribe(Subscription(64).to_wire(), None)), encode(Start(1, ["x", {}], -5))],
    ],
)
def test_messages_that_make_no_sense_are_refused_by_the_daemon(server, consumer, messages):
    with flight.connect(server.address) as client:
        writer, reader = exchange(client)
        for each in messages:
            writer.write_metadata(each)
        heard = None
        with contextlib.suppress(*LOST):
            while not isinstance(heard, Failed):
                heard = decode_from_server(reader.read_chunk().app_metadata.to_pybytes())
        assert isinstance(heard, Failed)


def test_two_streams_in_an_exchange_are_refused(server, consumer):
    with flight.connect(server.address) as client:
        writer, reader = exchange(client)
        for _ in range(2):
            writer.write_metadata(encode(Subscribe(Subscription(64).to_wire(), None)))
        assert "for one stream" in how_it_ends(reader)


@pytest.mark.parametrize(
    "command", [b"other", b"loaderd", b"loaderd[]", b'loaderd{"compression": "gzip"}', b'loaderd{"x": 1}']
)
def test_commands_that_are_none(server, command):
    with flight.connect(server.address) as client, pytest.raises(pa.ArrowInvalid):
        exchange(client, command)[1].read_chunk()


def test_data_where_messages_belong(server, consumer):
    with flight.connect(server.address) as client:
        writer, reader = exchange(client)
        writer.begin(pa.schema([("a", pa.int64())]))
        writer.write_batch(pa.record_batch({"a": [1, 2, 3]}))
        assert "a chunk must be a message" in how_it_ends(reader)


@pytest.mark.parametrize("options", [flight.FlightCallOptions(), OPTIONS])
def test_a_huge_message_costs_the_connection_and_little_memory(server, consumer, options):
    def peak_bytes():
        with open(f"/proc/{server.gateway.pid}/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

    before = peak_bytes()
    with flight.connect(server.address) as client, pytest.raises(flight.FlightUnavailableError):
        list(client.do_action(flight.Action("status", bytes(200 << 20)), options))
    assert peak_bytes() - before < 150 << 20


def test_many_large_messages_cost_the_connection(server, consumer):
    with flight.connect(server.address) as client:
        writer, reader = exchange(client)
        writer.write_metadata(HELLO)
        message = encode(Start(1, ["x" * 200_000], 0))
        with contextlib.suppress(*LOST):
            for _ in range(20 * TRUSTED_BYTES // len(message)):
                writer.write_metadata(message)
        how_it_ends(reader)


def test_who_says_nothing_is_shut_out(server, consumer):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    chatty = socket.create_connection(("127.0.0.1", server.port))
    began_s = time.monotonic()
    with contextlib.suppress(OSError):
        chatty.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(2 * UNKNOWN_BYTES))
    for sock in [chatty, *silent]:
        sock.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
        sock.close()
    assert time.monotonic() - began_s < UNKNOWN_S + 10


def test_bytes_at_random(server, consumer):
    rng = random.Random(1)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port)) as sock, contextlib.suppress(OSError):
            preface = rng.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"])
            sock.sendall(preface + rng.randbytes(rng.randrange(2000)))


def test_a_client_that_does_not_read_ends_with_its_connection(server, consumer):
    def names():
        return [each["name"] for each in ask_status(server.unix_address)["consumers"]]

    client = flight.connect(server.address)
    writer, reader = exchange(client)
    writer.write_metadata(HELLO)
    options = Subscription(500, epochs=None, name="does not read").to_wire()
    writer.write_metadata(encode(Subscribe(options, None)))
    while not isinstance(decode_from_server(reader.read_chunk().app_metadata.to_pybytes()), Opened):
        pass
    writer.write_metadata(encode(Start(1, [0, None, [], None], 0)))
    assert "does not read" in names()
    client.close()
    del writer, reader, client
    wait_until(lambda: "does not read" not in names())


def test_places_are_limited(start_server):
    server = start_server(max_consumers=2)
    kept = [loaderd.connect(server.address, dataset="train", batch_size=100) for _ in range(2)]
    with pytest.raises(loaderd.errors.ServerError, match="the server has its 2 consumers") as caught:
        loaderd.connect(server.address, dataset="train", batch_size=100)
    assert "--max-consumers" in caught.value.hint
    with (
        flight.connect(server.address) as client,
        pytest.raises(flight.FlightServerError, match="has its 2 consumers"),
    ):
        client.do_get(flight.Ticket(b'{"dataset": "train"}')).read_all()
    kept.pop().close()

    def is_free():
        with contextlib.suppress(loaderd.errors.ServerError):
            kept.append(loaderd.connect(server.address, dataset="train", batch_size=100))
            return True

    wait_until(is_free)
    for loader in kept:
        assert sum(batch.num_records for batch in loader) == 1000
        loader.close()
