"""The gateway: the server's process for the network, which speaks Arrow Flight.

==============  =====================================================================================================
DoGet           rows of a data set: :mod:`loaderd.gateway.row_answers`
DoAction        "table": what a data set holds; "status": the server's report as JSON; "healthz": "ok"
==============  =====================================================================================================

Every call needs the token, if there is one; other calls are refused. Rows are made by makers, processes of the
gateway's own (:mod:`loaderd.gateway.maker`), which ask the daemon at its Unix socket what the data sets are. The
gateway and its makers keep nothing that could be lost: an answer follows from its ticket. So each may be killed and
started again.

The supervisor starts the gateway with the message Gateway (settings: "unix", "host", "port", "tls_cert", "tls_key",
"tls_client_ca", "token", "makers", "cache", "max_bandwidth", "log_format"), and gets Status or
Failed. When the process is to end, it does so at once: shutting Flight down may crash at the interpreter's end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.flight as flight

from loaderd.client.connect import ask_status
from loaderd.client.transport import TransportLost
from loaderd.errors import LoaderdError, OptionError, to_wire
from loaderd.gateway.answers import Answer, Answers, NotReady
from loaderd.gateway.bandwidth import Bandwidth
from loaderd.gateway.handshakes import watch_handshakes
from loaderd.gateway.makers import Makers
from loaderd.gateway.tally import SOMEWHERE, Reader, Tally
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import enter_process
from loaderd.ipc.messages import AskStatus, Failed, Gateway, Made, Make, Status, Stop
from loaderd.logs import configure
from loaderd.options import require
from loaderd.remote.security import is_bearer, read_pem
from loaderd.remote.tickets import (
    AUTHORIZATION,
    COLUMN,
    CONSUMER,
    MAX_REQUEST_BYTES,
    TABLE,
    RowsTicket,
    parse,
)

_TABLE_CELL = -1
_CALLS = {flight.FlightMethod.DO_GET, flight.FlightMethod.DO_ACTION, flight.FlightMethod.LIST_ACTIONS}
_NO_TOKEN = "the token is missing, or wrong"
# Beyond what the process has at its start. gRPC takes requests of any size before we can look at them.
_MAX_MEMORY_BYTES = 2 << 30
# gRPC gives each call a thread, whose stack counts as memory: with the usual 8 MiB, half of what there may be.
_MOST_CALLS, _FEWEST_CALLS = 128, 16

_logger = logging.getLogger("loaderd")


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]  # of pyarrow, which has no types
    """Who calls. It lives as long as the call.

    ``has_token``: whether with the right token, or none is needed; ``is_too_much``: whether there are as many other
    calls as there may be.
    """

    def __init__(self, name: str, has_token: bool, is_too_much: bool) -> None:
        super().__init__()
        self.name = name
        self.has_token = has_token
        self.is_too_much = is_too_much


class _Door(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # of pyarrow, which has no types
    """Looks at the token of each call, counts calls, and refuses those that there are not, with what they would send.

    :class:`GatewayServer` refuses all others: it knows more of a call.
    """

    def __init__(self, token: str | None, tally: Tally) -> None:
        super().__init__()
        self._token = token
        self._tally = tally
        self._most_calls = _most_calls()
        self._callers: weakref.WeakSet[_Caller] = weakref.WeakSet()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> _Caller:
        has_token = self._token is None or is_bearer(_only(headers, AUTHORIZATION), self._token)
        if info.method not in _CALLS:
            if not has_token:
                self._tally.refused(SOMEWHERE, _NO_TOKEN)
                raise flight.FlightUnauthenticatedError(_NO_TOKEN)
            raise flight.FlightServerError("there is no such call: there are DoGet, DoAction and ListActions")
        caller = _Caller(_only(headers, CONSUMER)[:200], has_token, len(self._callers) >= self._most_calls)
        self._callers.add(caller)
        return caller


def _most_calls() -> int:
    """How many calls there may be at a time, so that the stacks of their threads leave memory for what they do."""
    stack_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if stack_bytes <= 0:  # unlimited: threads get 2 MiB
        return _MOST_CALLS
    return max(_FEWEST_CALLS, min(_MOST_CALLS, _MAX_MEMORY_BYTES // 2 // stack_bytes))


def _only(headers: dict[str, list[str | bytes]], name: str) -> str:
    values = headers.get(name, [])
    value = values[0] if len(values) == 1 else ""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Turn errors into Flight's. Their ``extra_info`` is the error that a consumer of loaderd raises again."""
    try:
        yield
    except flight.FlightError:
        raise
    except (TransportLost, NotReady) as error:
        raise flight.FlightUnavailableError(str(error)) from None
    except LoaderdError as error:  # without its traceback, which would tell a consumer where files are
        error.traceback = ""
        raise flight.FlightServerError(str(error), extra_info=msgpack.packb(to_wire(error))) from None
    except Exception as error:
        _logger.exception("a call failed")
        raise flight.FlightServerError(f"the server failed: {type(error).__name__}") from None


