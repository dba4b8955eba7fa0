"""KataGo's training data: npz files whose arrays have one row for each position.

lightvector/KataGo, cpp/dataio/trainingwrite.h, says what the arrays hold; KataGo's own training reads them in
python/katago/train/data_processing_pytorch.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loaderd.schema import Array, Bits, Field, FixedRecords, Schema
from loaderd.schema.features import check_integer
from loaderd.schemas.symmetry import has_any, with_symmetries

NUM_PLANES = 22
_WEIGHT = 25  # the place of a row's weight in globalTargetsNC
_TURNED = ("planes", "policy", "next_policy", "value_targets")


def rows(board_size: int = 19, num_targets: int = 64) -> np.dtype[np.void]:
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
        ]
    )


def katago(board_size: int = 19, num_targets: int = 64, symmetries: Sequence[int] = ()) -> Schema:
    """The schema of KataGo's npz. Its fields, all float32, for 19 × 19 points:

    ``planes`` (22, 19, 19) and ``global`` (19,): the inputs. ``policy`` and ``next_policy`` (362,): visits of the
    moves of this turn, and of the next one. ``targets`` (64,): results, utilities and weights, as KataGo lists them.
    ``weight`` (): the row's weight, which is number 25 of the targets. ``scores`` (842,): the final score's
    distribution. ``value_targets`` (5, 19, 19): the first is the final ownership, from -1 to 1.

    ``symmetries``: some of 0…7, as ``loaderd.board_symmetry`` numbers them; ``range(8)`` for all. Planes, policies
    and value targets of each record are turned by one of these, drawn anew in each epoch from the stream "symmetry".
    A smaller board in a corner of the 19 × 19 points goes to another corner, as in KataGo's own training: the first
    plane says where it is. Empty: as stored.

    ``num_targets`` is 80 in files of version 3. A file whose arrays have other shapes is a ShardReadError that names
    its shapes. The schema does not mask history at random; columns 36 to 40 of ``targets`` are for doing that.
    """
    record = rows(board_size, num_targets)
    plane_bytes = (board_size * board_size + 7) // 8
    shape, moves = (NUM_PLANES, board_size, board_size), (board_size * board_size + 1,)
    dtype = "int8" if has_any(symmetries) else "float32"  # bytes are turned, and become floats as they are delivered
    fields: dict[str, Field] = {
        "planes": Bits("binaryInputNCHWPacked", shape, plane_bytes=plane_bytes, dtype=dtype),
        "global": Array("globalInputNC"),
        "policy": Array("policyTargetsNCMove", "float32", shape=moves, first=0),
        "next_policy": Array("policyTargetsNCMove", "float32", shape=moves, first=moves[0]),
        "targets": Array("globalTargetsNC"),
        "weight": Array("globalTargetsNC", shape=(), first=_WEIGHT),
        "scores": Array("scoreDistrN", "float32"),
        "value_targets": Array("valueTargetsNCHW", dtype),
    }
    schema = Schema(FixedRecords(record, bits=["binaryInputNCHWPacked"]), fields)
    return with_symmetries(schema, _TURNED, symmetries, layout="NCHW") if has_any(symmetries) else schema
