"""Columns of Arrow as fields of records: batches that pyarrow has read become records of a fixed size.

=====================================  ==========================================================================
field of the records' dtype            column
=====================================  ==========================================================================
a number, a bool, a date               the same type of Arrow, little-endian; or a number that it holds exactly;
                                       of a date32, ``M8[D]``, or its int32: days since 1970
``u1 (n,)``, ``Sn``, ``Vn``            fixed_size_binary(n); or binary and text of n bytes each (of ``Sn``: up to n)
any ``(n,)``                           a fixed_size_list of n such values, or a list of which each row has n
``(n, m)``                             the same, of n * m; or lists in lists
a feature with a ``pad`` or ``cut``    lists of any length, of numbers, bytes or text; ``u1`` and ``S``: also binary
``Length``                             none: it is counted
=====================================  ==========================================================================

Each may be encoded by a dictionary. A null becomes the feature's ``default``; without one, it is an error.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaderd.errors import LoaderdError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.inflate import FileReader
from loaderd.formats.table import PIECE_BYTES, bad_table
from loaderd.kernels.crc import Bytes1D
from loaderd.kernels.views import places_within
from loaderd.schema import Feature, FixedRecords, Float, Int64, Length, Raw
from loaderd.schema.schema import with_lengths
from loaderd.storage.shard_file import ReadAt, ShardFile

MAX_BLOCK_BYTES = 1 << 30
"""Of the columns that are read, in a row group of Parquet or a record batch: they are in memory."""
_PROBED_ROWS = 1000
_LISTS = (Raw, Int64, Float)
_HINT_NULL = "Give the feature a default, or fill the column before it is written."
_HINT_LONG = "Make room for the longest in the feature's shape, or give cut=True, which keeps the first values."
_HINT_PAD = (
    'Where lengths differ, give FixedRecords a feature with a pad, such as {"moves": Raw("int64", (200,), pad=-1)}; '
    "for a list of words, with as_list=True, too."
)
HINT_LARGE = "Write the file with fewer rows in each: row_group_size=… of Parquet, max_chunksize=… of Arrow."


class ColumnFault(Exception):
    """``row`` of a batch does not fit; ``expected`` and ``found``, in words."""

    def __init__(self, row: int, expected: str, found: str, hint: str = "") -> None:
        super().__init__(row, expected, found, hint)
        self.row, self.expected, self.found, self.hint = row, expected, found, hint


class BatchTable:
    """What Parquet and Arrow files share: their blocks are read by pyarrow, as record batches."""

    is_plain = False

    def __init__(
        self, file: ShardFile, read_at: ReadAt, records: FixedRecords | None, on_read: OnRead = no_callback
    ) -> None:
        """``records`` None: nobody knows yet what they are; only :meth:`batches_of` is used."""
        self._shard, self._read_at, self._size, self._on_read = file.uri, read_at, file.size_bytes, on_read
        self._records = records
        self.blocks: list[tuple[int, int, int]] = []
        self.digest = self._held_bytes = 0
        self._rows = _PROBED_ROWS if records is None else max(1, PIECE_BYTES // records.record_bytes)
        self._block = -1
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._row = 0

    def _open(self) -> pa.PythonFile:
        return pa.PythonFile(FileReader(self._read_at, self._size, self._size), mode="r")

    def batches_of(self, block: int) -> Iterable[pa.RecordBatch]:
        """The batches of a block, with the columns that are read."""
        raise NotImplementedError

    def _names_in(self, schema: pa.Schema) -> list[str]:
        """The columns to read. Raises ShardReadError where one is missing, or of a type that the field cannot be."""
        if self._records is None:
            return [name for name in schema.names if len(schema.get_all_field_indices(name)) == 1]
        names = [name for name, feature in self._records.items() if not isinstance(feature, Length)]
        for name in names:
            numbers = schema.get_all_field_indices(name)
            if len(numbers) != 1:
                found = f"{len(numbers)} of that name" if numbers else f"only {schema.names!r:.500}"
                self._refuse(0, f"a column {name!r}", found)
            field, kind, feature = self._field(name), schema.field(numbers[0]).type, self._records[name]
            fits = _fits_padded(kind, feature) or _fits(kind, field.base, math.prod(field.shape))
            if not fits:
                self._refuse(0, f"column {name!r} of {field}", f"{kind}")
        return names

    def _field(self, name: str) -> np.dtype[Any]:
        assert self._records is not None and self._records.dtype.fields is not None
        field: np.dtype[Any] = self._records.dtype.fields[name][0]
        return field

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each block, and how many rows there are."""
        return [0, *accumulate(count for _, _, count in self.blocks)]

    def read(self, first: int, most: int) -> Bytes1D:
        """As in ``Table``."""
        starts = self._starts
        block = bisect_right(starts, first) - 1
        try:
            if block != self._block or first < self._row:
                self._block, self._batch = block, None
                self._batches, self._row = iter(self.batches_of(block)), starts[block]
            while self._batch is None or first >= self._row + self._batch.num_rows:
                self._row += self._batch.num_rows if self._batch is not None else 0
                self._batch = next(self._batches, None)
                if self._batch is None:
                    self._refuse(
                        first, f"{self.blocks[block][2]} rows in block {block}", f"{self._row - starts[block]}"
                    )
                self._on_read(self._size * self._row // max(1, starts[-1]))
            begin = first - self._row
            return self._records_of(self._batch.slice(begin, min(most, self._rows)), first)
        except BaseException:
            self.leave()  # nothing is known of where the reading stopped
            raise

    def leave(self) -> int:
        """As in ``Table``."""
        self._block, self._batch, self._batches = -1, None, iter(())
        return self._held_bytes

    def _records_of(self, batch: pa.RecordBatch, first: int) -> Bytes1D:
        assert self._records is not None
        out = np.zeros(batch.num_rows, self._records.dtype)
        for name, feature in self._records.items():
            if isinstance(feature, Length):
                continue
            field, column = self._field(name), batch.column(name)
            rows, lengths_of = np.arange(len(out)), self._records.lengths_of(name)
            if column.null_count and feature.default_bytes is not None:
                column, rows = self._without_nulls(name, column)
                out[name] = np.frombuffer(feature.default_bytes, field.base).reshape(field.shape)
                for each in lengths_of:
                    out[each] = feature.default_length
            try:
                if isinstance(feature, _LISTS) and _fits_padded(column.type, feature):
                    values, lengths = _padded(column, feature)
                    for each in lengths_of:
                        out[each][rows] = lengths
                else:
                    values = _values(column, field.base, math.prod(field.shape))
            except ColumnFault as fault:
                row = first + int(rows[fault.row])
                expected = f"column {name!r} of {field}: {fault.expected} in row {row}"
                self._refuse(row, expected, fault.found, fault.hint)
            except Exception as error:
                raise self._failed(f"column {name!r} of {field}", error, self._block) from None
            out[name][rows] = values.reshape(len(rows), *field.shape)
        return out.view(np.uint8).reshape(-1)

    def _without_nulls(self, name: str, column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.intp]]:
        """(the values that are there, their rows)"""
        try:
            column.validate()
            return column.drop_null(), np.flatnonzero(np.asarray(column.is_valid()))
        except Exception as error:
            raise self._failed(f"column {name!r}", error, self._block) from None

    def _check_size(self, block: int, num_bytes: int, hint: str = HINT_LARGE) -> None:
        if num_bytes > MAX_BLOCK_BYTES:
            expected = f"at most {MAX_BLOCK_BYTES:,} bytes of the columns that are read in block {block}"
            self._refuse(0, expected, f"{num_bytes:,}", hint)

    def _refuse(self, row: int, expected: str, found: str, hint: str = "") -> NoReturn:
        raise bad_table(self._shard, 0, expected, found, hint, row)

    def _failed(self, what: str, error: Exception, block: int | None = None) -> Exception:
        """The error to raise for one of pyarrow's: storage that failed, or a file that is damaged (in a block)."""
        if isinstance(error, LoaderdError):
            return error
        offset = 0 if block is None else self.blocks[block][0]
        record = sum(num_rows for _, _, num_rows in self.blocks[: block or 0])
        return bad_table(self._shard, offset, what, f"{error!s:.500}" or type(error).__name__, record=record)


