"""Descriptions of data sets: which records there are, and in which order. Nothing is read here.

A data set is a tree. A leaf is a :class:`Dataset`; a :class:`Concat` puts data sets one behind the other, and a
:class:`Mix` draws from several. Each is checked when it is made, as far as that is possible without reading a shard.
:mod:`loaderd.plan.rows` computes which rows an epoch has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Rational, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from loaderd.errors import OptionError
from loaderd.options import (
    DEFAULT_STORAGE,
    OnCorrupt,
    Refresh,
    Shuffle,
    Storage,
    StreamOptions,
    Unpack,
    as_count,
    as_float,
    as_seed,
    is_count,
    require,
    require_choice,
    suggests_options,
)
from loaderd.plan.rows import ConcatRows, MixRows, RowSequence
from loaderd.plan.sampling import Sample
from loaderd.plan.selection import HASHES, HashSplit, NewestShards, Operation, Range, Selection
from loaderd.redaction import redacted, shown
from loaderd.schema import Derived, FixedRecords, Schema, packed_schema
from loaderd.storage.names import Columns, absolute_names, checked_names

if TYPE_CHECKING:
    from fractions import Fraction

    from loaderd.schema.record_values import RecordValues

Order = Literal["path", "time"]
_COMMON = ("schema", "shuffle", "seed", "on_corrupt", "index_cache", "storage")


@dataclass(frozen=True)
class Dataset:
    """The description of a data set; nothing is read until a :class:`~loaderd.Loader` is made of it.

    The arguments mean what those of ``Loader`` with the same names mean. The batch size, the position and the host
    belong to the consumer, so they are options of the loader. :meth:`take`, :meth:`skip`, :meth:`newest` and
    :meth:`split` add to ``selection``; each works on the records that the ones before it left. If they leave no
    records, making a loader raises NoShardsError.

    ``where``: which records are in the data set, as a :class:`~loaderd.Derived` whose function returns a bool for
    each record; ``inputs`` may name stored features, too. It is called once for each record, when the shards are
    indexed, before ``selection``; what it returned is kept with the index, until its code changes, or what it sees. A
    record that does not pass is not counted; it costs 1 bit of memory and disk.

    ``order``: how shards are sorted: by ``"path"``, or by the ``"time"`` of their last change and then by path. Hosts
    agree on times only if they see the same files, not copies of them.

    ``sample``: each epoch draws some of the records that ``where`` and ``selection`` leave, anew, and the same number
    of them: a share, such as ``1/32`` of n records (n // 32), or a :class:`~loaderd.Sample`, with a weight for each.
    """

    shards: Any
    schema: Schema
    shuffle: bool | Shuffle = True
    seed: int = 0
    on_corrupt: OnCorrupt = "raise"
    index_cache: str = "user"
    refresh: Refresh = "never"
    selection: Selection = ()
    storage: Storage = DEFAULT_STORAGE
    where: Derived | None = None
    order: Order = "path"
    sample: float | Sample | None = None

    def __repr__(self) -> str:
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return f"Dataset({', '.join(f'{name}={redacted(repr(value))}' for name, value in values)})"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"shards": checked_names(self.shards)}
        require(isinstance(self.schema, Schema), "schema", "a loaderd.Schema", self.schema, _schema_hint(self.schema))
        if isinstance(checked["shards"], Columns):
            records = self.schema.records
            if records is None:
                require(False, "the schema of Columns", "one of FixedRecords", self.schema.features)
            else:
                records.by_columns([*checked["shards"].globs])
        require_choice(self.refresh, "refresh", Refresh)
        require_choice(self.order, "order", Order)
        made = isinstance(self.selection, tuple) and all(isinstance(each, Operation) for each in self.selection)
        require(made, "selection", "what take, skip, newest and split make of it", self.selection)
        if self.where is not None:
            must, hint = "a loaderd.Derived of a function and its inputs", "Derived(lambda x: x > 0, 'x')."
            require(isinstance(self.where, Derived), "where", must, self.where, hint)
        object.__setattr__(self, "sample", Sample.of(self.sample))
        _ = self.record_values
        order = self.order_options()
        options = StreamOptions(batch_size=1, workers=1, **order)
        checked.update((name, getattr(options, name)) for name in order)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def order_options(self) -> dict[str, Any]:
        """The options of this data set that ``StreamOptions`` has, too: all sets of a loader agree in them."""
        return {name: getattr(self, name) for name in _COMMON if name != "schema"}

    def take(self, count: int) -> Dataset:
        """The first ``count`` records, or all if there are fewer.

        Records are counted in the order of the files, before any shuffling: shard by shard in the order of the paths
        (folder by folder, however ``shards`` names them), unless ``order`` is another, and from front to back in each
        shard. Records that were found damaged are not counted. Raises OptionError for a ``count`` below 0.
        """
        return self._with(Range("take", count))

    def skip(self, count: int) -> Dataset:
        """All but the first ``count`` records, counted as in :meth:`take`."""
        return self._with(Range("skip", count))

    def newest(self, count: int | Callable[[int], int] | None = None, *, shards: int | None = None) -> Dataset:
        """The last ``count`` records, counted as in :meth:`take`, or of the last ``shards`` shards; all if fewer.

        ``count`` may be a function of the number of records, such as a :class:`~loaderd.PowerLaw`: it is called when
        an epoch begins that more shards belong to, and must depend on its argument alone.

        With ``refresh="epoch"``, each epoch has the records that are newest then; so the shards must be in the order
        of their age, by their paths or by ``order="time"``. Shards are counted that hold a record of this data set.
        Raises OptionError unless just one of both is given.
        """
        if (count is None) == (shards is None):
            raise OptionError(
                f"what newest takes must be a number of records or shards=, got {count} and shards={shards}",
                hint="newest(500_000), or newest(shards=20).",
            )
        return self._with(Range("newest", count) if count is not None else NewestShards(cast("int", shards)))

    def split(
        self, *fractions: float, by: Literal["record", "member", "shard"] = "record", seed: int = 0
    ) -> tuple[Dataset, ...]:
        """One data set (a side) for each of ``fractions``; each record is on exactly one side, always the same one.

        The side of a record depends on ``seed``, the name of its shard without folders, and its number in the shard.
        So it stays the same when shards are added or moved. A renamed shard is split anew, and shards of the same
        name in two folders are split alike. The sizes are not exact: of n records a side gets its fraction ± √n.

        ``by="shard"`` puts each shard on one side as a whole. Then the records of a game stay together, and only
        loaders of that side read the shard, while a split by records leaves some of every block to each side. The
        hash of each shard alone decides, whatever the others are: of n shards a side gets its fraction ± √n. So few
        shards may be divided far from the fractions, eight of one size at 0.75 and 0.25 in halves; a side may get
        none: making a loader of it raises NoShardsError. ``by="member"`` does so with each member of a tar: a game
        stays together, and each tar is on all sides. Shards of other kinds stay whole.

        A side may be split again, into parts that are independent of this split. Raises OptionError where the
        fractions are not all above 0, or don't sum to 1.
        """
        for fraction in fractions:
            require(isinstance(fraction, Real) and fraction > 0, "each fraction of split", "above 0", fraction)
            require(fraction <= 1, "each fraction of split", "at most 1", fraction)
        require(abs(sum(fractions) - 1) < 1e-9, "the sum of the fractions of split", "1", sum(fractions))
        is_known = isinstance(by, str) and by in ("record", "member", "shard")
        require(is_known, "by", "record, member or shard", by)
        seed = as_seed(seed)
        level = sum(isinstance(operation, HashSplit) for operation in self.selection)
        edges = [0, *(round(part * HASHES) for part in accumulate(fractions[:-1])), HASHES]
        return tuple(self._with(HashSplit(by, seed, level, start, stop)) for start, stop in pairwise(edges))

    def _with(self, operation: Operation) -> Dataset:
        return replace(self, selection=(*self.selection, operation))

    @cached_property
    def record_values(self) -> RecordValues | None:
        """What is computed of each record when its shard is indexed. Raises SchemaError if it cannot be."""
        weight = self.sample.weight if isinstance(self.sample, Sample) else None
        if self.where is None and weight is None:
            return None
        from loaderd.schema.record_values import RecordValues  # for those who need it

        return RecordValues.of(self.schema, self.where, weight)

    @property
    def grows(self) -> bool:
        """Whether each epoch is made of the shards that there are when it begins."""
        return self.refresh == "epoch"

    def leaves(self) -> list[Dataset]:
        """The data sets that this one is made of, in order."""
        return [self]

    def with_leaves(self, change: Callable[[Dataset], Dataset]) -> Dataset:
        """The same data set, with each of :meth:`leaves` replaced by what ``change`` returns for it."""
        return change(self)

    def names(self) -> list[str]:
        """The name of each of :meth:`leaves`: "" for a data set that stands alone."""
        return [""]

    def combine(self, leaves: Iterator[RowSequence]) -> RowSequence:
        """The rows of this data set, from those of each of :meth:`leaves` in order."""
        return next(leaves)


class _Combined:
    """What Concat and Mix share: their sets must be alike in all that a batch or a window depends on."""

    def parts(self) -> dict[str, AnyDataset]:
        """The data sets that are joined, by name."""
        raise NotImplementedError

    def _check_parts(self) -> None:
        what, parts = type(self).__name__, list(self.parts().values())
        require(len(parts) > 0, f"the sets of a {what}", "at least one", parts)
        for part in parts:
            require(isinstance(part, (Dataset, _Combined)), f"a set of a {what}", "a Dataset, Concat or Mix", part)
        for name in _COMMON:
            values = [getattr(leaf, name) for leaf in self.leaves()]
            other = next((value for value in values if value != values[0]), None)
            if other is not None:
                got = _difference(values[0], other) if name == "schema" else shown(values, 300)
                raise OptionError(
                    f"the sets of a {what} must agree in {name}, got {got}",
                    hint="They share batches and windows. Use dataclasses.replace(dataset, …).",
                )

    @property
    def schema(self) -> Schema:
        """The schema, which all sets have in common."""
        return self.leaves()[0].schema

    @property
    def grows(self) -> bool:
        """Whether any of the sets grows."""
        return any(part.grows for part in self.parts().values())

    def leaves(self) -> list[Dataset]:
        return [leaf for part in self.parts().values() for leaf in part.leaves()]

    def names(self) -> list[str]:
        """The name of each of :meth:`leaves`, such as "0" or "a.0"."""
        return [".".join(filter(None, (own, name))) for own, part in self.parts().items() for name in part.names()]


@dataclass(frozen=True)
class Concat(_Combined):
    """Data sets one behind the other: an epoch is one epoch of each.

    They must agree in schema, shuffle, seed, on_corrupt, index_cache and storage, and must not grow
    (``refresh="epoch"``); else OptionError is raised. A shuffle window may hold the end of one and the beginning of
    the next.
    """

    sets: Sequence[AnyDataset]

    def __post_init__(self) -> None:
        is_many = isinstance(self.sets, Iterable) and not isinstance(self.sets, (str, Mapping))
        require(is_many, "the sets of a Concat", "a list of data sets", self.sets)
        object.__setattr__(self, "sets", tuple(self.sets))
        self._check_parts()
        if self.grows:
            raise OptionError('the sets of a Concat must not grow: refresh must be "never"')

    def parts(self) -> dict[str, AnyDataset]:
        return {str(number): part for number, part in enumerate(self.sets)}

    def with_leaves(self, change: Callable[[Dataset], Dataset]) -> Concat:
        return Concat([part.with_leaves(change) for part in self.sets])

    def combine(self, leaves: Iterator[RowSequence]) -> RowSequence:
        return ConcatRows([part.combine(leaves) for part in self.sets])


@dataclass(frozen=True)
class Mix(_Combined):
    """Data sets in proportion to their weights, mixed within each shuffle window.

    ``weights``: by name; they must sum to 1. For weights that change, a mapping of epochs to such weights, which hold
    from that epoch on: ``{0: {"a": 1.0, "b": 0.0}, 10: {"a": 0.5, "b": 0.5}}``. ``sets``: the data sets by name; they
    must agree in schema, shuffle, seed, on_corrupt, index_cache and storage, and must be shuffled. No name has a dot.
    ``epoch_records``: records of an epoch of the mix (None: as many as there are in all sets together).

    Each set has epochs of its own: its records come in its own order, and start again when all of them have come,
    wherever the mix stands. Every window holds the share of each set, exact to one record. The order in which the
    sets are given does not matter. A set with ``refresh="epoch"`` begins a new epoch with each of the mix; then
    ``epoch_records`` must be given, and the mix cannot be a set of another one. Raises OptionError for arguments that
    break these rules.
    """

    weights: Mapping[Any, Any]
    sets: Mapping[str, AnyDataset]
    epoch_records: int | None = None
    schedule: Mapping[int, tuple[Fraction, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(isinstance(self.sets, Mapping), "the sets of a Mix", "a mapping of names to data sets", self.sets)
        # A position names a set in a set "a.b": no other one may have that name.
        named = all(isinstance(name, str) and name and "." not in name for name in self.sets)
        require(named, "the names of the sets", 'text that is not empty, without a "."', list(self.sets))
        # By name: the order of the records must not depend on the order of a dict, which may be that of a folder.
        object.__setattr__(self, "sets", MappingProxyType(dict(sorted(self.sets.items()))))
        self._check_parts()
        if any(part.grows and not isinstance(part, Dataset) for part in self.sets.values()):
            raise OptionError("a set of a Mix must not be a Mix that grows", hint="Make one Mix of all the sets.")
        if self.epoch_records is not None:
            records = as_count(self.epoch_records, "epoch_records", "a positive integer or None")
            object.__setattr__(self, "epoch_records", records)
        if not self.leaves()[0].shuffle:
            raise OptionError("the sets of a Mix must be shuffled", hint="Concat keeps the order of the files.")
        if self.epoch_records is None and self.grows:
            raise OptionError(
                "a Mix of a data set that grows needs epoch_records", hint="How many records is an epoch of it?"
            )
        require(isinstance(self.weights, Mapping), "weights", "a mapping of names to numbers", self.weights)
        change = all(is_count(key, 0) for key in self.weights)
        by_epoch = self.weights if change else {0: self.weights}
        if 0 not in by_epoch:
            raise OptionError(f"weights must begin at epoch 0, got the epochs {list(by_epoch)}")
        schedule = {int(epoch): self._exact(weights) for epoch, weights in sorted(by_epoch.items())}
        object.__setattr__(self, "schedule", MappingProxyType(schedule))
        # A copy: replace() computes the schedule anew, and by then the caller may have changed the dict.
        copied = {epoch: dict(weights) for epoch, weights in by_epoch.items()}
        object.__setattr__(self, "weights", copied if change else copied[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "sets": dict(self.sets), "schedule": dict(self.schedule)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not checked again: what was one object may be two by now, and some that are alike do not count as equal.
        proxies = {name: MappingProxyType(state[name]) for name in ("sets", "schedule")}
        vars(self).update(state, **proxies)

    def _exact(self, weights: Mapping[str, float]) -> tuple[Fraction, ...]:
        from fractions import Fraction  # imports decimal, too: only a Mix needs them

        require(isinstance(weights, Mapping), "weights", "a mapping of names to numbers", weights)
        if set(weights) != set(self.sets):
            raise OptionError(f"weights must name the sets {sorted(self.sets)}, got {list(weights)}")
        for name, weight in weights.items():
            as_float(weight, f"the weight of {name!r}", "a number of at least 0")
        total = sum(float(weight) for weight in weights.values())
        if abs(total - 1) > 1e-6:
            raise OptionError(f"the weights of a Mix must sum to 1, got {total:.9g}: {dict(weights)}")
        # Older Pythons cannot make a Fraction of numpy's float32.
        numbers = [w if isinstance(w, Rational) else float(w) for w in (weights[name] for name in self.sets)]
        exact = [Fraction(number).limit_denominator(10**9) for number in numbers]
        return tuple(weight / sum(exact) for weight in exact)

    def parts(self) -> dict[str, AnyDataset]:
        return dict(self.sets)

    def with_leaves(self, change: Callable[[Dataset], Dataset]) -> Mix:
        return replace(self, sets={name: part.with_leaves(change) for name, part in self.sets.items()})

    def combine(self, leaves: Iterator[RowSequence]) -> RowSequence:
        rows = [part.combine(leaves) for part in self.sets.values()]
        anew = [part.grows for part in self.sets.values()]
        return MixRows(rows, self.epoch_records or sum(one.num_records for one in rows), self.schedule, anew)


for _kind in (Dataset, Concat, Mix):
    _kind.__init__ = suggests_options(_kind.__init__)  # type: ignore[method-assign]

AnyDataset = Dataset | Concat | Mix


def delivered_schema(schema: Schema, unpack: Unpack) -> Schema:
    """What the workers of a loader with this ``unpack`` make of the rows of ``schema``."""
    return packed_schema(schema, for_device=True) if unpack == "device" else schema


def anchored(dataset: AnyDataset) -> AnyDataset:
    """The same data set with absolute paths, for another process to read.

    Raises NoShardsError for a relative path if the working directory has been deleted.
    """
    return dataset.with_leaves(lambda leaf: replace(leaf, shards=absolute_names(leaf.shards)))


def joined_text(dataset: AnyDataset, name: str = "") -> dict[str, str]:
    """The weights of each Mix in ``dataset``, as text by name, for a position's ``of``; ``name``: its own name."""
    if isinstance(dataset, Dataset):
        return {}
    found = {}
    if isinstance(dataset, Mix):
        weights = {
            epoch: dict(zip(dataset.sets, map(str, of), strict=True)) for epoch, of in dataset.schedule.items()
        }
        key = " ".join(filter(None, (name, "weights")))
        found[key] = f"{weights}, epochs of {dataset.epoch_records or 'all'} records"
    for own, part in dataset.parts().items():
        found.update(joined_text(part, ".".join(filter(None, (name, own)))))
    return found


def _difference(one: Schema, other: Schema) -> str:
    """The first difference between two schemas, as text: a whole schema would fill several screens."""
    for part in ("features", "fields", "intermediates"):
        mine, theirs = getattr(one, part), getattr(other, part)
        for name in {**mine, **theirs}:
            found = [shown(parts[name], 200) if name in parts else "none" for parts in (mine, theirs)]
            if mine.get(name) != theirs.get(name):
                return f"{part}[{name!r}] {found[0]} and {found[1]}"
        if mine != theirs or list(mine) != list(theirs):
            return f"{part} of the same names in another order, or at other places"
    raise AssertionError("they are equal")


def _schema_hint(got: Any) -> str:
    if callable(got) and not isinstance(got, type):
        return f"Call it: {getattr(got, '__name__', 'it')}()."
    if isinstance(got, (np.dtype, FixedRecords)):
        records = "loaderd.FixedRecords(dtype)" if isinstance(got, np.dtype) else "records"
        return f"loaderd.Schema.of_stored({records}) delivers each field as it is stored."
    return (
        "Of what tf.io.parse_example takes, loaderd_tf.schema_from_features(features, …) makes one; of a TFRecord "
        "shard, `loaderd inspect SHARD --features` proposes one."
    )


@dataclass(frozen=True)
class StreamDescription:
    """A stream: which data, in which batches, and from where on (``start``: a position as JSON).

    ``several_readers``: whether more than one consumer reads its slots. ``max_memory``: bytes that its windows and
    batches may take. ``row_bytes``: of a row on the server that has the records, which decides the size of the
    windows; None: that of the schema. ``of_server``: whether the daemon has other consumers, too.
    """

    dataset: AnyDataset
    options: StreamOptions
    start: str | None = None
    several_readers: bool = False
    max_memory: int | None = None
    row_bytes: int | None = None
    of_server: bool = False

    @property
    def schema(self) -> Schema:
        """What its workers make of the rows."""
        return delivered_schema(self.dataset.schema, self.options.unpack)
