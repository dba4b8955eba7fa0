"""The way from the name of a data set on servers to data: have a worker ask for its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from loaderd.daemon.indexing.preparation import Preparation
from loaderd.daemon.indexing.remote_data import RemoteData
from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.dataset import StreamDescription
from loaderd.errors import LoaderdError
from loaderd.ipc.messages import Welcome
from loaderd.ipc.worker_messages import AskTask
from loaderd.pickling import pickled
from loaderd.plan.passes import Listing
from loaderd.remote.source import RemoteStream
from loaderd.remote.tables import Table, table_from_wire, welcome_to
from loaderd.snapshots import Progress


class RemotePreparation(Preparation, TaskSource):
    """A source of one task. When there are ``data``, ``table`` is what the servers say of them.

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
        """The stream of the servers' data set, in the order that they have decided on."""
        assert self.table is not None
        options = self.table.ordered(self._stream().options)
        return StreamDescription(self.table.dataset, options, row_bytes=self.table.row_bytes)

    @property
    def welcome(self) -> Welcome:
        """What the consumer must know of the data."""
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
