"""Records that hold their number twice, and loaders of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import loaderd

SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)
"""Fields ``id`` () int64 and ``bits`` (32,) float32, which are the bits of ``id``."""


class Numbered:
    """Shards in the folder of a test, and what comes of them."""

    schema = SCHEMA

    def __init__(self, folder: Path, write_to: Callable[[Path, Sequence[int]], list[Path]]) -> None:
        self._folder = folder
        self._write_to = write_to

    def write(self, sizes: Sequence[int], folder: str = "shards") -> list[Path]:
        """Shards of so many records each, numbered through from 0."""
        return self._write_to(self._folder / folder, sizes)

    def loader(self, shards: Any, **options: Any) -> loaderd.Loader:
        """Of shards, or of new ones of so many records each. Batches of 10, by one worker, unless options differ."""
        if isinstance(shards, list) and all(isinstance(size, int) for size in shards):
            shards = self.write(shards)
        return loaderd.Loader(shards, self.schema, **{"batch_size": 10, "workers": 1, **options})

    @staticmethod
    def check(batch: loaderd.Batch) -> list[int]:
        """The numbers in a batch, of which every row is whole: bits and number agree."""
        assert np.array_equal(batch["bits"] @ 2.0 ** np.arange(31, -1, -1), batch["id"])
        return [int(number) for number in batch["id"]]

    def batches(self, batches: Iterable[loaderd.Batch]) -> list[list[int]]:
        """The numbers in each of ``batches``."""
        return [self.check(batch) for batch in batches]

    def records(self, batches: Iterable[loaderd.Batch]) -> list[int]:
        """The numbers in all of ``batches``."""
        return [number for batch in batches for number in self.check(batch)]
