"""From records of fixed size to rows: the same bytes, at the places where the row has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.decode.example import RecordFault
from loaderd.kernels.views import items_at
from loaderd.schema import FixedRecords, Schema

Bytes = npt.NDArray[np.uint8]


class FixedParser:
    """Copies records of ``schema.records`` to rows of ``schema.row_dtype``."""

    def __init__(self, schema: Schema) -> None:
        assert schema.records is not None
        self._records = schema.records
        self._runs = _runs(self._records, schema.row_dtype)

    def parse(
        self,
        buffer: Bytes,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: Bytes,
        places: npt.NDArray[np.intp],
    ) -> list[RecordFault]:
        """As ``RowParser.parse``; all ``lengths`` must be ``schema.records.record_bytes``."""
        if len(starts) == 0:
            return []
        follow = len(starts) > 1 and bool((np.diff(starts) == self._records.record_bytes).all())
        for row_offset, offset, num_bytes in self._runs:
            # Records that follow each other, as they mostly do, need not be gathered.
            if follow:
                first = int(starts[0]) + offset
                stored = items_at(buffer, num_bytes, first, self._records.record_bytes)[: len(starts)]
            else:
                stored = items_at(buffer, num_bytes, offset)[starts]
            items_at(out, num_bytes, row_offset, out.shape[1])[places] = stored
        return self._faults(buffer, starts)

    def _faults(self, buffer: Bytes, starts: npt.NDArray[np.int64]) -> list[RecordFault]:
        faults: dict[int, RecordFault] = {}
        for name, expected in self._records.expect.items():
            values = _values(self._records, name, buffer, starts)
            wrong = values != np.asarray(expected, values.dtype)
            for record in np.flatnonzero(wrong.reshape(len(starts), -1).any(axis=1)).tolist():
                fault = RecordFault(record, f"{name} {expected}", f"{name} {values[record].tolist()}")
                faults.setdefault(record, fault)
        return [faults[record] for record in sorted(faults)]


def _values(records: FixedRecords, name: str, buffer: Bytes, starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The values of a field, (n, *shape), of the records that begin at ``starts``."""
    assert records.dtype.fields is not None
    field = records.dtype.fields[name][0]
    items = items_at(buffer, field.itemsize, records.offset_of(name))[starts]
    values: npt.NDArray[Any] = items.view(field.base).reshape(len(starts), *field.shape)
    return values


def _runs(records: FixedRecords, row_dtype: np.dtype[Any]) -> list[tuple[int, int, int]]:
    """(offset in the row, offset in the record, bytes) of each copy; neighbours in both are copied as one."""
    assert row_dtype.fields is not None
    runs: list[tuple[int, int, int]] = []
    for name, feature in records.items():
        row_offset, offset = row_dtype.fields[name][1], records.offset_of(name)
        if runs:
            before_row, before, num_bytes = runs[-1]
            if before_row + num_bytes == row_offset and before + num_bytes == offset:
                runs[-1] = (before_row, before, num_bytes + feature.num_bytes)
                continue
        runs.append((row_offset, offset, feature.num_bytes))
    return runs
