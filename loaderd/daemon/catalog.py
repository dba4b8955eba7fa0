"""What a server serves: the data sets of the user's modules, by name, each with its data.

The command line names a data set by module and attribute, ``mypackage.datasets:train``; consumers know it as
``train``. So no code comes from outside. The shards of a data set are listed once, when the server starts or is
reloaded, so that all new consumers see the same data; a daemon that takes another's place leaves later shards out. A
consumer whose position belongs to the shards of an earlier start gets those (``indexing.shard_manifest``). (Where
data sets grow, each epoch lists them again.)
"""

from __future__ import annotations

import importlib
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

from loaderd.daemon.indexing.local_data import LocalData, digest_names
from loaderd.daemon.indexing.preparation import LocalPreparation, Prepare
from loaderd.daemon.indexing.shard_manifest import Manifest, Manifests
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, StreamDescription
from loaderd.errors import LoaderdError, OptionError, ServerError
from loaderd.formats.shard_index import Indexes
from loaderd.ipc.messages import Welcome
from loaderd.ipc.subscription import Subscription
from loaderd.machine import in_mib
from loaderd.options import StreamOptions
from loaderd.plan.passes import Listing
from loaderd.plan.positions import Position
from loaderd.progress import ProgressLines
from loaderd.remote.tables import welcome_to
from loaderd.restarts import Backoff
from loaderd.schema.packed import unpacking_schema
from loaderd.shm.layout import SlotLayout

_logger = logging.getLogger("loaderd")

TYPICAL_BATCH_SIZE = 512
_MOST_EARLIER = 4
HOW_TRAININGS_END = "trainings that run on it end when the server is started again after shards were added"


