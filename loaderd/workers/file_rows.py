"""Loading a window from shards that this process reads itself: from slices as messages name them, to blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import LoaderdError
from loaderd.plan.selection import numbers_that
from loaderd.schema import Schema
from loaderd.shards.reader import Block, Reading
from loaderd.shards.shard_file import ShardFile
from loaderd.workers.load import Part, WindowLoader

Places = npt.NDArray[np.intp]


def _numbers_left(block: Block, left: list[Any]) -> npt.NDArray[np.int64]:
    """int64, (left,): the numbers in the block of the records that are in the data set; ``left``: as in LoadTask."""
    low, high, conditions = left
    return numbers_that(conditions, low, high) - block.first_record


class FileRows:
    """Rows of ``schema`` from ``files``."""

    def __init__(
        self,
        schema: Schema,
        files: list[ShardFile],
        compressions: list[Any],
        reading: Reading | None = None,
    ) -> None:
        self._loader = WindowLoader(schema, files, compressions, reading)

    def close(self) -> None:
        """Close the shards' files."""
        self._loader.close()

    def begin(self, task: int, slices: Sequence[list[Any]]) -> None:
        """Begin to fetch what a load will read, where it is far away."""
        if self._loader.reader.fetches:
            self._loader.reader.begin([block for block, _ in self._wanted(slices)])

    def is_there(self, task: int, slices: Sequence[list[Any]]) -> bool:
        """Whether a load could begin at once: nothing that it reads is still on its way."""
        reader = self._loader.reader
        return not reader.fetches or reader.are_there([block for block, _ in self._wanted(slices)])

    def use_servers(self, addresses: tuple[str, ...]) -> None:
        """It has none."""

    def load(
        self, task: int, slices: Sequence[list[Any]], places: Places, window: npt.NDArray[np.uint8]
    ) -> list[tuple[list[int], LoaderdError]]:
        """Write the rows of ``slices`` (as in LoadTask) to ``window``, uint8 (max_rows, row_bytes), at ``places``.

        Returns the places that could not be written, and why.
        """
        first_row = slices[0][-2]
        parts = []
        for (block, wanted), (*_, first, stop, row, key) in zip(self._wanted(slices), slices, strict=True):
            of_block = np.full(block.num_records, -1)
            of_block[wanted] = places[row - first_row : row - first_row + stop - first]
            parts.append(Part(block, of_block, key))
        return self._loader.load(parts, window)

    def _wanted(self, slices: Sequence[list[Any]]) -> Iterator[tuple[Block, slice | npt.NDArray[np.int64]]]:
        """Of each slice what must be read of its block, and which of the records in that are wanted."""
        for *place, left, first, stop, _, _ in slices:
            block = Block(*place)
            if left is None:
                found = self._loader.reader.narrowed(block, first, stop)
                skipped = found.first_record - block.first_record
                yield found, slice(first - skipped, stop - skipped)
            else:
                numbers = _numbers_left(block, left)[first:stop]
                found = self._loader.reader.narrowed(block, int(numbers[0]), int(numbers[-1]) + 1)
                yield found, numbers - (found.first_record - block.first_record)

    def check_fits(self, block_fields: list[Any], most: int) -> None:
        """Raise RecordMismatchError where none of the first ``most`` records left of a block fit the schema."""
        *place, left = block_fields
        block = Block(*place)
        numbers = np.arange(block.num_records) if left is None else _numbers_left(block, left)
        self._loader.check_fits(block, numbers[:most])
