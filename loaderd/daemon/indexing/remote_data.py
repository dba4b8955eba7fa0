"""The data of a stream whose records are elsewhere: blocks that servers know, and rows that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from loaderd.daemon.indexing.local_data import naming
from loaderd.daemon.indexing.preparation import Preparation
from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.dataset import StreamDescription
from loaderd.errors import LoaderdError, WorkerError
from loaderd.ipc.messages import Welcome
from loaderd.ipc.worker_messages import AskTask, FilePlace
from loaderd.options import StreamOptions
from loaderd.pickling import pickled
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Listing
from loaderd.plan.rows import DatasetRows
from loaderd.remote.source import RemoteRows, RemoteSet, RemoteStream
from loaderd.remote.tables import Table, table_from_wire, welcome_to
from loaderd.remote.tickets import most_rows
from loaderd.snapshots import Progress
from loaderd.storage.shard_file import ShardFile


class RemoteData:
    """The data of a stream whose records servers read: like ``local_data.LocalData``, but it knows only blocks.

    ``of`` returns the data set, with the present addresses of its servers, for workers that are attached later.
    """

    is_far_away = True
    per_passing = 1.0
    """Servers do not say what ``where`` left out."""
    files: Sequence[ShardFile] = ()
    """The shards that are read here: none."""
    compressions: Sequence[str] = ()

    def __init__(self, table: Table, of: Callable[[], RemoteSet], options: StreamOptions) -> None:
        self._table = table
        self._of = of
        rows = [
            DatasetRows(counts, options.seed, bool(options.shuffle), drawing)
            for counts, drawing in zip(table.counts, table.drawings, strict=True)
        ]
        self.rows = table.dataset.combine(iter(rows))
        drawn = zip(table.counts, table.drawings, strict=True)
        counts = [of_set if drawing is None else drawing.counts(options.seed, 0) for of_set, drawing in drawn]
        self._counts = np.concatenate(counts)
        """int64, (blocks,): records of each block in epoch 0."""
        self.listing = table.listing
        self.of = table.of
        self.damages = table.damages
        self.left_out = table.left_out
        self.num_shards = table.num_shards
        self.num_blocks = len(self._counts)

    @property
    def source(self) -> bytes:
        table = self._table
        row_bytes = table.schema.row_bytes
        most = most_rows(row_bytes, table.row_bytes)
        return pickled(RemoteRows(self._of(), table.digest, row_bytes, most, table.shards, table.listing))

    def first_records(self, block: int) -> tuple[int, int, None]:
        """(block, its records, None) to look at before any epoch: what epoch 0 has of a block, or of a later one."""
        with_records = np.flatnonzero(self._counts)
        block = int(with_records[np.searchsorted(with_records, block) % len(with_records)])
        return block, int(self._counts[block]), None

    def places(self, slices: Sequence[Slice], seed: int) -> Iterator[FilePlace]:
        """No places: servers read the records."""
        return iter(())

    def error_context(self, records: Sequence[Slice], error: LoaderdError, *, survived: bool = False) -> WorkerError:
        """The ``error`` that workers met at ``records``, with their blocks and the data set named.

        ``survived``: as in ``naming``.
        """
        blocks = sorted({part.block for part in records})
        count = sum(part.stop - part.first for part in records)
        name = self._of().name
        named = f"{count} records of blocks {blocks[0]} to {blocks[-1]} of data set {name}"
        return naming(error, f" {named}", name, survived=survived)


class RemotePreparation(Preparation, TaskSource):
    """Has a worker ask servers for the table of a data set. When there are ``data``, ``table`` is what they say.

    ``stream`` returns the stream that is wanted, with the present addresses of the servers. ``belongs_to``: what the
    position to begin at belongs to, as its ``of``; servers of other data are not asked.
    """

    doing = "requested from its servers"

    def __init__(
        self,
        stream: Callable[[], RemoteStream],
        worker_manager: WorkerManager,
        listing: Listing | None = None,
        belongs_to: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(worker_manager, listing)
        self.table: Table | None = None
        self._stream = stream
        self._belongs_to = dict(belongs_to or {})
        self._is_begun = False
        self._is_source = True
        worker_manager.scheduler.add_source(self)
        worker_manager.start(1)

    @property
    def progress(self) -> Progress | None:
        of = self._stream().of
        return None if self.finished else Progress(f"asking {' and '.join(of.addresses)} for the data set {of.name}")

    @property
    def description(self) -> StreamDescription:
        assert self.table is not None
        options = self.table.ordered(self._stream().options)
        return StreamDescription(self.table.dataset, options, row_bytes=self.table.row_bytes)

    @property
    def welcome(self) -> Welcome:
        assert self.table is not None
        return welcome_to(self.table.dataset, self.table.schema, self.table.row_bytes)

    def next_task(self) -> Task | None:
        if self._is_begun:
            return None
        self._is_begun = True
        stream = self._stream()
        work = AskTask(stream.of.name, pickled(stream), self.listing, self._belongs_to)
        return Task(self, work, survives_stalls=False)

    def done(self, task: Task, result: bytes) -> None:
        of = self._stream().of
        try:
            self.table = table_from_wire(result, f"{of.addresses[0]}/{of.name}")
            self.data = RemoteData(self.table, lambda: self._stream().of, self.description.options)
        except LoaderdError as error:
            self.error = error

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.error = error

    def advance(self) -> None:
        if self.finished:
            self.cancel()
            self.index_s = time.monotonic() - self._began_s

    def cancel(self) -> None:
        if self._is_source:
            self._is_source = False
            self._worker_manager.scheduler.remove_source(self)
