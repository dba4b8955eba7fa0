"""Values scattered to their indices, and integers as one place of many that is 1."""

from __future__ import annotations

import math

import numpy as np

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.schema.dense import OneHot, Scatter
from loaderd.schema.exact import ArrayValues

_HINT_ZEROS = 'With outside="zeros", such a record has no 1.'


class ScatterValues(Engine):
    """``indices``, ``values``: columns of the rows, and the dtype that is stored there."""

    def __init__(
        self, what: str, field: Scatter, indices: tuple[slice, np.dtype], values: tuple[slice, np.dtype]
    ) -> None:
        self._what, self._size, self._adds = what, math.prod(field.shape), field.duplicates == "sum"
        self._indices, self._values, self._dtype = indices, values, field.dtype
        self._cast = ArrayValues(values[1], field.dtype, None, None, wrap=False)

    def check(self, rows: Bytes) -> None:
        """Raises WorkerError for an index that there is not, and for a value that the dtype does not hold."""
        columns, dtype = self._indices
        indices = rows[:, columns].view(dtype)
        if len(rows):
            for found in (indices.min(), indices.max()):
                if not -1 <= int(found) < self._size:
                    raise WorkerError(
                        f"{self._what}: expected indices from 0 to {self._size - 1}, or -1, found {found}"
                    )
        columns, dtype = self._values
        checked = self._cast.checked
        if checked is not None and (lost := checked.find_lost(rows[:, columns].view(dtype))):
            raise WorkerError(f"{self._what}: expected {checked.expected}, found {lost}")

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        self.check(rows)
        indices, stored = (rows[:, columns].view(dtype) for columns, dtype in (self._indices, self._values))
        values = np.empty(stored.shape, self._dtype)
        self._cast.put(stored, values)
        place = indices.astype(np.intp)
        is_there = place >= 0
        place += np.arange(len(rows))[:, None] * self._size
        flat = out.reshape(-1)
        flat[...] = 0
        if is_there.all():
            place, values = place.reshape(-1), values.reshape(-1)
        else:
            place, values = place[is_there], values[is_there]
        if self._adds:
            np.add.at(flat, place, values)
        else:
            flat[place] = values  # of values with one index, numpy keeps the last


class OneHotValues(Engine):
    """``columns``: of the rows; ``stored``: the dtype there."""

    def __init__(self, what: str, field: OneHot, columns: slice, stored: np.dtype) -> None:
        self._what, self._field, self._columns, self._stored = what, field, columns, stored

    def check(self, rows: Bytes) -> None:
        """Raises WorkerError for an integer that is no class, if that is an error."""
        if self._field.outside == "error" and len(rows):
            values = rows[:, self._columns].view(self._stored)
            for found in (values.min(), values.max()):
                if not 0 <= int(found) < self._field.classes:
                    expected = f"integers from 0 to {self._field.classes - 1}"
                    raise WorkerError(f"{self._what}: expected {expected}, found {found}", hint=_HINT_ZEROS)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        self.check(rows)
        values = rows[:, self._columns].view(self._stored).reshape(-1)
        out[...] = 0
        is_class = (values >= 0) & (values < self._field.classes)
        numbers = np.flatnonzero(is_class)
        out.reshape(-1)[numbers * self._field.classes + values[numbers].astype(np.intp)] = 1
