"""Planes of a board from several features: each part is decoded to its own planes of the batch.

::

    out (n, 112, 8, 8)    [ 104: Bits ][ 4: Spread ][ 1: Spread ][ 1: Spread ][ 1: Fill ][ 1: Fill ]

In the batch, the planes of a part are not contiguous from one record to the next: the other parts lie between. An
engine that cannot write to such places writes to scratch memory, and its values are copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.schema import Feature, Fill, PackedBits, Shape, Spread
from loaderd.schema.exact import ExactCast, text_of
from loaderd.schema.representable import integer_limits


class SpreadValues(Engine):
    """Each value of a feature, or one of them, on all places of a plane.

    ``decode`` raises WorkerError where the field's dtype, one of integers, does not hold a value.
    """

    writes_apart = True

    def __init__(self, what: str, definition: Spread, feature: Feature, start: int) -> None:
        """``what``: what the field is called in errors. ``start``: the byte of a row where the feature begins."""
        self._what = what
        self._scale, self._dtype = definition.scale, definition.dtype
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
        self._limits = None if self._dtype.kind == "b" else integer_limits(self._dtype)
        is_whole = self._scale.is_integer() and abs(self._scale) < 2**63
        self._is_exact = is_whole and self._limits is not None and integer_limits(self._stored) is not None
        """Whether it is computed in integers, as float64 does not hold all of them."""
        # Values of one byte come from a table of all 256; larger ones are computed.
        self._table: AnyArray | None = None
        if self._stored.itemsize == 1:
            values = self._values(np.arange(256, dtype=np.uint8))
            if not self._lost(values):
                self._table = self._scaled(values)

    def _values(self, stored: Bytes) -> AnyArray:
        values: AnyArray = stored.view(self._stored) if self._bit < 0 else stored >> self._bit & np.uint8(1)
        return values

    def _scaled(self, values: AnyArray) -> AnyArray:
        if self._is_exact:
            scaled: AnyArray = (values.astype(np.int64) * np.int64(self._scale)).astype(self._dtype)
            return scaled
        with np.errstate(all="ignore"):  # as in TensorFlow, without a warning
            scaled = (values.astype(np.float64) * self._scale).astype(self._dtype)
        return scaled

    def _lost(self, values: AnyArray) -> str:
        """As text, one of ``values`` that a dtype of integers does not hold once scaled; "" if there is none."""
        if self._is_exact:
            return ExactCast(self._stored, self._dtype, int(self._scale)).find_lost(values)
        if self._limits is None:
            return ""
        with np.errstate(all="ignore"):
            scaled = np.trunc(values.astype(np.float64) * self._scale)
        least, largest = self._limits
        is_lost = ~((scaled >= least) & (scaled < float(largest + 1)))
        return text_of(values[is_lost][0]) if is_lost.any() else ""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        stored = rows[:, self._columns]
        if self._table is not None:
            values = self._table[stored]
        else:
            values = self._values(stored)
            if lost := self._lost(values):
                scaled = "value" if self._scale == 1 else f"value * {self._scale:g}"
                raise WorkerError(
                    f"{self._what}: expected values of which {scaled} is within {self._dtype}, found {lost}",
                    hint="Give the field a dtype that holds them, or another scale.",
                )
            values = self._scaled(values)
        out[...] = values.reshape(len(rows), *self._shape)


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
