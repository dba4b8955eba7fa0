"""A loader of batches that are in memory, for tests that shall not write, read or start anything.

Passes, positions and the end are those of any loader; only the batches are given, not made by workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.client.base import BaseLoader
from loaderd.client.batch import Batch
from loaderd.client.batch_source import DaemonTotals, Stream
from loaderd.client.position import checked_start
from loaderd.errors import LoaderdError, OptionError
from loaderd.options import StreamOptions, require
from loaderd.plan.passes import Listing, Pass
from loaderd.plan.positions import PassSequence, Position
from loaderd.schema import Schema
from loaderd.snapshots import StorageCounts

Given = Mapping[str, npt.ArrayLike] | LoaderdError
"""A batch, or the error that comes in its place."""


class InMemoryLoader(BaseLoader):
    """What ``loaderd.testing.loader_of`` returns: a loader of which the batches are given."""

    def __init__(
        self, batches: Sequence[Given], schema: Schema, epochs: int | None = 1, start: Position | None = None
    ) -> None:
        checked = [one if isinstance(one, LoaderdError) else _batch(one, schema, n) for n, one in enumerate(batches)]
        sizes = [one.num_records for one in checked if isinstance(one, Batch)]
        require(bool(sizes), "batches", "at least one batch that is no error", batches)
        options = StreamOptions(sizes[0], epochs=epochs, shuffle=False, workers=1)
        stream = _InMemoryStream(checked, schema, options)
        super().__init__(stream, stream, checked_start(start))


def _batch(given: Mapping[str, npt.ArrayLike], schema: Schema, number: int) -> Batch:
    """``given`` as a batch, copied. Raises OptionError where it is no batch of this schema."""
    what = f"batches[{number}]"
    require(isinstance(given, Mapping), what, "a dict of arrays", given)
    arrays = {name: as_array(array, f"{what}[{name!r}]") for name, array in given.items()}
    require(arrays.keys() == schema.specs.keys(), what, f"of the fields {list(schema.specs)}", list(arrays))
    for name, spec in schema.specs.items():
        if arrays[name].dtype.newbyteorder("=") == spec.dtype.newbyteorder("="):
            arrays[name] = arrays[name].astype(spec.dtype, copy=False)  # as a Loader delivers it
        found = (arrays[name].dtype, arrays[name].shape[1:])
        must = f"of {spec.dtype} and of shape (records, {', '.join(map(str, spec.shape))})"
        if found != (spec.dtype, spec.shape) or not arrays[name].ndim:
            raise OptionError(
                f"{what}[{name!r}] must be {must}, got {arrays[name].dtype} {arrays[name].shape}",
                hint="Without a schema, all batches must be as the first one is.",
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    require(len(set(lengths.values())) == 1, what, "of as many records in each field", lengths)
    require(min(lengths.values()) > 0, what, "of at least one record", min(lengths.values()))
    return Batch({name: arrays[name] for name in schema.specs}).copy()


def as_array(given: npt.ArrayLike, what: str) -> npt.NDArray[Any]:
    """``given`` as an array. Raises OptionError where it is none, such as lists of different lengths."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{what} must be an array, got {given!r:.300}", hint=f"numpy says: {error}") from None


class _InMemoryStream(Stream):
    """A stream whose batches are given. It is also the ``StreamInfo`` of its loader."""

    grows = False

    def __init__(self, batches: list[Batch | LoaderdError], schema: Schema, options: StreamOptions) -> None:
        size = options.batch_size
        sizes = [one.num_records if isinstance(one, Batch) else size for one in batches]
        for number, found in enumerate(sizes):
            is_last = number == len(sizes) - 1
            must = f"of {'at most ' * is_last}{size} records, as the first one"
            require(found == size or (is_last and found < size), f"batches[{number}]", must, found)
        self.schema, self.options = schema, options
        self._facts = {
            "num_shards": 0,
            "num_records": sum(sizes),
            "storage": StorageCounts(),
            "kernels": "numpy",
            **dict.fromkeys(("workers", "slots", "slot_bytes", "window_records", "window_bytes", "index_cached"), 0),
            "index_s": 0.0,
        }
        self.pass_sequence = PassSequence(options, sum(sizes), sum(sizes), {"given_records": sum(sizes)})
        self._batches = batches
        super().__init__(DaemonTotals())

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    def pass_sequence_of(self, of: Pass | Position) -> PassSequence:
        return self.pass_sequence

    def list_shards(self, listing: Listing | None) -> None:
        raise AssertionError("what is given does not grow")

    def fetch(self, pass_: Pass, step: int) -> Batch | LoaderdError | None:
        """A copy each time: the consumer may write to it."""
        self.check()
        plan = self.pass_sequence.batches(pass_)
        if plan.num_steps is not None and step >= plan.num_steps:
            return None
        given = self._batches[plan.place_of(step)[1]]
        if isinstance(given, LoaderdError):
            return given
        return self._delivered(given).copy()
