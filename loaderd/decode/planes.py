"""Planes of a board from several features: each part is decoded to its own planes of the batch.

::

    out (n, 112, 8, 8)    [ 104: Bits ][ 4: Spread ][ 1: Spread ][ 1: Spread ][ 1: Fill ][ 1: Fill ]

In the batch, the planes of a part are not contiguous from one record to the next: the other parts lie between. An
engine that cannot write to such places writes to scratch memory, and its values are copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from loaderd.decode.compiled_bits import SelectBits
from loaderd.decode.engine import AnyArray, Bytes, Engine
from loaderd.schema import Fill, Shape, Spread


class SpreadValues:
    """Each value of a feature on all places of a plane."""

    scratch_record_bytes = 0

    def __init__(self, columns: slice, stored: np.dtype[Any], value_shape: Shape, definition: Spread) -> None:
        self._columns = columns
        self._stored = stored
        self._shape = (*value_shape, *(1 for _ in definition.shape))
        self._scale = definition.scale
        self._dtype = definition.dtype
        # Values of one byte come from a table of all 256; larger ones are computed.
        self._table: AnyArray | None = None
        if stored.itemsize == 1:
            self._table = self._scaled(np.arange(256, dtype=np.uint8).view(stored))

    def _scaled(self, values: AnyArray) -> AnyArray:
        with np.errstate(all="ignore"):  # as in TensorFlow, without a warning
            scaled: AnyArray = (values.astype(np.float64) * self._scale).astype(self._dtype)
        return scaled

    def reserve(self, max_records: int) -> None:
        """Nothing to allocate."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        stored = rows[:, self._columns]
        values = self._scaled(stored.view(self._stored)) if self._table is None else self._table[stored]
        out[...] = values.reshape(len(rows), *self._shape)


class FillValue:
    """The same value everywhere."""

    scratch_record_bytes = 0

    def __init__(self, definition: Fill) -> None:
        self._value = definition.value

    def reserve(self, max_records: int) -> None:
        """Nothing to allocate."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        out[...] = self._value


class JoinPlanes:
    """The engine of a field that consists of parts. ``parts``: (engine, shape of its planes) of each."""

    def __init__(self, parts: list[tuple[Engine, Shape]], dtype: np.dtype[Any]) -> None:
        self._parts = parts
        self._dtype = dtype
        self._scratch: dict[int, AnyArray] = {}

    @property
    def engines(self) -> list[Engine]:
        """The engines of the parts."""
        return [engine for engine, _ in self._parts]

    @property
    def scratch_record_bytes(self) -> int:
        copied = sum(int(np.prod(shape)) for engine, shape in self._parts if not _writes_apart(engine))
        return sum(engine.scratch_record_bytes for engine in self.engines) + copied * self._dtype.itemsize

    def reserve(self, max_records: int) -> None:
        for number, (engine, shape) in enumerate(self._parts):
            engine.reserve(max_records)
            if not _writes_apart(engine):
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


def _writes_apart(engine: Engine) -> bool:
    """Whether the records that an engine writes may lie apart from each other."""
    return isinstance(engine, (SelectBits, SpreadValues, FillValue))
