"""The way from shards to data: have the shards listed, take their indexes from the cache or have them made.

::

    ListPass (one task a set) ──► IndexPass (a task for each group of shards that the cache does not know) ──► Data

One preparation may serve many streams of the same data set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from loaderd.daemon.indexing.index_pass import IndexPass
from loaderd.daemon.indexing.list_pass import ListPass
from loaderd.daemon.indexing.local_data import LocalData, of_listing
from loaderd.daemon.indexing.preparation import Preparation
from loaderd.daemon.indexing.shard_manifest import Manifest, choose_by
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.dataset import AnyDataset
from loaderd.errors import LoaderdError
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import ShardIndex
from loaderd.ipc.worker_messages import IndexTask, ListTask
from loaderd.options import StreamOptions, pickled_storage
from loaderd.plan.passes import Listing
from loaderd.redaction import redacted
from loaderd.snapshots import Progress
from loaderd.storage.credentials import asked_of
from loaderd.storage.files import path_order
from loaderd.storage.shard_file import ShardFile

_SLOW_S = 5.0
_SILENT_S = 4.0  # storage that answers is heard every three seconds


class LocalPreparation(Preparation):
    """See the module's docstring.

    ``known``: indexes that are here already. ``found_before``: what :meth:`found` said of an earlier listing; of a
    set that does not grow, shards that have come since then are left out. ``manifests``: the shards of which the data
    must be, as the first of these says whose shards are all there; if none fits, that is an error.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        options: StreamOptions,
        worker_manager: WorkerManager,
        listing: Listing | None = None,
        known: Mapping[ShardFile, ShardIndex] | None = None,
        found_before: Sequence[Sequence[str] | None] | None = None,
        manifests: Sequence[Manifest] = (),
    ) -> None:
        super().__init__(worker_manager, listing)
        self.data: LocalData | None = None
        self._found_before = found_before or [None] * len(dataset.leaves())
        self._manifests = manifests
        self._manifest: Manifest | None = None
        self.index_pass: IndexPass | None = None
        self._dataset = dataset
        self._options = options
        self._known = known
        self._storage = pickled_storage(options.storage)
        self._slow_said: set[type] = set()
        self.sets: list[list[ShardFile]] = []
        self.list_pass: ListPass | None = ListPass(
            [leaf.shards for leaf in dataset.leaves()], worker_manager.stall_timeout, self._storage
        )
        worker_manager.scheduler.add_source(self.list_pass)
        worker_manager.start(1)

    @property
    def doing(self) -> str:
        return "indexed" if self.index_pass is not None else "listed"

    @property
    def progress(self) -> Progress | None:
        if self.list_pass is not None:
            # If it is silent, a warning will say so.
            is_silent = self._worker_manager.silent(self.list_pass, _SILENT_S) is not None
            return None if is_silent else Progress("listing shards", self.list_pass.num_found)
        return None if self.index_pass is None else self.index_pass.progress

    def advance(self) -> None:
        if self.list_pass is not None:
            self._after_listing(self.list_pass)
        if self.index_pass is not None:
            self._after_indexing(self.index_pass)

    def _after_listing(self, done: ListPass) -> None:
        if not done.finished:
            self._warn_if_slow(done)
            return
        self.cancel()
        self.error = done.error
        if self.error is None:
            try:
                sets = [_of_before(done.files[number], uris) for number, uris in enumerate(self._found_before)]
                if self._manifests:
                    self._manifest, sets = choose_by(self._manifests, sets)
                self.sets = of_listing(sets, self.listing)
            except LoaderdError as error:
                self.error = error
        if self.error is not None:
            return
        options = self._options
        # Sets may share shards; and what indexes are kept together depends on what is beside what.
        (files, *others) = self.sets
        if others:
            files = sorted({file for files in self.sets for file in files}, key=path_order)
        self.index_pass = IndexPass(
            files,
            IndexCache(options.index_cache, options.block_records, self._dataset.schema.records),
            self._known,
            options.storage.requests,
            self._storage,
        )
        self._worker_manager.scheduler.add_source(self.index_pass)
        if not self.index_pass.finished:
            self._worker_manager.start(options.num_workers)

    def _warn_if_slow(self, source: ListPass | IndexPass) -> None:
        """Say once in each pass what it waits for, long before it gives up: people watch a program that starts."""
        if type(source) in self._slow_said:
            return
        outage = self._worker_manager.outage(source)
        is_away = outage is not None and outage.for_s >= _SLOW_S
        task = self._worker_manager.silent(source, 0.0 if is_away else _SLOW_S)
        if task is None:
            return
        self._slow_said.add(type(source))
        assert isinstance(task.work, (ListTask, IndexTask))
        is_listing, names = isinstance(task.work, ListTask), task.work.names
        asked = asked_of(names) and f". Asked was {asked_of(names)}"
        if outage is not None and is_away:
            self._warnings.append(f"{outage.in_words()}{asked}. Requests are made again until there are answers")
            return
        doing = "listed" if is_listing else "read for its index"
        limit_s = self._worker_manager.stall_timeout
        if is_listing:
            limit_s = min(limit_s or math.inf, self._options.storage.retry_s)
        until = "" if limit_s is None else f"; that is given up after {limit_s:g} s"
        is_being = f"{names} is being {doing}"
        self._warnings.append(f"{is_being}, and the storage has not answered for {_SLOW_S:g} s{until}{asked}")

    def _after_indexing(self, done: IndexPass) -> None:
        if not done.finished:
            self._warn_if_slow(done)
            return
        self.cancel()
        self.num_cached = done.num_cached
        self.storage_counts = done.counts
        if done.error is not None:
            self.error = done.error
            return
        self.index_s = time.monotonic() - self._began_s
        if done.unstored:
            self._warnings.append(f"the index could not be kept, so the next start makes it again: {done.unstored}")
        self.indexes = done.indexes
        try:
            index_of, known = self.indexes.__getitem__, self._known or ()
            data = LocalData(self._dataset, self._options, self.sets, index_of, self.listing, known)
            if self._manifest is not None:
                self._manifest.check(data.digests, self.sets)
        except LoaderdError as error:
            self.error = error
        else:
            self.data = data

    def found(self) -> list[list[str] | None]:
        """The URIs of the shards of each set, without secrets; None of one that grows."""
        return [None if files is None else [redacted(file.uri) for file in files] for files in self.fixed_sets]

    @property
    def fixed_sets(self) -> list[list[ShardFile] | None]:
        """The shards of each set; None of one that grows."""
        return [None if leaf.grows else files for leaf, files in zip(self._dataset.leaves(), self.sets, strict=True)]

    def cancel(self) -> None:
        for source in (self.list_pass, self.index_pass):
            if source is not None:
                self._worker_manager.scheduler.remove_source(source)
        self.list_pass = self.index_pass = None


def _of_before(files: list[ShardFile], uris: Sequence[str] | None) -> list[ShardFile]:
    """Those that were found before; all, if some of them are gone: whoever had these data cannot go on."""
    if uris is None:
        return files
    before = set(uris)
    still_there = [file for file in files if redacted(file.uri) in before]
    return still_there if before == {redacted(file.uri) for file in still_there} else files
