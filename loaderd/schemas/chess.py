"""Chess positions with an evaluation, as one 194-byte bit field and a score."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema import Array, Bits, Derived, Int64, PackedBits, Schema

# Six groups of four channels are stored. The output has four groups of six: group i holds member i of each stored
# group. The second and the fourth group are negated.
_CHESS_CHANNEL_ORDER = tuple(channel for member in range(4) for channel in range(member, 24, 4))
_CHESS_CHANNEL_SCALE = tuple(sign for sign in (1.0, -1.0, 1.0, -1.0) for _ in range(6))


def chess_score(
    score: npt.NDArray[np.int64], mate: npt.NDArray[np.bool_], *, value_a: float, value_k: float, value_b: float
) -> npt.NDArray[np.float64]:
    """The target in (-1, 1) of a stored score: ``score`` int64, (n,); ``mate`` bool, (n,); returns float64, (n,).

    A·tanh(score / K), or, where ``score`` counts moves to mate,
    sign(score)·(A + (1 - A) / (B - 1) · max(0, B - \\|score\\|)).
    """
    moves_left = np.maximum(0.0, value_b - np.abs(score))
    decided = np.sign(score) * (value_a + (1.0 - value_a) / (value_b - 1.0) * moves_left)
    return np.where(mate, decided, value_a * np.tanh(score / value_k))


def chess_eval(value_a: float = 0.8, value_k: float = 600.0, value_b: float = 50.0, dtype: Any = "float32") -> Schema:
    """Chess positions with an evaluation: fields ``board`` (8, 8, 24), ``flags`` (10,) and ``score`` ().

    Reads the features ``d`` (194 bytes: 1536 bits of planes, ten flags, one bit "the score counts moves to mate",
    padding) and ``s`` (int64). ``dtype`` is that of board and flags; the score is float32. ``value_a``,
    ``value_k`` and ``value_b`` are those of :func:`chess_score`.
    """
    return Schema(
        features={"d": PackedBits(1552), "s": Int64()},
        fields={
            "board": Bits(
                "d",
                shape=(8, 8, 24),
                channel_order=_CHESS_CHANNEL_ORDER,
                scale=_CHESS_CHANNEL_SCALE,
                dtype=dtype,
            ),
            "flags": Bits("d", start=1536, shape=(10,), dtype=dtype),
            "score": Derived(
                partial(chess_score, value_a=value_a, value_k=value_k, value_b=value_b),
                inputs=("stored", "mate"),
                shape=(),
                dtype="float32",
            ),
        },
        intermediates={"stored": Array("s"), "mate": Bits("d", start=1546, dtype="bool")},
    )
