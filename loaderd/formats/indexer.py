"""The indexes of shards, taken from where they are kept, or made anew: every pass over shards does this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from loaderd.errors import ShardReadError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.fixed_index import build_fixed_index, build_fixed_indexes
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.kinds import refused_columns
from loaderd.formats.shard_index import ShardIndex, ValueSink, build_index, build_indexes, encode_indexes
from loaderd.schema import FixedRecords
from loaderd.schema.record_values import RecordValues
from loaderd.storage.access import Access
from loaderd.storage.shard_file import ShardFile

RecordFormat = FixedRecords | Literal["detect"] | None
"""What shards hold: records of fixed size; None: TFRecord; "detect": whichever each shard's content says."""


@dataclass(frozen=True)
class IndexResult:
    """The index of a shard; ``is_known``: it was kept already; ``unkept``: why a new one could not be kept."""

    index: ShardIndex
    is_known: bool = False
    unkept: str | None = None


class Values(NamedTuple):
    """What indexes are to hold of each record; ``sink`` makes what computes it for a group."""

    values: RecordValues
    sink: Callable[[], ValueSink]


def find_indexes(
    where: str,
    block_records: int,
    stored: RecordFormat,
    group: Sequence[ShardFile],
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: Values | None = None,
) -> list[IndexResult]:
    """The indexes of a group of shards (``groups_of``), kept ones or new; of one that cannot be read, a damage.

    ``where``, ``block_records``: as of an ``IndexCache``; "none" keeps nothing, so that each shard is read.
    ``on_read`` is called with the bytes of the group that are read so far. ``values``: those of records that the
    indexes are to hold. Raises StorageError, and what computing ``values`` raises.
    """
    if stored == "detect":
        assert values is None, "only a schema says what they are computed of"
        return _find_detected(where, block_records, group, on_read, access)
    cache = IndexCache(where, block_records, stored, None if values is None else values.values)
    if (kept := cache.load(*group)) is not None:
        return [IndexResult(index, is_known=True) for index in kept]
    sink = None if values is None else values.sink()
    return _keep(cache, group, make_indexes(group, stored, block_records, on_read, access, sink))


def _find_detected(
    where: str,
    block_records: int,
    group: Sequence[ShardFile],
    on_read: OnRead,
    access: Access | None,
) -> list[IndexResult]:
    """As :func:`find_indexes`, where the shards themselves say what they hold."""
    if len(group) > 1:
        # To see of each shard what it is would take far longer than to find all kept, or all healthy TFRecord.
        first = _detected(group[0], access)
        if not isinstance(first, ShardReadError):
            cache = IndexCache(where, block_records, first)
            kept = cache.load(*group)
            if kept is not None and not any(index.damages for index in kept):
                return [IndexResult(index, is_known=True) for index in kept]
            if kept is None and first is None:
                together = _made_together(group, None, block_records, on_read, access)
                if together is not None:
                    return _keep(cache, group, together)
    kinds = [_detected(file, access) for file in group]
    if any(kind != kinds[0] for kind in kinds) or isinstance(kinds[0], ShardReadError):
        return [
            IndexResult(ShardIndex.of_unreadable(file, kind))
            if isinstance(kind, ShardReadError)
            else find_indexes(where, block_records, kind, [file], access=access)[0]
            for file, kind in zip(group, kinds, strict=True)
        ]
    return find_indexes(where, block_records, kinds[0], group, on_read, access)


def _keep(cache: IndexCache, group: Sequence[ShardFile], made: list[ShardIndex]) -> list[IndexResult]:
    """New indexes, which are kept if all shards could be read."""
    unkept = None
    if all(index.error is None for index in made):
        unkept = cache.store(group, encode_indexes(made))
    return [IndexResult(index, unkept=unkept) for index in made]


FindIndexes = Callable[..., list[IndexResult]]
"""``find_indexes`` with its first arguments: takes a group, ``on_read`` and ``access``."""


def _made_together(
    group: Sequence[ShardFile],
    records: FixedRecords | None,
    block_records: int,
    on_read: OnRead,
    access: Access | None,
    values: ValueSink | None = None,
) -> list[ShardIndex] | None:
    """The indexes of small shards; None where any is damaged, or holds fixed records and is not in gzip."""
    try:
        if records is not None:
            return build_fixed_indexes(group, records, on_read, access, values)
        return build_indexes(group, block_records, on_read, access, values)
    except ShardReadError:
        return None


def _detected(file: ShardFile, access: Access | None) -> FixedRecords | ShardReadError | None:
    from loaderd.formats.detect import detect_records  # needed only without a schema

    try:
        return detect_records(file, access)
    except ShardReadError as error:
        return error


def make_indexes(
    group: Sequence[ShardFile],
    records: FixedRecords | None,
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: ValueSink | None = None,
) -> list[ShardIndex]:
    """Read shards of TFRecord, or of ``records``, from front to back; the index of one that cannot be read says why.

    ``on_read`` is called with the bytes of the group that are read so far. ``values``: what computes those of records
    that the indexes are to hold. Raises StorageError, and what ``values`` raises.
    """
    if records is None and any(file.columns for file in group):
        return [ShardIndex.of_unreadable(file, refused_columns(file.uri)) for file in group]
    if values is not None:
        values.begin(0)
    made = None
    if len(group) > 1 and not any(file.columns for file in group):
        made = _made_together(group, records, block_records, on_read, access, values)
    if made is None:
        made = _made_one_by_one(group, records, block_records, on_read, access, values)
    return made if values is None else values.put_into(made)


def _made_one_by_one(
    group: Sequence[ShardFile],
    records: FixedRecords | None,
    block_records: int,
    on_read: OnRead,
    access: Access | None,
    values: ValueSink | None,
) -> list[ShardIndex]:
    made: list[ShardIndex] = []
    begin = num_records = 0
    for file in group:
        if values is not None:
            values.begin(num_records)
        try:
            index = make_index(file, records, block_records, partial(_on_read_from, on_read, begin), access, values)
        except ShardReadError as error:
            index = ShardIndex.of_unreadable(file, error)
        made.append(index)
        begin, num_records = begin + file.size_bytes, num_records + index.end
    return made


def _on_read_from(on_read: OnRead, begin: int, offset: int) -> None:
    on_read(begin + offset)


def make_index(
    file: ShardFile,
    records: FixedRecords | None,
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: ValueSink | None = None,
) -> ShardIndex:
    """Read a shard of TFRecord, or of ``records``, from front to back. Raises ShardReadError and StorageError."""
    if records is None:
        return build_index(file, block_records, on_read, access, values)
    return build_fixed_index(file, records, block_records, on_read, access, values)
