"""What no client would say to a server's network port: in Flight's calls, and below them in HTTP/2 and TCP."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.flight as flight

from loaderd.remote.tickets import MAX_ROWS, TABLE
from tests.reliability import hostile

_LIMIT_S = 30.0
_CALLS_A_CLIENT = 50
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Caller:
    """Makes calls at a gateway, some with another token than ``token``; each returns how it ended."""

    def __init__(self, port: int, token: str, rng: random.Random) -> None:
        self._port = port
        self._token = token
        self._rng = rng
        self._client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
        self._calls = 0
        self._data = self._digest()

    def _digest(self) -> str:
        """What tells the data set of the server from others: a ticket for rows must name it."""
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {self._token}".encode())])
        (table,) = self._client.do_action(flight.Action(TABLE, b'{"dataset": "train"}'), options)
        return str(msgpack.unpackb(table.body.to_pybytes(), strict_map_key=False)["digest"])

    def call(self) -> tuple[str, str]:
        """(what was said, how it ended)."""
        if self._calls == _CALLS_A_CLIENT:
            self._client.close()
            self._client, self._calls = flight.FlightClient(f"grpc://127.0.0.1:{self._port}"), 0
        self._calls += 1
        say = self._rng.choices(list(_CALLS), list(_CALLS.values()))[0]
        try:
            return say.__name__, say(self, self._options()) or "end"
        except flight.FlightTimedOutError:
            return say.__name__, "timeout"
        except StopIteration:  # an answer without a batch
            return say.__name__, "end"
        except (pa.ArrowException, OSError) as error:
            return say.__name__, type(error).__name__

    def close(self) -> None:
        self._client.close()

    def _options(self) -> flight.FlightCallOptions:
        rng = self._rng
        tokens = [self._token] if rng.random() < 0.9 else rng.choice([[], ["x"], [self._token, "x"], ["x" * 5_000]])
        return flight.FlightCallOptions(
            headers=[(b"authorization", f"Bearer {token}".encode()) for token in tokens], timeout=_LIMIT_S
        )

    # --------------------------------------------------------------------------------- what consumers say

    def rows(self, options: flight.FlightCallOptions) -> str:
        """A ticket for rows of which something is wrong, or strange."""
        rng = self._rng
        ticket: dict[str, Any] = {"dataset": "train", "data": self._data, "rows": [[0, 0, 0, 5]]}
        if rng.random() < 0.6:
            ticket["rows"] = self._ranges()
        for _ in range(rng.choice([0, 1, 1, 2])):
            name = rng.choice(["dataset", "data", "rows", "listing", "compression", "more"])
            ticket[name] = rng.choice([hostile.number, hostile.value])(rng)
        self._client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
        return "rows"

    def _ranges(self) -> list[list[Any]]:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return [[hostile.number(rng) for _ in range(rng.choice([3, 4, 4, 5]))] for _ in range(rng.randint(1, 5))]
        if kind == 1:
            return [[0, 0, 0, 1]] * rng.choice([1, 100, 1 << 14, 1 << 17])
        if kind == 2:
            return [[0, rng.randrange(250), 0, rng.choice([1, 100, 101, MAX_ROWS, MAX_ROWS + 1])]]
        return [[hostile.number(rng), rng.randrange(250), rng.randrange(50), rng.randrange(120)]]

    def table(self, options: flight.FlightCallOptions) -> str:
        """The action with a body that is none."""
        rng = self._rng
        body = {"dataset": "train", rng.choice(["dataset", "listing", "protocol", "more"]): hostile.value(rng)}
        bodies = [json.dumps(body).encode(), b"", b"[" * 10_000, rng.randbytes(100), b'{"dataset": "valid"}']
        list(self._client.do_action(flight.Action(TABLE, rng.choice(bodies)), options))
        return "answer"

    def too_large(self, options: flight.FlightCallOptions) -> str:
        body = bytes(self._rng.choice([1 << 20, 3 << 20, 9 << 20]))
        list(self._client.do_action(flight.Action(self._rng.choice([TABLE, "status"]), body), options))
        return "answer"

    def exchange(self, options: flight.FlightCallOptions) -> str:
        """A call that there is not."""
        writer, reader = self._client.do_exchange(self._descriptor(), options)
        try:
            writer.write_metadata(self._rng.randbytes(self._rng.choice([1, 1_000, 100_000])))
            writer.done_writing()
            reader.read_chunk()
        finally:
            with contextlib.suppress(pa.ArrowException, OSError):  # else it is closed by its finalizer, which prints
                writer.close()
        return "answer"

    # --------------------------------------------------------------------------------------- other calls

    def get(self, options: flight.FlightCallOptions) -> str:
        """A ticket of nothing that there is."""
        self._client.do_get(flight.Ticket(self._ticket()), options).read_all()
        return "rows"

    def ask(self, options: flight.FlightCallOptions) -> str:
        """For what there is."""
        rng, client = self._rng, self._client
        kind = rng.randrange(4)
        if kind == 0:
            client.get_flight_info(self._descriptor(), options)
        elif kind == 1:
            client.get_schema(self._descriptor(), options)
        elif kind == 2:
            name = rng.choice(["shutdown", "Status", "", "x" * 10_000, "../status", "\u202e"])
            list(client.do_action(flight.Action(name, rng.randbytes(100)), options))
        else:
            list(client.list_flights(rng.randbytes(100), options))
        return "answer"

    def put(self, options: flight.FlightCallOptions) -> str:
        batch = pa.record_batch({"x": [1]})
        writer, _ = self._client.do_put(self._descriptor(), batch.schema, options)
        try:
            writer.write_batch(batch)
        finally:
            writer.close()
        return "answer"

    def _ticket(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.2:
            return rng.choice(
                [rng.randbytes(50), b"", b"[]", b"{}", b"[" * 10_000, b'{"dataset": "x"}', bytes(1 << 20)]
            )
        ticket: dict[str, Any] = {"dataset": "train"}
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(["dataset", "data", "rows", "compression", "more"])
            ticket[name] = rng.choice([hostile.number, hostile.value])(rng)
        return json.dumps(ticket).encode()

    def _descriptor(self) -> flight.FlightDescriptor:
        rng = self._rng
        if rng.random() < 0.5:
            paths = [["train", "x"], ["/etc/passwd"], [".."], [""], [], ["train"] * 500, ["x" * 50_000]]
            return flight.FlightDescriptor.for_path(*rng.choice(paths))
        return flight.FlightDescriptor.for_command(self._command())

    def _command(self) -> bytes:
        return self._rng.choice([self._ticket(), b"train", self._rng.randbytes(40)])


_CALLS: dict[Callable[[Caller, flight.FlightCallOptions], str], float] = {
    Caller.rows: 5,
    Caller.table: 2,
    Caller.get: 2,
    Caller.exchange: 0.5,
    Caller.too_large: 0.03,
    Caller.ask: 4,
    Caller.put: 0.5,
}


def below_flight(rng: random.Random) -> bytes:
    """Bytes that are no HTTP/2, and HTTP/2 that is none of gRPC's."""
    kind = rng.randrange(5)
    if kind == 0:
        return hostile.protocol_of_others(rng)
    if kind == 1:
        return rng.randbytes(rng.choice([1, 24, 300, 5_000]))
    if kind == 2:
        return PREFACE + _frame(rng, 4, b"") + rng.randbytes(rng.choice([1, 24, 300, 5_000]))
    frames = [
        _frame(rng, rng.randrange(12), rng.randbytes(rng.choice([0, 4, 8, 100]))) for _ in range(rng.randint(1, 30))
    ]
    if kind == 3:
        return PREFACE + _frame(rng, 4, b"") + b"".join(frames)
    # A header block that goes on and on.
    return PREFACE + _frame(rng, 4, b"") + b"".join(_frame(rng, 9, bytes(16_000)) for _ in range(rng.randint(1, 20)))


def _frame(rng: random.Random, kind: int, payload: bytes) -> bytes:
    """A frame of HTTP/2; of some the length is wrong."""
    size = len(payload) if kind == 4 or rng.random() < 0.8 else rng.choice([0, 16_385, 2**24 - 1])
    flags = rng.choice([0, 0, 1, 4, 5, 255]) if payload else 0
    stream = rng.choice([0, 1, 3, 2**31 - 1]) if payload else 0
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def say_below_flight(port: int, rng: random.Random) -> str:
    """A connection of its own; how it ended."""
    with socket.create_connection(("127.0.0.1", port), _LIMIT_S) as sock:
        try:
            sock.sendall(below_flight(rng))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            return "timeout"
        except OSError:
            return "reset"
        return "end"
