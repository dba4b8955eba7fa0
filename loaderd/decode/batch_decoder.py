"""From packed rows to the fields of a batch, into memory that is given.

::

    rows (n, row_bytes) ──┬── Bits ─────► loaderd.decode.compiled_bits, or loaderd.decode.bits
                          ├── Packed ───► CopyBytes
                          ├── Array ────► CastValues or LookUpValues
                          ├── Spread, Fill, Planes ──► loaderd.decode.planes
                          └── other fields ── Derived ──► the user's function
                              (and the record's key)

A batch is decoded a chunk of records at a time, all fields of a chunk before the next chunk. So scratch memory is
small, and what one step leaves there or in ``out`` is still in the cache when the next one reads it. Intermediate
fields exist for one chunk only.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loaderd.decode.bits import bits_engine
from loaderd.decode.compiled_bits import SelectBits
from loaderd.decode.engine import AnyArray, Bytes, Engine
from loaderd.decode.planes import FillValue, JoinPlanes, SpreadValues
from loaderd.errors import OptionError, WorkerError
from loaderd.randomness import RecordRandom
from loaderd.schema import Array, Bits, Derived, Field, Fill, Packed, Planes, Schema, Spread
from loaderd.schema.representable import in_dtype
from loaderd.schema.specs import spec_of
from loaderd.snapshots import Kernels
from loaderd.stages import Spent

# A chunk of chess records takes 40 calls of numpy, which cost 25 µs however few the records are: 890 ns a record in
# chunks of 98, 640 in chunks of 196, 500 in chunks of 512. Saving this is worth more than fitting a cache of 1 MiB.
_MAX_CHUNK_RECORDS = 512
_MAX_SCRATCH_BYTES = 3 << 19
_GAP, _LONG_NS = 16, 1_000_000


class BatchDecoder:
    """Decodes rows of ``schema`` to the fields of a batch. Not thread-safe: it owns scratch memory.

    ``spent``: where the ns of each of ``schema.made_fields`` are added up, in that order. It has ``num_places``
    places: if there are more fields, the last place is for all remaining ones. None: nobody wants to know.
    """

    def __init__(self, schema: Schema, spent: Spent | None = None, num_places: int = 0) -> None:
        self._row_bytes = schema.row_bytes
        self._record_keys = schema.record_keys
        self.specs = schema.specs
        self._fields: dict[str, Engine | DeriveField] = {}
        for name in schema.made_fields:
            self._fields[name] = _engine(schema, name)
        self._clock = _EverySoOften()
        self._spent: Spent = [0] * len(self._fields) if spent is None else spent
        self._last_place = len(self._fields) - 1 if spent is None else num_places - 1
        intermediates = {name: schema.spec_of(name) for name in self._fields if name not in self.specs}
        engines = [engine for engine in self._fields.values() if not isinstance(engine, DeriveField)]
        scratch_record_bytes = sum(engine.scratch_record_bytes for engine in engines)
        scratch_record_bytes += sum(spec.record_bytes for spec in intermediates.values())
        self._chunk_records = max(1, min(_MAX_CHUNK_RECORDS, _MAX_SCRATCH_BYTES // max(1, scratch_record_bytes)))
        for engine in engines:
            engine.reserve(self._chunk_records)
        self.kernels: Kernels = "compiled" if any(map(_is_compiled, engines)) else "numpy"
        """Whether any field is decoded by compiled code."""
        self._intermediates = {
            name: np.empty((self._chunk_records, *spec.shape), spec.dtype) for name, spec in intermediates.items()
        }

    def decode(self, rows: Bytes, out: Mapping[str, AnyArray]) -> None:
        """Write every delivered field of ``rows`` to ``out[name]``.

        ``rows``: uint8, (n, row_bytes), C-contiguous; it may be read-only. ``out``: for each delivered field an
        array of its dtype, (n, *shape), C-contiguous. Raises OptionError if these are of another form, and
        WorkerError if the function of a derived field raises, or returns what does not fit.
        """
        self._check(rows, out)
        n = len(rows)
        stands_for = self._clock.begin()
        for start in range(0, n, self._chunk_records):
            stop = min(start + self._chunk_records, n)
            values = {name: out[name][start:stop] for name in self.specs}
            self._decode_chunk(rows[start:stop], values, stands_for)
        if stands_for:
            self._clock.end()

    def _decode_chunk(self, rows: Bytes, values: dict[str, AnyArray], stands_for: int) -> None:
        """``stands_for``: for how many calls the times of this one count; 0: it is not timed."""
        for name, scratch in self._intermediates.items():
            values[name] = scratch[: len(rows)]
        spent, last_place = self._spent, self._last_place
        began_ns = time.monotonic_ns() if stands_for else 0
        for number, (name, engine) in enumerate(self._fields.items()):
            if isinstance(engine, DeriveField):
                inputs: list[Any] = [_read_only(values[source]) for source in engine.inputs]
                if engine.stream is not None:
                    inputs.append(RecordRandom(self._record_keys(rows), engine.stream))
                engine.derive(inputs, values[name])
            else:
                engine.decode(rows, values[name])
            if stands_for:
                now_ns = time.monotonic_ns()
                spent[number if number < last_place else last_place] += stands_for * (now_ns - began_ns)
                began_ns = now_ns

    def _check(self, rows: Bytes, out: Mapping[str, AnyArray]) -> None:
        if rows.dtype != np.uint8 or rows.shape[1:] != (self._row_bytes,) or not rows.flags.c_contiguous:
            raise OptionError(
                f"rows must be uint8, (n, {self._row_bytes}), C-contiguous, got {rows.dtype}, {rows.shape}, "
                f"strides {rows.strides}"
            )
        for name, spec in self.specs.items():
            array = out.get(name)
            if array is None:
                raise OptionError(f"out must have an array for field {name!r}, got only {sorted(out)}")
            expected = (len(rows), *spec.shape)
            # If it is not contiguous, reshape copies, and the values would be written to the copy.
            if array.dtype != spec.dtype or array.shape != expected or not array.flags.c_contiguous:
                raise OptionError(
                    f"out[{name!r}] must be {spec.dtype}, {expected}, C-contiguous, got {array.dtype}, "
                    f"{array.shape}, strides {array.strides}"
                )


def _engine(schema: Schema, name: str) -> Engine | DeriveField:
    definition = schema.definition_of(name)
    if isinstance(definition, Derived):
        return DeriveField(name, definition)
    return _engine_of(schema, name, definition)


def _is_compiled(engine: Engine) -> bool:
    parts = engine.engines if isinstance(engine, JoinPlanes) else [engine]
    return any(isinstance(part, SelectBits) for part in parts)


def _engine_of(schema: Schema, name: str, definition: Field) -> Engine:
    """The engine of a field, or of a part of it; ``name``: that of the field."""
    assert not isinstance(definition, Derived)
    if isinstance(definition, Fill):
        return FillValue(definition)
    spec = spec_of(name, definition, schema.features)
    if isinstance(definition, Planes):
        shapes = [spec_of(name, part, schema.features).shape for part in definition.parts]
        engines = [_engine_of(schema, name, part) for part in definition.parts]
        return JoinPlanes(list(zip(engines, shapes, strict=True)), spec.dtype)
    feature = schema.features[definition.feature]
    fields = schema.row_dtype.fields
    assert fields is not None
    start = fields[definition.feature][1]
    if isinstance(definition, Bits):
        return bits_engine(definition, start)
    columns = slice(start, start + feature.num_bytes)
    if isinstance(definition, Packed):
        return CopyBytes(columns)
    dtype = spec.dtype
    stored = feature.row_dtype.base
    if isinstance(definition, Spread):
        return SpreadValues(columns, stored, feature.row_dtype.shape, definition)
    if definition.first is not None:
        first = start + definition.first * stored.itemsize
        columns = slice(first, first + math.prod(spec.shape) * stored.itemsize)
    small_float = dtype.kind not in "iub" and dtype.itemsize <= 2
    engine = LookUpValues if small_float and stored.itemsize == 1 else CastValues
    return engine(columns, stored, dtype, definition)


class _EverySoOften:
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


class CopyBytes:
    """The bytes of a feature as they are."""

    scratch_record_bytes = 0

    def __init__(self, columns: slice) -> None:
        self._columns = columns

    def reserve(self, max_records: int) -> None:
        """Nothing to allocate."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        out[...] = rows[:, self._columns]


