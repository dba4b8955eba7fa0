"""What a server serves: the data sets of the user's modules, by name, each with its data.

The command line names a data set by module and attribute, ``mypackage.datasets:train``; consumers know it as
``train``. So no code comes from outside. The shards of a data set are listed once, when the server starts, so that
all consumers see the same data; a daemon that takes another's place leaves later ones out (``shard_note``). (Where
data sets grow, each epoch lists them again.)
"""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

from loaderd.daemon.delivery.opened_stream import MIN_ARENAS
from loaderd.daemon.pool.workforce import Workforce
from loaderd.daemon.preparing.local_data import Data
from loaderd.daemon.preparing.local_preparation import LocalPreparation
from loaderd.daemon.preparing.preparation import Prepare
from loaderd.daemon.shard_note import Found, ShardNote
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, StreamDescription, with_schema
from loaderd.errors import LoaderdError, OptionError, ServerError
from loaderd.memory.anonymous import SharedMemory
from loaderd.memory.layout import SlotLayout
from loaderd.options import StreamOptions
from loaderd.pickling import pickled
from loaderd.plan.passes import Listing
from loaderd.plan.positions import listing_in
from loaderd.progress import ProgressLines
from loaderd.protocol.messages import DataIs, Welcome
from loaderd.remote.tables import welcome_to
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import ShardIndex
from loaderd.subscription import Subscription

_logger = logging.getLogger("loaderd")

TYPICAL_BATCH_SIZE = 512
_MOST_LISTED = 4
_MOST_PREPARED = 16  # at a time: each takes its share of the workers' time
_LISTED_ANEW_S = 2.0
# Who waits for a listing asks again within 5 s: see ``remote.servers``.
_COME_FOR_S, _WAITED_FOR_S = 10.0, 30.0
_FIRST_RETRY_S, _MAX_RETRY_S = 5.0, 300.0


