"""KataGo's training data: npz files whose arrays have one row for each position.

lightvector/KataGo, cpp/dataio/trainingwrite.h, says what the arrays hold; KataGo's own training reads them in
python/katago/train/data_processing_pytorch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.randomness import RecordRandom
from loaderd.schema import Array, Bits, Derived, Field, FixedRecords, Schema
from loaderd.schema.features import check_integer
from loaderd.schema.permute import permute
from loaderd.schema.representable import as_number
from loaderd.schemas.symmetry import check_symmetries, has_any, with_symmetries

NUM_PLANES = 22
NUM_TARGETS = 80
"""Since version 3 of the data; before, there were 64."""
_OLDEST_NUM_TARGETS = 64
Q_VALUES, METADATA = "qValueTargetsNCMove", "metadataInputNC"  # arrays that not all files have
_WEIGHT = 25  # the place of a row's weight in globalTargetsNC
_TURNED = ("planes", "policy", "next_policy", "value_targets", "q_values")
# KataGo's symmetry t (apply_symmetry of its data_processing_pytorch.py), as board_symmetry numbers it.
_SYMMETRIES = (0, 1, 2, 3, 5, 4, 7, 6)
_TURNS = 5  # earlier moves that a row shows: planes 9 to 13, and values 0 to 4 of globalInputNC say which were passes
_LADDERS = 14  # plane 14 shows ladders now; 15 and 16 one and two turns ago


def rows(
    board_size: int = 19, num_targets: int = NUM_TARGETS, q_values: bool = False, metadata: bool = False
) -> np.dtype[np.void]:
    """The dtype of a record: one row of each of the arrays that :func:`katago` reads."""
    board_size = check_integer(board_size, "katago: board_size", 1, 255)
    num_targets = check_integer(num_targets, "katago: num_targets", _WEIGHT + 1, 65_535)
    points = board_size * board_size
    return np.dtype(
        [
            ("binaryInputNCHWPacked", "u1", (NUM_PLANES, (points + 7) // 8)),  # each plane is padded to whole bytes
            ("globalInputNC", "<f4", (19,)),
            ("policyTargetsNCMove", "<i2", (2, points + 1)),  # visits of the moves of this turn, and of the next one
            ("globalTargetsNC", "<f4", (num_targets,)),
            ("scoreDistrN", "i1", (2 * points + 120,)),
            ("valueTargetsNCHW", "i1", (5, board_size, board_size)),
            *([(Q_VALUES, "<i2", (3, points + 1))] if q_values else []),  # win - loss, score, visits
            *([(METADATA, "<f4", (192,))] if metadata else []),
        ]
    )


def katago(
    board_size: int = 19,
    num_targets: int = NUM_TARGETS,
    symmetries: Sequence[int] = (),
    *,
    mask_history: float = 0.0,
    q_values: bool = False,
    metadata: bool = False,
    absent: Literal["error", "zeros"] = "error",
) -> Schema:
    """The schema of KataGo's npz. Its fields, all float32, for 19 × 19 points:

    ``planes`` (22, 19, 19) and ``global`` (19,): the inputs. ``policy`` and ``next_policy`` (362,): visits of the
    moves of this turn, and of the next one. ``targets`` (80,): results, utilities and weights, as KataGo lists them.
    ``weight`` (): the row's weight, which is number 25 of the targets. ``scores`` (842,): the final score's
    distribution. ``value_targets`` (5, 19, 19): the first is the final ownership, from -1 to 1. With ``q_values``,
    also ``q_values`` (3, 362): win - loss · 32,000, score · 60 and visits of each move; with ``metadata``, also
    ``metadata`` (192,): the inputs that say who plays.

    Files of version 3 have 80 targets, older ones 64: behind these come zeros, as in KataGo's own training. Any other
    shape, and more than ``num_targets``, is a ShardReadError that names it. ``absent``: what becomes of a file
    without the array of ``q_values`` or ``metadata``: it is such an error, or its rows hold ``"zeros"``, as of moves
    without visits.

    ``mask_history``: the chance that a row's history ends at a turn, as drawn for each of the last five turns anew in
    each epoch from the stream "history"; KataGo's training has 0.02. Of the turns from there on, the move's plane and
    the word of a pass are 0, and ladders are those of the turn behind it. 0: as stored.

    ``symmetries``: some of 0…7, as KataGo numbers them: 1, 2 and 3 are quarter turns to the left, 5 mirrors left and
    right, 7 top and bottom, 4 along one diagonal, 6 along the other. ``range(8)`` for all. Planes, policies, q-values
    and value targets of each record are turned by one of these, drawn anew in each epoch from the stream "symmetry".
    A smaller board in a corner of the 19 × 19 points goes to another corner, as in KataGo's own training: the first
    plane says where it is. Empty: as stored.
    """
    if absent not in ("error", "zeros"):
        raise SchemaError(f'katago: absent must be "error" or "zeros", got {absent!r:.200}')
    chance = as_number(mask_history, "katago: mask_history")
    if not 0 <= chance <= 1:
        raise SchemaError(f"katago: mask_history must be a chance from 0 to 1, got {mask_history!r:.200}")
    record = rows(board_size, num_targets, q_values, metadata)
    plane_bytes = (board_size * board_size + 7) // 8
    shape, moves = (NUM_PLANES, board_size, board_size), (board_size * board_size + 1,)
    dtype = "int8" if has_any(symmetries) else "float32"  # bytes are turned, and become floats as they are delivered
    fields: dict[str, Field] = {
        "planes": Bits("binaryInputNCHWPacked", shape, plane_bytes=plane_bytes, dtype="int8" if chance else dtype),
        "global": Array("globalInputNC"),
        "policy": Array("policyTargetsNCMove", "float32", shape=moves, first=0),
        "next_policy": Array("policyTargetsNCMove", "float32", shape=moves, first=moves[0]),
        "targets": Array("globalTargetsNC"),
        "weight": Array("globalTargetsNC", shape=(), first=_WEIGHT),
        "scores": Array("scoreDistrN", "float32"),
        "value_targets": Array("valueTargetsNCHW", dtype),
    }
    padded = {"globalTargetsNC": min(_OLDEST_NUM_TARGETS, num_targets)}
    for name, stored in (("q_values", Q_VALUES), ("metadata", METADATA)):
        if stored in (record.names or ()):
            fields[name] = Array(stored, "float32")
            padded |= {stored: 0} if absent == "zeros" else {}
    intermediates: dict[str, Field] = {}
    if chance:
        masked = (
            ("planes", _history_planes(), board_size * board_size, shape, dtype),
            ("global", _history_passes(), 1, (19,), "float32"),
        )
        for name, sources, inner, of_row, to in masked:
            function = partial(permute, partial(turns_kept, float(chance)), sources, inner)
            intermediates[f"{name} (unmasked)"] = fields[name]
            fields[name] = Derived(function, f"{name} (unmasked)", of_row, to, random="history")
    records = FixedRecords(record, bits=["binaryInputNCHWPacked"], padded=padded)
    schema = Schema(records, fields, intermediates)
    if not has_any(symmetries):
        return schema
    chosen = [_SYMMETRIES[symmetry] for symmetry in check_symmetries(symmetries, range(8), "katago")]
    return with_symmetries(schema, [name for name in _TURNED if name in fields], chosen, layout="NCHW")


def turns_kept(chance: float, random: RecordRandom) -> npt.NDArray[np.intp]:
    """intp, (n,): how many of the last five turns a row may know of; at each, with ``chance``, it ends."""
    ends = random.random(_TURNS) < chance
    kept: npt.NDArray[np.intp] = np.where(ends.any(axis=1), ends.argmax(axis=1), _TURNS)
    return kept


def _history_planes() -> npt.NDArray[np.intp]:
    """intp, (6, 22): for each number of turns that are kept, which plane each plane shows; -1: it is 0.

    As ``build_history_matrices`` of KataGo's data_processing_pytorch.py has it.
    """
    sources = np.tile(np.arange(NUM_PLANES), (_TURNS + 1, 1))
    for kept, shown in enumerate(sources):
        shown[9 + kept : 9 + _TURNS] = -1
        shown[[_LADDERS + 1, _LADDERS + 2]] = [_LADDERS + min(kept, ago) for ago in (1, 2)]
    return sources


def _history_passes() -> npt.NDArray[np.intp]:
    """intp, (6, 19): the same of the values of globalInputNC."""
    sources = np.tile(np.arange(19), (_TURNS + 1, 1))
    for kept, shown in enumerate(sources):
        shown[kept:_TURNS] = -1
    return sources
