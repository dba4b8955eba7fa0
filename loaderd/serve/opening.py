"""From a data set to its data, in one process: list the shards, take their indexes from where they are kept, or make
them. Threads do it: inflating and waiting for storage release the GIL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from loaderd.daemon.catalog import stream_options
from loaderd.daemon.indexing.local_data import LocalData, files_with, of_listing
from loaderd.dataset import AnyDataset
from loaderd.formats.index_cache import groups_of
from loaderd.formats.indexer import Values, find_indexes
from loaderd.formats.shard_index import Indexes, ShardIndex
from loaderd.machine import usable_cores
from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing
from loaderd.progress import ProgressLines
from loaderd.schema.record_values import RecordValues
from loaderd.snapshots import Progress
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile
from loaderd.worker.value_pass import ValuePass

Choose = Callable[[list[list[ShardFile]]], list[list[ShardFile]]]
"""Which of the shards that were listed for each set are meant. Raises OptionError where they are not there."""

_logger = logging.getLogger("loaderd")


class IndexedShards:
    """The data of a data set. ``show`` is called with how far it is. ``known``: indexes that are here already.

    Raises LoaderdError.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        name: str,
        *,
        listing: Listing | None = None,
        choose: Choose = lambda listed: listed,
        known: Indexes | None = None,
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        options = stream_options(dataset, workers=1)
        self.access = Access(options.storage)
        lines = ProgressLines(partial(_logger.info, "%s: %s", name))

        def progress(now: Progress) -> None:
            lines(now)
            show(now)

        try:
            listed = [
                list_shards(leaf.shards, lambda number: progress(Progress("listing shards", number)), self.access)
                for leaf in dataset.leaves()
            ]
            self.sets = of_listing(dataset, choose(listed), listing)
            self.indexes = {
                values: self._index(values, dataset, options, (known or {}).get(values, {}), progress)
                for values in dict.fromkeys(leaf.record_values for leaf in dataset.leaves())
            }
        finally:
            lines.close()
        self.data = LocalData(dataset, options, self.sets, self.indexes, listing, known)

    def _index(
        self,
        values: RecordValues | None,
        dataset: AnyDataset,
        options: StreamOptions,
        known: Mapping[ShardFile, ShardIndex],
        progress: Callable[[Progress], None],
    ) -> dict[ShardFile, ShardIndex]:
        """The indexes with these ``values`` of the shards of the sets that need them."""
        files = files_with(values, dataset, self.sets)
        find = partial(find_indexes, options.index_cache, options.block_records, dataset.schema.records)
        if values is not None:
            find = partial(find, values=Values(values, partial(ValuePass, values)))
        groups = [group for group in groups_of(files) if not all(file in known for file in group)]
        indexes = {file: known[file] for file in files if file in known}
        done_bytes, total_bytes = 0, sum(file.size_bytes for group in groups for file in group)
        unkept: str | None = None
        with ThreadPoolExecutor(usable_cores(), thread_name_prefix="index") as pool:
            futures = [pool.submit(find, group, access=self.access) for group in groups]
            try:
                for future in as_completed(futures):
                    for result in future.result():
                        indexes[result.index.file] = result.index
                        unkept = unkept or result.unkept
                        done_bytes += result.index.file.size_bytes
                    progress(Progress("indexing shards", len(indexes), len(files), done_bytes, total_bytes))
            finally:
                for future in futures:
                    future.cancel()
        if unkept is not None:
            _logger.warning("the index could not be kept, so the next process makes it again: %s", unkept)
        return indexes
