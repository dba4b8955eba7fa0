"""Record batches that came over the network, into the slots of the consumer that they are for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from loaderd.decode.fields import BatchDecoder
from loaderd.errors import ServerError
from loaderd.memory.layout import Bytes1D, SlotLayout
from loaderd.remote.arrow import arrays_of, arrow_schema, stored_specs
from loaderd.schema import Schema


class SlotFiller:
    """Writes the fields of ``unpacking`` to slots of ``memory``, of batches that are ``packed``, or are not.

    A packed one is unpacked on the way: its columns become rows, 10 ns a record in chess, and the rows are decoded as
    the workers of a loader decode theirs.
    """

    def __init__(self, unpacking: Schema, packed: bool, memory: Bytes1D, layout: SlotLayout) -> None:
        self._memory = memory
        self._layout = layout
        self._specs = stored_specs(unpacking) if packed else unpacking.specs
        self._arrow_schema = arrow_schema(self._specs)
        self._decoder = BatchDecoder(unpacking) if packed else None
        self.kernels = self._decoder.kernels if self._decoder else None
        """What it unpacks with, if it does: as in ``Statistics``."""
        self._rows = np.zeros(layout.batch_size if packed else 0, unpacking.row_dtype)
        self._row_bytes = self._rows.view(np.uint8).reshape(-1, unpacking.row_bytes)

    def fill(self, slot: int, batch: pa.RecordBatch) -> None:
        """Write ``batch``. Raises ServerError if it is not of the form that was agreed on."""
        num_records = batch.num_rows
        if num_records > self._layout.batch_size:
            raise ServerError(f"a batch must have at most {self._layout.batch_size} records, got {num_records}")
        columns = arrays_of(batch, self._specs, self._arrow_schema)
        out = {name: view[:num_records] for name, view in self._layout.views(self._memory, slot).items()}
        if self._decoder is None:
            for name, column in columns.items():
                out[name][...] = column
            return
        for name, column in columns.items():
            self._rows[name][:num_records] = column
        self._decoder.decode(self._row_bytes[:num_records], out)