class CastValues:
    """``cast(value) * scale + offset``, each step in the dtype of the output, as TensorFlow computes it."""

    scratch_record_bytes = 0

    def __init__(self, columns: slice, stored: np.dtype[Any], dtype: np.dtype[Any], definition: Array) -> None:
        self._columns = columns
        self._stored = stored
        self._scale = None if definition.scale is None else in_dtype(definition.scale, dtype)
        self._offset = None if definition.offset is None else in_dtype(definition.offset, dtype)

    def reserve(self, max_records: int) -> None:
        """Nothing to allocate."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        stored = rows[:, self._columns].view(self._stored)
        values = out.reshape(stored.shape)
        with np.errstate(all="ignore"):  # what is too large becomes infinite, as in TensorFlow, without a warning
            values[...] = stored
            if self._scale is not None:
                np.multiply(values, self._scale, out=values)
            if self._offset is not None:
                np.add(values, self._offset, out=values)


class LookUpValues:
    """What CastValues makes of values of one byte, taken from a table of 256.

    For floats of 16 bits and less, which numpy computes one by one: 0.8 ns a value instead of 3 to 13. For other
    dtypes, the table would be four times slower than computing.
    """

    def __init__(self, columns: slice, stored: np.dtype[Any], dtype: np.dtype[Any], definition: Array) -> None:
        self._columns = columns
        self._num_bytes = int(columns.stop - columns.start)
        self._table: AnyArray = np.empty(256, dtype)
        every_byte = np.arange(256, dtype=np.uint8)[:, None]
        CastValues(slice(0, 1), stored, dtype, definition).decode(every_byte, self._table)

    @property
    def scratch_record_bytes(self) -> int:
        return 8 * self._num_bytes

    def reserve(self, max_records: int) -> None:
        self._index = np.empty((max_records, self._num_bytes), np.intp)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        index = self._index[: len(rows)]
        index[...] = rows[:, self._columns]
        self._table.take(index, out=out.reshape(index.shape), mode="clip")


class DeriveField:
    """Calls the user's function and checks what it returns."""

    def __init__(self, name: str, definition: Derived) -> None:
        self._name = name
        self._definition = definition
        self.inputs = tuple(definition.inputs)
        self.stream = name if definition.random is True else definition.random or None
        """The stream of the RecordRandom that the function gets after its inputs; None: it gets no RecordRandom."""

    def derive(self, inputs: Sequence[Any], out: AnyArray) -> None:
        """Write function(*inputs) to ``out``, (n, *shape). Raises WorkerError, naming the field.

        ``inputs``: arrays, (n, …), read-only because an input may be another field of the batch; then a RecordRandom
        if the field has a stream.
        """
        try:
            result = np.asarray(self._definition.function(*inputs))
            if result.shape == out.shape:
                out[...] = result
                return
        except BaseException as error:  # SystemExit, too: else the worker ends, and does not say at which field
            raise WorkerError(
                f"derived field {self._name!r}: expected {self._expected(out)}, "
                f"but its function raised {type(error).__name__}: {_text_of(error)}",
                hint=self._hint(inputs),
                traceback=traceback.format_exc(),
            ) from error
        raise WorkerError(
            f"derived field {self._name!r}: expected {self._expected(out)}, "
            f"but its function returned {result.dtype} of shape {result.shape}",
            hint=self._hint(inputs),
        )

    def _expected(self, out: AnyArray) -> str:
        return f"an array that can be cast to {out.dtype}, of shape {out.shape}"

    def _hint(self, inputs: Sequence[Any]) -> str:
        given = ", ".join(
            f"{name}: {array.dtype} {array.shape}" for name, array in zip(self.inputs, inputs, strict=False)
        )
        random = "" if self.stream is None else " and a RecordRandom"
        return f"It was called with read-only arrays ({given}){random}; the first dimension is any number of records."


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # it may be of a class of the user's
        return f"(its text raises {type(another).__name__})"


def _read_only(array: AnyArray) -> AnyArray:
    view: AnyArray = array.view()
    view.flags.writeable = False
    return view