class GatewayServer(flight.FlightServerBase):  # type: ignore[misc]  # of pyarrow, which has no types
    """Listens once it is made. Raises OptionError if it cannot, DaemonError without enough memory or processes."""

    def __init__(self, settings: dict[str, Any], tally: Tally) -> None:
        self._daemon = f"unix://{settings['unix']}"
        bandwidth = settings["max_bandwidth"]
        self._bandwidth = None if bandwidth is None else Bandwidth(bandwidth)
        self._sending = threading.Lock()
        self.tally = tally
        self.address = _address_of(settings["host"], settings["port"])
        secure = settings["tls_cert"] is not None
        options: dict[str, Any] = {}
        if secure:
            options["tls_certificates"] = [(read_pem(settings["tls_cert"]), read_pem(settings["tls_key"]))]
        if settings["tls_client_ca"] is not None:
            options |= {"verify_client": True, "root_certificates": read_pem(settings["tls_client_ca"])}
        _check_free(settings["host"], settings["port"])
        # Made before it listens, as consumers may be waiting to call.
        self._answers = Answers(settings["cache"])
        self._makers = Makers(settings["makers"], settings, self._answers.memory)
        try:
            super().__init__(
                f"grpc{'+tls' if secure else ''}://{self.address}",
                middleware={"caller": _Door(settings["token"], self.tally)},
                **options,
            )
        except (pa.ArrowException, OSError) as error:
            raise OptionError(f"cannot listen at {self.address}: {error!s:.500}") from None
        self.address = _address_of(settings["host"], self.port)

    @contextlib.contextmanager
    def _admitted(self, context: flight.ServerCallContext) -> Iterator[str]:
        """Around all that a call does: yields the caller's name, or raises FlightUnauthenticatedError."""
        caller = context.get_middleware("caller")
        if caller is None or not caller.has_token:
            self.tally.refused(_host_of(context.peer()), _NO_TOKEN)
            raise flight.FlightUnauthenticatedError(_NO_TOKEN)
        with _in_words():
            yield caller.name

    def _refuse_too_much(self, context: flight.ServerCallContext) -> None:
        """Raise NotReady where there are as many other calls as there may be; for calls that may take long."""
        if context.get_middleware("caller").is_too_much:
            raise NotReady("the server is full")

    # ------------------------------------------------------------------------------------------------ DoGet

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        with self._admitted(context) as name:
            self._refuse_too_much(context)
            reader = name or "a Flight client", _host_of(context.peer())
            text = _not_too_long(ticket.ticket)
            return self._rows(context, reader, parse(RowsTicket, text), text)

    def _rows(
        self, context: flight.ServerCallContext, reader: Reader, ticket: RowsTicket, text: bytes
    ) -> flight.GeneratorStream:
        def ask(answer: Answer) -> Made:
            return self._makers.make(Make(text, answer.cells.start, len(answer.cells)))

        def make(answer: Answer) -> None:
            made = ask(answer)
            while made.needed_bytes:
                self._answers.widen(answer, made.needed_bytes)
                made = ask(answer)
            answer.num_rows, answer.row_bytes, answer.faults = made.num_rows, made.row_bytes, made.faults

        # Answers are kept by a digest of the ticket, which may be longer than its answer.
        answer, was_there = self._answers.get(sha256(text).digest(), make)
        rows = self._answers.rows(answer)
        self._hold_back(context, rows.size)
        self.tally.answered(reader, ticket.dataset, answer.num_rows, rows.size, was_there)
        schema = pa.schema([pa.field(COLUMN, pa.binary(answer.row_bytes), nullable=False)])
        column = pa.Array.from_buffers(schema.field(0).type, answer.num_rows, [None, pa.py_buffer(rows)], 0)
        batch = pa.RecordBatch.from_arrays([column], schema=schema)
        return flight.GeneratorStream(schema, iter([(batch, answer.faults)]), _options(ticket.compression))

    def report(self) -> dict[str, Any]:
        """What the supervisor is told in a Status: plain values."""
        return {"address": self.address, "makers_restarted": self._makers.restarts, **self.tally.report()}

    def _hold_back(self, context: flight.ServerCallContext, num_bytes: int) -> None:
        """Wait until the limit of bandwidth allows to send more, and count ``num_bytes`` as sent.

        Raises FlightCancelledError if the caller has gone meanwhile: what nobody takes must not hold others back.
        """
        if self._bandwidth is None:
            return
        with self._sending:
            time.sleep(self._bandwidth.wait_s(time.monotonic()))
            if context.is_cancelled():
                raise flight.FlightCancelledError("the caller has gone")
            self._bandwidth.used(num_bytes, time.monotonic())

    # ---------------------------------------------------------------------------------------------- actions

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        with self._admitted(context):
            return [
                (TABLE, "what a data set holds, for a consumer of loaderd: of msgpack"),
                ("status", "what is served, to whom, and how it goes: a JSON object"),
                ("healthz", "ok"),
            ]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        with self._admitted(context):
            if action.type == TABLE:
                self._refuse_too_much(context)
                text = _not_too_long(action.body.to_pybytes())
                return [self._makers.make(Make(text, _TABLE_CELL)).table]
            if action.type not in ("status", "healthz"):
                raise OptionError(f"an action must be {TABLE}, status or healthz, got {action.type[:100]!r}")
            report = ask_status(self._daemon)
            return [json.dumps(report).encode() if action.type == "status" else b"ok"]


