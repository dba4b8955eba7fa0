"""Sparse inputs: which bits are set, or which pieces stand where, as a list of indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.schema.codes import PrefixCodes
from loaderd.schema.features import PackedBits, check_integer, resolve_dtype
from loaderd.schema.field_spec import (
    Features,
    FieldSpec,
    Tabled,
    as_table,
    check_bit_order,
    check_name,
    feature_of,
    packed_bits_of,
)

NUM_CODES = 16
"""How many codes four bits have."""
_MOST_K = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class Sparse(Tabled):
    """The set bits of a :class:`PackedBits` feature as ``k`` indices, in the order of the bits; behind them, -1.

    ``feature``: its name; or :class:`PrefixCodes`, whose places are the squares, and whose symbols are the codes.
    Then empty squares have a code, too; the table leaves it out. Fields with equal PrefixCodes read them once.

    The index of a bit is its number, from ``start`` on; or it comes from ``table``, an array of integers: ::

        table[bit]                      the bits are numbered from start on
        table[plane, square]            the same, where each plane of so many squares is a kind of piece
        table[code, square]             with codes: a set bit is the square of a piece, of which it tells the code;
                                        of PrefixCodes: table[symbol, place]
        table[bucket, code, square]     with bucket, which chooses among tables such as these

    ``codes``: the feature (:class:`PackedBits`, or a :class:`Raw` of bytes) that holds a code of four bits for each
    set bit, in the same order. ``bucket``: the feature, a :class:`Raw` of one byte, that chooses the table; or a code
    (a plane), an integer: then the square of the first such piece does, as of a king. So a table holds all that a net
    knows of a board: offsets of pieces, the other side's view (square ^ 56, colours swapped), mirrored files, king
    buckets.

    An index of -1 leaves a piece out, and -2 means that there is no such piece. A record with one of these, with a
    code or bucket for which there is no table, or with more than ``k`` indices, is a WorkerError that names it.

    ``bit_order``: as for :class:`Bits`; with ``"little"``, the low half of a byte of codes comes first. ``dtype``:
    int16, int32 or int64. With ``count=True``, the field is the number of the indices, of shape ().
    """

    feature: str | PrefixCodes
    k: int
    table: Any = None
    codes: str | None = None
    bucket: str | int | None = None
    start: int = 0
    bit_order: str = "big"
    dtype: Any = "int32"
    count: bool = False

    reads = ("feature", "codes", "bucket")

    def __post_init__(self) -> None:
        if isinstance(self.feature, PrefixCodes):
            is_beside = self.codes is not None or self.start or self.bit_order != "big"
            if is_beside or self.feature.end or not self.feature.is_of_symbols:
                raise SchemaError(
                    "Sparse: PrefixCodes must have values, dtype and end as they are by default, and no codes, "
                    "start or bit_order beside them",
                    hint="The table of Sparse says what each symbol becomes, and PrefixCodes their own bit_order.",
                )
            if self.table is None:
                raise SchemaError("Sparse: PrefixCodes need a table, which has an index for each symbol and place")
        else:
            check_name(self.feature, "Sparse: feature")
        check_bit_order(self.bit_order, "Sparse")
        object.__setattr__(self, "k", check_integer(self.k, "Sparse: k", 1, _MOST_K))
        object.__setattr__(self, "start", check_integer(self.start, "Sparse: start", 0))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        if self.dtype not in (np.int16, np.int32, np.int64):
            raise SchemaError(f"Sparse: dtype must be int16, int32 or int64, got {self.dtype}")
        if not isinstance(self.count, bool):
            raise SchemaError(f"Sparse: count must be True or False, got {self.count!r:.200}")
        if self.count and self.k > np.iinfo(self.dtype).max:
            raise SchemaError(f"Sparse: dtype must hold the number of up to {self.k} indices, got {self.dtype}")
        if self.codes is not None:
            check_name(self.codes, "Sparse: codes")
        if self.bucket is not None and not isinstance(self.bucket, str):
            object.__setattr__(self, "bucket", check_integer(self.bucket, "Sparse: bucket", 0))
        if self.table is not None:
            object.__setattr__(self, "table", as_table(self.table, "Sparse: table"))
            self._check_table()
        elif self.codes is not None or self.bucket is not None:
            raise SchemaError("Sparse: codes and a bucket need a table, which has an index for each")

    def _check_table(self) -> None:
        axes = (["bucket"] if self.bucket is not None else []) + ["code", "square"]
        has_codes = self.codes is not None or isinstance(self.feature, PrefixCodes)
        least = len(axes) - (not has_codes)
        if not least <= self.table.ndim <= len(axes):
            raise SchemaError(f"Sparse: table must have the axes ({', '.join(axes)}), got shape {self.table.shape}")
        most = min(np.iinfo(self.dtype).max, np.iinfo(np.int32).max)  # workers and devices find them as int32
        if self.table.min() < -2 or self.table.max() > most:
            wrong = self.table.min() if self.table.min() < -2 else self.table.max()
            raise SchemaError(
                f"Sparse: table must hold indices from 0 to {most}, -1 or -2, got {wrong}",
                hint="-1 leaves a piece out; -2 means that no record has it.",
            )
        buckets, codes, squares = self.full_table.shape
        if self.codes is not None and self.table.shape[-2] > NUM_CODES:
            raise SchemaError(f"Sparse: table must be for {NUM_CODES} codes at most, got {self.table.shape[-2]}")
        if isinstance(self.feature, PrefixCodes):
            must = (len(self.feature.codes), self.feature.num_places)
            if self.table.shape[-2:] != must:
                raise SchemaError(
                    f"Sparse: table must have the axes ({', '.join(axes)}), of which PrefixCodes have {must[0]} "
                    f"symbols and {must[1]} places, got shape {self.table.shape}"
                )
        if isinstance(self.bucket, int) and (self.bucket >= codes or buckets != squares):
            raise SchemaError(
                f"Sparse: bucket is the square of a piece of code {self.bucket}, so table must have that code, and "
                f"as many buckets as squares, got shape {self.table.shape}"
            )

    @property
    def full_table(self) -> npt.NDArray[np.int32]:
        """int32, (buckets, codes, squares): ``table`` with all of its axes, and for every code of four bits."""
        table = self.table
        if self.codes is None and table.ndim == (1 if self.bucket is None else 2):
            table = table[..., None, :]
        if self.bucket is None:
            table = table[None]
        if self.codes is not None:
            missing = max(0, NUM_CODES - table.shape[1])
            table = np.pad(table, ((0, 0), (0, missing), (0, 0)), constant_values=-2)
        return np.ascontiguousarray(table, np.int32)

    def indices_of(self, num_bits: int) -> npt.NDArray[np.int32]:
        """:attr:`full_table`, or what stands for one: the numbers of the bits of a feature that has ``num_bits``."""
        return np.arange(num_bits - self.start, dtype=np.int32)[None, None] if self.table is None else self.full_table

    def num_bits(self, feature: PackedBits) -> int:
        """How many bits it reads."""
        if self.table is None:
            return feature.num_bits - self.start
        table = self.indices_of(feature.num_bits)[0]
        return int(table.shape[1] if self.codes is not None else table.size)

    def spec(self, name: str, features: Features) -> FieldSpec:
        if isinstance(self.feature, PrefixCodes):
            self.feature.spec(name, features)
        else:
            self._check_bits(name, packed_bits_of(name, self.feature, features))
        for what in ("codes", "bucket"):
            of = getattr(self, what)
            if not isinstance(of, str):
                continue
            stored = feature_of(name, of, features)
            is_byte = isinstance(stored, PackedBits) or stored.row_dtype.base in (np.uint8, np.int8)
            if not is_byte or (what == "bucket" and stored.num_bytes != 1):
                must = "PackedBits, or a Raw of uint8" if what == "codes" else "a Raw of one uint8"
                raise SchemaError(f"field {name!r}: feature {of!r}, which {what} names, must be {must}, got {stored}")
        return FieldSpec(() if self.count else (self.k,), self.dtype)

    def _check_bits(self, name: str, feature: PackedBits) -> None:
        stop = self.start + (self.num_bits(feature) if self.table is not None else 1)
        if stop > feature.num_bits:
            raise SchemaError(
                f"field {name!r} needs bits {self.start}…{stop - 1} of feature {self.feature!r}, "
                f"which has {feature.num_bits}"
            )
        if self.table is None and feature.num_bits - self.start - 1 > np.iinfo(self.dtype).max:
            raise SchemaError(f"field {name!r}: {self.dtype} does not hold the numbers of {feature.num_bits} bits")

    def num_codes(self, features: Features) -> int:
        """For how many set bits there are codes."""
        assert self.codes is not None
        stored = features[self.codes]
        return stored.num_bits // 4 if isinstance(stored, PackedBits) else 2 * math.prod(stored.shape)
