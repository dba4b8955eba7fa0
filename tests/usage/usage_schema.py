"""What the programs read: 128 numbered records, and chess records; also a module for ``loaderd serve``."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import loaderd

RECORDS = 128
CHESS_RECORDS = 96
FOLDER = Path(os.environ["USAGE_FOLDER"])  # of the shards, and of what the programs in memory are made of

# 32 bits of a record's number; a target and a weight that follow from it. All are float32, but for the number itself.
schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={
        "bits": loaderd.Bits("bits", shape=(32,)),
        "target": loaderd.Array("id", dtype="float32", scale=1 / 64),
        "weight": loaderd.Array("id", dtype="float32", scale=1 / 128, offset=0.5),
        "id": loaderd.Array("id"),
    },
)
chess_schema = loaderd.schemas.chess_eval()

NUMBERED = str(FOLDER / "numbered" / "*.tfrecord")
CHESS = str(FOLDER / "chess" / "*.tfrecord")
numbered = loaderd.Dataset(NUMBERED, schema, shuffle=False)
shuffled = loaderd.Dataset(NUMBERED, schema)
chess = loaderd.Dataset(CHESS, chess_schema, shuffle=False)


def fields_of(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of ``schema`` of records with these numbers, made without loaderd."""
    bits = (numbers[:, None] >> np.arange(31, -1, -1)) & 1
    return {
        "bits": bits.astype(np.float32),
        "target": (numbers / 64).astype(np.float32),
        "weight": (numbers / 128 + 0.5).astype(np.float32),
        "id": numbers,
    }
