"""Positions of NNUE trainers, of shogi and of Ceres, as a script in Python reads them: one process, the files' order.

- bulletformat: plain Python, a board at a time; its trainer is in Rust.
- hcpe: cshogi (PyPI), a position at a time, as scripts around dlshogi do; its trainer decodes in C++.
- Ceres' TPG: numpy, a batch at a time, as TPGDataset of dje-dev/CeresTrain does in the workers of a DataLoader.
  Written anew after its steps, and kinder: nothing is copied to PyTorch's tensors, or sent to another process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.interface import Config, Step

NOTE = "one process, not shuffled"

Arrays = dict[str, npt.NDArray[Any]]
BULLET, HCPE, CERES = (f"loaderd.schemas:{name}" for name in ("bullet", "hcpe", "ceres_tpg"))
SIZES = {BULLET: 32, HCPE: 38, CERES: 9250}


def cannot(config: Config) -> str | None:
    if config.schema not in SIZES or config.packed:
        return f"it is written for the fields of {', '.join(SIZES)}"
    return None


def steps(config: Config) -> Iterator[Step]:
    decode = {BULLET: bullet, HCPE: shogi(), CERES: ceres}[config.schema]
    size = SIZES[config.schema]
    epoch = 0
    while config.epochs is None or epoch < config.epochs:
        for path in config.shards:
            for data in _batches(path, size * config.batch_size):
                yield Step(len(data) // size, decode(data))
        epoch += 1


def _batches(path: str, num_bytes: int) -> Iterator[bytes]:
    if path.endswith(".zst"):
        import zstandard

        reader: Any = zstandard.ZstdDecompressor().stream_reader(open(path, "rb"), closefd=True)  # noqa: SIM115
    else:
        reader = open(path, "rb")  # noqa: SIM115
    with reader:
        while data := reader.read(num_bytes):
            yield data


def bullet(data: bytes) -> Arrays:
    """Chess768: as the side to move sees each piece, and as the other side does."""
    stm, ntm, scores, results, counts = [], [], [], [], []
    for occupied, pieces, score, result in struct.iter_unpack("<Q16shB5x", data):
        ours, theirs = [], []
        while occupied:
            lowest = occupied & -occupied
            occupied ^= lowest
            square, place = lowest.bit_length() - 1, len(ours)
            code = pieces[place // 2] >> 4 * (place % 2) & 15
            other, kind = code >> 3, 64 * (code & 7)
            ours.append((384 if other else 0) + kind + square)
            theirs.append((0 if other else 384) + kind + (square ^ 56))
        padding = [-1] * (32 - len(ours))
        stm.append(ours + padding)
        ntm.append(theirs + padding)
        scores.append(score)
        results.append(result / 2)
        counts.append(len(ours))
    return {
        "stm": np.array(stm, np.int32),
        "ntm": np.array(ntm, np.int32),
        "score": np.array(scores, np.float32),
        "result": np.array(results, np.float32),
        "count": np.array(counts, np.int32),
    }


def shogi() -> Callable[[bytes], Arrays]:
    """What decodes positions: planes and hands, those of dlshogi's features that a board alone says."""
    try:
        import cshogi
        from cshogi import dlshogi
    except ImportError:
        return _lacking
    board, features = cshogi.Board(), (np.zeros((62, 9, 9), np.float32), np.zeros((57, 9, 9), np.float32))
    of_board = [*range(14), *range(31, 45)]

    def decode(data: bytes) -> Arrays:
        stored = np.frombuffer(data, cshogi.HuffmanCodedPosAndEval)
        n = len(stored)
        found: Arrays = {
            "pieces": np.empty((n, 28, 9, 9), np.float32),
            "hands": np.empty((n, 56), np.float32),
            "score": stored["eval"].astype(np.float32),
            "move": np.empty(n, np.int32),
            "result": np.empty(n, np.float32),
        }
        for row, position in enumerate(stored):
            board.set_hcp(np.ascontiguousarray(position["hcp"]))
            for each in features:
                each.fill(0)
            dlshogi.make_input_features(board, *features)
            found["pieces"][row] = features[0][of_board]
            found["hands"][row] = features[1][:56, 0, 0]
            found["move"][row] = dlshogi.make_move_label(int(position["bestMove16"]) & 0xFFFF, board.turn)
            winner = position["gameResult"]
            found["result"][row] = 0.5 if winner == 0 else winner - 1 == board.turn
        return found

    return decode


def _lacking(data: bytes) -> Arrays:
    raise ImportError("shogi is read by cshogi: pip install cshogi")


def ceres(data: bytes) -> Arrays:
    """The tensors of TPGDataset, with no smoothing."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, SIZES[CERES])

    def values(start: int, count: int, dtype: str) -> npt.NDArray[Any]:
        stop = start + count * np.dtype(dtype).itemsize
        return np.ascontiguousarray(rows[:, start:stop]).view(dtype)

    policies = np.zeros((len(rows), 1858), np.float16)
    np.put_along_axis(policies, values(114, 92, "<i2").astype(np.int64), values(298, 92, "<f2"), axis=1)
    squares = values(482, 64 * 137, "i1").reshape(-1, 64, 137).astype(np.float32)
    return {
        "squares": np.divide(squares, 100).astype(np.float32),
        "policies": policies,
        "wdl_deblundered": values(12, 3, "<f4"),
        "wdl_q": values(24, 3, "<f4"),
        "wdl_nondeblundered": values(0, 3, "<f4"),
        "q_deviation_lower": values(108, 1, "<f2").astype(np.float32),
        "q_deviation_upper": values(110, 1, "<f2").astype(np.float32),
        "played_q_suboptimality": values(36, 1, "<f4"),
        "mlh": np.square(values(100, 1, "<f4") / np.float32(0.1)) / np.float32(100),
        "unc": np.abs(values(104, 1, "<f4")),
        "uncertainty_policy": np.abs(values(96, 1, "<f4")),
        "policy_index_in_parent": values(112, 1, "<i2"),
    }
