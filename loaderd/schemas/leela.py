"""Leela Chess Zero's training data, version 6: gzip files of one game each, or the hourly tars of them.

The record is ``V6TrainingData`` of LeelaChessZero/lc0, src/trainingdata/trainingdata_v6.h: a packed struct,
little-endian. How it becomes planes is ``convert_v6_to_tuple`` of LeelaChessZero/lczero-training, tf/chunkparser.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.randomness import RecordRandom
from loaderd.schema import Array, Bits, Derived, Fill, FixedRecords, Planes, Schema, Spread
from loaderd.schema.permute import permute
from loaderd.schemas.leela_moves import mirrored_moves
from loaderd.schemas.symmetry import check_symmetries, has_any

RECORD = np.dtype(
    [
        ("version", "<u4"),
        ("input_format", "<u4"),
        ("probabilities", "<f4", (1858,)),  # -1: an illegal move
        ("planes", "<u8", (104,)),  # 8 positions of 13 planes; np.unpackbits gives each rank's files from a to h
        ("castling", "u1", (4,)),  # us queenside, us kingside, them queenside, them kingside
        ("side_to_move", "u1"),  # input formats from 3 on: en passant
        ("rule50_count", "u1"),
        ("invariance_info", "u1"),
        ("dummy", "u1"),
        ("root_q", "<f4"),
        ("best_q", "<f4"),
        ("root_d", "<f4"),
        ("best_d", "<f4"),
        ("root_m", "<f4"),
        ("best_m", "<f4"),
        ("plies_left", "<f4"),
        ("result_q", "<f4"),
        ("result_d", "<f4"),
        ("played_q", "<f4"),
        ("played_d", "<f4"),
        ("played_m", "<f4"),
        ("orig_q", "<f4"),  # orig_q, orig_d and orig_m may be NaN
        ("orig_d", "<f4"),
        ("orig_m", "<f4"),
        ("visits", "<u4"),
        ("played_idx", "<u2"),
        ("best_idx", "<u2"),
        ("policy_kld", "<f4"),
        ("q_st", "<f4"),
    ]
)
"""8,356 bytes."""

_READ = [
    *("version", "input_format", "probabilities", "planes", "castling", "side_to_move", "rule50_count"),
    *("plies_left", "result_q", "result_d"),
]


_WHY = "Pawns go up, so a board of chess has one symmetry beside itself: 4, files a to h mirrored."


def lc0(dtype: Any = "float32", symmetries: Sequence[int] = ()) -> Schema:
    """Fields ``planes`` (112, 8, 8), ``policy`` (1858,), ``wdl`` (3,) and ``plies_left`` ().

    ``planes``: 104 of pieces and repetitions, 4 of castling rights, the side to move, the 50-move count / 99, zeros,
    ones; of ``dtype``. The other fields are float32. ``policy`` is as stored: -1 is an illegal move. ``wdl``: win,
    draw and loss, of the game's result as the side to move sees it: ½(1 - d + q), d, ½(1 - d - q).

    ``symmetries``: with ``(0, 4)``, the planes and the policy of half of the records are mirrored left and right;
    which records is drawn anew in each epoch from the stream "symmetry". Positions with castling rights are never
    mirrored: their kings would stand on file d. Empty: as stored. Raises SchemaError for numbers other than 0 and 4.

    Each record of another version, or of an input format other than 1 (classical), is a RecordMismatchError.
    """

    def plane(feature: str, scale: float = 1.0) -> Spread:
        return Spread(feature, (1, 8, 8), scale, dtype)

    schema = Schema(
        features=FixedRecords(RECORD[_READ], bits=["planes"], expect={"version": 6, "input_format": 1}),
        fields={
            "planes": Planes(
                [
                    Bits("planes", (104, 8, 8), dtype=dtype),
                    Spread("castling", (8, 8), dtype=dtype),
                    plane("side_to_move"),
                    plane("rule50_count", 1 / 99),
                    Fill(0.0, (1, 8, 8), dtype),
                    Fill(1.0, (1, 8, 8), dtype),
                ]
            ),
            "policy": Array("probabilities"),
            "wdl": Derived(win_draw_loss, ("q", "d"), shape=(3,), dtype="float32"),
            "plies_left": Array("plies_left"),
        },
        intermediates={"q": Array("result_q", "float64"), "d": Array("result_d", "float64")},
    )
    return _mirrored(schema, check_symmetries(symmetries, (0, 4), "lc0", _WHY)) if has_any(symmetries) else schema


def _mirrored(schema: Schema, symmetries: tuple[int, ...]) -> Schema:
    stored, fields = {}, dict(schema.fields)
    for name, sources in (("planes", np.arange(8)[::-1]), ("policy", mirrored_moves())):
        stored[f"{name} (unturned)"] = schema.fields[name]
        spec, tables = schema.spec_of(name), np.stack([np.arange(len(sources)), sources])
        function = partial(permute, partial(mirror, symmetries), tables, 1)
        inputs = (f"{name} (unturned)", "castling")
        fields[name] = Derived(function, inputs, spec.shape, spec.dtype, random="symmetry")
    return Schema(schema.features, fields, {**schema.intermediates, **stored, "castling": Array("castling")})


def win_draw_loss(q: npt.NDArray[np.float64], d: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """float64, (n, 3): the chances of a win, a draw and a loss. ``q``: win - loss, (n,); ``d``: draw, (n,)."""
    return np.stack([0.5 * (1.0 - d + q), d, 0.5 * (1.0 - d - q)], axis=1)


def mirror(
    symmetries: tuple[int, ...], castling: npt.NDArray[np.uint8], random: RecordRandom
) -> npt.NDArray[np.uint8]:
    """uint8, (n,): 1 for the records that are mirrored, else 0.

    These are the ones without castling rights (``castling``: (n, 4)) for which 4 is drawn from ``symmetries``.
    """
    drawn = np.asarray(symmetries)[random.integers(0, len(symmetries))]
    mirrored: npt.NDArray[np.uint8] = ((drawn == 4) & ~castling.any(axis=1)).astype(np.uint8)
    return mirrored
