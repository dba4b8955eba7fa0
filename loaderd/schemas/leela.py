"""Leela Chess Zero's training data, versions 6 and 7: gzip files of one game each, or the hourly tars of them.

The record is ``V7TrainingData`` of LeelaChessZero/lc0, src/trainingdata/trainingdata_v7.h: a packed struct,
little-endian, which begins with all of ``V6TrainingData``. How it becomes planes is ``convert_v6_to_tuple`` of
LeelaChessZero/lczero-training, tf/chunkparser.py; the values are those of csrc/loader/stages/tensor_generator.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.randomness import RecordRandom
from loaderd.schema import Array, Bits, Derived, Field, Fill, FixedRecords, Planes, Schema, Spread
from loaderd.schema.features import is_integer, resolve_dtype
from loaderd.schema.permute import permute
from loaderd.schema.representable import check_holds_fractions
from loaderd.schemas.leela_moves import mirrored_moves
from loaderd.schemas.symmetry import check_symmetries, has_any

RECORD_V6 = np.dtype(
    [
        ("version", "<u4"),
        ("input_format", "<u4"),
        ("probabilities", "<f4", (1858,)),  # -1: an illegal move
        ("planes", "<u8", (104,)),  # 8 positions of 13 planes; np.unpackbits gives each rank's files from a to h
        ("castling", "u1", (4,)),  # us queenside, us kingside, them queenside, them kingside
        ("side_to_move", "u1"),  # input formats from 3 on: files of en passant
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

RECORD = np.dtype(
    [
        *RECORD_V6.descr,
        ("d_st", "<f4"),
        ("opp_played_idx", "<u2"),
        ("next_played_idx", "<u2"),
        ("reserved", "<f4", (8,)),
    ]
)
"""Version 7: 8,396 bytes."""

SIZES = {6: RECORD_V6.itemsize, 7: RECORD.itemsize}
"""Bytes of a record, by version."""
_FILL = {"d_st": np.nan, "opp_played_idx": 65535, "next_played_idx": 65535}
"""What records of version 6 do not have. lczero-training writes 65535 where there is no move."""

INPUT_FORMATS = {
    1: "INPUT_CLASSICAL_112_PLANE",
    2: "INPUT_112_WITH_CASTLING_PLANE",
    3: "INPUT_112_WITH_CANONICALIZATION",
    4: "INPUT_112_WITH_CANONICALIZATION_HECTOPLIES",
    5: "INPUT_112_WITH_CANONICALIZATION_V2",
    132: "INPUT_112_WITH_CANONICALIZATION_HECTOPLIES_ARMAGEDDON",
    133: "INPUT_112_WITH_CANONICALIZATION_V2_ARMAGEDDON",
}
"""Their names in LeelaChessZero/lc0, proto/net.proto."""
_CASTLING_PLANE, _FIRST_CANONICAL, _FIRST_OF_100, _ARMAGEDDON = 2, 3, 4, (132, 133)

_VALUES = {
    "result": ("result_q", "result_d", "plies_left"),
    "best": ("best_q", "best_d", "best_m"),
    "played": ("played_q", "played_d", "played_m"),
    "orig": ("orig_q", "orig_d", "orig_m"),
    "root": ("root_q", "root_d", "root_m"),
    "st": ("q_st", "d_st"),
}
"""Win - loss, draw, and moves left, if it has them; in the order of lczero-training's tensor of values."""
Targets = Literal["result", "best", "played", "orig", "root", "st", "all"]

_WHY = (
    "They are numbered as lc0 numbers its transforms: 1 mirrors left and right. Pawns go up, so boards with pawns "
    "have no other one."
)
_LAST_RANK = 56


