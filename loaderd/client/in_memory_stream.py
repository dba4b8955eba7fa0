"""Batches that are in memory, as a stream: for tests that shall not write, read or start anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.client.batch import Batch
from loaderd.client.skipped_data import SkippedData
from loaderd.client.stream import Stream
from loaderd.errors import LoaderdError, OptionError
from loaderd.options import StreamOptions, require
from loaderd.plan.passes import Listing, Pass
from loaderd.plan.positions import PassSequence, Position
from loaderd.schema import Schema
from loaderd.snapshots import StorageCounts

BatchOrError = Mapping[str, npt.ArrayLike] | LoaderdError
"""A batch, or the error that comes in its place."""


class InMemoryStream(Stream):
    """Delivers copies of ``batches``, in their order. Raises OptionError for a batch that does not fit."""

    grows = False

    def __init__(self, batches: Sequence[BatchOrError], schema: Schema, epochs: int | None) -> None:
        self._batches = [
            batch if isinstance(batch, LoaderdError) else _checked_batch(batch, schema, f"batches[{number}]")
            for number, batch in enumerate(batches)
        ]
        sizes = [batch.num_records for batch in self._batches if isinstance(batch, Batch)]
        require(bool(sizes), "batches", "at least one batch that is no error", batches)
        batch_size = sizes[0]
        sizes = [batch.num_records if isinstance(batch, Batch) else batch_size for batch in self._batches]
        for number, size in enumerate(sizes):
            is_last = number == len(sizes) - 1
            must = f"of {'at most ' * is_last}{batch_size} records, as the first one"
            require(size == batch_size or (is_last and size < batch_size), f"batches[{number}]", must, size)
        self._num_records = num_records = sum(sizes)
        self.schema = schema
        self.options = StreamOptions(batch_size, epochs=epochs, shuffle=False, workers=1)
        self.pass_sequence = PassSequence(self.options, num_records, num_records, {"given_records": num_records})
        super().__init__(SkippedData())

    @property
    def facts(self) -> dict[str, Any]:
        sizes = ("workers", "slots", "slot_bytes", "window_records", "window_bytes", "index_cached", "num_shards")
        return {
            **dict.fromkeys(sizes, 0),
            "num_records": self._num_records,
            "storage": StorageCounts(),
            "kernels": "numpy",
            "index_s": 0.0,
        }

    def pass_sequence_of(self, of: Pass | Position) -> PassSequence:
        return self.pass_sequence

    def list_shards(self, listing: Listing | None) -> None:
        raise AssertionError("batches in memory do not grow")

    def fetch(self, pass_: Pass, step: int) -> Batch | LoaderdError:
        """A copy each time: the consumer may write to it."""
        self.check()
        batch = self._batches[self.pass_sequence.batches(pass_).place_of(step)[1]]
        return batch if isinstance(batch, LoaderdError) else self._delivered(batch).copy()


def _checked_batch(fields: Mapping[str, npt.ArrayLike], schema: Schema, what: str) -> Batch:
    """``fields`` as a batch, copied. Raises OptionError where it is no batch of this schema."""
    require(isinstance(fields, Mapping), what, "a dict of arrays", fields)
    arrays = {name: as_array(array, f"{what}[{name!r}]") for name, array in fields.items()}
    require(arrays.keys() == schema.specs.keys(), what, f"of the fields {list(schema.specs)}", list(arrays))
    for name, spec in schema.specs.items():
        if arrays[name].dtype.newbyteorder("=") == spec.dtype.newbyteorder("="):
            arrays[name] = arrays[name].astype(spec.dtype, copy=False)  # as a Loader delivers it
        if arrays[name].dtype != spec.dtype or arrays[name].shape[1:] != spec.shape or not arrays[name].ndim:
            raise OptionError(
                f"{what}[{name!r}] must be of {spec.dtype} and of shape (records, {', '.join(map(str, spec.shape))})"
                f", got {arrays[name].dtype} {arrays[name].shape}",
                hint="Without a schema, all batches must be as the first one is.",
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    require(len(set(lengths.values())) == 1, what, "of as many records in each field", lengths)
    require(min(lengths.values()) > 0, what, "of at least one record", min(lengths.values()))
    return Batch({name: arrays[name] for name in schema.specs}).copy()


def as_array(values: npt.ArrayLike, what: str) -> npt.NDArray[Any]:
    """``values`` as an array. Raises OptionError where they are none, such as lists of different lengths."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{what} must be an array, got {values!r:.300}", hint=f"numpy says: {error}") from None