class ServedDataset:
    """The data set ``name`` of ``target``. ``options``: those that it sets itself, and how many workers there are.

    ``manifests``: those of this server and of the ones before it; None: none are kept. ``current``: the manifest of
    the shards that there are; None: they are not known yet.
    """

    def __init__(
        self,
        name: str,
        target: str,
        dataset: AnyDataset,
        options: StreamOptions,
        worker_manager: WorkerManager,
        manifests: Manifests | None,
        current: Manifest | None,
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.options = options
        self.current = current
        self.kept = ""
        """The key of ``current``, if it was kept."""
        self.is_ready = False
        self._target = target
        self._worker_manager = worker_manager
        self._manifests = manifests
        self.preparation = self._prepared(found_before=self._found_before)
        self._earlier: dict[str, LocalPreparation] = {}
        """By key, the data of earlier manifests that consumers came back to, the last one at the end."""
        self._failure: LoaderdError | None = None
        """The error of the last preparation that is finished; None: it succeeded, or none is finished."""
        self._lines = ProgressLines(partial(_logger.info, "%s: %s", name))
        self._retry_at_s = 0.0
        self._retries = Backoff(5.0, 300.0)

    def _prepared(self, **of: Any) -> LocalPreparation:
        return LocalPreparation(self.dataset, self.options, self._worker_manager, **of)

    def advance(self) -> list[str]:
        """Go on with all preparations, and log how far the first one is; returns their warnings."""
        if self.preparation.progress is not None:
            self._lines(self.preparation.progress)
        else:
            self._lines.close()
        under_way = (self.preparation, *self._earlier.values())
        for each in under_way:
            each.advance()
        warnings = [text for each in under_way for text in each.take_warnings()]
        if self.preparation.data is not None and not self.is_ready:
            self.is_ready = True
            self._log_what_there_is(self.preparation.data)
            warnings += filter(None, [self.preparation.data.left_out])
            warnings += self._note(self.preparation.data)
        if self.preparation.finished:
            self._retry_if_failed()
        return warnings

    def _log_what_there_is(self, data: LocalData) -> None:
        of_what = f"{data.rows.num_records:,} records in {data.num_shards:,} shards"
        fields = ", ".join(f"{field} {spec}" for field, spec in self._fields().items())
        _logger.info("%s: %s; fields: %s", self.name, of_what, fields)
        takes = in_mib(self._typical_bytes())
        _logger.info("%s: a consumer with batches of %d takes %s", self.name, TYPICAL_BATCH_SIZE, takes)

    def _note(self, data: LocalData) -> list[str]:
        self.current = manifest = Manifest.of(self._target, data.digests, self.preparation.fixed_sets)
        if self._manifests is None or not data.digests:
            return []
        if error := self._manifests.add(manifest):
            return [f"the list of its shards cannot be kept ({error}): {HOW_TRAININGS_END}"]
        self.kept = manifest.key
        return []

    @property
    def _found_before(self) -> list[list[str] | None] | None:
        """The shards that the data set is to have, if they were found before.

        None also if the user's module joins other sets by now.
        """
        current = self.current
        return current.uris if current is not None and current.fits(self.dataset) else None

    def _manifest_of(self, of: Mapping[str, Any]) -> Manifest | None:
        """The manifest of the shards that a position belongs to. Marks it as used."""
        digests = self._digests_in(of)
        if self._manifests is None or digests is None:
            return None
        self._manifests.touch(self._target, digests)
        found = self._manifests.find(self._target, digests)
        return found if found is not None and found.fits(self.dataset) else None

    def _digests_in(self, of: Mapping[str, Any]) -> dict[str, str] | None:
        """What a position's ``of``, which anybody may have sent, says of the shards; None: nothing."""
        digests = {name: of.get(name) for name in digest_names(self.dataset)}
        is_there = bool(digests) and all(isinstance(value, str) for value in digests.values())
        return cast("dict[str, str]", digests) if is_there else None

    def earlier(self, of: Mapping[str, Any]) -> LocalPreparation | None:
        """The preparation of the shards of a position, by its ``of``; None: those that there are now will do.

        Call it when :attr:`preparation` is finished. Also None if no manifest says which shards these were.
        """
        data = self.preparation.data
        if data is not None and data.digests == self._digests_in(of):
            return None
        manifest = self._manifest_of(of)
        if manifest is None:
            return None
        found = self._earlier.pop(manifest.key, None)
        if found is None or found.error is not None:
            found = self._prepared(known=self.preparation.indexes or None, manifest=manifest)
        self._earlier[manifest.key] = found
        for key in [key for key, each in self._earlier.items() if each.finished][:-_MOST_EARLIER]:
            del self._earlier[key]
        return found

    def mark_used(self, of: Mapping[str, Any]) -> None:
        """Note that a stream whose positions have this ``of`` goes on."""
        digests = self._digests_in(of)
        if self._manifests is not None and digests is not None:
            self._manifests.touch(self._target, digests)

    def _retry_if_failed(self) -> None:
        """Prepare again after a failure, less and less often: storage may come back, or missing shards be added."""
        now_s = time.monotonic()
        failure, before = self.preparation.error, self._failure
        self._failure = failure
        if failure is None:
            self._retries.reset()
        elif failure is not before:
            self._retry_at_s = now_s + self._retries.next_s()
            if str(failure) != str(before):
                _logger.error("%s: failed: %s", self.name, failure)
        elif now_s >= self._retry_at_s:
            self.preparation = self._prepared(found_before=self._found_before)

    def prepare(self, description: StreamDescription) -> tuple[LocalPreparation, Prepare | None]:
        """The preparation of a stream's data; and, if the data set grows, a function that makes another one."""
        if not self.dataset.grows:
            return self.preparation, None
        start = Position() if description.start is None else Position.from_json(description.start)
        manifest = self._manifest_of(start.of)  # of the sets in it that do not grow

        def prepare(listing: Listing | None, known: Indexes | None = None) -> LocalPreparation:
            dataset, options = description.dataset, description.options
            before = None if manifest is not None else self._found_before
            return LocalPreparation(dataset, options, self._worker_manager, listing, known, before, manifest)

        return prepare(start.listing), prepare

    def welcome(self) -> Welcome:
        schema = self.dataset.leaves()[0].schema
        return welcome_to(self.dataset, unpacking_schema(schema), schema.row_bytes)

    def stream(self, wanted: Subscription, start: str | None, max_memory: int | None) -> StreamDescription:
        """The stream that a consumer asks for. Raises OptionError where its options are not for data that grow."""
        options = replace(
            self.options,
            batch_size=wanted.batch_size,
            epochs=wanted.epochs,
            remainder=wanted.remainder,
            shard=wanted.shard,
            unpack=wanted.unpack,
            # The members of a group may all hold different batches, and each may wait for one more.
            held_batches=(wanted.held_batches + wanted.is_group) * wanted.consumers,
        )
        if self.dataset.grows:
            options.check_growing()
            if wanted.is_group:
                raise OptionError(f"sharing={wanted.sharing!r} is not for data that grow: each consumer lists them")
        return StreamDescription(
            self.dataset, options, start, several_readers=wanted.is_group, max_memory=max_memory, of_server=True
        )

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows of the data set: plain values."""
        preparation, state = self.preparation, "ready"
        num_shards, num_records = 0, 0
        if self._failure is not None:
            state = f"failed: {self._failure}"
        elif preparation.progress is not None and preparation.progress.num_bytes:
            state = f"indexing {100 * preparation.progress.done_bytes // preparation.progress.num_bytes} %"
        elif not preparation.finished:
            state = "listing its shards"
        elif preparation.data is not None:
            num_shards, num_records = preparation.data.num_shards, preparation.data.rows.num_records
        return {
            "name": self.name,
            "state": state,
            "num_shards": num_shards,
            "num_records": num_records,
            "manifest": self.kept,
            "fields": self._fields(),
        }

    def _fields(self) -> dict[str, str]:
        specs = self.dataset.leaves()[0].schema.specs
        return {name: f"{spec.dtype} {spec.shape}" for name, spec in specs.items()}

    def _typical_bytes(self) -> int:
        """Bytes that a consumer takes with batches of a usual size, if the data set is larger than a window."""
        schema = self.dataset.leaves()[0].schema
        options = replace(self.options, batch_size=TYPICAL_BATCH_SIZE)
        slots = options.num_slots * SlotLayout(schema.specs, TYPICAL_BATCH_SIZE).slot_bytes
        return slots + options.num_windows * options.window_records(schema.row_bytes) * schema.row_bytes


def load_catalog(
    targets: Sequence[str],
    workers: int | None,
    worker_manager: WorkerManager,
    manifests: Manifests | None,
    current: Mapping[str, str],
) -> dict[str, ServedDataset]:
    """Import the data sets of ``targets``, and begin to prepare them. Raises ServerError if one cannot be served.

    ``current``: the keys of the manifests, by name, of the data sets that the daemon before this one served.
    """
    catalog: dict[str, ServedDataset] = {}
    for target, (name, dataset) in zip(targets, imported_datasets(targets).items(), strict=True):
        options = stream_options(dataset, workers)
        key = current.get(name)
        manifest = None if manifests is None or key is None else manifests.get(key)
        catalog[name] = ServedDataset(name, target, dataset, options, worker_manager, manifests, manifest)
    return catalog


def stream_options(dataset: AnyDataset, workers: int | None) -> StreamOptions:
    """What a data set says itself of how it is read."""
    leaf = dataset.leaves()[0]
    return StreamOptions(
        1,
        shuffle=leaf.shuffle,
        seed=leaf.seed,
        on_corrupt=leaf.on_corrupt,
        index_cache=leaf.index_cache,
        storage=leaf.storage,
        workers=workers,
    )


def imported_datasets(targets: Sequence[str]) -> dict[str, AnyDataset]:
    """The data sets of ``targets``, by name, in their order. Raises ServerError if one cannot be served."""
    datasets: dict[str, AnyDataset] = {}
    for target in targets:
        name, dataset = imported_dataset(target)
        if name in datasets:
            raise ServerError(f"two data sets have the name {name!r}: the last is {target}")
        datasets[name] = dataset
    return datasets


def imported_dataset(target: str) -> tuple[str, AnyDataset]:
    """(name, data set) of ``module:attribute``. Raises ServerError if it cannot be served."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ServerError(f"a data set is named module:attribute, such as mypackage.datasets:train; got {target!r}")
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise ServerError(
            f"cannot import {target}: {type(error).__name__}: {error}",
            hint="The module must be importable from where the server is started.",
            traceback="" if isinstance(error, ModuleNotFoundError) else traceback.format_exc(),
        ) from None
    try:
        found = attrgetter(name)(imported)
    except AttributeError as error:
        raise ServerError(f"cannot serve {target}: {error}", hint=_data_sets_of(imported)) from None
    if not isinstance(found, (Dataset, Concat, Mix)):
        raise ServerError(
            f"{target} must be a loaderd.Dataset, Mix or Concat, got {type(found).__name__}",
            hint=_data_sets_of(imported),
        )
    return name, found


def _data_sets_of(module: ModuleType) -> str:
    """A hint for a user who named something else: the data sets in a module."""
    names = sorted(name for name, value in vars(module).items() if isinstance(value, (Dataset, Concat, Mix)))
    return f"The data sets in {module.__name__} are {', '.join(names)}." if names else ""
