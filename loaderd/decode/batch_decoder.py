"""From packed rows to the fields of a batch, into memory that is given.

::

    rows (n, row_bytes) ──┬── Bits ─────► loaderd.kernels.bits
                          ├── Sparse ───► loaderd.kernels.sparse, of bits or of the symbols of PrefixCodes
                          ├── Codes, PrefixCodes ──► loaderd.decode.codes
                          ├── Scatter, OneHot ─────► loaderd.decode.dense
                          ├── Packed ───► CastValues
                          ├── Array ────► CastValues or LookUpValues
                          ├── Spread, Fill, Planes ──► loaderd.decode.planes
                          └── other fields ── Derived ──► loaderd.decode.derive_field: the user's function
                              (and the record's key)            or C function

A batch is decoded a chunk of records at a time, all fields of a chunk before the next chunk. So scratch memory is
small, and what one step leaves there or in ``out`` is still in the cache when the next one reads it. Intermediate
fields exist for one chunk only.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from loaderd.decode.codes import LookUpCodes, ReadPrefixCodes
from loaderd.decode.dense import OneHotValues, ScatterValues
from loaderd.decode.derive_field import CallCFunction, DeriveField, put_result
from loaderd.decode.planes import FillValue, JoinPlanes, PickBits, SpreadPlanes
from loaderd.errors import WorkerError
from loaderd.kernels.bits import BitLayout, bits_engine
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.kernels.places import places_engine
from loaderd.kernels.sparse import CheckPieces, SparseLayout, sparse_engine
from loaderd.schema import (
    Array,
    Bits,
    CFunction,
    Codes,
    Derived,
    Feature,
    Field,
    FieldSpec,
    Fill,
    OneHot,
    Packed,
    PackedBits,
    Planes,
    PrefixCodes,
    Scatter,
    Schema,
    Sparse,
    Spread,
)
from loaderd.schema.exact import ArrayValues
from loaderd.schema.fields import Permuted
from loaderd.schema.permute import permuted
from loaderd.schema.representable import integer_limits
from loaderd.snapshots import Kernels
from loaderd.stages import StageTimes

# A chunk of chess records takes 40 calls of numpy, which cost 25 µs however few the records are: 890 ns a record in
# chunks of 98, 640 in chunks of 196, 500 in chunks of 512. Saving this is worth more than fitting a cache of 1 MiB.
_CHUNK_RECORDS, _MOST_CHUNK_RECORDS = 512, 8192
# Packed records are small, and chunks of them may have more: 66 ns a record in chunks of 512, 31 in chunks of 4,096.
_CHUNK_BYTES = 3 << 19
_MAX_SCRATCH_BYTES = 3 << 19
_GAP, _LONG_NS = 16, 1_000_000
_HINT_WRAP = (
    "Give the field a dtype that holds it; or wrap=True: then integers wrap round, and fractions are cut off, as "
    "numpy casts."
)


class BatchDecoder:
    """Decodes rows of ``schema`` to the fields of a batch. Not thread-safe: it owns scratch memory.

    ``spent``: where the ns of each of ``schema.made_fields`` are added up, in that order. It has ``num_places``
    places: if there are more fields, the last place is for all remaining ones. None: nobody wants to know.
    """

    def __init__(self, schema: Schema, spent: StageTimes | None = None, num_places: int = 0) -> None:
        self._row_bytes = schema.row_bytes
        self.specs = schema.specs
        self._values: dict[str | PrefixCodes, AnyArray] = {}
        """The fields of the chunk that is being decoded, by name, and the symbols that Sparse fields read."""
        self._symbols = _symbol_engines(schema)
        self._fields = {name: _engine(schema, name, self._values) for name in schema.made_fields}
        self._clock = _SampledTimer()
        self._spent: StageTimes = [0] * len(self._fields) if spent is None else spent
        self._last_place = len(self._fields) - 1 if spent is None else num_places - 1
        intermediates: dict[str | PrefixCodes, FieldSpec] = {
            name: schema.spec_of(name) for name in self._fields if name not in self.specs
        }
        for codes in self._symbols:
            intermediates[codes] = codes.spec(codes.feature, schema.features)
        self._checks = _check_engines(schema, self._values)
        engines = [*self._symbols.values(), *self._fields.values()]
        scratch_record_bytes = sum(engine.scratch_record_bytes for engine in engines)
        scratch_record_bytes += sum(spec.record_bytes for spec in intermediates.values())
        num_records = max(_CHUNK_RECORDS, _CHUNK_BYTES // (schema.row_bytes + schema.record_bytes))
        num_records = min(num_records, _MOST_CHUNK_RECORDS)
        self._chunk_records = max(1, min(num_records, _MAX_SCRATCH_BYTES // max(1, scratch_record_bytes)))
        for engine in engines:
            engine.reserve(self._chunk_records)
        self.kernels: Kernels = "compiled" if any(engine.is_compiled for engine in engines) else "numpy"
        """Whether any field is decoded by compiled code."""
        self._intermediates = {
            name: np.empty((self._chunk_records, *spec.shape), spec.dtype) for name, spec in intermediates.items()
        }

    def decode(self, rows: Bytes, out: Mapping[str, AnyArray]) -> None:
        """Write every delivered field of ``rows`` to ``out[name]``.

        ``rows``: uint8, (n, row_bytes), C-contiguous; it may be read-only. ``out``: for each delivered field an
        array of its dtype, (n, *shape), C-contiguous. Raises WorkerError if the function of a derived field
        raises, or a value does not fit the dtype of its field.
        """
        self._check(rows, out)
        n = len(rows)
        stands_for = self._clock.begin()
        try:
            for start in range(0, n, self._chunk_records):
                stop = min(start + self._chunk_records, n)
                for name in self.specs:
                    self._values[name] = out[name][start:stop]
                for key, scratch in self._intermediates.items():
                    self._values[key] = scratch[: stop - start]
                self._decode_chunk(rows[start:stop], stands_for)
        finally:
            self._values.clear()  # it must not keep the memory of ``out``
        if stands_for:
            self._clock.end()

    def _decode_chunk(self, rows: Bytes, stands_for: int) -> None:
        """``stands_for``: for how many calls the times of this one count; 0: it is not timed."""
        spent, last_place = self._spent, self._last_place
        began_ns = time.monotonic_ns() if stands_for else 0
        for codes, reader in self._symbols.items():
            reader.decode(rows, self._values[codes])
        for checked in self._checks:
            checked.check(rows)
        for number, (name, engine) in enumerate(self._fields.items()):
            engine.decode(rows, self._values[name])
            if stands_for:
                now_ns = time.monotonic_ns()
                spent[number if number < last_place else last_place] += stands_for * (now_ns - began_ns)
                began_ns = now_ns

    def _check(self, rows: Bytes, out: Mapping[str, AnyArray]) -> None:
        """Compiled code looks at no bounds; and where an array is not contiguous, reshape would copy."""
        assert rows.dtype == np.uint8 and rows.shape[1:] == (self._row_bytes,) and rows.flags.c_contiguous
        for name, spec in self.specs.items():
            array = out[name]
            assert (array.dtype, array.shape) == (spec.dtype, (len(rows), *spec.shape)), name
            assert array.flags.c_contiguous, name


def _symbol_engines(schema: Schema) -> dict[PrefixCodes, Engine]:
    """Those of the prefix codes that Sparse fields read: several may read the same ones."""
    engines: dict[PrefixCodes, Engine] = {}
    for name in (*schema.made_fields, *schema.checked_fields):
        definition = schema.definition_of(name)
        if isinstance(definition, Sparse) and isinstance(codes := definition.feature, PrefixCodes):
            engines.setdefault(codes, _engine_of(schema, name, f"field {name!r}", codes, {}))
    return engines


def _check_engines(schema: Schema, fields: Mapping[Any, AnyArray]) -> list[Engine]:
    """Those of ``schema.checked_fields``: one for all Sparse fields that read the same pieces."""
    engines, same_pieces = [], defaultdict(list)
    for name in schema.checked_fields:
        definition = schema.definition_of(name)
        if isinstance(definition, Sparse) and not isinstance(definition.feature, PrefixCodes):
            layout = _sparse_layout(f"field {name!r}", definition, schema)
            same_pieces[layout.pieces].append(layout)
        else:
            engines.append(_engine(schema, name, fields))
    return [*engines, *map(CheckPieces, same_pieces.values())]


def _engine(schema: Schema, name: str, fields: Mapping[Any, AnyArray]) -> Engine:
    return _field_engine(schema, name, schema.definition_of(name), fields)


def _field_engine(schema: Schema, name: str, definition: Field, fields: Mapping[Any, AnyArray]) -> Engine:
    if isinstance(definition, Permuted):
        spec = definition.of.spec(name, schema.features)
        of = _field_engine(schema, name, definition.of, fields)
        return PermuteValues(f"field {name!r}", definition, of, spec, schema.row_offsets[definition.number])
    if not isinstance(definition, Planes):
        return _engine_of(schema, name, f"field {name!r}", definition, fields)
    parts = []
    for number, part in enumerate(definition.parts):
        engine = _engine_of(schema, name, f"field {name!r}, part {number}", part, fields)
        parts.append((engine, part.spec(name, schema.features).shape))
    return JoinPlanes(parts, definition.spec(name, schema.features).dtype)


def _engine_of(schema: Schema, name: str, what: str, definition: Field, fields: Mapping[Any, AnyArray]) -> Engine:
    """The engine of field ``name``, or of a part of it; ``what``: what it is called in errors."""
    assert not isinstance(definition, (Planes, Permuted))
    if isinstance(definition, Derived):
        if isinstance(definition.function, CFunction):
            return CallCFunction(what, definition, schema, fields)
        return DeriveField(what, definition, name, schema, fields)
    if isinstance(definition, Fill):
        return FillValue(definition)
    starts = schema.row_offsets
    if isinstance(definition, Scatter):
        both = (definition.indices, definition.values)
        columns_of = [_columns(schema.features[each], starts[each]) for each in both]
        return ScatterValues(what, definition, *columns_of)
    if isinstance(definition, Sparse):
        layout, codes = _sparse_layout(what, definition, schema), definition.feature
        if isinstance(codes, PrefixCodes):
            return places_engine(layout, lambda: fields[codes])
        return sparse_engine(layout)
    feature = schema.features[definition.feature]
    start = starts[definition.feature]
    if isinstance(definition, Bits):
        return bits_engine(layout_of(definition, start)) if definition.places is None else PickBits(definition, start)
    if isinstance(definition, Codes):
        return LookUpCodes(what, definition, 8 * start + definition.start)
    if isinstance(definition, PrefixCodes):
        assert isinstance(feature, PackedBits)
        return ReadPrefixCodes(what, definition, start, feature.num_bits)
    if isinstance(definition, OneHot):
        return OneHotValues(what, definition, *_columns(feature, start))
    if isinstance(definition, Spread):
        return SpreadPlanes(what, definition, feature, start)
    stored = feature.row_dtype.base
    if isinstance(definition, Packed):
        definition = Array(definition.feature)
        spec = FieldSpec((feature.num_bytes,), stored)
    else:
        spec = definition.spec(name, schema.features)
    values = ArrayValues(stored, spec.dtype, definition.scale, definition.offset, definition.wrap)
    first = start + (definition.first or 0) * stored.itemsize
    columns = slice(first, first + math.prod(spec.shape) * stored.itemsize)
    if integer_limits(spec.dtype) is None and spec.dtype.itemsize <= 2 and stored.itemsize == 1:
        return LookUpValues(columns, stored, spec.dtype, values)
    return CastValues(columns, stored, values, what)


def layout_of(field: Bits, feature_offset: int) -> BitLayout:
    """Where the bits of ``field`` are in a row, if its feature begins at byte ``feature_offset``."""
    return BitLayout(
        first_byte=feature_offset + field.start // 8,
        lead=field.start % 8,
        num_bits=field.num_bits,
        order=field.order,
        scale=field.channel_scale,
        is_little=field.bit_order == "little",
        plane_bits=0 if field.plane_bytes is None else field.plane_bits,
        plane_bytes=field.plane_bytes or 0,
    )


def _columns(feature: Feature, start: int) -> tuple[slice, np.dtype[Any]]:
    """The columns of rows where a feature is that begins at byte ``start``, and the dtype of its values."""
    return slice(start, start + feature.num_bytes), feature.row_dtype.base


def _sparse_layout(what: str, field: Sparse, schema: Schema) -> SparseLayout:
    starts, first_bit, table = schema.row_offsets, 0, field.table
    if isinstance(field.feature, PrefixCodes):
        table = field.full_table
    else:
        feature = schema.features[field.feature]
        assert isinstance(feature, PackedBits)
        first_bit, table = 8 * starts[field.feature] + field.start, field.indices_of(feature.num_bits)
    return SparseLayout(
        what,
        first_bit=first_bit,
        table=table,
        k=field.k,
        dtype=field.dtype,
        is_little=field.bit_order == "little",
        codes_byte=-1 if field.codes is None else starts[field.codes],
        num_codes=0 if field.codes is None else field.num_codes(schema.features),
        bucket_byte=starts[field.bucket] if isinstance(field.bucket, str) else -1,
        bucket_code=field.bucket if isinstance(field.bucket, int) else -1,
        counts=field.count,
    )


class _SampledTimer:
    """Chooses which calls are timed: all, if they take long; else one in sixteen, which stands for all sixteen.

    For 512 chess boards, timing five fields takes 5 µs, and making them in compiled code 80 µs.
    """

    def __init__(self) -> None:
        self._gap = 1
        self._left = 1
        self._began_ns = 0

    def begin(self) -> int:
        """For how many calls this one stands; 0: it is not timed."""
        self._left -= 1
        if self._left:
            return 0
        self._left = self._gap  # in case this call raises, so that it has no end
        self._began_ns = time.monotonic_ns()
        return self._gap

    def end(self) -> None:
        """A call that was timed is over."""
        is_long = time.monotonic_ns() - self._began_ns > _LONG_NS
        self._gap = self._left = 1 if is_long else _GAP


class CastValues(Engine):
    """Stored values, cast and scaled.

    ``decode`` raises WorkerError where integers do not hold the result, unless the field is to wrap.
    """

    def __init__(self, columns: slice, stored: np.dtype[Any], values: ArrayValues, what: str) -> None:
        """``what``: what the field is called in errors."""
        self._columns, self._stored, self._values, self._what = columns, stored, values, what

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        stored = rows[:, self._columns].view(self._stored)
        checked = self._values.checked
        if checked is not None and (lost := checked.find_lost(stored)):
            raise WorkerError(f"{self._what}: expected {checked.expected}, found {lost}", hint=_HINT_WRAP)
        self._values.put(stored, out.reshape(stored.shape))


class PermuteValues(Engine):
    """Values that another engine makes, each record's taken from other places.

    ``decode`` raises WorkerError where the field's dtype does not hold one of them.
    """

    def __init__(self, what: str, definition: Permuted, of: Engine, spec: FieldSpec, number: int) -> None:
        """``of`` makes the values, of this ``spec``. ``number``: the byte of a row that has the number of a table."""
        self._what, self._of, self._spec, self._number = what, of, spec, number
        self._sources, self._inner = np.asarray(definition.sources, np.intp), definition.inner
        self.is_compiled = of.is_compiled

    @property
    def scratch_record_bytes(self) -> int:
        return self._of.scratch_record_bytes + 2 * self._spec.record_bytes

    def reserve(self, max_records: int) -> None:
        self._of.reserve(max_records)
        self._scratch = np.empty((max_records, *self._spec.shape), self._spec.dtype)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        values = self._scratch[: len(rows)]
        self._of.decode(rows, values)
        problem = put_result(permuted(values, rows[:, self._number], self._sources, self._inner), out)
        if problem:
            expected, found, remedy = problem
            raise WorkerError(f"{self._what}: expected {expected}, found {found}", hint=remedy)


class LookUpValues(Engine):
    """What CastValues makes of values of one byte, taken from a table of 256.

    For floats of 16 bits and less, which numpy computes one by one: 0.8 ns a value instead of 3 to 13. For other
    dtypes, the table would be four times slower than computing.
    """

    def __init__(self, columns: slice, stored: np.dtype[Any], dtype: np.dtype[Any], values: ArrayValues) -> None:
        self._columns = columns
        self._num_bytes = int(columns.stop - columns.start)
        self._table: AnyArray = np.empty(256, dtype)
        values.put(np.arange(256, dtype=np.uint8).view(stored), self._table)

    @property
    def scratch_record_bytes(self) -> int:
        return 8 * self._num_bytes

    def reserve(self, max_records: int) -> None:
        self._index = np.empty((max_records, self._num_bytes), np.intp)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        index = self._index[: len(rows)]
        index[...] = rows[:, self._columns]
        self._table.take(index, out=out.reshape(index.shape), mode="clip")
