"""The index of a shard, taken from where it is kept, or made anew: every pass over shards does this with each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loaderd.errors import ShardReadError
from loaderd.schema import FixedRecords
from loaderd.shards.access import Access
from loaderd.shards.compression import OnRead, tell_nobody
from loaderd.shards.fixed_index import build_fixed_index
from loaderd.shards.index_cache import IndexCache
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import ShardIndex, build_index

Stored = FixedRecords | Literal["told"] | None
"""What shards hold: records of fixed size; None: TFRecord; "told": whichever each shard's content says."""


@dataclass(frozen=True)
class Indexed:
    """The index of a shard; ``is_known``: it was kept already; ``unkept``: why a new one could not be kept."""

    index: ShardIndex
    is_known: bool = False
    unkept: OSError | None = None


class Indexer:
    """Finds the index of a shard, or makes and keeps it. May be called in several threads, and sent to a process."""

    def __init__(self, where: str, block_records: int, stored: Stored) -> None:
        """``where``, ``block_records``: as of an ``IndexCache``; "none" keeps nothing, so that each shard is read."""
        self._where = where
        self._block_records = block_records
        self._stored = stored

    def __call__(self, file: ShardFile, on_read: OnRead = tell_nobody, access: Access | None = None) -> Indexed:
        """The index of ``file``; that of a shard that cannot be read has one damage. Raises StorageError."""
        try:
            records = _told(file, access) if self._stored == "told" else self._stored
            cache = IndexCache(self._where, self._block_records, records)
            if (kept := cache.load(file)) is not None:
                return Indexed(kept, is_known=True)
            index = make_index(file, records, self._block_records, on_read, access)
        except ShardReadError as error:
            return Indexed(ShardIndex.of_unreadable(file, error))
        return Indexed(index, unkept=cache.store(index))


def _told(file: ShardFile, access: Access | None) -> FixedRecords | None:
    from loaderd.shards.told import tell_records  # needed only without a schema

    return tell_records(file, access)


def make_index(
    file: ShardFile,
    records: FixedRecords | None,
    block_records: int,
    on_read: OnRead = tell_nobody,
    access: Access | None = None,
) -> ShardIndex:
    """Read a shard of TFRecord, or of ``records``, from front to back. Raises ShardReadError and StorageError."""
    if records is None:
        return build_index(file, block_records, on_read, access)
    return build_fixed_index(file, records, block_records, on_read, access)
