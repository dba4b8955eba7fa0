"""From records of fixed size to rows: the same bytes, at the places where the row has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.decode.example import RecordFault
from loaderd.kernels.rows import Memory, Template, row_putter
from loaderd.kernels.views import items_at
from loaderd.schema import FixedRecords, Float, Int64, Length, Raw, Schema

Bytes = npt.NDArray[np.uint8]
_REMEDY = "Give the schema of what the records hold. `loaderd inspect SHARD` names it, where it recognizes them."


class FixedParser:
    """Copies records of ``schema.records`` to rows of ``schema.row_dtype``."""

    def __init__(self, schema: Schema) -> None:
        assert schema.records is not None
        self._records = schema.records
        self._putter = row_putter([_template(schema, self._records, size) for size in self._records.all_sizes])
        self._most: dict[str, int] = {}
        for name, each in self._records.items():
            counted = self._records[each.feature] if isinstance(each, Length) else None
            if isinstance(counted, (Raw, Int64, Float)):
                self._most[name] = counted.max_length

    def parse(
        self,
        buffer: Bytes,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: Bytes,
        places: npt.NDArray[np.intp],
    ) -> list[RecordFault]:
        """As ``RowParser.parse``; all ``lengths`` must be among ``schema.records.all_sizes``."""
        assert buffer.flags.c_contiguous and out.flags.c_contiguous
        starts, lengths, places = (np.ascontiguousarray(each, np.int64) for each in (starts, lengths, places))
        left = self._putter.put(Memory(buffer, starts, lengths, out, places))
        assert not len(left), "records of another size"
        is_checked = self._records.expect or self._records.sizes is not None or self._most
        return self._faults(buffer, starts, lengths, np.flatnonzero(places >= 0)) if is_checked else []

    def _faults(
        self,
        buffer: Bytes,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.intp],
    ) -> list[RecordFault]:
        faults: dict[int, RecordFault] = {}
        starts, lengths = starts[wanted], lengths[wanted]
        if self._records.sizes is not None:
            name, sizes = self._records.sizes
            values = _values(self._records, name, buffer, starts)
            is_right = np.zeros(len(starts), np.bool_)
            for value, size in sizes.items():
                is_right |= (values == value) & (lengths == size)
            for number in np.flatnonzero(~is_right).tolist():
                length = int(lengths[number])
                expected = next(value for value, size in sizes.items() if size == length)
                record, of = int(wanted[number]), f"{name} {expected}, of {length:,} bytes"
                faults[record] = RecordFault(record, of, f"{name} {values[number].tolist()}", _REMEDY)
        for name, expected in self._records.expect.items():
            values = _values(self._records, name, buffer, starts)
            wrong = values != np.asarray(expected, values.dtype)
            for number in np.flatnonzero(wrong.reshape(len(starts), -1).any(axis=1)).tolist():
                record = int(wanted[number])
                fault = RecordFault(record, f"{name} {expected}", f"{name} {values[number].tolist()}", _REMEDY)
                faults.setdefault(record, fault)
        for name, most in self._most.items():
            has = np.flatnonzero(lengths > self._records.offset_of(name))
            found = _values(self._records, name, buffer, starts[has])
            for number in np.flatnonzero((found < 0) | (found > most)).tolist():
                record = int(wanted[has[number]])
                faults.setdefault(record, RecordFault(record, f"{name} of 0 to {most}", f"{name} {found[number]}"))
        return [faults[record] for record in sorted(faults)]


def _values(records: FixedRecords, name: str, buffer: Bytes, starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The values of a field, (n, *shape), of the records that begin at ``starts``."""
    assert records.dtype.fields is not None
    field = records.dtype.fields[name][0]
    items = items_at(buffer, field.itemsize, records.offset_of(name))[starts]
    values: npt.NDArray[Any] = items.view(field.base).reshape(len(starts), *field.shape)
    return values


def _template(schema: Schema, records: FixedRecords, size: int) -> Template:
    """How records of ``size`` bytes become rows."""
    offsets, lacking = schema.row_offsets, records.lacking(size)
    fills = [(offsets[name], np.frombuffer(data, np.uint8)) for name, data in lacking.items()]
    return Template(size, schema.row_bytes, [], _runs(records, offsets, size), [], fills)


def _runs(records: FixedRecords, row_offsets: Mapping[str, int], size: int) -> list[tuple[int, int, int]]:
    """(offset in the row, offset in the record, bytes) of each copy; neighbours in both are copied as one."""
    runs: list[tuple[int, int, int]] = []
    for name, feature in records.items():
        if records.offset_of(name) >= size:
            continue
        row_offset, offset = row_offsets[name], records.offset_of(name)
        if runs:
            before_row, before, num_bytes = runs[-1]
            if before_row + num_bytes == row_offset and before + num_bytes == offset:
                runs[-1] = (before_row, before, num_bytes + feature.num_bytes)
                continue
        runs.append((row_offset, offset, feature.num_bytes))
    return runs
