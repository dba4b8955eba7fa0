"""Answers to tickets for rows: what a consumer's worker on another machine would read if it had the shards.

A ticket's records are read and checked as for a consumer on this machine, and then packed: features travel as they
are stored where that takes fewer bytes than the fields, and fields that only this side can make are finished
(``schema.packed``). A record that cannot be had is named; the others are sent.

The work of a ticket is bounded, whoever wrote it: each block is read once, however many ranges of it are asked for;
and between any two steps, ``check`` is called, which raises where nobody waits for the answer any more, or it has
taken too long.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from loaderd.daemon.indexing.local_data import LocalData
from loaderd.dataset import AnyDataset
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import LoaderdError, OptionError, WorkerError, to_wire
from loaderd.formats.reader import Reading
from loaderd.plan.epoch import Slice
from loaderd.remote.tickets import Ranges, RowFault
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.storage.access import Access
from loaderd.worker.file_rows import FileRows

# The fields of so many records are still in the cache when they are copied into rows.
_ROWS_AT_A_TIME, _BYTES_AT_A_TIME = 512, 1 << 20
_BLOCKS_AT_A_TIME = 8
_MOST_S = 1.0

_HINT = "A derived field that crashes, or too little memory, are the usual causes."

Rows = npt.NDArray[np.uint8]


class RowMaker:
    """Makes the rows of tickets for one data set; one ticket at a time. It owns scratch memory."""

    def __init__(self, dataset: AnyDataset, data: LocalData, access: Access) -> None:
        self._data = data
        leaf = dataset.leaves()[0]
        self._seed = leaf.seed
        self._schema = leaf.schema
        self._files = FileRows(leaf.schema, data.files, data.compressions, Reading(access=access))
        self._decoder = BatchDecoder(packed_schema(leaf.schema))
        self._row_dtype = unpacking_schema(leaf.schema).row_dtype
        self._window: Rows = np.empty((0, leaf.schema.row_bytes), np.uint8)
        specs = self._decoder.specs.items()
        self._at_a_time = 1  # it rises to the most that there are columns for, unless a function is slow
        self._most_at_a_time = max(1, min(_ROWS_AT_A_TIME, _BYTES_AT_A_TIME // max(1, self._row_dtype.itemsize)))
        self._columns = {name: np.empty((self._most_at_a_time, *spec.shape), spec.dtype) for name, spec in specs}

    def close(self) -> None:
        """Close the shards' files."""
        self._files.close()

    def make(self, ranges: Ranges, check: Callable[[], None], is_lost: bool = False) -> tuple[Rows, list[RowFault]]:
        """The rows of ``ranges``, uint8, (rows, row bytes); and which of them could not be had: their bytes are 0.

        ``is_lost``: processes have died of it, a single row. Raises OptionError where a record is asked for twice,
        and what ``check`` raises.
        """
        ends = np.cumsum(ranges[:, 3] - ranges[:, 2])
        num_rows = int(ends[-1])
        rows = np.zeros((num_rows, self._row_dtype.itemsize), np.uint8)  # no byte of another answer is in the gaps
        if is_lost:
            died = WorkerError("processes of the server died, one after another, when they made a row", hint=_HINT)
            return rows, [RowFault([0], to_wire(self._named(ranges, ends, 0, died)))]
        if len(self._window) < num_rows:  # kept: fresh memory for each ticket would cost 34 ns a record
            self._window = np.empty((num_rows, self._schema.row_bytes), np.uint8)
        faults: list[tuple[list[int], LoaderdError]] = []
        for blocks, places in _by_block(ranges):
            check()
            faults += self._files.read(blocks, [*self._data.places(blocks, self._seed)], places, self._window)
        lost = sorted({number for numbers, _ in faults for number in numbers})
        out = rows.reshape(-1).view(self._row_dtype)
        for before, end in itertools.pairwise([-1, *lost, num_rows]):
            first = before + 1
            while first < end:
                check()
                stop = min(end, first + self._at_a_time)
                began_s = time.monotonic()
                failed = self._pack(first, stop, out)
                self._adapt(stop - first, time.monotonic() - began_s)
                faults += [([number], self._named(ranges, ends, number, error)) for number, error in failed]
                first = stop
        for numbers, _ in faults:
            rows[numbers] = 0
        return rows, [RowFault(numbers, to_wire(error)) for numbers, error in faults]

    def _adapt(self, num_rows: int, seconds: float) -> None:
        """So many rows took so long: have as many at a time as take a second, about."""
        if seconds > _MOST_S:
            self._at_a_time = max(1, int(num_rows * _MOST_S / seconds))
        elif seconds < _MOST_S / 4 and num_rows == self._at_a_time:
            self._at_a_time = min(2 * self._at_a_time, self._most_at_a_time)

    def _named(self, ranges: Ranges, ends: npt.NDArray[np.int64], number: int, error: Exception) -> LoaderdError:
        """The error that a function met at row ``number``, with its record named."""
        if not isinstance(error, LoaderdError):
            error = WorkerError(f"the server failed at a record: {type(error).__name__}: {error}")
        epoch, block, _, stop = ranges[at := int(np.searchsorted(ends, number, "right"))].tolist()
        record = stop - (int(ends[at]) - number)
        named = self._data.error_context([Slice(block, record, record + 1, 0, epoch)], error, survived=True)
        named.traceback = ""  # it would tell a consumer where files are
        return named

    def _pack(self, first: int, stop: int, out: npt.NDArray[np.void]) -> list[tuple[int, Exception]]:
        """Write these rows of the window, packed, to ``out``; returns those at which a function failed, and why."""
        columns = {name: column[: stop - first] for name, column in self._columns.items()}
        try:
            self._decoder.decode(self._window[first:stop], columns)
        except Exception as error:  # in a user's function: find the record by halving
            if stop - first == 1:
                return [(first, error)]
            middle = (first + stop) // 2
            return self._pack(first, middle, out) + self._pack(middle, stop, out)
        for name, column in columns.items():
            out[name][first:stop] = column
        return []


def _by_block(ranges: Ranges) -> Iterator[tuple[list[Slice], npt.NDArray[np.intp]]]:
    """A few blocks at a time: one slice of each, with all that is wanted of it; and the row of each record, or -1.

    The slices count their records from 0. Raises OptionError where ranges of a block overlap.
    """
    lengths = ranges[:, 3] - ranges[:, 2]
    first_rows = (np.cumsum(lengths) - lengths).tolist()
    listed = sorted(zip(ranges.tolist(), first_rows, strict=True))
    blocks = [list(of_block) for _, of_block in itertools.groupby(listed, key=lambda each: each[0][:2])]
    for at in range(0, len(blocks), _BLOCKS_AT_A_TIME):
        slices: list[Slice] = []
        places = []
        num_records = 0
        for of_block in blocks[at : at + _BLOCKS_AT_A_TIME]:
            epoch, block, begin, _ = of_block[0][0]
            end, done = of_block[-1][0][3], begin
            rows = np.full(end - begin, -1, np.intp)
            for (_, _, first, stop), row in of_block:
                if first < done:
                    raise OptionError(f"a ticket asks for record {first} of block {block} twice")
                rows[first - begin : stop - begin] = np.arange(row, row + stop - first)
                done = stop
            slices.append(Slice(block, begin, end, num_records, epoch))
            places.append(rows)
            num_records += len(rows)
        yield slices, np.concatenate(places)
