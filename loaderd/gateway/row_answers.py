"""Answers to tickets for rows: what a worker of a consumer elsewhere would read, if the shards were there.

A ticket's records are read and checked as for a consumer on this machine, and then packed: features travel as they
are stored where that takes fewer bytes than the fields, and fields that only this side can make are finished
(``schema.packed``). A record that cannot be had is named, and the others are not lost.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from loaderd.daemon.preparing.local_data import Data
from loaderd.dataset import AnyDataset
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.errors import LoaderdError, OptionError, ServerError, WorkerError, to_wire
from loaderd.plan.epoch import Slice
from loaderd.remote.tables import table_to_wire
from loaderd.remote.tickets import Fault, RowsTicket
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.workers.file_rows import FileRows

Rows = npt.NDArray[np.uint8]


class ServedSet:
    """A data set that this process can read, and what it says of it (``remote.tables``)."""

    def __init__(self, dataset: AnyDataset, data: Data) -> None:
        self.dataset = dataset
        self.data = data
        self.table, self.digest = table_to_wire(
            dataset,
            data.counts,
            num_shards=data.num_shards,
            of=data.of,
            listing=data.listing,
            damages=data.damages,
        )
        self.row_bytes = unpacking_schema(dataset.leaves()[0].schema).row_bytes
        """Of a row that is sent."""
        self._counts = np.concatenate(data.counts)

    @cached_property
    def maker(self) -> RowMaker:
        """What makes its rows."""
        return RowMaker(self)

    def check(self, ticket: RowsTicket) -> None:
        """Raise ServerError where the ticket is for other data, OptionError where it asks for what is not there."""
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
    """Makes the rows of tickets for one data set; one ticket at a time."""

    def __init__(self, served: ServedSet) -> None:
        self._served = served
        leaf = served.dataset.leaves()[0]
        self._seed = leaf.seed
        self._schema = leaf.schema
        self._files = FileRows(leaf.schema, served.data.files, served.data.compressions)
        self._decoder = BatchDecoder(packed_schema(leaf.schema))
        self._specs = self._decoder.specs
        self._row_dtype = unpacking_schema(leaf.schema).row_dtype

    def close(self) -> None:
        """Close the shards' files."""
        self._files.close()

    def make(self, ticket: RowsTicket) -> tuple[Rows, list[Fault]]:
        """uint8, (ticket.num_rows, row bytes); and places of rows that could not be had, with why. These are 0."""
        slices, row = [], 0
        for epoch, block, first, stop in ticket.rows:
            slices.append(Slice(block, first, stop, row, epoch))
            row += stop - first
        window = np.zeros((row, self._schema.row_bytes), np.uint8)
        places = self._served.data.places(slices, self._seed)
        faults = self._files.read(slices, places, np.arange(row), window)
        lost = sorted({number for numbers, _ in faults for number in numbers})
        there = np.delete(np.arange(row), lost)
        found = np.zeros(row, self._row_dtype)
        return found.view(np.uint8).reshape(row, self._served.row_bytes), [
            Fault(numbers, to_wire(error)) for numbers, error in [*faults, *self._pack(window, there, found)]
        ]

    def _pack(
        self, window: Rows, numbers: npt.NDArray[np.intp], found: npt.NDArray[np.void]
    ) -> list[tuple[list[int], LoaderdError]]:
        """Write the rows ``numbers`` of ``window``, packed, to ``found``; returns those that a function refused."""
        if not len(numbers):
            return []
        out = {name: np.empty((len(numbers), *spec.shape), spec.dtype) for name, spec in self._specs.items()}
        try:
            self._decoder.decode(np.ascontiguousarray(window[numbers]), out)
        except Exception as error:  # of a function of the user's: halves show at which record
            if len(numbers) == 1:
                return [(numbers.tolist(), _of_function(error))]
            half = len(numbers) // 2
            return self._pack(window, numbers[:half], found) + self._pack(window, numbers[half:], found)
        for name, column in out.items():
            found[name][numbers] = column
        return []


def _of_function(error: Exception) -> LoaderdError:
    if isinstance(error, LoaderdError):
        return error
    return WorkerError(f"the server failed at a record: {type(error).__name__}: {error}")
