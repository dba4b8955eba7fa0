"""Where a consumer elsewhere finds its data: what its processes on this machine tell each other of servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing, listing_of
from loaderd.remote.tickets import Compression


@dataclass(frozen=True)
class Settings:
    """How to call servers. ``tls``: as ``TLS.to_wire()``; ``consumer``: a name, for people to read."""

    token: str | None = None
    tls: dict[str, Any] | None = None
    compression: Compression = None
    consumer: str = ""


@dataclass(frozen=True)
class RemoteSet:
    """Data set ``name`` of the servers at ``addresses``. Those that are away are called for ``limit_s`` seconds."""

    addresses: tuple[str, ...]
    settings: Settings
    name: str
    limit_s: float

    def to_wire(self) -> list[Any]:
        """Plain values, for a message to a process of ours."""
        settings = self.settings
        calling = [settings.token, settings.tls, settings.compression, settings.consumer]
        return [list(self.addresses), calling, self.name, self.limit_s]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> RemoteSet:
        """The way back."""
        addresses, calling, name, limit_s = wire
        return cls(tuple(addresses), Settings(*calling), name, limit_s)


@dataclass(frozen=True)
class RemoteRows:
    """Rows of a remote set: of the data whose digest is ``data``, ``row_bytes`` each; ``listing`` as in a ticket."""

    of: RemoteSet
    data: str
    row_bytes: int
    listing: Listing | None = None

    def to_wire(self) -> list[Any]:
        """Plain values, for a message to a process of ours."""
        return [self.of.to_wire(), self.data, self.row_bytes, self.listing]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> RemoteRows:
        """The way back."""
        of, data, row_bytes, listing = wire
        return cls(RemoteSet.from_wire(of), data, row_bytes, listing_of(listing))


@dataclass(frozen=True)
class RemoteStream:
    """A stream of a remote set, before the servers have said what that is: they decide on the order."""

    of: RemoteSet
    options: StreamOptions
