"""The way from a description to data, wherever these are: what a stream waits for before it can be opened."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from loaderd.daemon.pool.workforce import Workforce
from loaderd.daemon.preparing.local_data import Data
from loaderd.errors import LoaderdError
from loaderd.plan.passes import Listing
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import ShardIndex

if TYPE_CHECKING:
    from loaderd.daemon.preparing.remote_data import RemoteData


class Preparation(ABC):
    """In the end there are ``data``, or the ``error`` why not."""

    def __init__(self, workforce: Workforce, listing: Listing | None) -> None:
        self.data: Data | RemoteData | None = None
        self.error: LoaderdError | None = None
        self.listing = listing
        """The shards of sets that grow; None: those there are."""
        self.indexes: dict[ShardFile, ShardIndex] = {}
        self.num_cached = 0
        self.storage_counts: list[int] = []
        self.index_s = 0.0
        self._warnings: list[str] = []
        self._workforce = workforce
        self._began_s = time.monotonic()

    @property
    @abstractmethod
    def doing(self) -> str:
        """What is being done to the data set."""

    @property
    def progress(self) -> tuple[int, int] | None:
        """Bytes that are indexed, and of how many; None: it is not that far, or further."""
        return None

    @property
    def finished(self) -> bool:
        """Whether there are data, or an error."""
        return self.data is not None or self.error is not None

    def take_warnings(self) -> list[str]:
        """What people should hear of it, once."""
        found, self._warnings = self._warnings, []
        return found

    @abstractmethod
    def advance(self) -> None:
        """Go on to what comes next, or to the data, if what was waited for is there."""

    @abstractmethod
    def cancel(self) -> None:
        """Have nothing more done for it."""


Prepare = Callable[[Listing | None, Mapping[ShardFile, ShardIndex]], Preparation]
"""Makes a preparation: of which listing, and which indexes are here already."""