def _not_too_long(text: bytes) -> bytes:
    """``text``, a ticket or the body of an action. Raises OptionError if it is too long."""
    require(len(text) <= MAX_REQUEST_BYTES, "a ticket", f"of at most {MAX_REQUEST_BYTES:,} bytes", len(text))
    return text


def _check_free(host: str, port: int) -> None:
    """Raise OptionError, with the reason, if nobody can listen there: gRPC does not say why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise OptionError(f"cannot listen at {_address_of(host, port)}: {error.strerror or error}") from None


def _host_of(peer: str) -> str:
    """gRPC's "ipv4:10.0.0.7:51234" without the port, which is another one for each connection."""
    return peer.rpartition(":")[0]


def _options(compression: str | None) -> pa.ipc.IpcWriteOptions:
    return pa.ipc.IpcWriteOptions(compression=compression)


def _address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main() -> None:
    """Entry point of the gateway process: see ``ipc.spawn.start_process``."""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # gRPC's log has another form, and any caller can fill it
    sock, parent = enter_process("loaderd-gateway")
    channel = Channel(sock)
    with contextlib.suppress(ProcessLookupError, ChannelClosed):  # the supervisor ended
        _serve(channel, os.pidfd_open(parent))
    os._exit(0)


def _serve(channel: Channel, parent_fd: int) -> None:
    """Serve until the supervisor says Stop, or has ended."""
    server: GatewayServer | None = None
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(parent_fd, select.POLLIN)
    while parent_fd not in (fd for fd, _ in poll.poll()):
        for message in channel.receive():
            if isinstance(message, Stop):
                if server is not None:
                    channel.send(Status(server.report()))  # what was counted since the last one
                return
            if isinstance(message, Gateway):
                tally = Tally()
                if message.settings["tls_cert"] is not None:
                    watch_handshakes(tally.refused)
                configure(message.settings["log_format"], "gateway")
                try:
                    server = GatewayServer(message.settings, tally)
                except LoaderdError as error:
                    channel.send(Failed(error))
                    return
                _bound_memory()
            if isinstance(message, (Gateway, AskStatus)) and server is not None:
                channel.send(Status(server.report()))


def _bound_memory() -> None:
    """Have a request that takes too much memory end this process alone, which the supervisor then starts anew."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    limit = used + _MAX_MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
