"""Shards that are made of columns: the face of all their readers.

A **table** gives records by their number in the shard. What of it can be read alone is a block: all of an npz, a row
group of Parquet, a record batch of Arrow. A reader goes through a block from front to back, so a table keeps its
place in the block that it read last, and going back costs reading that block anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from loaderd.errors import Damage, ShardReadError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.kernels.crc import Bytes1D
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import Compression, ReadAt, ShardFile

PIECE_BYTES = 1 << 21
"""Records are given in pieces of some megabytes: what became records last is in the cache still."""


class Table(Protocol):
    """An opened shard; ``make(file, read_at, records, on_read)`` opens it, and raises as :meth:`read` does.

    ``blocks``: (offset, bytes, records) of each, in order; the first two say where in the file it lies. ``digest``: a
    CRC32C of what tells its content from others; None: it must be made of all records.
    """

    @property
    def blocks(self) -> Sequence[tuple[int, int, int]]: ...

    @property
    def is_plain(self) -> bool:
        """Whether reading may begin at any record, so that blocks may be cut into smaller ones."""

    @property
    def digest(self) -> int | None: ...

    def read(self, first: int, most: int) -> Bytes1D:
        """uint8, (records * record_bytes,): those from ``first`` on, ``most`` or fewer. Valid until the next call.

        ``first + most`` lies in the block of ``first``. Raises ShardReadError where a column is missing, of another
        type or damaged, and StorageError; ``on_read`` is called with how many bytes of the shard are passed.
        """
        ...

    def leave(self) -> int:
        """Forget the place in the block. Returns about how many bytes of memory the table takes still."""


def table_class(kind: Compression) -> Any:
    """The class of such tables. Each has libraries of its own, which are imported only where it is."""
    if kind == "npz":
        from loaderd.formats.npz import NpzTable

        return NpzTable
    if kind == "columns":
        from loaderd.formats.columns import ColumnsTable

        return ColumnsTable
    if kind == "parquet":
        from loaderd.formats.parquet import ParquetTable

        return ParquetTable
    from loaderd.formats.arrow_file import ArrowTable

    return ArrowTable


def open_table(
    kind: Compression, file: ShardFile, read_at: ReadAt, records: FixedRecords, on_read: OnRead = no_callback
) -> Table:
    """The table of a shard of this kind."""
    table: Table = table_class(kind)(file, read_at, records, on_read)
    return table


def bad_table(shard: str, offset: int, expected: str, found: str, hint: str = "", record: int = 0) -> ShardReadError:
    """The error for a table that is not what the schema says, or damaged."""
    damage = Damage(shard, record, offset, expected, found, lost_bytes=-1)
    hint = hint or "Check that the schema's dtype is what the file holds; or restore the file."
    return ShardReadError(str(damage), hint=hint, damage=damage)
