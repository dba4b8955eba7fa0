"""Who may speak with whom over the network: a token for the consumer, TLS for both.

The token is a secret that server and consumers share; it goes in a header of every call, and TLS keeps it secret. A
client certificate (mTLS) may be asked for besides, not instead.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Any, Literal

from loaderd.errors import OptionError
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.remote.tls import TLS

_PROBE_TIMEOUT_S = 3.0
_END_TIMEOUT_S = 1.0


def read_tokens(path: str | os.PathLike[str] | None) -> list[str]:
    """The tokens that a server takes: each line of a file, or the one in the environment. Raises OptionError."""
    if path is None:
        return [token] if (token := read_token(None)) else []
    lines = [line for line in _secret(path).split("\n") if line.strip()]
    if not lines:  # it may be written at this moment: a server that has a file is never open to all
        raise OptionError(f"the token file {os.fspath(path)!r} has no token")
    return [check_token(line, f"each line of {os.fspath(path)!r}") for line in lines]


def read_token(path: str | os.PathLike[str] | None) -> str | None:
    """The token in a file, or, without one, in the environment; None if there is neither. Raises OptionError.

    Space around the token is ignored. Nobody but its owner may have access to the file.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        return None if token is None else check_token(token, f"${TOKEN_VARIABLE}")
    return check_token(_secret(path), f"the token file {os.fspath(path)!r}")


def _secret(path: str | os.PathLike[str]) -> str:
    """The text of a file that is for its owner alone. Raises OptionError."""
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the token file {os.fspath(path)!r} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"the token file {os.fspath(path)!r} must be for its owner alone, got mode {stat.S_IMODE(mode):04o}",
            hint=f"chmod 600 {os.fspath(path)}",
        )
    return text


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
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # the base class of ssl.SSLError
        raise OptionError(f"the certificates of {tls} cannot be used: {error}") from None
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