def records_in(table: BatchTable) -> tuple[FixedRecords | None, dict[str, str]]:
    """What a row of a table holds, by the first rows; None: nothing. And why columns are left out."""
    features, left_out = dict[str, Feature](), {}
    for batch in table.batches_of(0) if table.blocks else ():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            column.validate()
            feature = _feature_of(column.drop_null())
            if feature is None or not feature.num_bytes:
                left_out[name] = f"{column.type} cannot be a feature"
            elif not column.null_count:
                features[name] = feature
            elif feature.dtype.kind in "iufSb":
                default: Any = () if feature.pad is not None else feature.dtype.type().item()
                features[name] = replace(feature, default=default)
            else:
                left_out[name] = "it has nulls"
        break
    return FixedRecords(with_lengths(features)) if features else None, left_out


def _feature_of(column: pa.Array) -> Raw | None:
    """A feature for a column; where its lists have different lengths, one with a pad."""
    if (dtype := _dtype_of(column)) is not None:
        return Raw(dtype.base, dtype.shape) if dtype.itemsize else None
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _feature_of(column.dictionary)
    if not (_is_bytes(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    most = int(np.diff(_ends_of(column)).max(initial=0))
    if _is_bytes(kind):
        return Raw("uint8", (most,), pad=0) if most else None
    of_value = _feature_of(column.values)
    if not most or of_value is None or (of_value.pad is not None and len(of_value.shape) > 1):
        return None
    if of_value.is_text or of_value.pad is not None or _holds_bytes(kind.value_type):
        pad: Any = of_value.is_text or 0
        return Raw(of_value.dtype, (most, *of_value.shape), pad=pad, as_list=True)
    is_signed = of_value.dtype.kind in "imM"
    return Raw(of_value.dtype, (most, *of_value.shape), pad=-1 if is_signed else of_value.dtype.type(0).item())


def _holds_bytes(kind: pa.DataType) -> bool:
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    return _is_bytes(kind) or bool(pa.types.is_fixed_size_binary(kind))


def _dtype_of(column: pa.Array) -> np.dtype[Any] | None:
    column.validate()
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _dtype_of(column.dictionary)
    if pa.types.is_fixed_size_binary(kind):
        return np.dtype((np.uint8, (kind.byte_width,)))
    if _is_bytes(kind):
        lengths = np.diff(_ends_of(column))
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return np.dtype(f"S{max(1, int(lengths.max(initial=0)))}")
        return np.dtype((np.uint8, (int(lengths[0]),))) if len(set(lengths.tolist())) == 1 else None
    inner: np.dtype[Any] | None
    if pa.types.is_fixed_size_list(kind):
        inner, length = _dtype_of(column.flatten()), kind.list_size
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(_ends_of(column))
        if len(set(lengths.tolist())) != 1:
            return None
        inner, length = _dtype_of(column.values), int(lengths[0])
    else:
        return _numpys(kind)
    return None if inner is None or not length else np.dtype((inner.base, (length, *inner.shape)))


def _fits(kind: pa.DataType, base: np.dtype[Any], count: int) -> bool:
    """Whether a column of this type can hold ``count`` values of ``base`` in each row."""
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        return size > 0 and count % size == 0 and _fits(kind.value_type, base, count // size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _fits_in_list(kind.value_type, base)
    if pa.types.is_fixed_size_binary(kind):
        is_text = base.kind in "SV" and count == 1
        return bool(kind.byte_width == base.itemsize * count and (is_text or base == np.uint8))
    if _is_bytes(kind):
        return (base.kind in "SV" and count == 1) or base == np.uint8
    if pa.types.is_date32(kind) and base == np.dtype("M8[D]"):
        return count == 1
    stored = _numpys(kind)
    if count != 1 or stored is None:  # numpy takes None for float64
        return False
    return stored == base or (stored.kind in "iuf" and base.kind in "iuf" and np.can_cast(stored, base))


def _fits_in_list(kind: pa.DataType, base: np.dtype[Any]) -> bool:
    while _is_list(kind):
        kind = kind.value_type
    return _fits(kind, base, 1)


def _fits_padded(kind: pa.DataType, feature: Feature) -> bool:
    """Whether a column of this type can hold values of a feature in any number."""
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not isinstance(feature, _LISTS) or (feature.pad is None and not feature.varies):
        return False
    base = feature.value_dtype
    if isinstance(feature, Raw) and feature.as_list:
        inner = replace(feature, shape=feature.shape[1:], as_list=False, default=None)
        return _is_list(kind) and (
            _fits_padded(kind.value_type, inner) or _fits(kind.value_type, base, inner.num_values)
        )
    if _is_bytes(kind):
        return base.kind == "S" or base == np.uint8
    if base.kind == "S":  # a list of words, of which Length would count characters
        return False
    return _is_list(kind) and bool(feature.shape) and _fits(kind.value_type, base, math.prod(feature.shape[1:]))


def _is_list(kind: pa.DataType) -> bool:
    is_of = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in is_of)


def _is_bytes(kind: pa.DataType) -> bool:
    is_of = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in is_of)


def _numpys(kind: pa.DataType) -> np.dtype[Any] | None:
    """numpy's dtype of a number, a flag or a date, as it is read; None of anything else."""
    if not (pa.types.is_primitive(kind) and not pa.types.is_decimal(kind)):
        return None
    try:
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        return None
    if pa.types.is_date32(kind):
        return np.dtype(np.int32)
    if dtype.kind in "mM":  # pandas' of a date may be another one
        unit = getattr(kind, "unit", "ms")
        return np.dtype(f"{dtype.kind}8[{unit}]") if dtype.itemsize * 8 == kind.bit_width else None
    return dtype


def _values(column: pa.Array, base: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """The values of a column: ``count`` of ``base`` in each row. Raises ColumnFault."""
    _check(column)
    kind, rows = column.type, len(column)
    if pa.types.is_dictionary(kind):
        return _of_dictionary(column, lambda used: (_values(used, base, count).reshape(len(used), count),))[0]
    if pa.types.is_fixed_size_list(kind):
        return _of_rows(column.flatten(), base, count, kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _of_list(column, base, count)
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        data = np.frombuffer(column.buffers()[1] or b"", np.uint8)[column.offset * width :][: rows * width]
        return data.view(base).reshape(rows, count)
    if _is_bytes(kind):
        return _of_bytes(column, base, count)
    if pa.types.is_date32(kind) and base.kind != "M":
        column = column.view(pa.int32())
    return np.asarray(column.to_numpy(zero_copy_only=False), base).reshape(rows, count)


def _check(column: pa.Array) -> None:
    column.validate()
    if column.null_count:
        row = int(np.argmax(np.asarray(column.is_null())))
        raise ColumnFault(row, "a value", "null", _HINT_NULL)


def _of_dictionary(
    column: pa.Array, made_of: Callable[[pa.Array], tuple[npt.NDArray[Any], ...]]
) -> tuple[npt.NDArray[Any], ...]:
    """What ``made_of`` makes of the values that are used, for each row."""
    indices, values = column.indices.to_numpy(zero_copy_only=False), column.dictionary
    bad = (indices < 0) | (indices >= len(values))
    if bad.any():
        raise ColumnFault(int(bad.argmax()), f"one of {len(values)} values of its dictionary", "another number")
    used, places = np.unique(indices, return_inverse=True)
    try:
        return tuple(made[places] for made in made_of(values.take(pa.array(used))))
    except ColumnFault as fault:
        row = int(np.argmax(places == fault.row))
        raise ColumnFault(row, fault.expected, fault.found, fault.hint) from None


def _padded(column: pa.Array, feature: Raw | Int64 | Float) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """(values, (rows, num_values), with the pad behind those that are there; the ``Length`` of each row)."""
    _check(column)
    kind, rows = column.type, len(column)
    if pa.types.is_dictionary(kind):
        values, lengths = _of_dictionary(column, lambda used: _padded(used, feature))
        return values, lengths
    if _is_bytes(kind):
        ends, flat, room, item = (
            _ends_of(column),
            np.frombuffer(column.buffers()[2] or b"", np.uint8),
            feature.num_bytes,
            1,
        )
        dtype, unit = np.dtype(np.uint8), "bytes"
    else:
        is_fixed = pa.types.is_fixed_size_list(kind)
        ends = np.arange(rows + 1) * kind.list_size if is_fixed else _ends_of(column)
        flat = column.flatten() if is_fixed else column.values
        room, item, dtype, unit = feature.shape[0], math.prod(feature.shape[1:]), feature.value_dtype, "values"
    lengths = np.diff(ends)
    wrong = (lengths < 0) | ((lengths > room) & (not feature.cut)) | ((lengths < room) & (feature.pad is None))
    if wrong.any():
        row = int(wrong.argmax())
        hint = "" if lengths[row] < room else _HINT_LONG
        must = f"{room} {unit}" if feature.pad is None else f"up to {room} {unit}"
        raise ColumnFault(row, must, f"{int(lengths[row])}", hint)
    if rows and not 0 <= ends[0] <= ends[-1] <= len(flat):
        raise ColumnFault(0, f"{unit} of its own", "some beyond them")
    kept = np.minimum(lengths, room)
    numbers, places = np.repeat(np.arange(rows), kept), places_within(0, kept)
    out = np.zeros((rows, room, item), dtype)
    if feature.pad is not None and not feature.is_text:
        out[...] = feature.pad
    items = np.repeat(ends[:-1], kept) + places
    try:
        out[numbers, places] = _items(flat, items, feature).reshape(len(items), item)
    except ColumnFault as fault:
        raise ColumnFault(int(numbers[fault.row]), fault.expected, fault.found, fault.hint) from None
    return out.reshape(rows, room * item).view(feature.value_dtype), kept * (1 if feature.as_list else item)


def _items(flat: Any, items: npt.NDArray[np.int64], feature: Raw | Int64 | Float) -> npt.NDArray[Any]:
    """The values of some items of lists, or bytes of text."""
    if isinstance(flat, np.ndarray):
        return flat[items]
    taken = flat.take(pa.array(items))
    if isinstance(feature, Raw) and feature.as_list:
        inner = replace(feature, shape=feature.shape[1:], as_list=False, default=None)
        if _fits_padded(taken.type, inner):
            return _padded(taken, inner)[0]
        feature = inner
        return _values(taken, feature.value_dtype, feature.num_values)
    return _values(taken, feature.value_dtype, math.prod(feature.shape[1:]))


def _of_rows(flat: pa.Array, base: np.dtype[Any], count: int, each: int) -> npt.NDArray[Any]:
    """The values of rows that have ``each`` items in ``flat``."""
    try:
        return _values(flat, base, count // each).reshape(-1, count)
    except ColumnFault as fault:
        raise ColumnFault(fault.row // each, fault.expected, fault.found, fault.hint) from None


def _of_list(column: pa.Array, base: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    ends = _ends_of(column)
    lengths = np.diff(ends)
    each = int(lengths[0]) if len(lengths) else count
    inner = column.type.value_type
    if not _is_list(inner):
        each = count
    wrong = lengths != each
    if wrong.any() or not each or count % each:
        row = int(wrong.argmax())
        raise ColumnFault(row, f"a list of {each or count} values", f"one of {int(lengths[row])}", _HINT_PAD)
    if ends[0] < 0 or ends[-1] > len(column.values):
        raise ColumnFault(0, "a list of its values", "one beyond them")
    return _of_rows(column.values.slice(int(ends[0]), int(ends[-1] - ends[0])), base, count, each)


def _ends_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """int64, (rows + 1,): where the items of each row begin and end."""
    is_large = pa.types.is_large_list(column.type) or pa.types.is_large_binary(column.type)
    is_large = is_large or pa.types.is_large_string(column.type)
    offsets = np.frombuffer(column.buffers()[1] or b"", np.int64 if is_large else np.int32)
    ends = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    return ends if len(ends) == len(column) + 1 else np.zeros(len(column) + 1, np.int64)


def _of_bytes(column: pa.Array, base: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    width = base.itemsize * count
    ends, data = _ends_of(column), np.frombuffer(column.buffers()[2] or b"", np.uint8)
    lengths = np.diff(ends)
    wrong = lengths > width if base.kind == "S" else lengths != width
    if wrong.any():
        row = int(wrong.argmax())
        must = f"up to {width} bytes" if base.kind == "S" else f"{width} bytes"
        raise ColumnFault(row, must, f"{int(lengths[row])}", _HINT_PAD if lengths[row] < width else "")
    if (lengths < 0).any() or ends[0] < 0 or ends[-1] > len(data):
        raise ColumnFault(0, "bytes of its values", "some beyond them")
    if (lengths == width).all():
        return data[ends[0] : ends[-1]].view(base).reshape(len(column), count)
    out = np.zeros((len(column), width), np.uint8)
    rows = np.repeat(np.arange(len(column)), lengths)
    out[rows, places_within(0, lengths)] = data[ends[0] : ends[-1]]
    return out.view(base)
