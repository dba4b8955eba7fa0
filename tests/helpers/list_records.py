"""Records with a list of up to five numbers, padded with -1, and its length."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import loaderd
from loaderd.decode.example_writer import encode_examples

_FEATURES = {"moves": loaderd.Int64((5,), pad=-1), "num_moves": loaderd.Length("moves")}
SCHEMA = loaderd.Schema(_FEATURES, {"moves": loaderd.Array("moves", dtype="int32"), "n": loaderd.Array("num_moves")})
LENGTHS = [number % 6 for number in range(60)]
"""Of the lists, one a record; all their numbers are 0."""


def write(folder: Path) -> list[str]:
    """The shards."""
    rows = np.zeros(len(LENGTHS), loaderd.Schema.of_stored(_FEATURES).row_dtype)
    rows["num_moves"] = LENGTHS
    return loaderd.testing.write_shards(folder, list(encode_examples(rows, _FEATURES)))
