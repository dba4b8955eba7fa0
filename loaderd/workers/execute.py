"""What a worker does for each kind of task. All of it can be done again: the same task writes the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.dataset import StreamDescription
from loaderd.decode.fields import BatchDecoder
from loaderd.errors import to_wire
from loaderd.memory.layout import SlotLayout, WindowLayout
from loaderd.memory.page import MAX_FIELDS
from loaderd.memory.shared import SharedMemory
from loaderd.plan.epoch import WindowOrder
from loaderd.plan.selection import numbers_that
from loaderd.protocol.worker_messages import IndexTask, ListTask, LoadTask, ProbeTask
from loaderd.shards.blocks import Block
from loaderd.shards.compression import OnRead, tell_nobody
from loaderd.shards.files import ShardFile, list_shards
from loaderd.shards.index import build_index
from loaderd.shards.index_cache import IndexCache
from loaderd.stages import Stage
from loaderd.statistics import Kernels
from loaderd.workers.fill import Segment
from loaderd.workers.load import Part, WindowLoader

_MAX_PROBED = 1000


def list_set(task: ListTask, on_name: OnRead = tell_nobody) -> list[list[Any]]:
    """[uri, size_bytes, mtime_ns] of each shard. Raises as ``list_shards``."""
    files = list_shards(task.shards, on_name)
    return [[file.uri, file.size_bytes, file.mtime_ns] for file in files]


def index_shard(task: IndexTask, on_read: OnRead = tell_nobody) -> list[Any]:
    """[the index, encoded; why it could not be cached, or None]."""
    index = build_index(ShardFile(*task.file), task.block_records, on_read)
    unstored = IndexCache(task.index_cache, task.block_records).store(index)
    return [index.encode(), None if unstored is None else str(unstored)]


def _numbers_left(block: Block, left: list[Any]) -> npt.NDArray[np.int64]:
    """int64, (left,): the numbers in the block of the records that are in the data set; ``left``: as in LoadTask."""
    low, high, conditions = left
    return numbers_that(conditions, low, high) - block.first_record


class Executor:
    """The tasks of one stream, on its two memories."""

    def __init__(
        self,
        description: StreamDescription,
        files: list[ShardFile],
        compressions: list[Any],
        max_rows: int,
        windows: SharedMemory,
        slots: SharedMemory,
        on_read: OnRead = tell_nobody,
        spent: memoryview[int] | None = None,
    ) -> None:
        """``spent``: as ``Page.spent`` has it; None: nobody wants to know."""
        schema = description.schema
        self._loader = WindowLoader(schema, files, compressions, on_read, spent)
        self._decoder = BatchDecoder(schema, None if spent is None else spent[len(Stage) :], MAX_FIELDS)
        window_layout = WindowLayout(schema.row_bytes, max_rows)
        num_arenas = len(windows.bytes) // window_layout.arena_bytes
        self._rows = [window_layout.rows(windows.bytes, arena) for arena in range(num_arenas)]
        slot_layout = SlotLayout(schema.specs, description.options.batch_size, description.several_readers)
        num_slots = len(slots.bytes) // slot_layout.slot_bytes
        self._slots = [slot_layout.views(slots.bytes, slot) for slot in range(num_slots)]

    def close(self) -> None:
        """Close the shards' files. The memory goes with the object."""
        self._loader.close()

    def probe(self, task: ProbeTask) -> Kernels:
        """What batches are decoded with.

        Raises RecordMismatchError where the first record that is left of a block does not fit the schema; or, if the
        task asks whether any of them does, where none of the first thousand fits.
        """
        *fields, left = task.block
        block = Block(*fields)
        numbers = np.arange(block.count) if left is None else _numbers_left(block, left)
        self._loader.check_fits(block, numbers[: _MAX_PROBED if task.any_fits else 1])
        return self._decoder.kernels

    def load(self, task: LoadTask) -> list[list[Any]]:
        """Bring records into a window; returns the faults: [places, error] each."""
        # The rows of the slices follow each other: to ask for the places of all at once costs a quarter.
        *_, first, stop, last_row, _ = task.slices[-1]
        first_row = task.slices[0][-2]
        in_window = WindowOrder(*task.order).places(first_row, last_row + stop - first)
        parts = []
        for *fields, left, first, stop, row, key in task.slices:
            block = Block(*fields)
            places = np.full(block.count, -1)
            wanted = slice(first, stop) if left is None else _numbers_left(block, left)[first:stop]
            places[wanted] = in_window[row - first_row : row - first_row + stop - first]
            parts.append(Part(block, places, key))
        return [[places, to_wire(error)] for places, error in self._loader.load(parts, self._rows[task.arena])]

    def fill(self, slot: int, segments: Sequence[Segment], omit: Sequence[int]) -> None:
        """Decode a batch into its slot, but for the rows ``omit`` of it."""
        self._decode(self._slots[slot], segments, omit)

    def try_out(self, segments: Sequence[Segment], omit: Sequence[int]) -> None:
        """Decode a batch, and forget it."""
        room = {name: np.empty_like(view) for name, view in self._slots[0].items()}
        self._decode(room, segments, omit)

    def _decode(
        self, views: Mapping[str, npt.NDArray[Any]], segments: Sequence[Segment], omit: Sequence[int]
    ) -> None:
        if omit:
            whole = np.concatenate([self._rows[arena][start:stop] for arena, start, stop in segments])
            rows = np.delete(whole, omit, axis=0)
            self._decoder.decode(rows, {name: view[: len(rows)] for name, view in views.items()})
            return
        done = 0
        for arena, start, stop in segments:
            end = done + stop - start
            out = {name: view[done:end] for name, view in views.items()}
            self._decoder.decode(self._rows[arena][start:stop], out)
            done = end