def lc0(
    dtype: Any = "float32", symmetries: Sequence[int] = (), targets: Targets = "result", input_format: int = 1
) -> Schema:
    """Fields ``planes`` (112, 8, 8), ``policy`` (1858,), ``wdl`` (3,), ``plies_left`` () and ``version`` ().

    ``planes``: 104 of pieces and repetitions, 5 of castling rights and the side to move, the 50-move count / 99,
    zeros, ones; of ``dtype``. ``policy``, float32, is as stored: -1 is an illegal move. ``version``, int32: 6 or 7;
    both may be in one data set.

    ``targets``: whose values ``wdl`` and ``plies_left`` are: those of the game's "result", of the "best" move, of the
    "played" one, of the "orig"inal network, of the search's "root", or of "st", the short-term value, without
    ``plies_left``. ``wdl``, float32: win, draw and loss as the side to move sees them: ½(1 - d + q), d, ½(1 - d - q).
    "all": one field ``values``, float32 (6, 3), in place of both: q, d and moves left of result, best, played, orig,
    root and st, as lczero-training's loader delivers them.

    Values that a record does not have are NaN: moves left of st, "orig" where it was not in lc0's cache, and d of st
    in version 6. Its q of st is as stored; lczero-training computes both anew from the games of that version.

    ``input_format``: that of all records. 1: classical. 2: planes of the rooks that may castle. 3: canonical; files
    of en passant in place of the side to move. 4: the 50-move count / 100. 5: v2. 132 and 133: 4 and 5 for
    armageddon; the plane of zeros is the side to move. Boards that lc0 has turned are delivered as they are stored.

    ``symmetries``: with ``(0, 1)``, the planes and the policy of half of the records are mirrored left and right;
    which records is drawn anew in each epoch from the stream "symmetry". Positions with castling rights are never
    mirrored: their kings would stand on file d. Empty: as stored. Raises SchemaError for numbers other than 0 and 1,
    and for input formats from 3 on, of which lc0 has mirrored the boards already.

    ``where=`` and ``sample=`` may name all other fields of the record, such as "policy_kld". Each record of another
    version or input format is a RecordMismatchError.
    """
    if not is_integer(input_format) or input_format not in INPUT_FORMATS:
        known = ", ".join(f"{number} ({name})" for number, name in INPUT_FORMATS.items())
        raise SchemaError(f"lc0: input_format must be one of {known}, got {input_format!r:.200}")
    if not isinstance(targets, str) or targets not in (*_VALUES, "all"):
        raise SchemaError(f"lc0: targets must be one of {', '.join((*_VALUES, 'all'))}, got {targets!r:.200}")
    planes, bits = _planes(input_format, dtype)
    records = FixedRecords(
        _with_bits(bits), ["planes", *bits], {"input_format": input_format}, sizes=("version", SIZES), fill=_FILL
    )
    others = {name: Array(name) for name in records if name not in ("version", "probabilities", *records.bits)}
    fields: dict[str, Field] = {"planes": planes, "policy": Array("probabilities")}
    if targets == "all":
        names = [name for each in _VALUES.values() for name in each]
        fields["values"] = Derived(all_values, names, shape=(6, 3), dtype="float32")
    else:
        q, d, *moves_left = _VALUES[targets]
        others |= {"q": Array(q, "float64"), "d": Array(d, "float64")}
        fields["wdl"] = Derived(win_draw_loss, ("q", "d"), shape=(3,), dtype="float32")
        if moves_left:
            fields["plies_left"] = Array(moves_left[0])
    fields["version"] = Array("version", "int32", wrap=True)
    schema = Schema(records, fields, {name: each for name, each in others.items() if name not in fields})
    if not has_any(symmetries):
        return schema
    chosen = check_symmetries(symmetries, (0, 1), "lc0", _WHY)
    if input_format >= _FIRST_CANONICAL:
        raise SchemaError(
            f"lc0: symmetries must be empty for input_format {input_format}, got {symmetries!r}",
            hint="Its boards are canonical: lc0 has mirrored each so that the king stands on files e to h.",
        )
    return _mirrored(schema, chosen)


