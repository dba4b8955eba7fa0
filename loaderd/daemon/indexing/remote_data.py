"""The data of a stream whose records are elsewhere: blocks that servers know, and rows that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loaderd.daemon.indexing.error_context import naming
from loaderd.errors import Damage, LoaderdError, WorkerError
from loaderd.ipc.worker_messages import FilePlace
from loaderd.options import StreamOptions
from loaderd.pickling import pickled
from loaderd.plan.epoch import Slice
from loaderd.plan.rows import DatasetRows
from loaderd.remote.source import RemoteRows, RemoteSet
from loaderd.remote.tables import Table
from loaderd.remote.tickets import most_rows
from loaderd.storage.shard_file import ShardFile


class RemoteData:
    """The data of a stream whose records servers read: like ``local_data.LocalData``, but it knows only blocks.

    ``of`` returns the data set, with the present addresses of its servers, for workers that are attached later.
    """

    def __init__(self, table: Table, of: Callable[[], RemoteSet], options: StreamOptions) -> None:
        self._table = table
        self._of = of
        self._counts = np.concatenate(table.counts)
        rows = [DatasetRows(counts, options.seed, bool(options.shuffle)) for counts in table.counts]
        self.rows = table.dataset.combine(iter(rows))
        self.listing = table.listing
        self.of = table.of
        self.damages: list[Damage] = table.damages
        self.left_out = table.left_out
        self.num_shards = table.num_shards
        self.num_blocks = len(self._counts)

    is_far_away = True
    files: Sequence[ShardFile] = ()
    """The shards that are read here: none."""
    compressions: Sequence[str] = ()

    @property
    def source(self) -> bytes:
        table = self._table
        row_bytes = table.schema.row_bytes
        most = most_rows(row_bytes, table.row_bytes)
        return pickled(RemoteRows(self._of(), table.digest, row_bytes, most, table.shards, table.listing))

    def count(self, block: int) -> int:
        return int(self._counts[block])

    def places(self, slices: Sequence[Slice], seed: int) -> list[FilePlace]:
        """No places: servers read the records."""
        return []

    def error_context(self, records: Sequence[Slice], error: LoaderdError, *, survived: bool = False) -> WorkerError:
        """The ``error`` that workers met at ``records``, with their blocks and the data set named.

        ``survived``: as in ``ErrorContext``.
        """
        blocks = sorted({part.block for part in records})
        count = sum(part.stop - part.first for part in records)
        name = self._of().name
        named = f"{count} records of blocks {blocks[0]} to {blocks[-1]} of data set {name}"
        return naming(error, f" {named}", name, survived=survived)
