"""Who may speak with whom over the network: a token for the consumer, TLS for both, and where a server may listen.

The token is a secret that server and consumers share; it goes in a header of every call, and TLS keeps it secret. A
client certificate (mTLS) may be asked for besides, not instead.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import ssl
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loaderd.errors import OptionError, ServerError
from loaderd.options import require

TOKEN_VARIABLE = "LOADERD_TOKEN"
_PROBE_TIMEOUT_S = 10.0


def read_token(path: str | os.PathLike[str] | None) -> str | None:
    """The token in a file, or, without one, in the environment; None if there is neither. Raises OptionError.

    Space around it does not count. The file must be for its owner alone.
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
    """``token`` without the space around it; raises OptionError unless it can be one."""
    stripped = token.strip() if isinstance(token, str) else ""
    if not stripped or not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise OptionError(
            f"{where} must hold a token: one word of printable ASCII characters",
            hint="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return stripped


def bearer(token: str) -> str:
    """What the header "authorization" says."""
    return f"Bearer {token}"


def is_bearer(header: str, token: str) -> bool:
    """Whether the header says ``token``; how long this takes does not tell where it differs."""
    return hmac.compare_digest(header.encode(errors="replace"), bearer(token).encode())


@dataclass(frozen=True)
class TLS:
    """How a consumer checks a server, and shows who it is. All are paths of PEM files but ``server_name``.

    ``ca``: who may have signed the server's certificate; None: who this machine trusts. ``cert`` and ``key``: the
    consumer's own, for a server that asks for one. ``server_name``: the name that the server's certificate must be
    for, if it is not the host's in the address.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            path = getattr(self, name)
            is_path = path is None or (isinstance(path, (str, os.PathLike)) and os.path.isfile(path))
            require(is_path, f"TLS.{name}", "the path of a PEM file, or None", path)
            object.__setattr__(self, name, None if path is None else os.path.abspath(os.fspath(path)))
        require(
            (self.cert is None) == (self.key is None), "TLS.key", "given where TLS.cert is, and only there", self.key
        )
        is_name = self.server_name is None or (isinstance(self.server_name, str) and bool(self.server_name))
        require(is_name, "TLS.server_name", "a host's name, or None", self.server_name)

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for a message; ``TLS(**wire)`` is the way back."""
        return asdict(self)

    @property
    def roots(self) -> bytes:
        """The certificates, PEM, that are trusted."""
        paths = ssl.get_default_verify_paths()
        path = self.ca or os.environ.get(paths.openssl_cafile_env) or paths.cafile
        if path is None:
            raise OptionError("this machine has no file of trusted certificates", hint="Say which: TLS(ca=…).")
        return Path(path).read_bytes()


def split_address(address: str, what: str) -> tuple[str, int]:
    """Host and port of "host:port", the host without brackets; raises OptionError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    right = bool(colon and host) and (bracketed or ":" not in host) and port.isascii() and port.isdigit()
    if not right or int(port) > 65535:
        raise OptionError(f"{what} must be host:port, as in 0.0.0.0:8471 or [::1]:8471, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``: a name counts by all the addresses that it stands for."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OptionError(f"the host {host!r} cannot be found: {error.strerror}") from None
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)


def check_listen(address: str, *, has_tls: bool, has_token: bool, insecure: bool) -> tuple[str, int]:
    """Host and port to listen on; raises OptionError where others could reach it unasked or overhear."""
    host, port = split_address(address, "the address to listen on")
    lacks = [what for what, has in (("TLS", has_tls), ("a token", has_token)) if not has]
    if lacks and not insecure and not is_loopback(host):
        raise OptionError(
            f"listening on {address} needs TLS and a token, for others can reach it; it lacks {' and '.join(lacks)}",
            hint="Give --tls-cert and --tls-key, and --token-file or $LOADERD_TOKEN; or say --insecure, "
            "where everybody on the network may read the data.",
        )
    return host, port


def probe(host: str, port: int, tls: TLS | None) -> None:
    """See whether a server is there whose certificate is right. Raises ConnectionError if none answers.

    Raises ServerError where the certificate is wrong: gRPC's own words for that do not say what.
    """
    try:
        raw = socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S)
    except OSError as error:
        raise ConnectionError(f"nothing answers at {host}:{port}: {error.strerror or error}") from None
    with raw:
        if tls is None:
            return
        context = ssl.create_default_context(cafile=tls.ca)
        context.set_alpn_protocols(["h2"])
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        name = tls.server_name or host
        try:
            with context.wrap_socket(raw, server_hostname=name):
                return
        except ssl.SSLCertVerificationError as error:
            raise ServerError(
                f"the certificate of {host}:{port} is not trusted: {error.verify_message}",
                hint=f"It must be valid now, for the name {name!r} (TLS.server_name), and signed by "
                f"{tls.ca or 'one whom this machine trusts'} (TLS.ca).",
            ) from None
        except ssl.SSLError as error:
            raise ServerError(
                f"{host}:{port} does not speak TLS, or not with us: {error.reason or error}",
                hint="Without TLS, a server's address is grpc://host:port.",
            ) from None
        except OSError as error:
            raise ConnectionError(f"{host}:{port} went away: {error.strerror or error}") from None
