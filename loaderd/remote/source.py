"""Where a consumer elsewhere finds its data.

The consumer sends these as pickles, which only its own daemon and workers read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from loaderd.errors import OptionError
from loaderd.options import StreamOptions
from loaderd.pickling import pickled
from loaderd.plan.passes import Listing
from loaderd.redaction import shown
from loaderd.remote.security import TLS, read_token
from loaderd.remote.tickets import ConsumerName

Token = str | os.PathLike[str] | Callable[[], str]


@dataclass(frozen=True)
class Settings:
    """How to ask servers. ``token``: itself; or a file or a function that it is read from, again when refused."""

    token: Token | None = field(default=None, repr=False)
    tls: TLS | None = None
    consumer: ConsumerName = field(default_factory=ConsumerName)

    def read_token(self) -> str | None:
        """The token as it is now. Raises OptionError."""
        if self.token is None or isinstance(self.token, str):
            return self.token
        if not callable(self.token):
            return read_token(self.token)
        try:
            return self.token()
        except Exception as error:
            raise OptionError(f"the token's function failed: {type(error).__name__}: {error}") from error


def check_token_function(function: Callable[[], str]) -> None:
    """Raise OptionError if worker processes cannot have this function."""
    try:
        pickled(function)
    except Exception as error:
        raise OptionError(
            f"token must be a function that can be pickled, for the worker processes, got {shown(function, 200)}: "
            f"{type(error).__name__}: {error}",
            hint="Create what it uses inside the function, or give the path of a file that holds the token.",
        ) from None


@dataclass(frozen=True)
class RemoteSet:
    """Data set ``name`` of the servers at ``addresses``. If none answers, they are asked for ``limit_s`` seconds."""

    addresses: tuple[str, ...]
    settings: Settings
    name: str
    limit_s: float


@dataclass(frozen=True)
class RemoteRows:
    """Rows of a remote set, ``row_bytes`` each, of which a request may have ``most_rows``.

    ``data``: the digest of its table; ``shards``: as in the table.
    """

    of: RemoteSet
    data: str
    row_bytes: int
    most_rows: int
    shards: bytes
    listing: Listing | None = None


@dataclass(frozen=True)
class RemoteStream:
    """A stream of a remote set, before the servers have said what the set is. They decide on the order.

    ``has_begun``: as of ``Servers``.
    """

    of: RemoteSet
    options: StreamOptions
    has_begun: bool = False
