"""What does it cost to make sparse inputs, next to writing as many bytes?

::

    python bench/sparse.py

Chess boards as trainers store them become 32 int32 indices for each side, a score, a result and a count, by
``BatchDecoder`` as in a worker, on one core, into 32 batches of 4,096 in turn. The bound is numpy's copy of such
batches: C code that makes nothing, and reads as much as it writes. Alternated rounds in one process. At last, a
loader shuffles boards of 32 bytes from a file and delivers batches of 16,384: CPU time of all its processes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.process_tree import CpuMeter
from harness.questions import publish, question_of
from harness.report import Spread
from harness.rounds import turns

import loaderd
from loaderd import Schema
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.schemas.nnue import BULLET, SFEN, SFEN_BOARD

BATCH, SLOTS, DISTINCT, LOADER_BATCH = 4096, 32, 8192, 16_384
VERSIONS = {"loaderd": loaderd.__version__, "numpy": np.__version__, "llvmlite": version("llvmlite")}
COPY, LOADER = "copying the output", "a loader of bullet()"
Boards = npt.NDArray[Any]


def bullet_boards(count: int) -> Boards:
    """Boards of 2 to 32 pieces, of which the first two are kings; how many there are is drawn evenly."""
    rng, boards = np.random.default_rng(0), np.zeros(count, BULLET)
    order = rng.random((count, 64)).argsort(axis=1)
    is_occupied = order < rng.integers(2, 33, (count, 1))
    boards["occupied"] = np.packbits(is_occupied, axis=1, bitorder="little")
    codes = rng.choice([*range(5), *range(8, 13)], (count, 32))
    codes[:, :2] = 5, 13
    boards["pieces"] = codes[:, ::2] | codes[:, 1::2] << 4
    kings = np.argsort(~is_occupied, axis=1, kind="stable")[:, :2]
    boards["king"], boards["opponent_king"] = kings[:, 0], kings[:, 1] ^ 56
    boards["score"], boards["result"] = rng.integers(-3000, 3000, count), rng.integers(0, 3, count)
    return boards


def sfen_boards(count: int) -> Boards:
    """The same, with two kings, in the codes of a PackedSfenValue."""
    rng, boards = np.random.default_rng(0), np.zeros(count, SFEN)
    for board in boards[:DISTINCT]:
        squares = rng.permutation(64)[: rng.integers(2, 33)]
        symbols = dict(zip(squares[2:].tolist(), rng.integers(1, 11, len(squares) - 2).tolist(), strict=True))
        codes = [SFEN_BOARD.codes[symbols.get(place, 0)] or "" for place in SFEN_BOARD.order or ()]
        codes = [code for place, code in zip(SFEN_BOARD.order or (), codes, strict=True) if place not in squares[:2]]
        bits = "0" + "".join(f"{king:06b}"[::-1] for king in squares[:2]) + "".join(codes)
        board["sfen"] = np.packbits([bit == "1" for bit in bits.ljust(256, "0")], bitorder="little")
    return np.resize(boards[:DISTINCT], count)


def rows_of(schema: Schema, boards: Boards) -> npt.NDArray[np.uint8]:
    rows = np.zeros(len(boards), schema.row_dtype)
    for name in schema.features:
        rows[name] = boards[name].reshape(rows[name].shape)
    return rows.view(np.uint8).reshape(len(rows), schema.row_bytes)


def made_by(kernels: str, schema: Schema, boards: Boards) -> Callable[[], None]:
    os.environ["LOADERD_KERNELS"] = kernels
    decoder, rows = BatchDecoder(schema), rows_of(schema, boards)
    if decoder.kernels != kernels:
        raise SystemExit("this needs what is compiled: pip install 'loaderd[compiled]'")
    slots = [
        {name: np.zeros((BATCH, *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
        for _ in range(SLOTS)
    ]

    def make() -> None:
        for number in range(len(boards) // BATCH):
            decoder.decode(rows[number * BATCH :][:BATCH], slots[number % SLOTS])

    return make


def copied(count: int) -> Callable[[], None]:
    slots = np.zeros((SLOTS, BATCH, 2, 32), np.int32)

    def copy() -> None:
        for number in range(count // BATCH):
            np.copyto(slots[number % SLOTS], slots[(number + SLOTS // 2) % SLOTS])

    return copy


def loaded_ns(path: Path, workers: int, seconds: float, warmup_s: float) -> float:
    """CPU time of a record, in ns, of a loader that has warmed up: of all its processes, the consumer's too."""
    options = {"batch_size": LOADER_BATCH, "epochs": None, "workers": workers}
    with loaderd.Loader(path, loaderd.schemas.bullet(), **options) as loader:
        batches, began_s = iter(loader), time.perf_counter()
        while time.perf_counter() - began_s < warmup_s:
            next(batches)
        meter, num_records, began_s = CpuMeter(), 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            num_records += next(batches).num_records
        return meter.read()[0] / num_records * 1e9


def main() -> None:
    options = question_of(__doc__, rounds=9, records=262_144).parse_args()
    count = max(BATCH, options.records // BATCH * BATCH)
    bullet, sfen, schemas = bullet_boards(count), sfen_boards(count), loaderd.schemas
    cases = {
        COPY: copied(count),
        "bullet()": made_by("compiled", schemas.bullet(), bullet),
        "bullet(), a bucket for each square of a king": made_by("compiled", schemas.bullet([*range(64)]), bullet),
        "nnue_bin()": made_by("compiled", schemas.nnue_bin(), sfen),
        "bullet(), numpy": made_by("numpy", schemas.bullet(), bullet),
        "nnue_bin(), numpy": made_by("numpy", schemas.nnue_bin(), sfen),
    }
    runs: list[dict[str, Any]] = []

    def note(case: str, number: int, ns: float) -> None:
        runs.append({"case": case, "round": number, "ns": ns, "config": {"records": count}, "versions": VERSIONS})

    for make in cases.values():
        make()  # the first one meets fresh memory
    for number, case in turns(list(cases), options.rounds):
        began_s = time.process_time()
        cases[case]()
        note(case, number, (time.process_time() - began_s) / count * 1e9)
    os.environ["LOADERD_KERNELS"] = "compiled"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "boards.bin"
        np.resize(bullet, 8 * count).tofile(path)
        for number in range(options.rounds):
            note(LOADER, number, loaded_ns(path, options.workers, options.seconds, options.warmup_seconds))
    runs.sort(key=lambda run: int(run["round"]))
    of_case = {case: [float(run["ns"]) for run in runs if run["case"] == case] for case in (*cases, LOADER)}
    rows = []
    for case in of_case:
        rates = Spread.of([1e9 / each for each in of_case[case]])
        ratio = Spread.of([each / copy for each, copy in zip(of_case[case], of_case[COPY], strict=True)])
        rows.append((case, Spread.of(of_case[case]).shown(".0f"), rates.shown(",.0f"), ratio.shown(".1f")))
    notes = [
        "256 bytes are copied for each record; the schemas write 12 more",
        f"the loader: from a file, shuffled, to batches of {LOADER_BATCH:,} in the training process; CPU time of all "
        f"its processes, with {options.workers} workers",
    ]
    publish(("both sides", "ns a record", "records/s and core", "× the copy"), rows, notes, runs, options)


if __name__ == "__main__":
    main()
