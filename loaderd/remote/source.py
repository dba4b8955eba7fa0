"""Where a consumer elsewhere finds its data.

The consumer sends these as pickles, which only its own daemon and workers read.
"""

from __future__ import annotations

from dataclasses import dataclass

from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing
from loaderd.remote.tickets import Compression
from loaderd.tls import TLS


@dataclass(frozen=True)
class Settings:
    """How to call servers. ``consumer``: a name, for people to read."""

    token: str | None = None
    tls: TLS | None = None
    compression: Compression = None
    consumer: str = ""


@dataclass(frozen=True)
class RemoteSet:
    """Data set ``name`` of the servers at ``addresses``. If none answers, they are called for ``limit_s`` seconds."""

    addresses: tuple[str, ...]
    settings: Settings
    name: str
    limit_s: float


@dataclass(frozen=True)
class RemoteRows:
    """Rows of a remote set, ``row_bytes`` each. ``data``: the digest of its data; ``listing``: as in a ticket."""

    of: RemoteSet
    data: str
    row_bytes: int
    listing: Listing | None = None


@dataclass(frozen=True)
class RemoteStream:
    """A stream of a remote set, before the servers have said what the set is. They decide on the order."""

    of: RemoteSet
    options: StreamOptions
