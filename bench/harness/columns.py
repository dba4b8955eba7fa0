"""Synthetic Parquet files of records of 42 bytes; what reads them delivers the stored columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from loaderd import FixedRecords, Schema

COLUMNS = "harness.columns:SCHEMA"
_PLANE_BYTES = 24
RECORD = np.dtype(
    [("number", "<i8"), ("planes", "u1", (_PLANE_BYTES,)), ("policy", "<f4"), ("move", "<i4"), ("score", "<i2")]
)
SCHEMA = Schema.of_stored(FixedRecords(RECORD))


def cached_parquet(root: Path, num_records: int, row_group_records: int, num_files: int = 8) -> list[Path]:
    """Files below ``root`` that are written once and used again afterwards."""
    folder = root / f"parquet-{num_records}-{row_group_records}-{num_files}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.parquet" for number in range(num_files)]
    for first, path in zip(range(0, num_records, -(-num_records // num_files)), paths, strict=False):
        if not path.is_file():
            count = min(-(-num_records // num_files), num_records - first)
            unfinished = path.with_suffix(".unfinished")  # renamed when whole: an interrupted one is not used
            pq.write_table(_table(first, count), unfinished, row_group_size=row_group_records)
            unfinished.rename(path)
    return [path for path in paths if path.is_file()]


def _table(first: int, count: int) -> pa.Table:
    rng = np.random.default_rng(first)
    planes = pa.py_buffer(rng.bytes(count * _PLANE_BYTES))
    return pa.table(
        {
            "number": np.arange(first, first + count),
            "planes": pa.FixedSizeBinaryArray.from_buffers(pa.binary(_PLANE_BYTES), count, [None, planes]),
            "policy": rng.random(count, np.float32),
            "move": rng.integers(0, 1 << 12, count, np.int32),
            "score": rng.integers(-1000, 1000, count, np.int16),
        }
    )
