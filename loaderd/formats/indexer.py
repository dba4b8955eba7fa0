"""The indexes of shards, taken from where they are kept, or made anew: every pass over shards does this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from loaderd.errors import ShardReadError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import ShardIndex, build_index, build_indexes, encode_indexes
from loaderd.schema import FixedRecords
from loaderd.storage.access import Access
from loaderd.storage.shard_file import ShardFile

RecordFormat = FixedRecords | Literal["detect"] | None
"""What shards hold: records of fixed size; None: TFRecord; "detect": whichever each shard's content says."""


@dataclass(frozen=True)
class IndexResult:
    """The index of a shard; ``is_known``: it was kept already; ``unkept``: why a new one could not be kept."""

    index: ShardIndex
    is_known: bool = False
    unkept: OSError | None = None


class Indexer:
    """Finds the indexes of a group of shards, or makes and keeps them.

    May be called in several threads, and sent to a process.
    """

    def __init__(self, where: str, block_records: int, stored: RecordFormat) -> None:
        """``where``, ``block_records``: as of an ``IndexCache``; "none" keeps nothing, so that each shard is read."""
        self._where = where
        self._block_records = block_records
        self._stored = stored

    def __call__(
        self, group: Sequence[ShardFile], on_read: OnRead = no_callback, access: Access | None = None
    ) -> list[IndexResult]:
        """The indexes of a group (``groups_of``); that of a shard that cannot be read has one damage.

        ``on_read`` is called with the bytes of the group that are read so far. Raises StorageError.
        """
        if self._stored != "detect":
            return self._find(group, self._stored, on_read, access)
        kinds = [_told(file, access) for file in group]
        if all(kind == kinds[0] for kind in kinds) and not isinstance(kinds[0], ShardReadError):
            return self._find(group, kinds[0], on_read, access)
        return [
            IndexResult(ShardIndex.of_unreadable(file, kind))
            if isinstance(kind, ShardReadError)
            else self._find([file], kind, no_callback, access)[0]
            for file, kind in zip(group, kinds, strict=True)
        ]

    def _find(
        self, group: Sequence[ShardFile], records: FixedRecords | None, on_read: OnRead, access: Access | None
    ) -> list[IndexResult]:
        cache = IndexCache(self._where, self._block_records, records)
        if (kept := cache.load(*group)) is not None:
            return [IndexResult(index, is_known=True) for index in kept]
        made = make_indexes(group, records, self._block_records, on_read, access)
        unkept = None
        if all(index.error is None for index in made):
            unkept = cache.store(group, encode_indexes(made))
        return [IndexResult(index, unkept=unkept) for index in made]


def _told(file: ShardFile, access: Access | None) -> FixedRecords | ShardReadError | None:
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
) -> list[ShardIndex]:
    """Read shards of TFRecord, or of ``records``, from front to back; the index of one that cannot be read says why.

    ``on_read`` is called with the bytes of the group that are read so far. Raises StorageError.
    """
    if records is None and len(group) > 1:
        try:
            together = build_indexes(group, block_records, on_read, access)
        except ShardReadError:
            together = None
        if together is not None:
            return together
    begins = accumulate((file.size_bytes for file in group), initial=0)
    made = []
    for file, begin in zip(group, begins, strict=False):

        def on_read_of_file(offset: int, begin: int = begin) -> None:
            on_read(begin + offset)

        try:
            made.append(make_index(file, records, block_records, on_read_of_file, access))
        except ShardReadError as error:
            made.append(ShardIndex.of_unreadable(file, error))
    return made


def make_index(
    file: ShardFile,
    records: FixedRecords | None,
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
) -> ShardIndex:
    """Read a shard of TFRecord, or of ``records``, from front to back. Raises ShardReadError and StorageError."""
    if records is None:
        return build_index(file, block_records, on_read, access)
    return build_fixed_index(file, records, block_records, on_read, access)
