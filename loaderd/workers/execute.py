"""What a worker does for each kind of task. All of it can be done again: the same task writes the same bytes."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderd.dataset import StreamDescription
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import to_wire
from loaderd.memory.anonymous import SharedMemory
from loaderd.memory.layout import SlotLayout, WindowLayout
from loaderd.memory.page import MAX_FIELDS
from loaderd.memory.runs import ArenaSegment
from loaderd.protocol.worker_messages import (
    FilesFound,
    Indexed,
    IndexTask,
    ListTask,
    Loaded,
    LoadFault,
    LoadTask,
    Probed,
    ProbeTask,
    TrialTask,
    TriedOut,
)
from loaderd.shards.access import Access
from loaderd.shards.compression import OnRead, tell_nobody
from loaderd.shards.files import list_shards
from loaderd.shards.index_cache import IndexCache
from loaderd.shards.indexer import make_index
from loaderd.stages import Stage
from loaderd.workers.file_rows import FileRows

if TYPE_CHECKING:
    from loaderd.remote.row_fetcher import RowFetcher

_MAX_PROBED = 1000
_MOST_SEARCH_NS = 10**9
_MOST_FAILING = 32  # if more records of a batch fail, it is not the data's fault


def list_set(task: ListTask, on_name: OnRead = tell_nobody, access: Access | None = None) -> FilesFound:
    """The shards that a task asks for. Raises as ``list_shards``."""
    return FilesFound(task.task, list_shards(task.shards, on_name, access))


def index_shard(task: IndexTask, on_read: OnRead = tell_nobody, access: Access | None = None) -> Indexed:
    """Make the index of a shard, and keep it in the cache. Raises ShardReadError and StorageError."""
    access = access or Access()
    records = pickle.loads(task.records)
    index = make_index(task.file, records, task.block_records, on_read, access)
    unkept = IndexCache(task.index_cache, task.block_records, records).store(index)
    asked = list(astuple(access.take_counts()))
    return Indexed(task.task, index.encode(), None if unkept is None else str(unkept), asked)


class Executor:
    """Does the tasks of one stream, in its two memories."""

    def __init__(
        self,
        description: StreamDescription,
        rows: FileRows | RowFetcher,
        max_rows: int,
        windows: SharedMemory,
        slots: SharedMemory,
        spent: memoryview[int] | None = None,
    ) -> None:
        """``rows``: where windows are loaded from. ``spent``: the words of ``Page.spent``; None: count no time."""
        schema = description.schema
        self.rows = rows
        self._decoder = BatchDecoder(schema, None if spent is None else spent[len(Stage) :], MAX_FIELDS)
        window_layout = WindowLayout(schema.row_bytes, max_rows)
        num_arenas = len(windows.bytes) // window_layout.arena_bytes
        self._windows = [window_layout.rows(windows.bytes, arena) for arena in range(num_arenas)]
        slot_layout = SlotLayout(schema.specs, description.options.batch_size, description.several_readers)
        num_slots = len(slots.bytes) // slot_layout.slot_bytes
        self._slots = [slot_layout.views(slots.bytes, slot) for slot in range(num_slots)]

    def close(self) -> None:
        """Read nothing more. The memory goes with the object."""
        self.rows.close()

    def probe(self, task: ProbeTask) -> Probed:
        """See whether records of a block fit the schema.

        Raises RecordMismatchError where the first one that is in the data set does not; or, if the task asks whether
        any of them fits, where none of the first thousand does.
        """
        self.rows.check_fits(task, _MAX_PROBED if task.any_fits else 1)
        return Probed(task.task, self._decoder.kernels)

    def load(self, task: LoadTask) -> Loaded:
        """Bring records into a window."""
        # The slices' rows are consecutive: to ask for all their places at once takes a quarter of the time.
        last = task.slices[-1]
        places = task.order.places(task.slices[0].row, last.row + last.stop - last.first)
        faults = self.rows.load(task, places, self._windows[task.arena])
        return Loaded(task.task, [LoadFault(of_error, to_wire(error)) for of_error, error in faults])

    def fill(self, slot: int, segments: Sequence[ArenaSegment], omit: Sequence[int]) -> None:
        """Decode a batch into its slot, without its rows ``omit``."""
        self._decode(self._slots[slot], segments, omit)

    def try_out(self, task: TrialTask) -> TriedOut:
        """Decode a batch, and forget it."""
        self._decode(self._room(), task.segments, task.omit)
        return TriedOut(task.task)

    def failing_rows(
        self, segments: Sequence[ArenaSegment], omit: Sequence[int], began_ns: int
    ) -> tuple[list[int], bool]:
        """Of a batch that cannot be made, the rows that cannot be made alone either, found by halving; and True.

        The first of them, and False, if there are more than 32, or if it takes more than a second from ``began_ns``,
        by the monotonic clock.
        """
        rows = np.arange(sum(stop - start for _, start, stop in segments))
        room = self._room()
        waiting = deque([np.delete(rows, omit)])
        found: list[int] = []
        while waiting:
            if len(found) > _MOST_FAILING or time.monotonic_ns() - began_ns > _MOST_SEARCH_NS:
                return found[:1], False
            half = waiting.pop()
            try:
                self._decode(room, segments, np.delete(rows, half).tolist())
            except Exception:
                middle = len(half) // 2
                if middle:
                    waiting += [half[middle:], half[:middle]]
                else:
                    found += half.tolist()
        return found, len(found) <= _MOST_FAILING

    def _room(self) -> dict[str, npt.NDArray[Any]]:
        """Room for a batch that nobody gets."""
        return {name: np.empty_like(view) for name, view in self._slots[0].items()}

    def _decode(
        self, views: Mapping[str, npt.NDArray[Any]], segments: Sequence[ArenaSegment], omit: Sequence[int]
    ) -> None:
        if omit:
            whole = np.concatenate([self._windows[arena][start:stop] for arena, start, stop in segments])
            rows = np.delete(whole, omit, axis=0)
            self._decoder.decode(rows, {name: view[: len(rows)] for name, view in views.items()})
            return
        done = 0
        for arena, start, stop in segments:
            end = done + stop - start
            out = {name: view[done:end] for name, view in views.items()}
            self._decoder.decode(self._windows[arena][start:stop], out)
            done = end
