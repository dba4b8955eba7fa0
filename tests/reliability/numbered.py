"""Small shards whose records know their number, and a schema by which each row of a batch can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import loaderd
from loaderd.kernels.crc import framed

Int64s = npt.NDArray[np.int64]

_LEAST = 1 << 14  # from here to 2**21, a varint takes three bytes, so all records have one length


def square(numbers: Any) -> Any:
    return numbers * numbers


SCHEMA = loaderd.Schema(
    {"n": loaderd.Int64()},
    {"n": loaderd.Array("n"), "square": loaderd.Derived(square, "n", dtype="int64")},
)


def write_shards(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Shards of so many records each, numbered through from 0 (to fewer than two million); 32 bytes a record."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{shard:03}.tfrecord") for shard in range(len(sizes))]
    number = _LEAST
    for path, size in zip(paths, sizes, strict=True):
        with open(path, "wb") as file:
            for _ in range(size):
                file.write(_record(number))
                number += 1
    return paths


def _record(number: int) -> bytes:
    """A tf.train.Example of one int64, framed."""
    varint = bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])
    # features { feature { key: "n"  value { int64_list { value: number } } } }
    payload = b"\x0a\x0e\x0a\x0c\x0a\x01n\x12\x07\x1a\x05\x0a\x03" + varint
    return framed(payload)


def numbers_of(batch: loaderd.Batch) -> Int64s:
    """int64, (records,): the numbers from 0; raises AssertionError for a row whose fields disagree."""
    numbers = batch["n"]
    assert np.array_equal(numbers * numbers, batch["square"]), f"rows are torn: {numbers} {batch['square']}"
    return numbers_from(numbers)


def numbers_from(stored: Int64s) -> Int64s:
    """The numbers from 0 of field ``n``."""
    return stored - _LEAST
