"""The chess_eval record decoded as plainly as can be: what every candidate must deliver.

Written from the description of the record, not from any candidate's code, so that they can be checked by it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

VALUE_A, VALUE_K, VALUE_B = 0.8, 600.0, 50.0

CHANNEL_ORDER = np.array([channel for member in range(4) for channel in range(member, 24, 4)])
CHANNEL_SIGN = np.repeat(np.array([1.0, -1.0, 1.0, -1.0], np.float32), 6)

Rows = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]


def decode(stored: npt.NDArray[np.uint8], scores: npt.NDArray[np.int64]) -> Rows:
    """Board float32 (n, 8, 8, 24), flags (n, 10), score (n,) of ``d`` uint8 (n, 194) and ``s`` int64 (n,).

    The score is computed in float64 and rounded to float32 once, so that it has one right value:
    A·tanh(s / K), or sign(s)·(A + (1 - A) / (B - 1) · max(0, B - \\|s\\|)) where it counts moves to mate.
    """
    bits = np.unpackbits(stored, axis=1)
    board = bits[:, :1536].reshape(-1, 8, 8, 24)[..., CHANNEL_ORDER] * CHANNEL_SIGN
    flags = bits[:, 1536:1546].astype(np.float32)
    size = np.abs(scores.astype(np.float64))
    decided = VALUE_A + (1.0 - VALUE_A) / (VALUE_B - 1.0) * np.maximum(0.0, VALUE_B - size)
    score = np.where(bits[:, 1546] == 1, np.sign(scores) * decided, VALUE_A * np.tanh(scores / VALUE_K))
    return board, flags, score.astype(np.float32)
