"""Ceres' training data: TPG, files of zstd whose records have 9,250 bytes.

``TPGRecord`` as dje-dev/CeresTrain reads it, src/CeresTrainPy/tpg_dataset.py. All numbers are little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schema import Array, Derived, FixedRecords, Scatter, Schema, Spread
from loaderd.schema.features import resolve_dtype
from loaderd.schema.representable import check_holds_fractions

Floats = npt.NDArray[np.float32]
MAX_MOVES, NUM_MOVES, SQUARE_BYTES = 92, 1858, 137

RECORD = np.dtype(
    [
        ("wdl_nondeblundered", "<f4", (3,)),
        ("wdl_deblundered", "<f4", (3,)),
        ("wdl_q", "<f4", (3,)),
        ("played_q_suboptimality", "<f4"),
        ("unused", "V56"),
        ("uncertainty_policy", "<f4"),
        ("mlh", "<f4"),
        ("unc", "<f4"),
        ("q_deviation_lower", "<f2"),
        ("q_deviation_upper", "<f2"),
        ("policy_index_in_parent", "<i2"),
        ("policy_indices", "<u2", (MAX_MOVES,)),  # unsigned: -1, which Scatter leaves out, is damage
        ("policy_values", "<f2", (MAX_MOVES,)),
        ("squares", "i1", (64, SQUARE_BYTES)),  # hundredths
    ]
)
"""9,250 bytes."""


def ceres_tpg(dtype: Any = "float32") -> Schema:
    """The tensors of CeresTrain's TPGDataset, by its names, without the smoothing of its options.

    ``squares`` (64, 137): what is stored / 100, of ``dtype``. ``policies`` (1858,), float16: the stored values at
    their indices. ``wdl_deblundered``, ``wdl_q`` and ``wdl_nondeblundered`` (3,); ``mlh``, ``unc``,
    ``uncertainty_policy``, ``q_deviation_lower``, ``q_deviation_upper`` and ``played_q_suboptimality`` (1,), float32;
    ``policy_index_in_parent`` (1,), int16.

    An index that is no move is a WorkerError.
    """
    check_holds_fractions(resolve_dtype(dtype), "ceres_tpg: dtype")
    as_stored = ("wdl_deblundered", "wdl_q", "wdl_nondeblundered")
    as_numbers = ("q_deviation_lower", "q_deviation_upper", "played_q_suboptimality")
    return Schema(
        FixedRecords(RECORD[[name for name in RECORD.names or () if name != "unused"]]),
        {
            "squares": Spread("squares", (), 0.01, dtype),
            "policies": Scatter("policy_indices", "policy_values", (NUM_MOVES,), dtype="float16"),
            **{name: Array(name) for name in as_stored},
            **{name: Array(name, "float32", shape=(1,)) for name in as_numbers},
            "mlh": Derived(moves_left, ("mlh (stored)",), (1,), "float32"),
            "unc": Derived(np.abs, ("unc (stored)",), (1,), "float32"),
            "uncertainty_policy": Derived(np.abs, ("uncertainty_policy (stored)",), (1,), "float32"),
            "policy_index_in_parent": Array("policy_index_in_parent", shape=(1,)),
        },
        {f"{name} (stored)": Array(name, shape=(1,)) for name in ("mlh", "unc", "uncertainty_policy")},
    )


def could_be(records: npt.NDArray[Any]) -> bool:
    """Whether ``records``, an array of RECORD, are of this format: chances with the sum 1, and moves."""
    chances = np.stack([records[name] for name in ("wdl_deblundered", "wdl_q", "wdl_nondeblundered")])
    moves = records["policy_indices"]
    return bool((np.abs(chances.sum(axis=2) - 1) < 0.01).all() and (moves < NUM_MOVES).all())


def moves_left(stored: Floats) -> Floats:
    """float32, (n, 1): hundreds of moves, of which a tenth of the square root is stored."""
    found: Floats = np.square(stored / np.float32(0.1)) / np.float32(100)
    return found
