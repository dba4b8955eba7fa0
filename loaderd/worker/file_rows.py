"""Loads windows from shards that this process reads itself: finds the blocks that slices are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from loaderd.formats.reader import Reading
from loaderd.ipc.worker_messages import CheckTask, FilePlace, LoadTask
from loaderd.plan.epoch import Slice
from loaderd.schema import Schema
from loaderd.snapshots import Outage
from loaderd.storage.shard_file import Block, Compression, ShardFile
from loaderd.worker.window_loader import BlockPlacement, Bytes2D, Faults, Places, WindowLoader


def _numbers_of(place: FilePlace, most: int) -> npt.NDArray[np.int64]:
    """int64, (left,): the numbers in its block of the first ``most`` records that are in the epoch."""
    block, left, _ = place
    if left is None:
        return np.arange(min(block.num_records, most))
    return left.numbers()[:most] - block.first_record


class FileRows:
    """Rows of ``schema`` from ``files``."""

    def __init__(
        self,
        schema: Schema,
        files: list[ShardFile],
        compressions: list[Compression],
        reading: Reading | None = None,
    ) -> None:
        reading = reading or Reading()
        self.access = reading.access
        self._loader = WindowLoader(schema, files, compressions, reading)

    @property
    def outage(self) -> Outage | None:
        """Storage that does not answer; None: it does."""
        return self.access.outages.outage

    def close(self) -> None:
        self._loader.close()

    def begin(self, task: LoadTask) -> None:
        if self._loader.reader.fetches:
            self._loader.reader.begin([block for block, _ in self._wanted(task.slices, task.places)])

    def is_there(self, task: LoadTask) -> bool:
        """Whether a load could begin at once: nothing that it reads is still on its way."""
        reader = self._loader.reader
        return not reader.fetches or reader.are_there([block for block, _ in self._wanted(task.slices, task.places)])

    def use_servers(self, addresses: tuple[str, ...]) -> None:
        """Nothing to do: it has no servers."""

    def load(self, task: LoadTask, places: Places, window: Bytes2D) -> Faults:
        return self.read(task.slices, task.places, places, window)

    def read(self, slices: Sequence[Slice], from_: Sequence[FilePlace], places: Places, window: Bytes2D) -> Faults:
        """Write the rows of ``slices``, each read where ``from_`` says, to ``window``, uint8 (max_rows, row_bytes).

        They go to ``places``. Returns the places that could not be written, and why.
        """
        first_row = slices[0].row
        parts = []
        wanted_of = self._wanted(slices, from_)
        for (block, wanted), (_, first, stop, row, _), place in zip(wanted_of, slices, from_, strict=True):
            of_block = places[row - first_row : row - first_row + stop - first]
            if isinstance(wanted, slice):
                number = wanted.start
            else:
                number = int(wanted[0])
                of_wanted, of_block = of_block, np.full(int(wanted[-1]) + 1 - number, -1)
                of_block[wanted - number] = of_wanted
            parts.append(BlockPlacement(block, of_block, place.key, number))
        return self._loader.load(parts, window)

    def _wanted(
        self, slices: Sequence[Slice], from_: Sequence[FilePlace]
    ) -> Iterator[tuple[Block, slice | npt.NDArray[np.int64]]]:
        """For each slice, the part of its block that must be read, and which records of that part are wanted."""
        for (_, first, stop, _, _), place in zip(slices, from_, strict=True):
            block = place.block
            if place.left is None and stop - first == block.num_records:
                yield block, slice(0, stop)
            elif place.left is None:
                narrowed = self._loader.reader.narrowed(block, first, stop)
                skipped = narrowed.first_record - block.first_record
                yield narrowed, slice(first - skipped, stop - skipped)
            else:
                numbers = _numbers_of(place, stop)[first:]
                narrowed = self._loader.reader.narrowed(block, int(numbers[0]), int(numbers[-1]) + 1)
                yield narrowed, numbers - (narrowed.first_record - block.first_record)

    def check_fits(self, task: CheckTask, most: int) -> list[str]:
        """Raise RecordMismatchError where none of a block's first ``most`` records in the data set fit the schema.

        Returns the names of the feature lists of the first record, which are not read.
        """
        assert task.place is not None
        self._loader.check_fits(task.place.block, _numbers_of(task.place, most))
        return self._loader.feature_lists
