"""Planes of a board from several features: each part is decoded to its own planes of the batch.

::

    out (n, 112, 8, 8)    [ 104: Bits ][ 4: Spread ][ 1: Spread ][ 1: Spread ][ 1: Fill ][ 1: Fill ]

In the batch, the planes of a part are not contiguous from one record to the next: the other parts lie between. An
engine that cannot write to such places writes to scratch memory, and its values are copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.schema import Bits, Feature, Fill, PackedBits, Shape, Spread
from loaderd.schema.exact import SpreadValues

# numpy makes indices of 8 bytes of as many values: of Ceres' 8,768 a record, 7 µs a record, and 17 of all at once.
_VALUES_AT_ONCE = 1 << 17


class SpreadPlanes(Engine):
    """Each value of a feature, or one of them, on all places of a plane.

    ``decode`` raises WorkerError where the field's dtype, one of integers, does not hold a value.
    """

    writes_apart = True

    def __init__(self, what: str, definition: Spread, feature: Feature, start: int) -> None:
        """``what``: what the field is called in errors. ``start``: the byte of a row where the feature begins."""
        self._what, self._definition = what, definition
        self._stored = feature.row_dtype.base
        first, shape, num_bytes = definition.first, feature.row_dtype.shape, feature.num_bytes
        self._bit = -1
        """The bit of a byte that is the value, from the least significant one; -1: all of a value's bytes are."""
        if isinstance(feature, PackedBits):
            assert first is not None
            self._bit = first % 8 if definition.bit_order == "little" else 7 - first % 8
            first //= 8
        if first is not None:
            start, shape, num_bytes = start + first * self._stored.itemsize, (), self._stored.itemsize
        self._columns = slice(start, start + num_bytes)
        self._shape = (*shape, *(1 for _ in definition.shape))
        self._is_spread = any(size != 1 for size in definition.shape)
        self._rows_at_once = max(1, _VALUES_AT_ONCE // max(1, math.prod(shape)))
        self._arithmetic = SpreadValues(self._stored, definition.dtype, definition.scale)
        # Values of one byte come from a table of all 256; larger ones are computed.
        self._table: AnyArray | None = None
        if self._stored.itemsize == 1:
            values = self._values(np.arange(256, dtype=np.uint8))
            if not self._arithmetic.find_lost(values):
                self._table = self._arithmetic.of(values)

    def _values(self, stored: Bytes) -> AnyArray:
        values: AnyArray = stored.view(self._stored) if self._bit < 0 else stored >> self._bit & np.uint8(1)
        return values

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        stored = rows[:, self._columns]
        if self._table is not None and not self._is_spread and out.flags.c_contiguous:
            values = out.reshape(stored.shape)
            for start in range(0, len(rows), self._rows_at_once):
                some = slice(start, start + self._rows_at_once)
                self._table.take(stored[some], out=values[some], mode="clip")
            return
        planes = self._table[stored] if self._table is not None else self._computed(self._values(stored))
        out[...] = planes.reshape(len(rows), *self._shape)

    def _computed(self, values: AnyArray) -> AnyArray:
        if lost := self._arithmetic.find_lost(values):
            scale, dtype = self._definition.scale, self._definition.dtype
            scaled = "value" if scale == 1 else f"value * {scale:g}"
            raise WorkerError(
                f"{self._what}: expected values of which {scaled} is within {dtype}, found {lost}",
                hint="Give the field a dtype that holds them, or another scale.",
            )
        return self._arithmetic.of(values)


class PickBits(Engine):
    """Bits that lie anywhere in a feature."""

    writes_apart = True

    def __init__(self, definition: Bits, start: int) -> None:
        """``start``: the byte of a row where the feature begins."""
        source = definition.sources
        bit = source % 8 if definition.bit_order == "little" else 7 - source % 8
        self._bytes = start + np.maximum(source, 0) // 8
        self._masks = np.where(source < 0, 0, 1 << bit).astype(np.uint8)
        self._values = np.resize(definition.channel_scale, len(source))
        self._shape = definition.shape

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        is_set = (rows[:, self._bytes] & self._masks) != 0
        out[...] = np.where(is_set, self._values, np.zeros((), self._values.dtype)).reshape(len(rows), *self._shape)


class FillValue(Engine):
    """The same value everywhere."""

    writes_apart = True

    def __init__(self, definition: Fill) -> None:
        self._value = definition.value

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        out[...] = self._value


class JoinPlanes(Engine):
    """The engine of a field that consists of parts. ``parts``: (engine, shape of its planes) of each."""

    def __init__(self, parts: list[tuple[Engine, Shape]], dtype: np.dtype[Any]) -> None:
        self._parts = parts
        self._dtype = dtype
        self._scratch: dict[int, AnyArray] = {}
        self.is_compiled = any(engine.is_compiled for engine, _ in parts)

    @property
    def scratch_record_bytes(self) -> int:
        copied = sum(int(np.prod(shape)) for engine, shape in self._parts if not engine.writes_apart)
        return sum(engine.scratch_record_bytes for engine, _ in self._parts) + copied * self._dtype.itemsize

    def reserve(self, max_records: int) -> None:
        for number, (engine, shape) in enumerate(self._parts):
            engine.reserve(max_records)
            if not engine.writes_apart:
                self._scratch[number] = np.empty((max_records, *shape), self._dtype)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        first = 0
        for number, (engine, shape) in enumerate(self._parts):
            planes = out[:, first : first + shape[0]]
            first += shape[0]
            if number in self._scratch:
                values = self._scratch[number][: len(rows)]
                engine.decode(rows, values)
                planes[...] = values
            else:
                engine.decode(rows, planes)
