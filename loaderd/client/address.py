"""Where a server is: on this machine, at a Unix socket, or somewhere on the network."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from loaderd.errors import OptionError

TOKEN_VARIABLE = "LOADERD_TOKEN"
"""The environment's variable that holds a consumer's token, and a server's."""

_NETWORK_SCHEMES = ("grpc", "grpc+tls")


def default_socket_path() -> str:
    """Where a server listens that was told nothing else: in ``$XDG_RUNTIME_DIR``, or in a folder of ours in /tmp."""
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/loaderd-{os.getuid()}", "loaderd.sock")


def unix_path(address: str) -> str | None:
    """The path of an address ``unix:///path``, or ``unix:`` for the default; None: it is one of the network.

    Raises OptionError where it is neither.
    """
    scheme, colon, rest = str(address).partition(":")
    if scheme == "unix" and colon and (not rest.startswith("//") or rest.startswith("///")):
        path = rest.removeprefix("//")
        return os.path.abspath(path) if path else default_socket_path()
    if scheme not in _NETWORK_SCHEMES or not _names_host_and_port(address):
        raise OptionError(
            f"address must be unix:///PATH, grpc+tls://HOST:PORT or grpc://HOST:PORT, got {address!r}",
            hint="unix: alone is where a server listens by default.",
        )
    return None


def _names_host_and_port(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return bool(parts.hostname and parts.port) and not (parts.username or parts.path or parts.query)
    except ValueError:  # a port that is no number, or a bracket that stays open
        return False
