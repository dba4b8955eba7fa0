"""The token and the certificates that ``loaderd status`` and ``loaderd doctor`` use with a server on the network."""

from __future__ import annotations

import argparse
import os

from loaderd.errors import ServerError
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.remote.security import TLS, read_token


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`access_of` reads."""
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"holds the server's token; default: the variable {TOKEN_VARIABLE}"
    )
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file: the CA of the server's certificate; default: the system's CAs"
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="PEM file: a certificate of your own, if the server asks for one"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file: the private key of --tls-cert")


def access_of(arguments: argparse.Namespace) -> tuple[str | None, TLS | None]:
    """The server's token, and the certificates; None for what is not given. Raises OptionError."""
    given = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    # A variable that is set to nothing is no token: a server that asks for one will say so, and others ask for none.
    has_token = arguments.token_file is not None or os.environ.get(TOKEN_VARIABLE)
    return read_token(arguments.token_file) if has_token else None, TLS(*given) if any(given) else None


def no_report(address: str, error: Exception) -> ServerError:
    """The error for what a server says of itself, at which ``error`` was raised."""
    return ServerError(
        f"{address} answers with something that is no report of a server: {type(error).__name__}: {error!s:.100}",
        hint="Something else listens there, or a server of another version.",
    )
