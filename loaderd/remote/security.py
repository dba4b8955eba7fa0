"""Who may speak with whom over the network: a token for the consumer, TLS for both.

The token is a secret that server and consumers share; it goes in a header of every call, and TLS keeps it secret. A
client certificate (mTLS) may be asked for besides, not instead.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from loaderd.errors import OptionError
from loaderd.options import as_absolute, is_path, require
from loaderd.remote.address import TOKEN_VARIABLE

_PROBE_TIMEOUT_S = 3.0
_END_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class TLS:
    """Paths of PEM files, for ``loaderd.connect(…, tls=…)``. Raises OptionError where they do not fit together.

    ``ca``: the certificates that must have signed the server's; None: those that the system trusts. ``cert`` and
    ``key``: the consumer's own, where the server asks for one (mTLS). ``server_name``: the name that must stand in
    the server's certificate, where it is not the host of the address.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_name = field.name == "server_name" and isinstance(value, str) and bool(value)
            require(value is None or is_name or is_path(value), f"TLS.{field.name}", "text or None", value)
            if value is not None and field.name != "server_name":
                object.__setattr__(self, field.name, as_absolute(value, f"TLS.{field.name}"))
        if (self.cert is None) != (self.key is None):
            raise OptionError(f"TLS.cert and TLS.key belong together, got cert={self.cert!r} and key={self.key!r}")


def read_token(path: str | os.PathLike[str] | None) -> str | None:
    """The first of :func:`read_tokens`; None: there is none. Raises OptionError."""
    return next(iter(read_tokens(path)), None)


def read_tokens(path: str | os.PathLike[str] | None) -> list[str]:
    """The tokens in the lines of a file; without one, the one in the environment, if it is there.

    Space around a token is ignored. Raises OptionError, also for a file to which others than its owner have access.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        return [] if token is None else [check_token(token, f"${TOKEN_VARIABLE}")]
    name = f"the token file {os.fspath(path)!r}"
    try:
        mode = os.stat(path).st_mode
        lines = [line for line in Path(path).read_text().split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{name} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"{name} must be for its owner alone, got mode {stat.S_IMODE(mode):04o}",
            hint=f"chmod 600 {os.fspath(path)}",
        )
    if not lines:  # it may be written at this moment: a server that has a file is never open to all
        raise OptionError(f"{name} has no token")
    return [check_token(line, f"each line of {name}") for line in lines]


def check_token(token: Any, where: str) -> str:
    """``token`` without the space around it; raises OptionError, which names ``where``, if it is none."""
    stripped = token.strip() if isinstance(token, str) else ""
    if not stripped or not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise OptionError(
            f"{where} must hold a token: one word of printable ASCII characters",
            hint="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return stripped


def tls_context(tls: TLS) -> ssl.SSLContext:
    """How a consumer speaks TLS. Raises OptionError if its certificates cannot be used."""
    try:
        changed = [None if path is None else os.stat(path).st_mtime_ns for path in (tls.ca, tls.cert, tls.key)]
        return _tls_context(tls, *changed)
    except OSError as error:  # the base class of ssl.SSLError
        raise OptionError(f"the certificates of {tls} cannot be used: {error}") from None


@lru_cache(4)
def _tls_context(tls: TLS, *changed: int | None) -> ssl.SSLContext:
    """One for all servers, as long as its files are the same: it takes 0.8 MiB."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def speaks_tls(host: str, port: int) -> bool:
    """Whether the server answers a TLS handshake, whatever its certificate is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return _shake_hands(host, port, context, host) != "fails"


def ends_tls(host: str, port: int, context: ssl.SSLContext, server_name: str | None) -> bool:
    """Whether the server ends each TLS connection after the handshake, before it was asked for anything.

    So it does where it wants another certificate. A server that is killed meanwhile does so once, but not twice; one
    that is full says so.
    """
    return all(_shake_hands(host, port, context, server_name or host) == "ends" for _ in range(2))


def _shake_hands(host: str, port: int, context: ssl.SSLContext, name: str) -> Literal["fails", "ends", "goes on"]:
    """What becomes of a TLS connection."""
    try:
        with (
            socket.create_connection((host, port), _PROBE_TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=name) as sock,
        ):
            sock.settimeout(_END_TIMEOUT_S)
            try:
                return "goes on" if sock.recv(1) else "ends"
            except TimeoutError:
                return "goes on"
    except ssl.SSLError as error:
        return "ends" if "alert" in str(error).lower() else "fails"
    except OSError:
        return "fails"
