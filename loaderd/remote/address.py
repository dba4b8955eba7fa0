"""Where servers are: on this machine, at a Unix socket, or somewhere on the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from loaderd.errors import OptionError
from loaderd.redaction import shown

TOKEN_VARIABLE = "LOADERD_TOKEN"
"""The environment variable that holds the token, of a consumer and of a server."""

Addresses = str | Sequence[str] | Callable[[], Sequence[str]]

_NETWORK_SCHEMES = {"http": False, "https": True}
_FORMER_SCHEMES = {"grpc": "http", "grpc+tls": "https"}


def default_socket_path() -> str:
    """Where a server listens by default: in ``$XDG_RUNTIME_DIR``; without that, in a folder of loaderd's in /tmp."""
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/loaderd-{os.getuid()}", "loaderd.sock")


def unix_path(address: str) -> str | None:
    """The path of an address ``unix:///path``, or the default path for ``unix:``; None for a network address.

    Raises OptionError for anything else.
    """
    scheme, colon, rest = str(address).partition(":")
    if scheme == "unix" and colon and (not rest.startswith("//") or rest.startswith("///")):
        path = rest.removeprefix("//")
        return os.path.abspath(path) if path else default_socket_path()
    network_address(address)
    return None


def network_address(address: str) -> tuple[str, int, bool]:
    """(host, port, whether with TLS) of ``https://HOST:PORT`` or ``http://HOST:PORT``. Raises OptionError."""
    try:
        parts = urlsplit(address if isinstance(address, str) else "")
        host, port = parts.hostname, parts.port
        is_plain = not (parts.username or parts.path.strip("/") or parts.query) and can_be_host(host or "")
    except ValueError:  # a port that is no number, an open bracket
        host, port, is_plain = None, None, False
    if is_plain and host and port and parts.scheme in _FORMER_SCHEMES:
        name = f"[{host}]" if ":" in host else host
        raise OptionError(
            f"{parts.scheme}:// is no more: servers speak HTTP, got {shown(address, 300)}",
            hint=f"Write {_FORMER_SCHEMES[parts.scheme]}://{name}:{port}, and start the server with this version.",
        )
    if not (is_plain and host and port and parts.scheme in _NETWORK_SCHEMES):
        raise OptionError(
            f"address must be unix:///PATH, https://HOST:PORT or http://HOST:PORT, got {shown(address, 300)}",
            hint="unix: alone is where a server listens by default.",
        )
    return host, port, _NETWORK_SCHEMES[parts.scheme]


def can_be_host(name: str) -> bool:
    """Whether the machine can be asked where ``name`` is: not of "a..b", nor of a part over 63 characters."""
    try:
        name.encode("idna")  # as socket.getaddrinfo does
    except UnicodeError:
        return False
    return True


def checked_addresses(found: Any) -> tuple[str, ...]:
    """The network addresses in ``found``, each once. Raises OptionError if one is not valid, or there is none."""
    addresses = listed_addresses(found)
    if not addresses:
        raise OptionError("there must be at least one address of a server, got none")
    return addresses


def listed_addresses(found: Any) -> tuple[str, ...]:
    """The network addresses in ``found``, each once; maybe none. Raises OptionError if one is not valid."""
    if isinstance(found, str) or not hasattr(found, "__iter__"):
        raise OptionError(f"the addresses of servers must be a list, got {shown(found, 200)}")
    addresses = list(found)
    for address in addresses:
        network_address(address)
    return tuple(dict.fromkeys(addresses))
