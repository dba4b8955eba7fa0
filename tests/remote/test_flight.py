"""Any Flight client can read batches: pyarrow alone, nothing of loaderd."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from serving import wait_until

import loaderd


@pytest.fixture(scope="module")
def server(start_shared_server):
    return start_shared_server(token="secret")


@pytest.fixture(scope="module")
def embedded(server):
    with loaderd.Loader(server.dataset(), batch_size=100, epochs=2, workers=1) as loader:
        return [batch["id"].tolist() for batch in loader]


@pytest.fixture
def client(server):
    with flight.connect(server.address) as client:
        yield client


OPTIONS = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer secret")])


def get(client, **ticket):
    return client.do_get(flight.Ticket(json.dumps({"dataset": "train", "batch_size": 100, **ticket})), OPTIONS)


def test_ten_lines_of_pyarrow(server, embedded):
    client = flight.connect(server.address)
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer secret")])
    ticket = flight.Ticket(json.dumps({"dataset": "train", "batch_size": 100, "epochs": 2}))
    found = []
    for chunk in client.do_get(ticket, options):
        arrays = {}
        for field, column in zip(chunk.data.schema, chunk.data.columns, strict=True):
            values = column.flatten() if pa.types.is_fixed_size_list(field.type) else column
            shape = json.loads(field.metadata[b"shape"])
            arrays[field.name] = values.to_numpy().reshape(-1, *shape)
        assert np.array_equal(arrays["bits"] @ 2.0 ** np.arange(31, -1, -1), arrays["id"])
        assert np.array_equal(arrays["twice"], 2 * arrays["id"])
        found.append(arrays["id"].tolist())
    assert found == embedded


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_compressed(client, embedded, compression):
    table = get(client, compression=compression).read_all()
    assert table["id"].to_pylist() == [number for batch in embedded[:10] for number in batch]


def test_it_goes_on_at_a_position(client, embedded):
    chunks = [chunk for chunk, _ in zip(get(client, epochs=2), range(4), strict=False)]
    start = json.loads(chunks[3].app_metadata.to_pybytes())
    rest = [chunk.data["id"].to_pylist() for chunk in get(client, epochs=2, start=start)]
    assert rest == embedded[4:]


def test_packed(client, embedded):
    table = get(client, packed=True).read_all()
    (stored,) = [name for name in table.column_names if name.startswith("bits")]
    bits = np.array(table[stored].to_pylist(), np.uint8)
    assert np.array_equal(bits.view(">u4")[:, 0], table["id"].to_numpy())


def test_parts(client):
    parts = [get(client, shard=[host, 2]).read_all()["id"].to_pylist() for host in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(1000))


def test_a_client_that_goes_leaves_nothing(server, client):
    def slots():
        with open(f"/proc/{server.gateway.pid}/maps") as maps:
            return sum("memfd:loaderd-slots" in line for line in maps)

    wait_until(lambda: slots() == 0)  # of those who left in earlier tests
    with flight.connect(server.address) as leaving:
        reader = get(leaving, epochs=None)
        assert reader.read_chunk().data.num_rows == 100
        assert slots() == 1
        reader.cancel()
    wait_until(lambda: slots() == 0)


def test_what_there_is(client, server):
    (found,) = client.list_flights(options=OPTIONS)
    assert found.descriptor.path == [b"train"] and found.total_records == 1000
    assert client.get_schema(flight.FlightDescriptor.for_path("train"), OPTIONS).schema == found.schema
    assert client.do_get(found.endpoints[0].ticket, OPTIONS).read_all().num_rows == 1000
    command = flight.FlightDescriptor.for_command(json.dumps({"dataset": "train", "packed": True}))
    packed = client.get_flight_info(command, OPTIONS)
    assert packed.schema == get(client, packed=True).schema != found.schema


def test_actions(client):
    assert [each.type for each in client.list_actions(OPTIONS)] == ["table", "status", "healthz"]
    (status,) = client.do_action("status", OPTIONS)
    assert json.loads(status.body.to_pybytes())["datasets"][0]["name"] == "train"
    (health,) = client.do_action("healthz", OPTIONS)
    assert health.body.to_pybytes() == b"ok"
    with pytest.raises(flight.FlightServerError, match="must be table, status or healthz, got 'shutdown'"):
        list(client.do_action("shutdown", OPTIONS))


@pytest.mark.parametrize(
    ("ticket", "error", "words"),
    [
        (b"train", flight.FlightServerError, "a ticket must be a JSON object"),
        (b"[" * 100_000, flight.FlightServerError, "a ticket must be a JSON object"),
        (b"{}", flight.FlightServerError, "a ticket has a dataset"),
        (
            b'{"dataset": "train", "path": "/etc/passwd"}',
            flight.FlightServerError,
            "a ticket has a dataset, and may have",
        ),
        (b'{"dataset": 7}', flight.FlightServerError, "dataset must be the name"),
        (b'{"dataset": "/etc/passwd"}', flight.FlightServerError, "no data set '/etc/passwd'"),
        (b'{"dataset": "rows"}', flight.FlightServerError, "no data set 'rows'"),
        (b'{"dataset": "train", "batch_size": 0}', flight.FlightServerError, "batch_size must be a positive integer"),
        (
            b'{"dataset": "train", "batch_size": "9"}',
            flight.FlightServerError,
            "batch_size must be a positive integer",
        ),
        (b'{"dataset": "train", "shard": [2, 2]}', flight.FlightServerError, "shard must be"),
        (b'{"dataset": "train", "shard": 5}', flight.FlightServerError, "shard must be"),
        (b'{"dataset": "train", "packed": 1}', flight.FlightServerError, "packed must be a bool"),
        (b'{"dataset": "train", "start": {"epoch": 1}}', flight.FlightServerError, "a position must be"),
        (b'{"dataset": "train", "compression": "gzip"}', flight.FlightServerError, "compression must be"),
        (b'{"dataset": "train", "compression": []}', flight.FlightServerError, "compression must be"),
    ],
)
def test_tickets_that_are_none(client, ticket, error, words):
    with pytest.raises(error, match=words):
        client.do_get(flight.Ticket(ticket), OPTIONS).read_all()
    with pytest.raises(error, match=words):
        client.get_flight_info(flight.FlightDescriptor.for_command(ticket), OPTIONS)


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")]])
def test_every_call_needs_the_token(client, headers):
    options = flight.FlightCallOptions(headers=headers)
    descriptor = flight.FlightDescriptor.for_path("train")
    calls = [
        lambda: client.do_get(flight.Ticket(b'{"dataset": "train"}'), options).read_all(),
        lambda: list(client.list_flights(options=options)),
        lambda: client.get_flight_info(descriptor, options),
        lambda: client.get_schema(descriptor, options),
        lambda: list(client.list_actions(options)),
        lambda: list(client.do_action("healthz", options)),
        lambda: client.do_exchange(flight.FlightDescriptor.for_command(b"loaderd{}"), options)[1].read_chunk(),
        lambda: client.do_put(descriptor, pa.schema([]), options)[1].read(),
    ]
    for call in calls:
        with pytest.raises((flight.FlightUnauthenticatedError, OSError), match="the token is missing, or wrong"):
            call()
