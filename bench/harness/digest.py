"""A digest of decoded rows that does not depend on their order: do two candidates deliver the same?

Each row, the values of all fields, is hashed by itself to 64 bits; the digest is the number of rows with the sum and
the exclusive or of their hashes. One changed bit changes both; a row that is missing or doubled changes the count,
and a row that replaces another changes sum and exclusive or.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from loaderd import Schema


@dataclass(frozen=True)
class Digest:
    """``rows``: how many; ``total``: the sum of their hashes modulo 2**64; ``parity``: their exclusive or."""

    rows: int = 0
    total: int = 0
    parity: int = 0

    def updated(self, schema: Schema, batch: Mapping[str, Any]) -> Digest:
        """The digest with a batch added: the fields of ``schema`` by name, as anything array-like.

        Raises ValueError where a field, dtype or shape is not as in the schema. -0.0 counts as 0.0, but not inside of
        structured values.
        """
        if set(batch) != set(schema.specs):
            raise ValueError(f"the fields must be {sorted(schema.specs)}, got {sorted(batch)}")
        arrays = {name: np.asarray(batch[name]) for name in schema.specs}
        num_rows = len(next(iter(arrays.values())))
        columns = []
        for name, spec in schema.specs.items():
            array, expected = arrays[name], (num_rows, *spec.shape)
            if array.dtype != spec.dtype or array.shape != expected:
                raise ValueError(f"{name} must be {spec.dtype} {expected}, got {array.dtype} {array.shape}")
            # The floats of ml_dtypes are of the kind "V", too.
            is_float = spec.dtype.kind in "fV" and not issubclass(spec.dtype.type, np.void)
            positive_zero = array + spec.dtype.type(0) if is_float else array
            columns.append(np.ascontiguousarray(positive_zero).reshape(num_rows, -1).view(np.uint8))
        total, parity = self.total, self.parity
        for row in np.concatenate(columns, axis=1):
            value = int.from_bytes(blake2b(row.data, digest_size=8).digest(), "little")
            total, parity = (total + value) % (1 << 64), parity ^ value
        return Digest(self.rows + num_rows, total, parity)
