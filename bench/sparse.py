"""What does it cost to make sparse inputs, next to writing as many bytes?

::

    python bench/sparse.py

Chess boards of 32 bytes (the squares that are occupied, and a code for each piece) become 32 int32 indices for each
side, by ``BatchDecoder`` as in a worker, on one core, into 32 batches in turn. The bound is numpy's copy of such
batches: C code that makes nothing, and reads as much as it writes. Alternated rounds in one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.questions import publish, question_of
from harness.report import Spread
from harness.rounds import turns

import loaderd
from loaderd import FixedRecords, Schema, Sparse
from loaderd.decode.batch_decoder import BatchDecoder

BATCH, SLOTS = 4096, 32
VERSIONS = {"loaderd": loaderd.__version__, "numpy": np.__version__, "llvmlite": version("llvmlite")}
COPY = "copying the output"
STORED = np.dtype([("occupied", "u1", (8,)), ("pieces", "u1", (16,)), ("king", "u1"), ("rest", "V7")])
Table = npt.NDArray[np.int64]


def tables() -> tuple[Table, Table]:
    """(16, 64) each: the indices of a piece for the side to move, and for the other one."""
    own, other = np.full((2, 16, 64), -2)
    square = np.arange(64)
    for colour in (0, 1):
        for kind in range(6):
            own[8 * colour + kind] = 384 * colour + 64 * kind + square
            other[8 * colour + kind] = 384 * (1 - colour) + 64 * kind + (square ^ 56)
    return own, other


def schema(has_buckets: bool) -> Schema:
    """``has_buckets``: both sides have an index for each square of a king: 49,152 in all."""
    fields = {}
    for name, table in zip(("own", "other"), tables(), strict=True):
        by_king = np.where(table < 0, -2, table + 768 * np.arange(64)[:, None, None])
        more: dict[str, Any] = {"table": by_king, "bucket": "king"} if has_buckets else {"table": table}
        fields[name] = Sparse("occupied", 32, codes="pieces", bit_order="little", **more)
    return Schema(FixedRecords(STORED[["occupied", "pieces", "king"]], bits=["occupied", "pieces"]), fields)


def rows_of(of: Schema, count: int) -> npt.NDArray[np.uint8]:
    """Boards of 2 to 32 pieces; how many there are is drawn evenly."""
    rng = np.random.default_rng(0)
    stored = np.zeros(count, of.row_dtype)
    order = rng.random((count, 64)).argsort(axis=1)
    stored["occupied"] = np.packbits(order < rng.integers(2, 33, (count, 1)), axis=1, bitorder="little")
    codes = rng.choice([*range(6), *range(8, 14)], (count, 32))
    stored["pieces"] = codes[:, ::2] | codes[:, 1::2] << 4
    stored["king"] = rng.integers(0, 64, count)
    return stored.view(np.uint8).reshape(count, of.row_bytes)


def made_by(kernels: str, has_buckets: bool, count: int) -> Callable[[], None]:
    of = schema(has_buckets)
    os.environ["LOADERD_KERNELS"] = kernels
    decoder, rows = BatchDecoder(of), rows_of(of, count)
    if decoder.kernels != kernels:
        raise SystemExit("this needs what is compiled: pip install 'loaderd[compiled]'")
    slots = [
        {name: np.zeros((BATCH, *spec.shape), spec.dtype) for name, spec in of.specs.items()} for _ in range(SLOTS)
    ]

    def make() -> None:
        for number in range(count // BATCH):
            decoder.decode(rows[number * BATCH :][:BATCH], slots[number % SLOTS])

    return make


def copied(count: int) -> Callable[[], None]:
    slots = np.zeros((SLOTS, BATCH, 2, 32), np.int32)

    def copy() -> None:
        for number in range(count // BATCH):
            np.copyto(slots[number % SLOTS], slots[(number + SLOTS // 2) % SLOTS])

    return copy


def main() -> None:
    options = question_of(__doc__, rounds=9, records=262_144).parse_args()
    count = max(BATCH, options.records // BATCH * BATCH)
    cases = {
        COPY: copied(count),
        "compiled": made_by("compiled", False, count),
        "compiled, by the king's square": made_by("compiled", True, count),
        "numpy": made_by("numpy", False, count),
    }
    runs: list[dict[str, Any]] = []
    for make in cases.values():
        make()  # the first one meets fresh memory
    for number, case in turns(list(cases), options.rounds):
        began_s = time.process_time()
        cases[case]()
        ns = (time.process_time() - began_s) / count * 1e9
        runs.append({"case": case, "round": number, "ns": ns, "config": {"records": count}, "versions": VERSIONS})
    runs.sort(key=lambda run: int(run["round"]))
    of_case = {case: [float(run["ns"]) for run in runs if run["case"] == case] for case in cases}
    rows = []
    for case, ns in of_case.items():
        rates = Spread.of([1e9 / each for each in ns])
        ratio = Spread.of([each / copy for each, copy in zip(ns, of_case[COPY], strict=True)])
        rows.append((case, Spread.of(ns).shown(".0f"), rates.shown(",.0f"), ratio.shown(".1f")))
    notes = ["256 bytes are written of each record; of those that are made, 25 are read"]
    publish(("both sides", "ns a record", "records/s and core", "× the copy"), rows, notes, runs, options)


if __name__ == "__main__":
    main()
