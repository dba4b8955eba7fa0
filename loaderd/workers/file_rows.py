"""Loading a window from shards that this process reads itself: from slices as messages name them, to blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import LoaderdError
from loaderd.plan.selection import numbers_that
from loaderd.schema import Schema
from loaderd.shards.reader import Block, Reading
from loaderd.shards.shard_file import ShardFile
from loaderd.workers.load import Part, WindowLoader

_BLOCK_FIELDS = len(Block._fields)

Places = npt.NDArray[np.intp]


def _numbers_left(block: Block, left: list[Any]) -> npt.NDArray[np.int64]:
    """int64, (left,): the numbers in the block of the records that are in the data set; ``left``: as in LoadTask."""
    low, high, conditions = left
    return numbers_that(conditions, low, high) - block.first_record


def _blocks_of(slices: Sequence[list[Any]]) -> list[Block]:
    return [Block(*place[:_BLOCK_FIELDS]) for place in slices]


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
            self._loader.reader.begin(_blocks_of(slices))

    def is_there(self, task: int, slices: Sequence[list[Any]]) -> bool:
        """Whether a load could begin at once: nothing that it reads is still on its way."""
        reader = self._loader.reader
        return not reader.fetches or reader.are_there(_blocks_of(slices))

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
        for *place, left, first, stop, row, key in slices:
            block = Block(*place)
            of_block = np.full(block.num_records, -1)
            wanted = slice(first, stop) if left is None else _numbers_left(block, left)[first:stop]
            of_block[wanted] = places[row - first_row : row - first_row + stop - first]
            parts.append(Part(block, of_block, key))
        return self._loader.load(parts, window)

    def check_fits(self, block_fields: list[Any], most: int) -> None:
        """Raise RecordMismatchError where none of the first ``most`` records left of a block fit the schema."""
        *place, left = block_fields
        block = Block(*place)
        numbers = np.arange(block.num_records) if left is None else _numbers_left(block, left)
        self._loader.check_fits(block, numbers[:most])
