"""Who may speak with whom over the network: a token for the consumer, TLS for both.

The token is a secret that server and consumers share; it goes in a header of every call, and TLS keeps it secret. A
client certificate (mTLS) may be asked for besides, not instead.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Any

from loaderd.errors import OptionError, ServerError
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.tls import TLS

_PROBE_TIMEOUT_S = 10.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_TLS_ALERT = b"\x15"


def read_token(path: str | os.PathLike[str] | None) -> str | None:
    """The token in a file, or, without one, in the environment; None if there is neither. Raises OptionError.

    Space around the token is ignored. Nobody but its owner may have access to the file.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        return None if token is None else check_token(token, f"${TOKEN_VARIABLE}")
    try:
        mode = os.stat(path).st_mode
        token = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the token file {os.fspath(path)!r} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(
            f"the token file {os.fspath(path)!r} must be for its owner alone, got mode {stat.S_IMODE(mode):04o}",
            hint=f"chmod 600 {os.fspath(path)}",
        )
    return check_token(token, f"the token file {os.fspath(path)!r}")


def check_token(token: Any, where: str) -> str:
    """``token`` without the space around it; raises OptionError, which names ``where``, if it is none."""
    stripped = token.strip() if isinstance(token, str) else ""
    if not stripped or not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise OptionError(
            f"{where} must hold a token: one word of printable ASCII characters",
            hint="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return stripped


def bearer(token: str) -> str:
    """The value of the header "authorization"."""
    return f"Bearer {token}"


def is_bearer(header: str, token: str) -> bool:
    """Whether the header holds ``token``. The time that this takes does not reveal where they differ."""
    return hmac.compare_digest(header.encode(errors="replace"), bearer(token).encode())


def trusted_roots(tls: TLS) -> bytes:
    """The certificates, PEM, that a consumer trusts. Raises OptionError."""
    paths = ssl.get_default_verify_paths()
    path = tls.ca or os.environ.get(paths.openssl_cafile_env) or paths.cafile
    if path is None:
        raise OptionError("this machine has no file of trusted certificates", hint="Say which: TLS(ca=…).")
    return read_pem(path)


def read_pem(path: str | os.PathLike[str]) -> bytes:
    """The contents of a file of certificates or of a key. Raises OptionError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {os.fspath(path)}: {error.strerror}") from None


def probe(host: str, port: int, tls: TLS | None) -> None:
    """Check that a server answers, and that its certificate is right. Raises ConnectionError if none answers.

    Raises ServerError, with the reason, if the certificate is wrong: gRPC does not say why it is. Raises OptionError
    if the certificates in ``tls`` cannot be used.
    """
    try:
        raw = socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S)
    except OSError as error:
        raise ConnectionError(f"nothing answers at {host}:{port}: {error.strerror or error}") from None
    with raw:
        if tls is None:
            _check_speaks_plainly(raw, host, port)
            return
        context = _context_of(tls)
        try:
            with context.wrap_socket(raw, server_hostname=tls.server_name or host) as secured:
                # An HTTP/2 server speaks first. If it needs a certificate and got none, it closes now, not before.
                has_spoken = bool(secured.recv(1))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # as a proxy whose server is away ends it
            raise ConnectionError(
                f"{host}:{port} ended the connection in the TLS handshake. Without TLS: grpc://{host}:{port}"
            ) from None
        except ssl.SSLError as error:
            raise _handshake_error(error, host, port, tls) from None
        except OSError as error:
            raise ConnectionError(f"{host}:{port} went away: {error.strerror or error}") from None
        if not has_spoken:
            asks = " Maybe it asks for a certificate: TLS(cert=…, key=…)." if tls.cert is None else ""
            raise ConnectionError(f"{host}:{port} ended the connection without a word.{asks}")


def _context_of(tls: TLS) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.set_alpn_protocols(["h2"])
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # the base class of ssl.SSLError
        raise OptionError(f"the certificates of {tls} cannot be used: {error}") from None
    return context


def _handshake_error(error: ssl.SSLError, host: str, port: int, tls: TLS) -> ServerError:
    """What went wrong in a handshake, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ServerError(
            f"the certificate of {host}:{port} is not trusted: {error.verify_message}",
            hint=f"It must be valid now, for the name {tls.server_name or host!r} (TLS.server_name), and signed by "
            f"{tls.ca or 'one whom this machine trusts'} (TLS.ca).",
        )
    words = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in words:
        return ServerError(
            f"{host}:{port} refuses the connection: {words}",
            hint="If it asks for a certificate, give one that it trusts: TLS(cert=…, key=…).",
        )
    return ServerError(
        f"the TLS handshake with {host}:{port} failed: {words}",
        hint="Without TLS, a server's address is grpc://host:port.",
    )


def _check_speaks_plainly(sock: socket.socket, host: str, port: int) -> None:
    """Raise ConnectionError if the other end does not answer in plain HTTP/2."""
    try:
        sock.sendall(_HTTP2_PREFACE)
        has_spoken = sock.recv(1) not in (b"", _TLS_ALERT)
    except OSError as error:
        raise ConnectionError(f"{host}:{port} went away: {error.strerror or error}") from None
    if not has_spoken:
        raise ConnectionError(
            f"{host}:{port} ended the connection without a word. Maybe it speaks TLS: grpc+tls://{host}:{port}"
        )