@dataclass
class Served:
    """The data set ``name``. ``options``: those that it sets itself, and how many workers there are."""

    name: str
    dataset: AnyDataset
    options: StreamOptions
    preparation: LocalPreparation
    note: ShardNote
    _is_noted: bool = False
    _listed: dict[LocalPreparation, float] = field(default_factory=dict)
    """Of a data set that grows: the listings asked for, and when last (``time.monotonic``), the latest at the end."""
    _had: set[LocalPreparation] = field(default_factory=set)
    """Those of ``_listed`` that somebody has had since they were finished."""
    _failure: LoaderdError | None = None
    """The error of the last preparation that is finished; None: it succeeded, or none is finished."""
    _lines: ProgressLines = field(init=False)
    _retry_at_s: float = 0.0
    _retry_s: float = _FIRST_RETRY_S

    def __post_init__(self) -> None:
        self._lines = ProgressLines(partial(_logger.info, "%s: %s", self.name))

    def advance(self, workforce: Workforce) -> list[str]:
        """Go on with all preparations, and log how far the first one is; returns their warnings."""
        if self.preparation.progress is not None:
            self._lines(self.preparation.progress)
        else:
            self._lines.close()
        for each in (self.preparation, *self._listed):
            each.advance()
        left_out = ""
        if self.preparation.data is not None and not self._is_noted:
            self._is_noted = True
            left_out = self.preparation.data.left_out
            if (shards := self.preparation.found()) != self.note.shards.get(self.name):
                self.note.add(self.name, shards)
        found = [text for each in (self.preparation, *self._listed) for text in each.take_warnings()]
        found += filter(None, [left_out])
        if found:
            self._lines.said()
        if self.preparation.finished:
            self._retry_if_failed(workforce)
        self._drop_unwanted()
        return found

    @property
    def _found_before(self) -> Found | None:
        """The shards that the data set is to have, if they were found before."""
        return _noted(self.name, self.dataset, self.note)

    def _retry_if_failed(self, workforce: Workforce) -> None:
        """Prepare again after a failure, less and less often: storage may come back, or missing shards be added."""
        now_s = time.monotonic()
        failure, before = self.preparation.error, self._failure
        self._failure = failure
        if failure is None:
            self._retry_s = _FIRST_RETRY_S
        elif failure is not before:
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        elif now_s >= self._retry_at_s:
            self.preparation = LocalPreparation(
                self.dataset, self.options, workforce, found_before=self._found_before
            )

    def prepare(
        self, description: StreamDescription, workforce: Workforce
    ) -> tuple[LocalPreparation, Prepare | None]:
        """The preparation of a stream's data; and, if the data set grows, a function that makes another one."""
        if not self.dataset.grows:
            return self.preparation, None

        def prepare(listing: Listing | None, known: Mapping[ShardFile, ShardIndex] | None = None) -> LocalPreparation:
            dataset, options = description.dataset, description.options
            return LocalPreparation(dataset, options, workforce, listing, known, self._found_before)

        return prepare(listing_in(description.start)), prepare

    def data(self, listing: Listing | None, workforce: Workforce) -> tuple[DataIs, SharedMemory | None]:
        """The data of ``listing`` (None: of the shards there are now) in memory, pickled: see :func:`data_of`.

        With None in place of memory, DataIs says why the data are not there yet. Raises LoaderdError if they failed.
        """
        found = self._prepared(listing, workforce)
        if found is None:
            return DataIs(0, f"the server is preparing {_MOST_PREPARED} other listings of data set {self.name}"), None
        if found.error is not None:
            raise found.error
        if not found.finished:
            return DataIs(0, f"data set {self.name} is being {found.doing}"), None
        data = pickled((self.dataset, self.options, found.sets, found.indexes, found.listing), self.dataset)
        # ``data`` is a pickle in a pickle: unpickling it imports modules, so ``sys.path`` must be set before.
        path = [each for each in sys.path if isinstance(each, str)]
        contents = pickle.dumps((path, data))
        return DataIs(len(contents), ""), SharedMemory.holding("data", contents)

    def _prepared(self, listing: Listing | None, workforce: Workforce) -> LocalPreparation | None:
        """The preparation of a listing, begun if there is none; None: too many others are under way."""
        if not self.dataset.grows:
            return self.preparation
        found = next((each for each in self._listed if each.listing == listing and self._lasts(each)), None)
        if found is None:
            if sum(not each.finished for each in self._listed) >= _MOST_PREPARED:
                return None
            known = next((each.indexes for each in reversed(self._listed) if each.indexes), self.preparation.indexes)
            found = LocalPreparation(self.dataset, self.options, workforce, listing, known, self._found_before)
        self._listed.pop(found, None)
        self._listed[found] = time.monotonic()
        if found.finished:
            self._had.add(found)
        return found

    def _lasts(self, prepared: LocalPreparation) -> bool:
        """Whether it may answer further questions.

        Errors, and the shards there are now, may do so only for a moment; but whoever waits may come later than that.
        """
        if prepared.listing is not None and prepared.error is None:
            return True
        return prepared.age_s < (_LISTED_ANEW_S if prepared in self._had else _COME_FOR_S)

    def _drop_unwanted(self) -> None:
        """Drop listings that nobody waits for, the oldest first, while there are more than ``_MOST_LISTED``."""
        since_s = time.monotonic() - _WAITED_FOR_S
        unwanted = [each for each, asked_s in self._listed.items() if asked_s < since_s or not self._lasts(each)]
        for each in unwanted[: max(0, len(self._listed) - _MOST_LISTED)]:
            each.cancel()
            del self._listed[each]
            self._had.discard(each)

    def welcome(self) -> Welcome:
        """What a consumer must know to ask for batches."""
        schema = self.dataset.leaves()[0].schema
        return welcome_to(self.dataset, unpacking_schema(schema), schema.row_bytes)

    def stream(self, wanted: Subscription, start: str | None, max_memory: int | None) -> StreamDescription:
        """The stream that a consumer asks for. Raises OptionError where its options are not for data that grow."""
        dataset = self.dataset
        if wanted.packed:
            dataset = with_schema(dataset, packed_schema(dataset.leaves()[0].schema))
        options = replace(
            self.options,
            batch_size=wanted.batch_size,
            epochs=wanted.epochs,
            remainder=wanted.remainder,
            shard=wanted.shard,
            # The members of a group may all hold different batches, and each may wait for one more.
            held_batches=(wanted.held_batches + wanted.is_group) * wanted.consumers,
        )
        if dataset.grows:
            options.check_growing()
            if wanted.is_group:
                raise OptionError(f"sharing={wanted.sharing!r} is not for data that grow: each consumer lists them")
        return StreamDescription(
            dataset, options, start, several_readers=wanted.is_group, max_memory=max_memory, of_server=True
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
        """Bytes that a consumer takes with batches of a usual size, if the data set is larger than a window."""
        schema = self.dataset.leaves()[0].schema
        options = replace(self.options, batch_size=TYPICAL_BATCH_SIZE)
        slots = options.num_slots * SlotLayout(schema.specs, TYPICAL_BATCH_SIZE).slot_bytes
        return slots + MIN_ARENAS * options.window_records(schema.row_bytes) * schema.row_bytes


def _noted(name: str, dataset: AnyDataset, note: ShardNote) -> Found | None:
    """The shards that a note says the data set has; None if the user's module joins other sets by now."""
    found = note.shards.get(name)
    fits = found is not None and [each is None for each in found] == [leaf.grows for leaf in dataset.leaves()]
    return found if fits else None


def data_of(contents: bytes) -> tuple[AnyDataset, Data]:
    """The way back from :meth:`Served.data`. Sets ``sys.path`` to the daemon's: modules are imported from there."""
    sys.path[:], data = pickle.loads(contents)
    dataset, options, sets, indexes, listing = pickle.loads(data)
    return dataset, Data(dataset, options, sets, indexes.__getitem__, listing)


def load_catalog(
    targets: Sequence[str], workers: int | None, workforce: Workforce, note: ShardNote
) -> dict[str, Served]:
    """Import the data sets of ``targets``, and begin to prepare them. Raises ServerError if one cannot be served."""
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
        preparation = LocalPreparation(dataset, options, workforce, found_before=_noted(name, dataset, note))
        catalog[name] = Served(name, dataset, options, preparation, note)
    return catalog


def _imported(target: str) -> tuple[str, AnyDataset]:
    """(name, data set) of ``module:attribute``."""
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
    if names:
        return f"The data sets in {module.__name__} are {', '.join(names)}."
    return f"There is no data set in {module.__name__}; make one, such as train = loaderd.Dataset(shards, schema)."
