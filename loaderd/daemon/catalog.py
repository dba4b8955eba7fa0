"""What a server serves: the data sets of the user's modules, by name, each with its data.

A data set is named as uvicorn names an app, ``mypackage.datasets:train``, and is known to consumers as ``train``. So
nothing executable comes from outside. Its shards are listed once, when the server starts: all consumers are to see
the same data. (Where data sets grow, each epoch lists them again.)
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loaderd.daemon.opening import MIN_ARENAS
from loaderd.daemon.preparation import Preparation
from loaderd.daemon.workforce import Workforce
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, StreamDescription, with_schema
from loaderd.errors import OptionError, ServerError
from loaderd.memory.layout import SlotLayout
from loaderd.options import Shuffle, StreamOptions
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.schema.wire import to_wire
from loaderd.subscription import Subscription

TYPICAL_BATCH_SIZE = 512


@dataclass
class Served:
    """A data set of that name. ``options`` are those that it sets itself."""

    name: str
    dataset: AnyDataset
    options: StreamOptions
    preparation: Preparation

    def welcome(self) -> dict[str, Any]:
        """What a consumer must know to ask for batches: see ``Welcome``."""
        schema, shuffle = self.dataset.leaves()[0].schema, self.options.shuffle
        return {
            "schema": to_wire(unpacking_schema(schema)),
            "row_bytes": schema.row_bytes,
            "shuffle": [shuffle.window_records, shuffle.block_records] if isinstance(shuffle, Shuffle) else shuffle,
            "seed": self.options.seed,
            "on_corrupt": self.options.on_corrupt,
            "grows": self.dataset.grows,
        }

    def stream(self, wanted: Subscription, start: str | None) -> StreamDescription:
        """The stream that a consumer asks for."""
        dataset = self.dataset
        if wanted.packed:
            dataset = with_schema(dataset, packed_schema(dataset.leaves()[0].schema))
        options = replace(
            self.options,
            batch_size=wanted.batch_size,
            epochs=wanted.epochs,
            remainder=wanted.remainder,
            shard=wanted.shard,
            # Where several have one stream, each may hold other batches of it than the others, and wait for one more.
            held_batches=(wanted.held_batches + wanted.is_group) * wanted.consumers,
        )
        if dataset.grows and wanted.remainder == "carry":
            raise OptionError('remainder="carry" cannot complete a batch from an epoch that has not been listed yet')
        if dataset.grows and wanted.is_group:
            raise OptionError(f"sharing={wanted.sharing!r} is not for data that grow: each consumer lists them")
        return StreamDescription(dataset, options, start, several_readers=wanted.is_group)

    def report(self) -> dict[str, Any]:
        """For people to read."""
        preparation, state = self.preparation, "ready"
        num_shards, num_records = 0, 0
        passing = preparation.index_pass
        if preparation.list_pass is not None:
            state = "listing its shards"
        elif passing is not None:
            state = f"indexing {100 * passing.done_bytes // max(1, passing.total_bytes)} %"
        elif preparation.error is not None:
            state = f"failed: {preparation.error}"
        elif preparation.data is not None:
            num_shards, num_records = len(preparation.data.files), preparation.data.rows.num_records
        specs = self.dataset.leaves()[0].schema.specs
        fields = {name: f"{spec.dtype} {spec.shape}" for name, spec in specs.items()}
        return {
            "name": self.name,
            "state": state,
            "num_shards": num_shards,
            "num_records": num_records,
            "fields": fields,
            "consumer_bytes": self._typical_bytes(),
        }

    def _typical_bytes(self) -> int:
        """Memory that a consumer takes with batches of usual size, if the data set is larger than a window."""
        schema = self.dataset.leaves()[0].schema
        options = replace(self.options, batch_size=TYPICAL_BATCH_SIZE)
        slots = options.num_slots * SlotLayout(schema.specs, TYPICAL_BATCH_SIZE).slot_bytes
        return slots + MIN_ARENAS * options.window_records(schema.row_bytes) * schema.row_bytes


def load_catalog(targets: Sequence[str], workers: int | None, workforce: Workforce) -> dict[str, Served]:
    """Import the data sets of ``targets``, and begin to prepare them. Raises ServerError where one is none."""
    catalog: dict[str, Served] = {}
    for target in targets:
        name, dataset = _imported(target)
        if name in catalog:
            raise ServerError(f"two data sets have the name {name!r}: the last is {target}")
        common = dataset.leaves()[0]
        options = StreamOptions(
            1,
            shuffle=common.shuffle,
            seed=common.seed,
            on_corrupt=common.on_corrupt,
            index_cache=common.index_cache,
            storage=common.storage,
            workers=workers,
        )
        catalog[name] = Served(name, dataset, options, Preparation(dataset, options, workforce))
    return catalog


def _imported(target: str) -> tuple[str, AnyDataset]:
    """(name, data set) of ``module:attribute``."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ServerError(f"a data set is named module:attribute, such as mypackage.datasets:train; got {target!r}")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ServerError(
            f"cannot import {target}: {type(error).__name__}: {error}",
            hint="The module must be importable from where the server is started.",
            traceback="" if isinstance(error, ModuleNotFoundError) else traceback.format_exc(),
        ) from None
    if not isinstance(found, (Dataset, Concat, Mix)):
        raise ServerError(
            f"{target} must be a loaderd.Dataset, Mix or Concat, got {type(found).__name__}",
            hint="Such as train = loaderd.Dataset(shards, schema).",
        )
    return name, found
