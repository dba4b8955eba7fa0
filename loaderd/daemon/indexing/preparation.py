"""The way from a description to data. A stream waits for this before it can be opened.

::

    ListPass (one task) ──► IndexPass (a task for each group of shards that the cache does not know) ──► Data

Where servers have the records, ``remote_data`` goes another way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from loaderd.daemon.indexing.index_pass import IndexPass
from loaderd.daemon.indexing.list_pass import ListPass
from loaderd.daemon.indexing.local_data import LocalData, files_with, of_listing
from loaderd.daemon.indexing.shard_manifest import Manifest
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.dataset import AnyDataset
from loaderd.errors import LoaderdError
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import Indexes, ShardIndex
from loaderd.ipc.worker_messages import IndexTask, ListTask
from loaderd.options import StreamOptions, pickled_storage
from loaderd.plan.passes import Listing
from loaderd.redaction import redacted
from loaderd.schema.record_values import RecordValues
from loaderd.snapshots import Progress
from loaderd.storage.credentials import asked_of
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemoteData

_SLOW_S = 5.0
_SILENT_S = 4.0  # storage that answers is heard every three seconds


class Preparation:
    """Finds the data of a stream. In the end there are ``data``, or an ``error``: why there are none."""

    def __init__(self, worker_manager: WorkerManager, listing: Listing | None) -> None:
        """``listing``: which shards of sets that grow are wanted; None: those that there are now."""
        self.data: LocalData | RemoteData | None = None
        self.error: LoaderdError | None = None
        self.listing = listing
        self.indexes: dict[RecordValues | None, dict[ShardFile, ShardIndex]] = {}
        self.num_cached = 0
        self.storage_counts: list[int] = []
        self.index_s = 0.0
        self._warnings: list[str] = []
        self._worker_manager = worker_manager
        self._began_s = time.monotonic()

    @property
    def doing(self) -> str:
        """What is being done to the data set, as a word that may follow "is being"."""
        raise NotImplementedError

    @property
    def progress(self) -> Progress | None:
        """How far the present stage is; None: it takes no time, or all are over."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        return self.data is not None or self.error is not None

    def take_warnings(self) -> list[str]:
        """The warnings that have come since the last call."""
        found, self._warnings = self._warnings, []
        return found

    def advance(self) -> None:
        """Go on to the next stage, or to the data, if what this stage waits for is there."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Stop all work for it."""
        raise NotImplementedError


Prepare = Callable[[Listing | None, Indexes], Preparation]
"""Makes a preparation from the listing that is wanted and the indexes that are here already."""


