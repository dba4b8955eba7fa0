"""The data of a stream: the shards of its sets, their tables, and the rows of it all.

Blocks and shards are numbered through all sets. The listing says which shards of a set that grows make an epoch,
so that a loader can go back to a position in that epoch when there are more shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, takewhile

import numpy as np
import numpy.typing as npt

from loaderd.daemon.indexing.block_table import BlockTable
from loaderd.daemon.indexing.index_pass import (
    MAX_NAMED_DAMAGES,
    MAX_REPORTED_DAMAGES,
    count_damaged,
    damage_error,
    version_error,
)
from loaderd.dataset import AnyDataset, Dataset, joined_text
from loaderd.errors import Damage, LoaderdError, NoShardsError, OptionError, WorkerError
from loaderd.formats.shard_index import Indexes, ShardIndex
from loaderd.ipc.worker_messages import FilePlace, Shards
from loaderd.options import OnCorrupt, StreamOptions, pickled_storage
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Listing
from loaderd.plan.rows import DatasetRows
from loaderd.plan.sampling import Drawing, Sample
from loaderd.plan.selection import Range
from loaderd.redaction import redacted
from loaderd.schema.record_values import RecordValues
from loaderd.storage.files import path_order
from loaderd.storage.names import some_of
from loaderd.storage.shard_file import ShardFile

_MOST_NAMED = 3
_UNKNOWN = -1

_Entry = tuple[str, str, int, str] | None
"""A set's entry in a listing: see :func:`_entry`."""


def of_listing(dataset: AnyDataset, found: list[list[ShardFile]], listing: Listing | None) -> list[list[ShardFile]]:
    """The shards ``found`` of each set, in its order; of sets that grow, only those of ``listing`` (None: all).

    ``found``: in the order of their paths. Raises OptionError where shards of the listing are not there any more.
    """
    found = [
        sorted(files, key=lambda file: file.mtime_ns) if leaf.order == "time" else files
        for leaf, files in zip(dataset.leaves(), found, strict=True)
    ]
    if listing is None:
        return found
    if len(listing) != len(found):
        raise OptionError(
            f"the position belongs to data of {len(listing)} sets: expected to find them again, found {len(found)}",
            hint="Give the data set that it was taken with, or go without it.",
        )
    return [files if entry is None else _listed(files, *entry) for files, entry in zip(found, listing, strict=True)]


def files_with(values: RecordValues | None, dataset: AnyDataset, sets: Sequence[list[ShardFile]]) -> list[ShardFile]:
    """The shards of the sets whose indexes hold ``values``, each once, in the order of their paths.

    Sets may share shards; and what indexes are kept together depends on what is beside what, so never on times.
    """
    own = (files for leaf, files in zip(dataset.leaves(), sets, strict=True) if leaf.record_values == values)
    return sorted(dict.fromkeys(chain.from_iterable(own)), key=path_order)


def _listed(files: list[ShardFile], first: str, last: str, count: int, _: str) -> list[ShardFile]:
    """The ``count`` shards from ``first`` to ``last``. If there are more by now, the newest of them are left out.

    Raises OptionError where there are fewer. Whether they are those of then, a digest says.
    """
    begins, ends = ([at for at, file in enumerate(files) if file.is_at(path)] for path in (first, last))
    sizes = [(end + 1 - begin, begin) for begin in begins for end in ends if end + 1 - begin >= count]
    if sizes:
        size, begin = min(sizes)
        by_age = sorted(range(begin, begin + size), key=lambda at: files[at].mtime_ns)
        return [files[at] for at in sorted(by_age[:count])]
    missing = [path for path, places in ((first, begins), (last, ends)) if not places]
    how_many = f"{' and '.join(missing)} missing" if missing else f"{max(0, ends[-1] - begins[0] + 1)}"
    raise OptionError(
        f"the position belongs to {count} shards, {first} to {last}: expected to find them again, found {how_many}",
        hint="Bring them back, or go without the position.",
    )


