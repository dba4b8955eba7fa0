"""Calls to one server on the network, and what users read when they fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from loaderd.errors import LoaderdError, ServerError, from_wire
from loaderd.remote.address import network_address
from loaderd.remote.security import bearer, check_token, probe, read_pem, trusted_roots
from loaderd.remote.source import Settings
from loaderd.remote.tickets import AUTHORIZATION, COLUMN, CONSUMER, Fault, faults_from_wire
from loaderd.tls import TLS

PackedRows = npt.NDArray[np.uint8]

_NO_ROOM = "resource exhausted"
"""What gRPC says of a server that could start no thread for a call."""


class OutOfReach(Exception):
    """The server is away, too slow, or too busy now: another one may answer, or this one later.

    ``unconnected``: whether not even a connection could be made.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.unconnected = "connect" in why


class Calls:
    """Calls to the server at ``address``, over one connection, from any thread. Raises OptionError.

    Each call raises OutOfReach, or the LoaderdError with which the server refuses.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        self.address = address
        self._host, self._port, is_secure = network_address(address)
        self._tls = (settings.tls or TLS()) if is_secure else None
        headers = [(CONSUMER.encode(), settings.consumer.encode("ascii", "replace"))]
        if settings.token is not None:
            headers.append((AUTHORIZATION.encode(), bearer(check_token(settings.token, "token")).encode()))
        self._headers = headers
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._client = flight.FlightClient(
            f"grpc{'+tls' if is_secure else ''}://{host}:{self._port}",
            generic_options=[
                ("grpc.enable_http_proxy", 0),  # the environment's proxy is for the web
                ("grpc.use_local_subchannel_pool", 1),  # else all Calls to an address would share a connection
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ],
            **({} if self._tls is None else _tls_options(self._tls)),
        )

    def rows(self, ticket: bytes, timeout_s: float) -> tuple[PackedRows, list[Fault]]:
        """The rows of a ``RowsTicket``, uint8, (rows, row_bytes); and which of them could not be had."""
        with self._in_words():
            reader = self._client.do_get(flight.Ticket(ticket), self._options(timeout_s))
            found, metadata = [], None
            for chunk in reader:
                found.append(chunk.data)
                metadata = chunk.app_metadata
        rows = [_rows_of(batch) for batch in found]
        faults = faults_from_wire(b"" if metadata is None else metadata.to_pybytes())
        return (rows[0] if len(rows) == 1 else np.concatenate(rows)), faults

    def act(self, name: str, body: bytes, timeout_s: float) -> bytes:
        """The answer to an action."""
        with self._in_words():
            results = list(self._client.do_action(flight.Action(name, body), self._options(timeout_s)))
            return b"".join(result.body.to_pybytes() for result in results)

    def why_not(self) -> str:
        """Why the server cannot be reached, in words; "" if it can. Raises ServerError if a certificate is wrong."""
        try:
            probe(self._host, self._port, self._tls)
        except ConnectionError as error:
            return str(error)
        return ""

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError):
            raise ServerError(
                f"the server at {self.address} refuses the token",
                hint="Give the one that it was started with: token=…, or in $LOADERD_TOKEN.",
            ) from None
        except flight.FlightTimedOutError:
            raise OutOfReach(f"the server at {self.address} has not answered in time") from None
        except (flight.FlightUnavailableError, flight.FlightCancelledError) as error:
            raise OutOfReach(f"the server at {self.address}: {_words_of(error)}") from None
        except flight.FlightError as error:
            raise _refusal(error, self.address) from None
        except (pa.ArrowException, OSError) as error:
            if _NO_ROOM in str(error):
                raise OutOfReach(f"the server at {self.address} has no room now: {_words_of(error)}") from None
            raise ServerError(f"the server at {self.address} failed: {_words_of(error)}") from None


def _rows_of(batch: pa.RecordBatch) -> PackedRows:
    if batch.schema.names != [COLUMN] or not pa.types.is_fixed_size_binary(batch.schema.field(0).type):
        raise ServerError(
            f"the server's answer does not hold rows, but {batch.schema!s:.200}", hint="Is it a server of loaderd?"
        )
    column = batch.column(0)
    size = column.type.byte_width
    rows = np.frombuffer(column.buffers()[1] or b"", np.uint8, len(column) * size, column.offset * size)
    return rows.reshape(len(column), size)


def _refusal(error: flight.FlightError, address: str) -> LoaderdError:
    """The error that the server sent along, or one with gRPC's words."""
    with contextlib.suppress(ValueError, TypeError, KeyError, msgpack.UnpackException):
        return from_wire(msgpack.unpackb(error.extra_info))
    return ServerError(f"the server at {address} failed: {_words_of(error)}")


def _words_of(error: BaseException) -> str:
    """What gRPC says, without its details for debugging."""
    words = str(error).split(". gRPC client debug context")[0].split(". Detail: ")[0]
    return words.split(", with message: ")[-1][:500]


def _tls_options(tls: TLS) -> dict[str, bytes | str]:
    options: dict[str, bytes | str] = {"tls_root_certs": trusted_roots(tls)}
    if tls.cert is not None and tls.key is not None:
        options |= {"cert_chain": read_pem(tls.cert), "private_key": read_pem(tls.key)}
    if tls.server_name is not None:
        options["override_hostname"] = tls.server_name
    return options