class LocalPreparation(Preparation):
    """See the module's docstring. It may serve many streams of the same data set.

    ``known``: indexes that are here already. ``found_before``: what :meth:`found` said of an earlier listing; of a
    set that does not grow, shards that have come since then are left out. ``manifest``: the shards of which the data
    must be; if some are gone, or are others now, that is an error.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        options: StreamOptions,
        worker_manager: WorkerManager,
        listing: Listing | None = None,
        known: Indexes | None = None,
        found_before: Sequence[Sequence[str] | None] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(worker_manager, listing)
        self.data: LocalData | None = None
        self.sets: list[list[ShardFile]] = []
        self._found_before = found_before or [None] * len(dataset.leaves())
        self._manifest = manifest
        self._dataset = dataset
        self._options = options
        self._known = known
        self._storage = pickled_storage(options.storage)
        self._is_slow_said = False
        self._values = list(dict.fromkeys(leaf.record_values for leaf in dataset.leaves()))
        """What indexes are still to be made with, one pass after the other: they share what they make without."""
        self._stage: ListPass | IndexPass | None = ListPass(
            [leaf.shards for leaf in dataset.leaves()], worker_manager.stall_timeout, self._storage
        )
        worker_manager.scheduler.add_source(self._stage)
        worker_manager.start(1)

    @property
    def doing(self) -> str:
        return "indexed" if isinstance(self._stage, IndexPass) else "listed"

    @property
    def progress(self) -> Progress | None:
        stage = self._stage
        if isinstance(stage, ListPass):
            # If it is silent, a warning will say so.
            is_silent = self._worker_manager.silent(stage, _SILENT_S) is not None
            return None if is_silent else Progress("listing shards", stage.num_found)
        return None if stage is None else stage.progress

    def advance(self) -> None:
        while (stage := self._stage) is not None:
            if not stage.finished:
                self._warn_if_slow(stage)
                return
            self.cancel()
            try:
                if stage.error is not None:
                    raise stage.error
                if isinstance(stage, IndexPass):
                    self._indexed(stage, self._values.pop(0))
                elif stage.files is not None:
                    self._choose(stage.files)
                if self._values:
                    self._index(self._values[0])
                else:
                    self._finish()
            except LoaderdError as error:
                self.error = error

    def _choose(self, listed: list[list[ShardFile]]) -> None:
        """Note the shards that are wanted of each set."""
        listed = [_those_found_before(files, uris) for files, uris in zip(listed, self._found_before, strict=True)]
        if self._manifest is not None:
            listed = self._manifest.choose(listed)
        self.sets = of_listing(self._dataset, listed, self.listing)

    def _index(self, values: RecordValues | None) -> None:
        """Begin to index the shards of the sets that need indexes with these values."""
        files = files_with(values, self._dataset, self.sets)
        options, known = self._options, (self._known or {}).get(values)
        cache = IndexCache(options.index_cache, options.block_records, self._dataset.schema.records, values)
        sent = b""
        if values is not None:
            from loaderd.pickling import pickled  # imports cloudpickle

            sent = pickled(values)
        self._stage = IndexPass(files, cache, known, options.storage.requests, self._storage, sent)
        self._is_slow_said = False
        self._worker_manager.scheduler.add_source(self._stage)
        if not self._stage.finished:
            self._worker_manager.start(options.num_workers)

    def _indexed(self, indexed: IndexPass, values: RecordValues | None) -> None:
        self.indexes[values] = indexed.indexes
        self.num_cached += indexed.num_cached
        self.storage_counts = [sum(both) for both in zip_longest(self.storage_counts, indexed.counts, fillvalue=0)]
        if indexed.unstored:
            text = f"the index could not be kept, so the next start makes it again: {indexed.unstored}"
            self._warnings.append(text)

    def _finish(self) -> None:
        """Make the data of what is indexed."""
        self.index_s = time.monotonic() - self._began_s
        data = LocalData(self._dataset, self._options, self.sets, self.indexes, self.listing, self._known)
        if self._manifest is not None:
            self._manifest.check(data.digests, self.sets)
        self.data = data

    def _warn_if_slow(self, stage: ListPass | IndexPass) -> None:
        """Say once in each stage what it waits for, long before it gives up: people watch a program that starts."""
        if self._is_slow_said:
            return
        outage = self._worker_manager.outage(stage)
        is_away = outage is not None and outage.for_s >= _SLOW_S
        task = self._worker_manager.silent(stage, 0.0 if is_away else _SLOW_S)
        if task is None:
            return
        self._is_slow_said = True
        assert isinstance(task.work, (ListTask, IndexTask))
        names = task.work.names
        asked = f". Asked was {asked_of(names)}" if asked_of(names) else ""
        if outage is not None and is_away:
            self._warnings.append(f"{outage.in_words()}{asked}. Requests are made again until there are answers")
        else:
            is_being = f"{names} is being {self.doing}"
            self._warnings.append(f"{is_being}, and the storage has not answered for {_SLOW_S:g} s{asked}")

    def found(self) -> list[list[str] | None]:
        """The URIs of the shards of each set, without secrets; None of one that grows."""
        return [None if files is None else [redacted(file.uri) for file in files] for files in self.fixed_sets]

    @property
    def fixed_sets(self) -> list[list[ShardFile] | None]:
        """The shards of each set; None of one that grows."""
        return [None if leaf.grows else files for leaf, files in zip(self._dataset.leaves(), self.sets, strict=True)]

    def cancel(self) -> None:
        if self._stage is not None:
            self._worker_manager.scheduler.remove_source(self._stage)
            self._stage = None


def _those_found_before(files: list[ShardFile], uris: Sequence[str] | None) -> list[ShardFile]:
    """Those that were found before; all, if some of them are gone: whoever had these data cannot go on."""
    if uris is None:
        return files
    before = set(uris)
    still_there = [file for file in files if redacted(file.uri) in before]
    return still_there if before == {redacted(file.uri) for file in still_there} else files
