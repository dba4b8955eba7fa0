"""A connection to a gateway: made, used, and what is said where it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as flight

from loaderd.errors import OptionError, ServerError
from loaderd.options import require
from loaderd.protocol.messages import Dial
from loaderd.remote.security import bearer, check_token, probe, read_pem, trusted_roots
from loaderd.remote.sockets import notice_dead_peers
from loaderd.remote.wire import AUTHORIZATION, check_compression, exchange_command
from loaderd.tls import TLS

_SCHEMES = {"grpc": False, "grpc+tls": True}


class Uplink:
    """One exchange with the gateway at ``dial.address``.

    ``dial.settings``: "token", "tls" (``TLS.to_wire()``) and "compression", each of which may be None. Raises
    ConnectionError where nobody answers, ServerError where somebody does who is not to be trusted, OptionError.
    """

    def __init__(self, dial: Dial) -> None:
        settings = dial.settings
        self._host, self._port, tls = _parse(dial.address, settings.get("tls"))
        token = settings.get("token")
        headers = [] if token is None else [(AUTHORIZATION.encode(), bearer(check_token(token, "token")).encode())]
        command = exchange_command(check_compression(settings.get("compression")))
        probe(self._host, self._port, tls)
        self._client = flight.FlightClient(
            flight.Location(f"grpc{'' if tls is None else '+tls'}://{self._netloc}"),
            # The proxy of the environment is for the web; and here it is known who is at the other end.
            generic_options=[("grpc.enable_http_proxy", 0)],
            **({} if tls is None else _tls_options(tls)),
        )
        with self._in_words():
            self._writer, self._reader = self._client.do_exchange(
                flight.FlightDescriptor.for_command(command), flight.FlightCallOptions(headers=headers)
            )
        notice_dead_peers(self._port)  # now there is a socket

    @property
    def _netloc(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def send(self, data: bytes) -> None:
        """Send a message, encoded."""
        self._writer.write_metadata(data)

    def receive(self) -> tuple[bytes, pa.RecordBatch | None]:
        """A message, encoded, and the batch that comes with it.

        Raises ConnectionError where there is no connection any more, ServerError where the server refuses.
        """
        with self._in_words():
            chunk = self._reader.read_chunk()
        return b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes(), chunk.data

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except StopIteration:
            raise ConnectionError(f"the server at {self._netloc} ended the connection") from None
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError):
            raise ServerError(
                f"the server at {self._netloc} refuses the token",
                hint="Give the one that it was started with: token=…, or in $LOADERD_TOKEN.",
            ) from None
        except (flight.FlightUnavailableError, flight.FlightTimedOutError, flight.FlightCancelledError) as error:
            raise ConnectionError(f"the connection to {self._netloc} was lost: {_words_of(error)}") from None
        except (pa.ArrowException, OSError) as error:
            raise ServerError(f"the server at {self._netloc} failed: {_words_of(error)}") from None


def _words_of(error: BaseException) -> str:
    """What gRPC says, without its own diary."""
    return str(error).split(". gRPC client debug context")[0][:500]


def _parse(address: str, tls_wire: dict[str, str | None] | None) -> tuple[str, int, TLS | None]:
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    right = parts.scheme in _SCHEMES and host and port and not parts.path.strip("/")
    require(bool(right), "the address", "grpc+tls://host:port or grpc://host:port", address)
    assert host and port
    if not _SCHEMES[parts.scheme]:
        if tls_wire is not None:
            raise OptionError(f"tls is for an address that begins with grpc+tls://, got {address!r}")
        return host, port, None
    return host, port, TLS(**(tls_wire or {}))


def _tls_options(tls: TLS) -> dict[str, bytes | str]:
    options: dict[str, bytes | str] = {"tls_root_certs": trusted_roots(tls)}
    if tls.cert is not None and tls.key is not None:
        options |= {"cert_chain": read_pem(tls.cert), "private_key": read_pem(tls.key)}
    if tls.server_name is not None:
        options["override_hostname"] = tls.server_name
    return options
