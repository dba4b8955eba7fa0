"""Computes the values of records (``RecordValues``) that go into the indexes of their shards.

A shard has just been indexed, as a rule: it is read a second time, from memory, block by block, as it will be read
for the training. A record that cannot be read or decoded, or does not fit the schema, counts as one that passes, of
weight 1: so the loader meets it, and says so or leaves it out, as without the functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from traceback import format_exception
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import Damage, LoaderdError, OptionError, ShardReadError, WorkerError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.reader import Reading
from loaderd.formats.shard_index import LEAST_WEIGHT, MOST_WEIGHT, ShardIndex, shrunk
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS
from loaderd.kernels.views import places_within
from loaderd.redaction import shown
from loaderd.schema import Derived, Schema
from loaderd.schema.record_values import RecordValues
from loaderd.storage.access import Access
from loaderd.storage.shard_file import TABLES, Block, Compression
from loaderd.worker.halving import HalvingSearch
from loaderd.worker.window_loader import BlockPlacement, Bytes2D, WindowLoader

_ROWS_AT_A_TIME, _BYTES_AT_A_TIME = 4096, 4 << 20

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


def add_values(
    values: RecordValues, indexes: Sequence[ShardIndex], on_read: OnRead = no_callback, access: Access | None = None
) -> list[ShardIndex]:
    """The indexes of a group of shards with the values of their records; that of an unreadable shard as it is.

    ``on_read`` is called with the bytes of the group, again and again. Raises OptionError, which names the function
    and a record, where a function raises or returns something else than it must; ShardReadError where a shard cannot
    be read any more; StorageError.
    """
    num_bytes = sum(index.file.size_bytes for index in indexes)
    firsts = list(accumulate((index.end for index in indexes), initial=0))
    functions = _functions_of(values)
    results: list[npt.NDArray[Any]] = [np.ones(firsts[-1], dtype=function.dtype) for function in functions]
    files, compressions = [index.file for index in indexes], [index.compression for index in indexes]
    blocks = [
        Block(shard, *index.block(number))
        for shard, index in enumerate(indexes)
        for number in range(len(index.counts))
    ]
    decoder = _Decoder(values.schema)
    reading = Reading(lambda _: on_read(num_bytes), access or Access())
    with closing(WindowLoader(values.schema, files, compressions, reading)) as loader:
        for numbers, rows in _rows_of(loader, blocks, compressions, firsts, values.schema):
            on_read(num_bytes)
            if not len(numbers):
                continue
            try:
                for function, result in zip(functions, results, strict=True):
                    result[numbers] = decoder.values_of(rows, function)
                    if function.column == "passing":  # no other is called with the rest
                        is_in = result[numbers]
                        numbers, rows = numbers[is_in], rows[is_in]
            except _Failed as failed:
                number = int(numbers[failed.row])
                shard = bisect_right(firsts, number) - 1
                raise failed.at(files[shard].uri, number - firsts[shard]) from None
    if len(results) > 1:
        results[1] *= results[0]  # what does not pass weighs nothing
    columns = dict(zip((function.column for function in functions), results, strict=True))
    found = []
    for index, own in zip(indexes, pairwise(firsts), strict=True):
        of_shard: dict[str, Any] = {name: _STORED[name](result[slice(*own)]) for name, result in columns.items()}
        found.append(index if index.error is not None else replace(index, **of_shard))
    return found


_STORED: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "passing": lambda passing: np.packbits(passing, bitorder="little"),
    "weights": lambda weights: shrunk(weights.view(np.uint16)),
}
"""How the index of a shard holds the values of its records, by the name of its array."""


def _rows_of(
    loader: WindowLoader, blocks: list[Block], compressions: list[Compression], firsts: list[int], schema: Schema
) -> Iterator[tuple[Int64s, Bytes2D]]:
    """The rows of all blocks, some at a time, without those that cannot be read; and the numbers of their records.

    ``firsts``: the number of the first record of each shard.
    """
    at_a_time = max(1, min(_ROWS_AT_A_TIME, _BYTES_AT_A_TIME // (schema.row_bytes + schema.record_bytes)))
    window = np.empty((at_a_time, schema.row_bytes), dtype=np.uint8)
    reader = loader.reader
    groups = list(_groups([block for block in blocks if reader.can_read_together(block)], at_a_time))
    for group, following in zip_longest(groups, groups[1:], fillvalue=()):
        reader.begin([*following])
        bounds = [0, *accumulate(block.num_records for block in group)]
        if bounds[-1] > len(window):
            window = np.empty((bounds[-1], schema.row_bytes), dtype=np.uint8)
        parts = [BlockPlacement(block, np.arange(*own)) for block, own in zip(group, pairwise(bounds), strict=True)]
        is_valid = np.ones(bounds[-1], dtype=np.bool_)
        for places, error in loader.load(parts, window):
            if isinstance(error, ShardReadError):
                raise error
            is_valid[places] = False
        starts = np.array([firsts[block.shard] + block.first_record for block in group])
        numbers = places_within(starts, np.diff(bounds))
        # A block is read whole, and may have many more rows than are to be decoded at a time.
        for start in range(0, len(numbers), at_a_time):
            part = slice(start, start + at_a_time)
            yield _valid(numbers[part], window[part], is_valid[part])
    for block in blocks:
        if not reader.can_read_together(block):
            try:
                for begin, is_valid in loader.read_all(block, window[:at_a_time]):
                    first = firsts[block.shard] + block.first_record + begin
                    yield _valid(np.arange(first, first + len(is_valid)), window, is_valid)
            except ShardReadError as error:
                if (
                    compressions[block.shard] not in TABLES or error.damage is None
                ):  # else this block alone is damaged
                    raise


def _groups(blocks: list[Block], most: int) -> Iterator[list[Block]]:
    """Blocks that are read together: of ``most`` records or a few more, or one."""
    group: list[Block] = []
    num_records = 0
    for block in blocks:
        group.append(block)
        num_records += block.num_records
        if num_records >= most:
            yield group
            group, num_records = [], 0
    if group:
        yield group


def _valid(numbers: Int64s, window: Bytes2D, is_valid: Bools) -> tuple[Int64s, Bytes2D]:
    rows = window[: len(numbers)]
    return (numbers, rows) if is_valid.all() else (numbers[is_valid], rows[is_valid])


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
    """``row``: the first that ``function`` fails at; ``alone``: whether it fails with that row alone."""

    def __init__(self, row: int, function: _Function, error: Exception, alone: bool) -> None:
        super().__init__(row)
        self.row, self._function, self._error, self._alone = row, function, error, alone

    def at(self, shard: str, record: int) -> OptionError:
        """The error for the ``record`` of ``shard`` that is in this row."""
        error, trace = self._error, ""
        if isinstance(error, (LoaderdError, _WrongResult)):
            found = error.args[0]
        else:
            found, trace = f"{type(error).__name__}: {error}", "".join(format_exception(error, chain=False))
        damage = Damage(shard, record, -1, self._function.must, found)
        which = "Called with this record alone" if self._alone else "Called with this record and some behind it"
        hint = f"{which}, it fails. It gets read-only arrays, whose first axis is the records."
        return OptionError(str(damage), hint=hint, damage=damage, traceback=trace)


class _Decoder:
    """Calls functions with the fields of records, and finds the record at which one fails."""

    def __init__(self, schema: Schema) -> None:
        self._decoder = BatchDecoder(schema)

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
                if len(bad) > MOST_ROW_FAULTS:
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
        columns = {name: np.empty((len(rows), *spec.shape), spec.dtype) for name, spec in self._decoder.specs.items()}
        self._decoder.decode(rows, columns)
        for column in columns.values():
            column.flags.writeable = False
        return columns

    def _call(self, function: _Function, columns: dict[str, npt.NDArray[Any]], num_records: int) -> npt.NDArray[Any]:
        derived = function.derived
        return function.checked(derived.function(*(columns[name] for name in derived.inputs)), num_records)
