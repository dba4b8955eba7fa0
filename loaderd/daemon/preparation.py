"""The way from a description to data: list the shards, take their indexes from the cache or have them made, join.

One preparation may serve many streams of the same data set.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from loaderd.daemon.data import Data, list_sets
from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.tasks import IndexWork, Task
from loaderd.daemon.workforce import Workforce
from loaderd.dataset import AnyDataset
from loaderd.errors import LoaderdError
from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing
from loaderd.protocol.worker_messages import IndexTask
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ShardIndex
from loaderd.shards.index_cache import IndexCache


class Preparation:
    """See the module's docstring. In the end there are ``data``, or the ``error`` why not.

    ``known``: indexes that are here already. ``listing``: the shards of sets that grow; None: those there are.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        options: StreamOptions,
        workforce: Workforce,
        listing: Listing | None = None,
        known: Mapping[ShardFile, ShardIndex] | None = None,
    ) -> None:
        self.data: Data | None = None
        self.error: LoaderdError | None = None
        self.indexes: dict[ShardFile, ShardIndex] = {}
        self._warnings: list[str] = []
        self.num_cached = 0
        self.index_s = 0.0
        self.index_pass: IndexPass | None = None
        self._dataset = dataset
        self._options = options
        self._workforce = workforce
        self._began_s = time.monotonic()
        try:
            self._sets = list_sets(dataset, listing)
        except LoaderdError as error:
            self.error = error
            return
        files = [file for files in self._sets for file in files]
        self.index_pass = IndexPass(files, IndexCache(options.index_cache, options.block_records), known)
        workforce.add_source(self.index_pass, self._message_of)
        if not self.index_pass.finished:
            workforce.start(options.num_workers)

    @property
    def finished(self) -> bool:
        """Whether there are data, or an error."""
        return self.data is not None or self.error is not None

    def _message_of(self, task: Task) -> IndexTask:
        assert self.index_pass is not None and isinstance(task.work, IndexWork)
        file = self.index_pass.files[task.work.file]
        options = self._options
        place = [file.uri, file.size_bytes, file.mtime_ns]
        return IndexTask(task.number, place, options.index_cache, options.block_records)

    def advance(self) -> None:
        """Make the data of the indexes, if they are all there."""
        done = self.index_pass
        if done is None or not done.finished:
            return
        self.cancel()
        self.num_cached = done.num_cached
        self.index_s = time.monotonic() - self._began_s
        if done.unstored:
            self._warnings.append(f"the index could not be kept, so the next start makes it again: {done.unstored}")
        self.indexes = {file: done.indexes[number] for number, file in enumerate(done.files)}
        try:
            self.data = data = Data(self._dataset, self._options, self._sets, self.indexes.__getitem__)
        except LoaderdError as error:
            self.error = error
            return
        if data.unreadable:
            text = f"{len(data.unreadable)} of {len(data.files)} shards cannot be indexed and are left out"
            self._warnings.append(f"{text}: {data.unreadable[0].message}")

    def take_warnings(self) -> list[str]:
        """What people should hear of it, once."""
        found, self._warnings = self._warnings, []
        return found

    def cancel(self) -> None:
        """Have nothing more done for it."""
        if self.index_pass is not None:
            self._workforce.remove_source(self.index_pass)
            self.index_pass = None
