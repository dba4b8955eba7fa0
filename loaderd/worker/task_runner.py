"""What a worker does for each kind of task. All of it can be done again: the same task writes the same bytes."""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderd.dataset import StreamDescription
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import CorruptRecordError, LoaderdError, OptionError, StorageError, WorkerError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.indexer import make_indexes
from loaderd.formats.shard_index import encode_indexes
from loaderd.ipc.channel import MAX_MESSAGE_BYTES
from loaderd.ipc.worker_messages import (
    MOST_ROW_FAULTS,
    CheckTask,
    IndexResult,
    IndexTask,
    LoadFault,
    LoadTask,
)
from loaderd.machine import remedy
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.batches import Segment
from loaderd.schema.record_values import RecordValues
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout, WindowLayout
from loaderd.shm.page import MAX_FIELDS
from loaderd.snapshots import Kernels
from loaderd.stages import Stage
from loaderd.storage.access import Access
from loaderd.worker.file_rows import FileRows
from loaderd.worker.halving import HalvingSearch
from loaderd.worker.value_pass import ValuePass

if TYPE_CHECKING:
    from loaderd.remote.row_fetcher import RowFetcher

_HINT_DAMAGES = "Restore the file, or write it anew if what wrote it left out the CRCs."

# The rest of the message is for the blocks: as many as there are damages.
_MOST_DAMAGE_BYTES = MAX_MESSAGE_BYTES // 4 * 3
_MAX_PROBED = 1000
_MOST_SEARCH_NS = 10**9


def index_group(task: IndexTask, on_read: OnRead = no_callback, access: Access | None = None) -> IndexResult:
    """Make the indexes of a group of shards, and keep them in the cache.

    Raises the error of a shard that cannot be read, StorageError, CorruptRecordError where a message could not name
    all their damage, and OptionError where a function of the values fails.
    """
    access = access or Access()
    cache = task.cache
    values = value_pass_of(task.values) if task.values else None
    num_read = 0

    def count(num_bytes: int) -> None:
        nonlocal num_read
        num_read = num_bytes
        on_read(num_bytes)

    if values is not None:
        values.report_to(lambda: on_read(num_read))  # a worker that says nothing for long is taken for stalled
    indexes = make_indexes(task.group, cache.records, cache.block_records, count, access, values)
    for index in indexes:
        if index.error is not None:
            raise index.error
    if sum(index.damage_bytes for index in indexes) > _MOST_DAMAGE_BYTES:
        damages = [damage for index in indexes for damage in index.damages]
        text = f"{len(damages):,} records of one shard are damaged, more than an index can name"
        raise CorruptRecordError(f"{text}; the first is {damages[0]}", hint=_HINT_DAMAGES, damage=damages[0])
    if values is not None:
        cache.without_values.store(task.group, encode_indexes([index.without_values for index in indexes]))
    encoded = encode_indexes(indexes)
    unkept = cache.store(task.group, encoded)
    return IndexResult(encoded, unkept, list(astuple(access.take_counts())))


@lru_cache(maxsize=1)
def value_pass_of(pickled: bytes) -> ValuePass:
    """What computes ``IndexTask.values``: many tasks have the same. Raises OptionError."""
    try:
        values: RecordValues = pickle.loads(pickled)
    except (Exception, SystemExit) as error:  # modules of the user's are imported
        raise OptionError(
            f"where or sample: a worker cannot take the function over: {type(error).__name__}: {error}",
            hint="It must be importable, or picklable by value, in another process.",
            traceback=traceback.format_exc(),
        ) from None
    return ValuePass(values)