def _planes(input_format: int, dtype: Any) -> tuple[Planes, dict[str, str]]:
    """The planes, and the features of bits that they need besides: the field of the record that each one is."""
    check_holds_fractions(resolve_dtype(dtype), "lc0: dtype")

    def plane(feature: str, scale: float = 1.0) -> Spread:
        return Spread(feature, (1, 8, 8), scale, dtype)

    bits: dict[str, str] = {}
    zeros: Fill | Spread = Fill(0.0, (1, 8, 8), dtype)
    middle: list[Bits | Spread]
    if input_format < _CASTLING_PLANE:
        middle = [Spread("castling", (8, 8), dtype=dtype)]
    else:  # byte 0 and 2: files of the rooks on the first and the last rank that may castle queenside; then kingside
        bits["rooks"] = "castling"
        masks = np.full((4, 64), -1)
        masks[:2, :8] = np.arange(16).reshape(2, 8)
        masks[:2, _LAST_RANK:] = np.arange(16, 32).reshape(2, 8)
        middle = [Bits("rooks", (4, 8, 8), dtype=dtype, bit_order="little", places=masks.ravel().tolist())]
    if input_format < _FIRST_CANONICAL:
        middle.append(plane("side_to_move"))
    else:
        bits["en_passant"] = "side_to_move"
        files = [*[-1] * _LAST_RANK, *range(8)]
        middle.append(Bits("en_passant", (1, 8, 8), dtype=dtype, bit_order="little", places=files))
    if input_format in _ARMAGEDDON:
        bits["black_to_move"] = "invariance_info"
        zeros = Spread("black_to_move", (1, 8, 8), dtype=dtype, first=0)
    rule50 = plane("rule50_count", 1 / (99 if input_format < _FIRST_OF_100 else 100))
    board = Bits("planes", (104, 8, 8), dtype=dtype)
    return Planes([board, *middle, rule50, zeros, Fill(1.0, (1, 8, 8), dtype)]), bits


def _with_bits(bits: dict[str, str]) -> np.dtype[Any]:
    """The record, without what it has no use for; with ``bits``, fields that are in the place of others."""
    assert RECORD.fields is not None
    fields = {name: RECORD.fields[name][:2] for name in RECORD.fields if name not in ("dummy", "reserved")}
    fields |= {name: fields[of] for name, of in bits.items()}
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": RECORD.itemsize})


def all_values(*values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32, (n, 6, 3), of 17 values, (n,) each: the last place, st's moves left, is NaN."""
    stacked = np.full((len(values[0]), 18), np.nan, np.float32)
    np.stack(values, axis=1, out=stacked[:, :17])
    return stacked.reshape(-1, 6, 3)


def _mirrored(schema: Schema, symmetries: tuple[int, ...]) -> Schema:
    stored, fields = {}, dict(schema.fields)
    for name, sources in (("planes", np.arange(8)[::-1]), ("policy", mirrored_moves())):
        stored[f"{name} (unturned)"] = schema.fields[name]
        spec, tables = schema.spec_of(name), np.stack([np.arange(len(sources)), sources])
        function = partial(permute, partial(mirror, symmetries), tables, 1)
        inputs = (f"{name} (unturned)", "castling")
        fields[name] = Derived(function, inputs, spec.shape, spec.dtype, random="symmetry")
    return Schema(schema.features, fields, {**schema.intermediates, **stored})


def win_draw_loss(q: npt.NDArray[np.float64], d: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """float64, (n, 3): the chances of a win, a draw and a loss. ``q``: win - loss, (n,); ``d``: draw, (n,)."""
    return np.stack([0.5 * (1.0 - d + q), d, 0.5 * (1.0 - d - q)], axis=1)


def mirror(
    symmetries: tuple[int, ...], castling: npt.NDArray[np.uint8], random: RecordRandom
) -> npt.NDArray[np.uint8]:
    """uint8, (n,): 1 for the records that are mirrored, else 0.

    These are the ones without castling rights (``castling``: (n, 4)) for which 1 is drawn from ``symmetries``.
    """
    drawn = np.asarray(symmetries)[random.integers(0, len(symmetries))]
    mirrored: npt.NDArray[np.uint8] = ((drawn == 1) & ~castling.any(axis=1)).astype(np.uint8)
    return mirrored