class LocalData:
    """Raises what :func:`damage_error` says where damage forbids it; NoShardsError if a set has no record left, and
    OptionError if what is chosen of it cannot be.

    ``wanted``: the listing that the shards were found by, if there was one. ``known``: those of an earlier listing,
    whose shards ``left_out`` does not name again.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        options: StreamOptions,
        sets: Sequence[Sequence[ShardFile]],
        indexes_of: Indexes,
        wanted: Listing | None = None,
        known: Indexes | None = None,
    ) -> None:
        self.files = [file for files in sets for file in files]
        self.is_far_away = any(file.is_far_away for file in self.files)
        self.storage = options.storage
        leaves = dataset.leaves()
        by_file = [indexes_of[leaf.record_values] for leaf in leaves]
        indexes = [[own[file] for file in files] for own, files in zip(by_file, sets, strict=True)]
        of_files = {index.file: index for of_set in indexes for index in of_set}  # sets may share shards
        damages = [damage for index in of_files.values() for damage in index.damages]
        unreadable = [index.error for index in of_files.values() if index.error is not None]
        self.num_shards = len(of_files)
        most = MAX_NAMED_DAMAGES if options.report is None else MAX_REPORTED_DAMAGES
        if damages and options.on_corrupt == "raise":
            num_members = sum(index.num_damaged_members for index in of_files.values())
            raise damage_error(damages, len(of_files), unreadable, most, num_members)
        if options.on_corrupt != "skip_any" and (
            error := version_error(damages, sum(index.num_records for index in of_files.values()))
        ):
            raise error
        self.damages: list[Damage] = damages[:most]
        listed_before = {file for of_values in (known or {}).values() for file in of_values}
        new = [index for file, index in of_files.items() if index.damages and file not in listed_before]
        self.left_out = redacted(_left_out(new, len(of_files), options.on_corrupt))
        """What is left out, in words; "": nothing."""
        first_shards = accumulate((len(files) for files in sets[:-1]), initial=0)
        self._tables: list[BlockTable] = []
        for name, leaf, of_set, first_shard in zip(dataset.names(), leaves, indexes, first_shards, strict=True):
            try:
                self._tables.append(_table(leaf, of_set, options.on_corrupt, first_shard, len(self._tables)))
            except (NoShardsError, OptionError) as error:
                place = f"the set {name!r} of a {type(dataset).__name__}: " if name else ""
                raise type(error)(place + error.message, hint=error.hint) from error.__cause__
        before = sum(table.num_before_where for table in self._tables)
        self.per_passing = before / sum(table.num_passing for table in self._tables)
        """How many records there are for each of weight 1 that passes ``where``."""
        self._block_ends = list(accumulate(len(table.counts) for table in self._tables))
        self.compressions = [compression for table in self._tables for compression in table.compressions]
        self._seed = options.seed
        rows = [
            DatasetRows(table.counts, options.seed, bool(options.shuffle), table.drawing) for table in self._tables
        ]
        self.rows = dataset.combine(iter(rows))
        entries = [_entry(*found) for found in zip(leaves, sets, self._tables, strict=True)]
        self.listing: Listing | None = _as_wanted(entries, wanted) if any(entries) else None
        fixed = [table for table, entry in zip(self._tables, entries, strict=True) if entry is None]
        self.digests = {
            name: f"{table.num_records} records in {table.num_shards} shards, digest {table.digest}"
            for name, table in zip(digest_names(dataset), fixed, strict=True)
        }
        """What positions say of the shards of sets that do not grow: see :func:`digest_names`."""
        self.of = {**joined_text(dataset), **self.digests}

    @property
    def num_blocks(self) -> int:
        return self._block_ends[-1]

    @property
    def counts(self) -> list[npt.NDArray[np.int64]]:
        """Of each set, int64, (blocks,): the records of each block that are in the data set."""
        return [table.counts for table in self._tables]

    @property
    def drawings(self) -> list[Drawing | None]:
        """Of each set, what its epochs draw of its blocks; None: all."""
        return [table.drawing for table in self._tables]

    @property
    def source(self) -> Shards:
        """Where workers find the records: as in Attach."""
        return Shards(self.files, self.compressions, pickled_storage(self.storage))

    def count(self, block: int, epoch: int) -> int:
        """How many records an epoch of its set has of a block."""
        own, of_set = self._find(block)
        drawing = self._tables[of_set].drawing
        if drawing is not None:
            return drawing.block(own, self._seed, epoch).num_drawn
        return int(self._tables[of_set].counts[own])

    def first_records(self, block: int) -> tuple[int, int, FilePlace]:
        """(block, its records, where they are read) to look at before any epoch: all that are in the data set."""
        own, of_set = self._find(block)
        table = self._tables[of_set]
        return block, int(table.counts[own]), table.place(own)

    def places(self, slices: Sequence[Slice], seed: int) -> Iterator[FilePlace]:
        """Where each slice is read; the keys of its records come from ``seed``."""
        return (self._place(part.block, seed, part.epoch) for part in slices)

    def _place(self, block: int, seed: int = 0, epoch: int | None = None) -> FilePlace:
        own, of_set = self._find(block)
        return self._tables[of_set].place(own, seed, epoch)

    def error_context(self, records: Sequence[Slice], error: LoaderdError, *, survived: bool = False) -> WorkerError:
        """The ``error`` that workers met at ``records``, with the shards, blocks and records named.

        ``survived``: as in :func:`naming`.
        """
        numbers: dict[int, list[int]] = {}
        for part in records:
            numbers.setdefault(part.block, []).extend(self._numbers(part))
        named = [self._named(block, first_numbers) for block, first_numbers in numbers.items()]
        more = f"\n  … and of {len(named) - _MOST_NAMED} more blocks" if len(named) > _MOST_NAMED else ""
        text = "".join(f"\n  {place}" for place in named[:_MOST_NAMED]) + more
        block, first_numbers = next(iter(numbers.items()))
        uri = self.files[self._place(block).block.shard].uri
        return naming(error, text, uri, min(first_numbers), survived=survived)

    def _named(self, block: int, numbers: Sequence[int]) -> str:
        of = self._place(block).block
        which = f"record {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} records from {min(numbers)} on"
        where = f"the block of {of.num_records} from record {of.first_record} at byte {of.offset}"
        return f"{self.files[of.shard].uri}: {which}, of {where}"

    def _numbers(self, part: Slice) -> list[int]:
        block, left, _ = self._place(part.block, self._seed, part.epoch)
        if left is None:
            return [*range(block.first_record + part.first, block.first_record + part.stop)]
        numbers: list[int] = left.numbers()[part.first : part.stop].tolist()
        return numbers

    def _find(self, block: int) -> tuple[int, int]:
        """(number in its set, set) of a block."""
        of_set = bisect_right(self._block_ends, block)
        return block - (self._block_ends[of_set - 1] if of_set else 0), of_set


def naming(error: LoaderdError, named: str, shard: str, record: int = _UNKNOWN, *, survived: bool) -> WorkerError:
    """``error`` with the records that are ``named`` behind it; the first is ``record`` of ``shard``.

    ``survived``: the worker lives; it cannot make a row of the first record.
    """
    if survived:
        which, expected = "Called with one record at a time, it fails first at", "a record of which a row can be made"
    else:
        which, expected = "It holds", "records that workers survive"
    damage = Damage(shard, record, _UNKNOWN, expected, error.message)
    text = f"{error.message}. {which}{named}"
    return WorkerError(text, hint=error.hint, damage=damage, traceback=error.traceback)


def digest_names(dataset: AnyDataset) -> list[str]:
    """The names of what a position says in ``of`` of the shards: one for each set that does not grow."""
    pairs = zip(dataset.names(), dataset.leaves(), strict=True)
    return [" ".join(filter(None, (name, "shards"))) for name, leaf in pairs if not leaf.grows]


def _as_wanted(entries: Sequence[_Entry], wanted: Listing | None) -> Listing:
    """The listing of these entries, in the words of the ``wanted`` one where that says the same.

    Its names may be shorter: they leave out the folders that all of its shards have in common.
    """
    pairs = zip(entries, entries if wanted is None else wanted, strict=True)
    return tuple(named if entry and named and entry[2:] == named[2:] else entry for entry, named in pairs)


def _left_out(damaged: Sequence[ShardIndex], num_shards: int, on_corrupt: OnCorrupt) -> str:
    """What is left out of shards with damage, in words.

    Their damages do not tell how much: a shard that cannot be read has one, and "skip_shard" leaves sound ones out.
    """
    parts = []
    if errors := [index.error for index in damaged if index.error is not None]:
        parts.append(f"{len(errors)} of {num_shards} shards cannot be indexed and are left out: {errors[0].message}")
    if damaged := [index for index in damaged if index.error is None]:
        of_shards = f"{len(damaged)} of {num_shards} shards"
        if on_corrupt == "skip_shard":
            sound = sum(int(index.counts.sum()) for index in damaged)
            which = some_of([index.file.uri for index in damaged])
            parts.append(f"{of_shards} are damaged and left out whole, with {sound:,} sound records: {which}")
        else:
            num_damages = sum(len(index.damages) for index in damaged)
            what = count_damaged(num_damages, sum(index.num_damaged_members for index in damaged))
            parts.append(f"{what} in {of_shards} {'are' if num_damages > 1 else 'is'} left out")
            if others := sum(damage.other_records for index in damaged for damage in index.damages):
                parts.append(f"{others:,} records in them are of another version")
            if lost := [index.file.uri for index in damaged if not index.counts.any()]:
                parts.append(f"no record can be read from {len(lost)} of {num_shards} shards: {some_of(lost)}")
        parts.append(f"the first damage: {damaged[0].damages[0]}")
    return f'on_corrupt="{on_corrupt}": {"; ".join(parts)}' if parts else ""


def _table(
    leaf: Dataset, indexes: list[ShardIndex], on_corrupt: OnCorrupt, first_shard: int, of_set: int
) -> BlockTable:
    """The blocks of a set. Raises NoShardsError where it has no record, and OptionError."""
    where = "" if leaf.record_values is None else leaf.record_values.where_name
    has_keys, sample = leaf.schema.needs_record_key, Sample.of(leaf.sample)
    table = BlockTable(indexes, on_corrupt, leaf.selection, first_shard, has_keys, where, sample, of_set)
    if table.num_records:
        return table
    damage = next((damage for index in indexes for damage in index.damages), None)
    shards = f"{len(indexes)} shard{'s' * (len(indexes) != 1)}"
    raise NoShardsError(
        f"no record can be read from {shards}" + (f": {damage}" if damage else f", such as {indexes[0].file.uri}"),
        hint="Check that these are the right files, and that nobody writes to them at this moment.",
    )


def _entry(leaf: Dataset, files: Sequence[ShardFile], table: BlockTable) -> _Entry:
    """What the listing says of the shards of a set: (first, last, count, digest); None if the set does not grow.

    Shards in front of the newest records are left out, so that they may be deleted, unless a function asks how many
    records there are. The first and the last one are paths below the folder that both are in: several folders may
    hold shards of the same name.
    """
    if not leaf.grows:
        return None
    ranges = [each for each in leaf.selection if isinstance(each, Range)]
    counts_all = any(each.kind != "newest" or callable(each.count) for each in ranges)
    first = 0 if counts_all else table.place(0).block.shard - table.first_shard
    folders = [file.path.split("/")[:-1] for file in (files[0], files[-1])]
    depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*folders, strict=False)))
    begin, end = ("/".join(file.path.split("/")[depth:]) for file in (files[first], files[-1]))
    return begin, end, len(files) - first, table.digest