class TaskRunner:
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
        self._schema = schema = description.schema
        self.rows = rows
        self._options = description.options
        self._decoder = BatchDecoder(schema, None if spent is None else spent[len(Stage) :], MAX_FIELDS)
        window_layout = WindowLayout(schema.row_bytes, max_rows)
        num_arenas = len(windows.bytes) // window_layout.arena_bytes
        self._windows = [window_layout.rows(windows.bytes, arena) for arena in range(num_arenas)]
        slot_layout = SlotLayout(schema.specs, description.options.batch_size, description.several_readers)
        num_slots = len(slots.bytes) // slot_layout.slot_bytes
        self._slots = [slot_layout.views(slots.bytes, slot) for slot in range(num_slots)]

    def probe(self, task: CheckTask) -> tuple[Kernels, list[str]]:
        """See whether records of a block fit the schema.

        Raises RecordMismatchError where the first one that is in the data set does not; or, if the task asks whether
        any of them fits, where none of the first thousand does.
        """
        feature_lists = self.rows.check_fits(task, _MAX_PROBED if task.any_fits else 1)
        return self._decoder.kernels, feature_lists

    def load(self, task: LoadTask) -> list[LoadFault]:
        """Bring records into a window. Raises StorageError where memory runs out."""
        # The slices' rows are consecutive: to ask for all their places at once takes a quarter of the time.
        last = task.slices[-1]
        places = task.order.places(task.slices[0].row, last.row + last.stop - last.first)
        try:
            faults = self.rows.load(task, places, self._windows[task.arena])
        except MemoryError as error:  # no record is damaged: the load is tried again
            raise StorageError("memory ran out while records were read", hint=remedy(error)) from None
        return [LoadFault(tuple(of_error), error) for of_error, error in faults]

    def fill(self, slot: int, segments: Sequence[Segment], omit: Sequence[int]) -> None:
        """Decode a batch into its slot, without its rows ``omit``."""
        self._decode(self._slots[slot], segments, omit)

    def decode_suspects(self, slot: int, batch: BatchRange) -> Iterator[int]:
        """Decode the suspects of a batch part by part in its slot, to see whether the worker survives it.

        Yields the first row of each part before the part is decoded. Errors are discarded: they come again with the
        whole batch. Nor does the time count as time of its fields.
        """
        decoder, views = BatchDecoder(self._schema), self._slots[slot]
        whole = np.concatenate([self._windows[arena][start:stop] for _, start, stop, arena in batch.segments])
        for first in batch.suspects:
            rows = whole[batch.suspects_at(first)]
            yield first
            with contextlib.suppress(Exception):
                decoder.decode(rows, {name: view[: len(rows)] for name, view in views.items()})

    def row_faults(
        self,
        slot: int,
        segments: Sequence[Segment],
        omit: Sequence[int],
        fill_ns: int,
        on_try: Callable[[int], None],
    ) -> tuple[dict[int, LoaderdError], bool]:
        """What is wrong with the rows of a batch that cannot be made alone, found by halving in its slot; and True.

        Only the first of them, and False, if there are too many, if memory runs out, or if it takes too long: longer
        than a second and four times ``fill_ns``, which it took to find that the batch cannot be made. ``on_try`` gets
        the ns of each attempt.
        """
        now_ns = time.monotonic_ns()
        until_ns = now_ns + _MOST_SEARCH_NS + 4 * fill_ns
        most = 0 if self._options.on_corrupt == "raise" else MOST_ROW_FAULTS
        rows = np.arange(sum(stop - start for _, start, stop, _ in segments))
        search = HalvingSearch(np.delete(rows, omit).tolist())
        faults: dict[int, LoaderdError] = {}
        while search and len(faults) <= most:
            if now_ns > until_ns:
                return _first_of(faults), False
            part = search.next()
            try:
                self.fill(slot, segments, np.delete(rows, part).tolist())
            except MemoryError:  # no row's fault
                return _first_of(faults), False
            except Exception as error:
                if search.failed(part):
                    if not isinstance(error, LoaderdError):
                        error = WorkerError(f"{type(error).__name__}: {error}")
                    faults[part[0]] = error
            began_ns, now_ns = now_ns, time.monotonic_ns()
            on_try(now_ns - began_ns)
        return (faults, True) if len(faults) <= most else (_first_of(faults), False)

    def _decode(
        self, views: Mapping[str, npt.NDArray[Any]], segments: Sequence[Segment], omit: Sequence[int]
    ) -> None:
        if omit:
            whole = np.concatenate([self._windows[arena][start:stop] for _, start, stop, arena in segments])
            rows = np.delete(whole, omit, axis=0)
            self._decoder.decode(rows, {name: view[: len(rows)] for name, view in views.items()})
            return
        done = 0
        for _, start, stop, arena in segments:
            end = done + stop - start
            out = {name: view[done:end] for name, view in views.items()}
            self._decoder.decode(self._windows[arena][start:stop], out)
            done = end


def _first_of(faults: dict[int, LoaderdError]) -> dict[int, LoaderdError]:
    return dict(islice(faults.items(), 1))
