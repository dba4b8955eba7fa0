"""A digest of decoded rows that does not depend on their order: do two candidates deliver the same?

Each row, the float32 values of board, flags and score, is hashed by itself to 64 bits; the digest is the number
of rows with the sum and the exclusive or of their hashes. One changed bit changes both; a row that is missing
or doubled changes the count, and a row that replaces another changes sum and exclusive or.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

_ROW_SHAPES = ((8, 8, 24), (10,), ())


@dataclass(frozen=True)
class Digest:
    """``rows`` counted, and the sum modulo 2**64 and exclusive or of their hashes."""

    rows: int = 0
    total: int = 0
    parity: int = 0

    def updated(self, board: Any, flags: Any, score: Any) -> Digest:
        """The digest with a batch added: float32 (n, 8, 8, 24), (n, 10) and (n,), anything array-like.

        Raises ValueError where a dtype or shape is another. -0.0 counts as 0.0.
        """
        arrays = [np.asarray(array) for array in (board, flags, score)]
        num_rows = len(arrays[2])
        for name, array, shape in zip(("board", "flags", "score"), arrays, _ROW_SHAPES, strict=True):
            if array.dtype != np.float32 or array.shape != (num_rows, *shape):
                raise ValueError(f"{name} must be float32 {(num_rows, *shape)}, got {array.dtype} {array.shape}")
        rows = np.concatenate([array.reshape(num_rows, -1) for array in arrays], axis=1) + np.float32(0.0)
        total, parity = self.total, self.parity
        for row in rows:
            value = int.from_bytes(blake2b(row.data, digest_size=8).digest(), "little")
            total, parity = (total + value) % (1 << 64), parity ^ value
        return Digest(self.rows + num_rows, total, parity)
