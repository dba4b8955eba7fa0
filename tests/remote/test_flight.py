"""What the gateway says to any Flight client: actions, refusals."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.flight as flight
import pytest


@pytest.fixture(scope="module")
def server(start_shared_server):
    return start_shared_server(token="secret")


@pytest.fixture
def client(server):
    with flight.connect(server.address) as client:
        yield client


OPTIONS = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer secret")])


def test_actions(client):
    assert [each.type for each in client.list_actions(OPTIONS)] == ["table", "status", "healthz"]
    (status,) = client.do_action("status", OPTIONS)
    assert json.loads(status.body.to_pybytes())["datasets"][0]["name"] == "train"
    (health,) = client.do_action("healthz", OPTIONS)
    assert health.body.to_pybytes() == b"ok"
    with pytest.raises(flight.FlightServerError, match="must be table, status or healthz, got 'shutdown'"):
        list(client.do_action("shutdown", OPTIONS))


def calls_that_there_are_not(client, options):
    descriptor = flight.FlightDescriptor.for_path("train")
    return [
        lambda: list(client.list_flights(options=options)),
        lambda: client.get_flight_info(descriptor, options),
        lambda: client.get_schema(descriptor, options),
        lambda: client.do_exchange(flight.FlightDescriptor.for_command(b"loaderd{}"), options)[1].read_chunk(),
        lambda: client.do_put(descriptor, pa.schema([]), options)[1].read(),
    ]


def test_there_are_no_other_calls(client):
    for call in calls_that_there_are_not(client, OPTIONS):
        with pytest.raises((pa.ArrowException, OSError), match="there are DoGet, DoAction and ListActions"):
            call()


@pytest.mark.parametrize(
    ("ticket", "words"),
    [
        (b"train", "a ticket must be a JSON object"),
        (b"[" * 100_000, "a ticket must be a JSON object"),
        (b"{}", "a ticket has a wrong value"),
        (b'{"dataset": "train", "batch_size": 512}', "a ticket may have"),
    ],
)
def test_tickets_that_are_none(client, ticket, words):
    with pytest.raises(flight.FlightServerError, match=words):
        client.do_get(flight.Ticket(ticket), OPTIONS).read_all()


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")]])
def test_every_call_needs_the_token(client, headers):
    options = flight.FlightCallOptions(headers=headers)
    calls = [
        lambda: client.do_get(flight.Ticket(b'{"dataset": "train"}'), options).read_all(),
        lambda: list(client.list_actions(options)),
        lambda: list(client.do_action("healthz", options)),
        *calls_that_there_are_not(client, options),
    ]
    for call in calls:
        with pytest.raises((flight.FlightUnauthenticatedError, OSError), match="the token is missing, or wrong"):
            call()
