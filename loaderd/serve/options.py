"""The options of the two servers, checked when they are made."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import re
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loaderd.daemon.catalog import HOW_TRAININGS_END
from loaderd.daemon.indexing.shard_manifest import Manifests
from loaderd.errors import OptionError, ServerError
from loaderd.logs import FORMATS, LogFormat
from loaderd.options import MAX_WORKERS, as_count, as_float, is_count, require
from loaderd.remote.address import TOKEN_VARIABLE, can_be_host
from loaderd.remote.security import read_tokens

_logger = logging.getLogger("loaderd")

_SHORT_TOKEN = 16
_SOON_S = 7 * 86_400
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_bytes(text: str, what: str = "a number of bytes") -> int:
    """The number of bytes in ``text``, such as "100MB" or "1.5 GiB". Raises OptionError, which names ``what``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]i?B|B)", text.strip())
    wanted = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
    number = round(wanted) if math.isfinite(wanted) else 0
    require(number > 0, what, f"like 100MB, with a unit of {', '.join(_UNITS)}", text)
    return number


def _check_bytes(number: int | None, what: str) -> None:
    require(number is None or is_count(number), what, "from 1 to 2**63 - 1 bytes", number)


def default_state_folder() -> str:
    """Where a server keeps what outlives it: systemd's ``$STATE_DIRECTORY``, else in the user's state folder."""
    if folder := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return folder
    return os.path.join(os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state"), "loaderd")


def manifest_folder(state: str | None) -> str | None:
    """The folder of ``daemon.indexing.shard_manifest`` in the folder ``state``; None: the default one cannot be used.

    Raises ServerError if the one that was asked for cannot.
    """
    folder = os.path.join(state or default_state_folder(), "manifests")
    try:
        Manifests(folder).close()
    except ServerError as error:
        if state is not None:
            raise
        _logger.warning("%s: %s. Choose another one with --state", error.message, HOW_TRAININGS_END)
        return None
    return folder


@dataclass(frozen=True)
class Address:
    """Where on the network to listen; port 0: any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "an address") -> Address:
        """The address in ``text``, "HOST:PORT" (IPv6 in brackets). Raises OptionError, which names ``what``."""
        host, colon, port = text.rpartition(":")
        is_port = bool(colon) and port.isascii() and port.isdigit() and int(port) < 1 << 16
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        require(
            is_port and bool(bare) and (":" not in host or bare != host) and can_be_host(bare),
            what,
            "HOST:PORT, such as 127.0.0.1:8471 or [::]:8471",
            text,
        )
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to it. Raises OptionError for a name that cannot be resolved."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OptionError(f"cannot listen at {self}: {error.strerror}") from None
        return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)

    def bound(self, option: str) -> socket.socket:
        """A socket that listens here, which ``option`` has asked for. Raises ServerError."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            raise ServerError(f"{option} cannot listen at {self}: {error.strerror}") from None


@dataclass(frozen=True)
class ServerOptions:
    """What both servers have: options of the same names as those of ``loaderd serve``. Raises OptionError.

    ``targets``: the data sets, each ``mypackage.module:dataset``. ``workers``: processes. ``grace``, ``watchdog``:
    seconds. ``state``: a folder for what outlives the server; None: :func:`default_state_folder`.
    """

    targets: tuple[str, ...]
    workers: int | None = None
    health: Address | None = None
    log_format: LogFormat = "lines"
    grace: float = 10.0
    watchdog: float = 30.0
    state: str | None = None

    def __post_init__(self) -> None:
        require(len(self.targets) > 0, "what is served", "at least one mypackage.module:dataset", self.targets)
        for target in self.targets:
            is_target = all(part.isidentifier() for part in re.split(r"[.:]", target)) and target.count(":") == 1
            require(is_target, "a data set", "named like mypackage.module:dataset", target)
        if self.workers is not None:
            as_count(self.workers, "workers", most=MAX_WORKERS)
        require(self.log_format in FORMATS, "log_format", " or ".join(FORMATS), self.log_format)
        as_float(self.grace, "grace", "at least 0 s")
        as_float(self.watchdog, "watchdog", "at least 1 s", 1)


@dataclass(frozen=True)
class UnixOptions(ServerOptions):
    """Of the server of this machine. ``unix``: the path of its socket.

    ``max_memory``: bytes of the windows and batches of a consumer, or of a group. ``idle_timeout``: seconds.
    """

    unix: str = ""
    max_consumers: int = 64
    max_held_batches: int = 64
    max_memory: int | None = None
    idle_timeout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_consumers", "max_held_batches"):
            as_count(getattr(self, name), name)
        _check_bytes(self.max_memory, "max_memory")
        if self.idle_timeout is not None:
            as_float(self.idle_timeout, "idle_timeout", "a positive number of seconds", sys.float_info.min)


@dataclass(frozen=True)
class HttpOptions(ServerOptions):
    """Of the server of other machines. ``listen``: where. ``tls_…``, ``token_file``: paths of files.

    ``max_bandwidth``: bytes/s, to all consumers together.
    """

    listen: Address = Address("127.0.0.1", 0)
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    token_file: str | None = None
    insecure: bool = False
    max_connections: int = 1024
    max_bandwidth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        as_count(self.max_connections, "max_connections")
        _check_bytes(self.max_bandwidth, "max_bandwidth")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key go together, got one of them")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise OptionError("--tls-client-ca needs --tls-cert and --tls-key")
        missing = [
            *([] if self.tls_cert else ["TLS (--tls-cert and --tls-key)"]),
            *([] if self.tokens() else [f"a token (--token-file, or the environment's {TOKEN_VARIABLE})"]),
        ]
        if missing and not self.insecure and not self.listen.is_loopback:
            raise OptionError(
                f"--listen {self.listen} can be reached from other machines, and needs {' and '.join(missing)}",
                hint="Listen at 127.0.0.1, give what is missing, or pass --insecure if everybody may read the data.",
            )

    def tokens(self) -> list[str]:
        """The tokens that are in the file, or in the environment, now. Raises OptionError."""
        return read_tokens(self.token_file)

    def expires_s(self) -> float | None:
        """When the certificate expires, as a Unix time. Raises OptionError if the certificates cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        what = f"--tls-cert {self.tls_cert} and --tls-key {self.tls_key} must be a certificate and its private key"
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: b"")
            if self.tls_client_ca is not None:
                what = f"--tls-client-ca {self.tls_client_ca} must be the certificate of a CA"
                context.load_verify_locations(self.tls_client_ca)
            # Python has no public way to read a certificate without a connection; this one is as old as ssl.
            found: dict[str, Any] = ssl._ssl._test_decode_cert(self.tls_cert)  # type: ignore[attr-defined]
        except OSError as error:  # the base class of ssl.SSLError
            reason = str(getattr(error, "reason", None) or error.strerror or "there is none")
            reason = reason.lower().replace("_", " ")
            raise OptionError(f"{what}, PEM, without a passphrase: {reason}") from None
        return float(ssl.cert_time_to_seconds(found["notAfter"]))

    def warnings(self) -> Iterator[str]:
        """Of secrets as they are now. Raises OptionError if they cannot be used."""
        shortest = min(map(len, self.tokens()), default=_SHORT_TOKEN)
        if shortest < _SHORT_TOKEN:
            yield (
                f"a token has {shortest} characters and could be guessed; {_SHORT_TOKEN} or more are better: "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        left_s = (self.expires_s() or math.inf) - time.time()
        if left_s < _SOON_S:
            when = "has expired" if left_s <= 0 else f"expires in {left_s / 3600:.0f} hours"
            yield f"the certificate {self.tls_cert} {when}. SIGHUP makes the server read a new one"
