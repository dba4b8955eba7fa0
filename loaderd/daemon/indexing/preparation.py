"""The way from a description to data, wherever they are. A stream waits for this before it can be opened."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from loaderd.daemon.indexing.local_data import LocalData
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.errors import LoaderdError
from loaderd.formats.shard_index import ShardIndex
from loaderd.plan.passes import Listing
from loaderd.snapshots import Progress
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemoteData


class Preparation(ABC):
    """Finds the data of a stream. In the end there are ``data``, or an ``error``: why there are none."""

    def __init__(self, worker_manager: WorkerManager, listing: Listing | None) -> None:
        self.data: LocalData | RemoteData | None = None
        self.error: LoaderdError | None = None
        self.listing = listing
        """Which shards of sets that grow are wanted; None: those that there are now."""
        self.indexes: dict[ShardFile, ShardIndex] = {}
        self.num_cached = 0
        self.storage_counts: list[int] = []
        self.index_s = 0.0
        self._warnings: list[str] = []
        self._worker_manager = worker_manager
        self._began_s = time.monotonic()

    @property
    @abstractmethod
    def doing(self) -> str:
        """What is being done to the data set, as a word that may follow "is being"."""

    @property
    @abstractmethod
    def progress(self) -> Progress | None:
        """How far the present stage is; None: it takes no time, or all are over."""

    @property
    def finished(self) -> bool:
        """Whether there are data, or an error."""
        return self.data is not None or self.error is not None

    def take_warnings(self) -> list[str]:
        """The warnings that have come since the last call."""
        found, self._warnings = self._warnings, []
        return found

    @abstractmethod
    def advance(self) -> None:
        """Go on to the next stage, or to the data, if what this stage waits for is there."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop all work for it."""


Prepare = Callable[[Listing | None, Mapping[ShardFile, ShardIndex]], Preparation]
"""Makes a preparation from the listing that is wanted and the indexes that are here already."""
