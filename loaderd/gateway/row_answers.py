"""Answers to tickets for rows: what a consumer's worker on another machine would read if it had the shards.

A ticket's records are read and checked as for a consumer on this machine, and then packed: features travel as they
are stored where that takes fewer bytes than the fields, and fields that only this side can make are finished
(``schema.packed``). A record that cannot be had is named; the others are sent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loaderd.daemon.indexing.local_data import LocalData
from loaderd.dataset import AnyDataset
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import LoaderdError, OptionError, ServerError, WorkerError, to_wire
from loaderd.formats.reader import Reading
from loaderd.gateway.answers import HINT_OF_DEATHS
from loaderd.plan.epoch import Slice, record_at
from loaderd.remote.tables import table_to_wire
from loaderd.remote.tickets import Fault, RowsTicket
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.storage.access import Access, no_callback
from loaderd.worker.file_rows import FileRows

# The fields of so many records are still in the cache when they are copied into rows.
_ROWS_AT_A_TIME, _BYTES_AT_A_TIME = 512, 1 << 20
_MOST_S = 1.0

Rows = npt.NDArray[np.uint8]


class ServedSet:
    """A data set that this process can read, and its table for consumers (``remote.tables``).

    ``on_wait`` is called now and then while storage does not answer, and while rows are made.
    """

    def __init__(self, dataset: AnyDataset, data: LocalData, on_wait: Callable[[], None] = no_callback) -> None:
        self.dataset = dataset
        self.data = data
        self.access = Access(data.storage, on_wait)
        self.table, self.digest = table_to_wire(
            dataset,
            data.counts,
            num_shards=data.num_shards,
            of=data.of,
            listing=data.listing,
            damages=data.damages,
            left_out=data.left_out,
        )
        self.row_bytes = unpacking_schema(dataset.leaves()[0].schema).row_bytes
        """Bytes of a row as it is sent."""
        self._counts = np.concatenate(data.counts)

    @cached_property
    def maker(self) -> RowMaker:
        """Makes its rows; created at the first use."""
        return RowMaker(self)

    def close(self) -> None:
        """Close the files of its maker, if it has one."""
        if "maker" in vars(self):
            self.maker.close()

    def check(self, ticket: RowsTicket) -> None:
        """Raise ServerError if the ticket is for other data, OptionError if it asks for records that do not exist."""
        if ticket.data != self.digest:
            raise ServerError(
                f"this server has other data {ticket.dataset!r} than are asked for: digest {self.digest}, "
                f"expected {ticket.data:.40}",
                hint="Servers of one data set need the same shards, schema, seed and shuffle. Connect anew to use "
                "what this one has.",
            )
        for _, block, _, stop in ticket.rows:
            if block >= len(self._counts) or stop > self._counts[block]:
                raise OptionError(f"a ticket asks for record {stop - 1} of block {block}, which is not in the data")


class RowMaker:
    """Makes the rows of tickets for one data set; one ticket at a time. It owns scratch memory."""

    def __init__(self, served: ServedSet) -> None:
        self._served = served
        leaf = served.dataset.leaves()[0]
        self._seed = leaf.seed
        self._schema = leaf.schema
        reading = Reading(access=served.access)
        self._files = FileRows(leaf.schema, served.data.files, served.data.compressions, reading)
        self._decoder = BatchDecoder(packed_schema(leaf.schema))
        self._row_dtype = unpacking_schema(leaf.schema).row_dtype
        self._gaps = _gaps_of(self._row_dtype)
        self._window: Rows = np.empty((0, leaf.schema.row_bytes), np.uint8)
        specs = self._decoder.specs.items()
        self._at_a_time = 1  # it rises to the most that there are columns for, unless a function is slow
        self._most_at_a_time = max(1, min(_ROWS_AT_A_TIME, _BYTES_AT_A_TIME // max(1, served.row_bytes)))
        self._columns = {name: np.empty((self._most_at_a_time, *spec.shape), spec.dtype) for name, spec in specs}

    def close(self) -> None:
        """Close the shards' files, and end the threads that ask storage."""
        self._files.close()
        self._files.access.abandon()

    def make(
        self,
        ticket: RowsTicket,
        out: Rows,
        without: Collection[int] = (),
        begin_row: Callable[[int], None] | None = None,
    ) -> list[Fault]:
        """Write the rows to ``out``, uint8, (ticket.num_rows, row bytes), C-contiguous.

        Returns which rows could not be had, and why. The bytes of these are 0. ``without``: rows of which processes
        have died. ``begin_row``: make one row at a time, and call this with its number before.
        """
        slices, row = [], 0
        for epoch, block, first, stop in ticket.rows:
            slices.append(Slice(block, first, stop, row, epoch))
            row += stop - first
        if len(self._window) < row:  # kept: fresh memory for each ticket would cost 34 ns a record
            self._window = np.empty((row, self._schema.row_bytes), np.uint8)
        places = self._served.data.places(slices, self._seed)
        faults = self._files.read(slices, places, np.arange(row), self._window)
        deaths = WorkerError(
            "processes of the server died, one after another, when they made a row", hint=HINT_OF_DEATHS
        )
        faults += [
            ([number], self._served.data.error_context([record_at(slices, number)], deaths)) for number in without
        ]
        lost = sorted({number for numbers, _ in faults for number in numbers})
        found = out.reshape(-1).view(self._row_dtype)
        for before, stop in itertools.pairwise([-1, *lost, row]):
            first = before + 1
            while first < stop:
                if begin_row:
                    begin_row(first)
                else:
                    self._served.access.on_wait()
                end = min(stop, first + (1 if begin_row else self._at_a_time))
                began_s = time.monotonic()
                failed = self._pack(first, end, found)
                self._took(end - first, time.monotonic() - began_s)
                faults += [([number], self._named(slices, number, error)) for number, error in failed]
                first = end
        for gap in self._gaps:  # nobody may see what an earlier answer has left there
            out[:, gap] = 0
        for numbers, _ in faults:
            out[numbers] = 0
        return [Fault(numbers, to_wire(error)) for numbers, error in faults]

    def _took(self, num_rows: int, seconds: float) -> None:
        """So many rows took so long: have as many at a time as take a second, about."""
        if seconds > _MOST_S:
            self._at_a_time = max(1, int(num_rows * _MOST_S / seconds))
        elif seconds < _MOST_S / 4 and num_rows == self._at_a_time:
            self._at_a_time = min(2 * self._at_a_time, self._most_at_a_time)

    def _named(self, slices: list[Slice], number: int, error: Exception) -> LoaderdError:
        """The error that a function met at row ``number``, with its record named."""
        if not isinstance(error, LoaderdError):
            error = WorkerError(f"the server failed at a record: {type(error).__name__}: {error}")
        return self._served.data.error_context([record_at(slices, number)], error, survived=True)

    def _pack(self, first: int, stop: int, found: npt.NDArray[np.void]) -> list[tuple[int, Exception]]:
        """Write these rows of the window, packed, to ``found``; returns those at which a function failed, and why."""
        columns = {name: column[: stop - first] for name, column in self._columns.items()}
        try:
            self._decoder.decode(self._window[first:stop], columns)
        except Exception as error:  # in a user's function: find the record by halving
            if stop - first == 1:
                return [(first, error)]
            middle = (first + stop) // 2
            return self._pack(first, middle, found) + self._pack(middle, stop, found)
        for name, column in columns.items():
            found[name][first:stop] = column
        return []


def _gaps_of(row_dtype: np.dtype[np.void]) -> list[slice]:
    """The bytes of a row that belong to no feature."""
    ends = sorted((offset, offset + dtype.itemsize) for dtype, offset, *_ in (row_dtype.fields or {}).values())
    bounds = [0, *itertools.chain.from_iterable(ends), row_dtype.itemsize]
    return [slice(first, stop) for first, stop in zip(bounds[::2], bounds[1::2], strict=True) if first < stop]
