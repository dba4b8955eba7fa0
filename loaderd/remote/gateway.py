"""The gateway: the server's process for the network, which speaks Arrow Flight.

==============  =====================================================================================================
DoExchange      a consumer of loaderd: :mod:`loaderd.remote.tunnel`
DoGet           batches for any Flight client; the ticket is a JSON object: :mod:`loaderd.remote.reading`
ListFlights     the data sets
GetFlightInfo   of a data set: a path of its name, or a command that is the ticket wanted; GetSchema as well
DoAction        "status": the server's report as JSON; "healthz": "ok"
==============  =====================================================================================================

Every call needs the token. To the daemon the gateway is nothing but consumers on its Unix socket; it holds nothing
that the daemon or a consumer would miss, so either process may be killed and started again.

The supervisor starts it with Gateway (settings: "unix", "host", "port", "tls_cert", "tls_key", "tls_client_ca",
"token", "max_consumers", "log_format"), and hears Status or Failed. The process ends at once, without the shutdown of
Flight, which may crash at the interpreter's end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from loaderd.client.connect import ask_status
from loaderd.client.link import LinkLost, link_to_server
from loaderd.errors import BusyError, LoaderdError, OptionError, ServerError, to_wire
from loaderd.logs import configure
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import AskStatus, Bye, Failed, Gateway, Status, Stop
from loaderd.protocol.process import enter_process
from loaderd.remote.arrow import arrow_schema
from loaderd.remote.reading import Ticket, ask_schema, batches_of
from loaderd.remote.security import is_bearer, read_pem
from loaderd.remote.sockets import notice_dead_peers, parse_peer
from loaderd.remote.tunnel import Tunnel, dismiss
from loaderd.remote.watch import Watch
from loaderd.remote.wire import AUTHORIZATION, parse_command, write_options

_logger = logging.getLogger("loaderd")


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # of pyarrow, which has no types
    """Refuses calls without the token. None: there is none."""

    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> None:
        values = headers.get(AUTHORIZATION, [])
        value = values[0] if len(values) == 1 else ""
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        if self._token is not None and not is_bearer(text, self._token):
            raise flight.FlightUnauthenticatedError("the token is missing, or wrong")


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """What goes wrong in a call, as Flight says it."""
    try:
        yield
    except OptionError as error:
        raise pa.ArrowInvalid(str(error)) from None
    except LoaderdError as error:
        raise flight.FlightServerError(str(error)) from None
    except LinkLost as lost:
        raise flight.FlightUnavailableError(str(lost)) from None


class GatewayServer(flight.FlightServerBase):  # type: ignore[misc]  # of pyarrow, which has no types
    """Listens from when it is made on. Raises OptionError where it cannot."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._daemon = f"unix://{settings['unix']}"
        self._num_places = settings["max_consumers"]
        self._places = threading.Semaphore(self._num_places)
        self.address = _address_of(settings["host"], settings["port"])
        secure = settings["tls_cert"] is not None
        options: dict[str, Any] = {}
        if secure:
            options["tls_certificates"] = [(read_pem(settings["tls_cert"]), read_pem(settings["tls_key"]))]
        if settings["tls_client_ca"] is not None:
            options |= {"verify_client": True, "root_certificates": read_pem(settings["tls_client_ca"])}
        try:
            super().__init__(
                f"grpc{'+tls' if secure else ''}://{self.address}",
                middleware={"token": _TokenCheck(settings["token"])},
                **options,
            )
        except (pa.ArrowException, OSError) as error:
            raise OptionError(f"cannot listen at {self.address}: {error!s:.500}") from None
        self.address = _address_of(settings["host"], self.port)
        self.watch = Watch(self.port)
        notice_dead_peers(self.port)

    @contextlib.contextmanager
    def _call(self, context: flight.ServerCallContext) -> Iterator[None]:
        """A call of one who knows the token."""
        self.watch.trust(parse_peer(context.peer()))
        with _in_words():
            yield

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """One of those that the server has for consumers of the network; raises BusyError."""
        if not self._places.acquire(blocking=False):
            raise BusyError(f"the server has its {self._num_places} consumers", hint="See --max-consumers.")
        try:
            yield
        finally:
            self._places.release()

    # -------------------------------------------------------------------------------------------- consumers

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        with self._call(context):
            compression = parse_command(descriptor.command)
            peer = parse_peer(context.peer())
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self._place())
                    link = link_to_server(self._daemon)
                except BusyError as error:
                    dismiss(reader, writer, Failed(to_wire(error)), peer)
                except LinkLost as lost:
                    dismiss(reader, writer, Bye(str(lost)), peer)
                else:
                    Tunnel(link.channel, reader, writer, compression, peer).run()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        with self._call(context):
            wanted = Ticket.parse(ticket.ticket)
            schema = arrow_schema(wanted.specs(ask_schema(self._daemon, wanted.dataset)))
            wanted = wanted.sized(self._num_records(wanted.dataset))
            return flight.GeneratorStream(schema, self._batches(wanted, schema), write_options(wanted.compression))

    def _batches(self, wanted: Ticket, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        with _in_words(), self._place():
            yield from batches_of(self._daemon, wanted, schema)

    # ---------------------------------------------------------------------------------------- the data sets

    def list_flights(self, context: flight.ServerCallContext, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with self._call(context):
            names = [each["name"] for each in ask_status(self._daemon)["datasets"] if each["state"] == "ready"]
            return iter([self._info(flight.FlightDescriptor.for_path(name)) for name in names])

    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        with self._call(context):
            return self._info(descriptor)

    def get_schema(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.SchemaResult:
        with self._call(context):
            return flight.SchemaResult(self._info(descriptor).schema)

    def _info(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        wanted = Ticket.described(descriptor)
        schema = arrow_schema(wanted.specs(ask_schema(self._daemon, wanted.dataset)))
        num_records = self._num_records(wanted.dataset)
        endpoint = flight.FlightEndpoint(wanted.sized(num_records).to_json(), [])
        return flight.FlightInfo(schema, descriptor, [endpoint], num_records, -1)

    def _num_records(self, dataset: str) -> int:
        found = {each["name"]: each for each in ask_status(self._daemon)["datasets"]}.get(dataset)
        if found is None or found["state"] != "ready":
            raise ServerError(f"the data set is not ready: {'it is gone' if found is None else found['state']}")
        return int(found["num_records"])

    # ---------------------------------------------------------------------------------------------- status

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        with self._call(context):
            return [("status", "what is served, to whom, and how it goes: a JSON object"), ("healthz", "ok")]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        with self._call(context):
            if action.type not in ("status", "healthz"):
                raise OptionError(f"an action must be status or healthz, got {action.type[:100]!r}")
            report = ask_status(self._daemon)
            return [json.dumps(report).encode() if action.type == "status" else b"ok"]


def _address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main() -> None:
    """Entry point of the gateway process: see ``protocol.process.start_process``."""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # its log is of another form, and anybody can fill it
    sock, parent = enter_process("loaderd-gateway")
    channel = Channel(sock)
    with contextlib.suppress(ProcessLookupError, ChannelClosed):  # the supervisor ended
        _serve(channel, os.pidfd_open(parent))
    os._exit(0)


def _serve(channel: Channel, parent_fd: int) -> None:
    """Until the supervisor says so, or has ended."""
    server: GatewayServer | None = None
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(parent_fd, select.POLLIN)
    while parent_fd not in (fd for fd, _ in poll.poll()):
        for message in channel.receive():
            if isinstance(message, Stop):
                return
            if isinstance(message, Gateway):
                configure(message.settings["log_format"], "gateway")
                try:
                    server = GatewayServer(message.settings)
                except LoaderdError as error:
                    channel.send(Failed(to_wire(error)))
                    return
            if isinstance(message, (Gateway, AskStatus)) and server is not None:
                channel.send(Status({"address": server.address}))
