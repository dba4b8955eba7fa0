"""Computes the values of records (``RecordValues``) that go into the indexes of their shards, while these are made.

A shard is read once: the records of which its index is made become rows, and those are decoded and given to the
functions. A record that cannot be decoded, or does not fit the schema, counts as one that passes, of weight 1: so the
loader meets it, and says so or leaves it out, as without the functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from traceback import format_exception
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.decode.example_rows import RowParser
from loaderd.decode.fixed_rows import FixedParser
from loaderd.errors import Damage, OptionError, WorkerError
from loaderd.formats.framing import RecordChunk
from loaderd.formats.shard_index import LEAST_WEIGHT, MOST_WEIGHT, ShardIndex, shrunk
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS
from loaderd.redaction import shown
from loaderd.schema import Derived
from loaderd.schema.record_values import RecordValues
from loaderd.worker.halving import HalvingSearch
from loaderd.worker.window_loader import Bytes2D

_ROWS_AT_A_TIME, _BYTES_AT_A_TIME = 1 << 14, 4 << 20
_ROWS_A_FAULT_LIMIT = 1 << 12
"""MOST_ROW_FAULTS of so many rows may be left out."""

Int64s = npt.NDArray[np.int64]


class ValuePass:
    """A ``ValueSink``. Records are numbered through the group; an error of a function is kept until they count."""

    def __init__(self, values: RecordValues) -> None:
        schema = values.schema
        self._parser = RowParser(schema) if schema.records is None else FixedParser(schema)
        self._decoder = _Decoder(BatchDecoder(schema))
        self._functions = _functions_of(values)
        at_a_time = max(1, min(_ROWS_AT_A_TIME, _BYTES_AT_A_TIME // (schema.row_bytes + schema.record_bytes)))
        self._rows = np.empty((at_a_time, schema.row_bytes), dtype=np.uint8)
        """Those of records that were added and not decoded yet: the first ``_num_rows``."""
        self._numbers = np.empty(at_a_time, dtype=np.int64)
        self._num_rows = 0
        self._results: list[npt.NDArray[Any]] = [np.ones(0, dtype=each.dtype) for each in self._functions]
        self._failed: _Failed | None = None
        self._first = 0

    def report_to(self, on_progress: Callable[[], None]) -> None:
        """Call ``on_progress`` before each call of a function: there may be many for one piece that was read."""
        self._decoder.on_progress = on_progress

    def begin(self, first: int) -> None:
        """As in ``ValueSink``."""
        self._first = first
        self.drop(0)

    def add(self, piece: RecordChunk) -> None:
        """As in ``ValueSink``."""
        healthy = np.arange(piece.num_records)
        if piece.bad:
            healthy = np.delete(healthy, piece.bad)
        starts, lengths = piece.payload_starts, piece.payload_lengths
        while len(healthy) and self._failed is None:
            begin = self._num_rows
            part, healthy = healthy[: len(self._rows) - begin], healthy[len(self._rows) - begin :]
            places = np.arange(begin, begin + len(part))
            faults = self._parser.parse(piece.buffer, starts[part], lengths[part], self._rows, places)
            self._numbers[begin : begin + len(part)] = part + (self._first + piece.first_record)
            self._num_rows += len(part)
            if faults:  # what does not fit passes
                left = np.delete(np.arange(self._num_rows), [begin + fault.record for fault in faults])
                self._num_rows = len(left)
                self._rows[: len(left)], self._numbers[: len(left)] = self._rows[left], self._numbers[left]
            if self._num_rows == len(self._rows):
                self._compute()

    def drop(self, record: int) -> None:
        """As in ``ValueSink``."""
        number = self._first + record
        self._num_rows = int(np.searchsorted(self._numbers[: self._num_rows], number))
        self._results = [result[:number] for result in self._results]
        if self._failed is not None and self._failed.number >= number:
            self._failed = None

    def put_into(self, indexes: Sequence[ShardIndex]) -> list[ShardIndex]:
        """As in ``ValueSink``. Raises OptionError, which names the function and a record, where it fails."""
        firsts = list(accumulate((index.end for index in indexes), initial=0))
        self.begin(firsts[-1])
        self._compute()
        if self._failed is not None:
            shard = bisect_right(firsts, self._failed.number) - 1
            raise self._failed.at(indexes[shard].file.uri, self._failed.number - firsts[shard])
        self._make_room(firsts[-1])
        if len(self._results) > 1:
            self._results[1] *= self._results[0]  # what does not pass weighs nothing
        found = []
        for index, own in zip(indexes, pairwise(firsts), strict=True):
            of_shard: dict[str, Any] = {
                function.column: _STORED[function.column](result[slice(*own)])
                for function, result in zip(self._functions, self._results, strict=True)
            }
            found.append(index if index.error is not None else replace(index, **of_shard))
        return found

    def _compute(self) -> None:
        """Call the functions with the rows. Where one fails, they stay: not all of them may count."""
        numbers, rows = self._numbers[: self._num_rows], self._rows[: self._num_rows]
        if not len(numbers) or self._failed is not None:
            return
        self._make_room(int(numbers[-1]) + 1)
        try:
            for function, result in zip(self._functions, self._results, strict=True):
                if result is not self._results[0]:  # it is not called with what does not pass
                    is_in = self._results[0][numbers]
                    numbers, rows = numbers[is_in], rows[is_in]
                if len(numbers):
                    result[numbers] = self._decoder.values_of(rows, function)
        except _Failed as failed:
            failed.number = int(numbers[failed.row])
            self._failed = failed
        else:
            self._num_rows = 0

    def _make_room(self, num_records: int) -> None:
        """Have results for so many records; of those that nothing was computed of, 1."""
        missing = num_records - len(self._results[0])
        if missing > 0:
            more = max(missing, len(self._results[0]))
            self._results = [np.append(result, np.ones(more, result.dtype)) for result in self._results]


_STORED: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "passing": lambda passing: np.packbits(passing, bitorder="little"),
    "weights": lambda weights: shrunk(weights.view(np.uint16)),
}
"""How the index of a shard holds the values of its records, by the name of its array."""


class _WrongResult(Exception):
    """A function has returned something else than it must."""


class _Function(NamedTuple):
    """A function whose results go into a ``column`` of an index, as ``dtype``; ``must``: what it must return."""

    column: Literal["passing", "weights"]
    dtype: type[np.bool_ | np.float16]
    derived: Derived
    must: str

    def checked(self, result: Any, num_records: int) -> npt.NDArray[Any]:
        """What it returned for so many records. Raises _WrongResult."""
        kinds = "b" if self.dtype is np.bool_ else "biuf"
        is_array = isinstance(result, np.ndarray)
        if not is_array or result.dtype.kind not in kinds or result.shape != (num_records,):
            what = f"an array of {result.dtype} of shape {result.shape}" if is_array else shown(result, 100)
            raise _WrongResult(f"{what}, which it returned for {num_records} record{'s' * (num_records > 1)}")
        if self.dtype is np.float16:
            is_weight = (result == 0) | ((result >= LEAST_WEIGHT) & (result <= MOST_WEIGHT))
            if not is_weight.all():
                raise _WrongResult(f"{result[~is_weight][0]!s}, which it returned")
        return np.abs(np.asarray(result, self.dtype))  # of -0.0, the bits are no weight's


def _functions_of(values: RecordValues) -> list[_Function]:
    functions = []
    if values.where is not None:
        functions.append(_Function("passing", np.bool_, values.where, f"a bool of where={values.where_name}"))
    if values.weight is not None:
        to = f"{LEAST_WEIGHT:.7f} to {MOST_WEIGHT:,.0f}"
        must = f"a weight of sample={values.weight_name}, 0 or {to}, which the share multiplies"
        functions.append(_Function("weights", np.float16, values.weight, must))
    return functions


class _Failed(Exception):
    """``row``: the first that ``function`` fails at; ``alone``: whether it fails with that row alone.

    ``number``: that of the record in the row, in the group.
    """

    number = -1

    def __init__(self, row: int, function: _Function, error: Exception, alone: bool) -> None:
        super().__init__(row)
        self.row, self._function, self._error, self._alone = row, function, error, alone

    def at(self, shard: str, record: int) -> OptionError:
        """The error for the ``record`` of ``shard`` that is in this row."""
        error, trace = self._error, ""
        if isinstance(error, (WorkerError, _WrongResult)):
            found = error.message if isinstance(error, WorkerError) else str(error)
        else:
            found, trace = f"{type(error).__name__}: {error}", "".join(format_exception(error, chain=False))
        damage = Damage(shard, record, -1, self._function.must, found)
        which = "Called with this record alone" if self._alone else "Called with this record and some behind it"
        hint = f"{which}, it fails. It gets read-only arrays, whose first axis is the records."
        return OptionError(str(damage), hint=hint, damage=damage, traceback=trace)


class _Decoder:
    """Calls functions with the fields of records, and finds the record at which one fails."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self._decoder = decoder
        self.on_progress: Callable[[], None] = lambda: None

    def values_of(self, rows: Bytes2D, function: _Function) -> npt.NDArray[Any]:
        """(n,), of the function's dtype: what it returns for each record; 1 for what cannot be decoded.

        Raises _Failed.
        """
        values = np.ones(len(rows), dtype=function.dtype)
        decodable = np.arange(len(rows))
        try:
            try:
                columns = self._decode(rows)
            except WorkerError:
                decodable = self._decodable(rows, function)
                rows = rows[decodable]
                columns = self._decode(rows) if len(rows) else {}
            if len(rows):
                values[decodable] = self._call(function, columns, len(rows))
        except _Failed:
            raise
        except Exception as error:
            raise self._first_failure(rows, decodable, function, error) from None
        return values

    def _decodable(self, rows: Bytes2D, function: _Function) -> Int64s:
        """int64, (decodable,): the rows that can be decoded alone. Raises _Failed if too many cannot."""
        bad: list[int] = []
        search = HalvingSearch(range(len(rows)))
        while search:
            part = search.next()
            try:
                self._decode(rows[list(part)])
            except WorkerError as of_part:
                if search.failed(part):
                    bad.append(part[0])
                if len(bad) > MOST_ROW_FAULTS * max(1, len(rows) // _ROWS_A_FAULT_LIMIT):
                    raise _Failed(bad[0], function, of_part, alone=True) from None
        return np.delete(np.arange(len(rows)), bad)

    def _first_failure(self, rows: Bytes2D, numbers: Int64s, function: _Function, error: Exception) -> _Failed:
        search = HalvingSearch(range(len(rows)))
        while search:
            part = search.next()
            try:
                self._call(function, self._decode(rows[list(part)]), len(part))
            except Exception as of_part:
                if search.failed(part):
                    return _Failed(int(numbers[part[0]]), function, of_part, alone=True)
        return _Failed(int(numbers[0]), function, error, alone=False)

    def _decode(self, rows: Bytes2D) -> dict[str, npt.NDArray[Any]]:
        self.on_progress()
        columns = {name: np.empty((len(rows), *spec.shape), spec.dtype) for name, spec in self._decoder.specs.items()}
        self._decoder.decode(rows, columns)
        for column in columns.values():
            column.flags.writeable = False
        return columns

    def _call(self, function: _Function, columns: dict[str, npt.NDArray[Any]], num_records: int) -> npt.NDArray[Any]:
        derived = function.derived
        return function.checked(derived.function(*(columns[name] for name in derived.inputs)), num_records)
