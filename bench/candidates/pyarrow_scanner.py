"""pyarrow's scanner of Parquet, its columns taken as numpy arrays: files' order, threads for all cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from harness.columns import COLUMNS
from harness.interface import Config, Step
from pyarrow import dataset

NOTE = "rows are not shuffled"


def cannot(config: Config) -> str | None:
    return None if config.schema == COLUMNS else "it reads Parquet"


def _array(column: pa.Array) -> np.ndarray:
    if not pa.types.is_fixed_size_binary(column.type):
        return column.to_numpy()
    width = column.type.byte_width
    stored = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :]
    return stored[: len(column) * width].reshape(-1, width)


def steps(config: Config) -> Iterator[Step]:
    files = dataset.dataset(list(config.shards), format="parquet")
    names = list(config.delivered().fields)
    for _ in itertools.count() if config.epochs is None else range(config.epochs):
        for batch in files.to_batches(columns=names, batch_size=config.batch_size):
            yield Step(batch.num_rows, {name: _array(batch.column(name)) for name in names})
