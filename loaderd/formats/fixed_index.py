"""The index of a shard of records of fixed size. ``fixed`` says how a shard wraps them.

In the terms of ``shard_index``: a block of a plain file is the bytes of its records. Any other block is a whole
compressed stream: the file itself, or a member of a tar. It begins with the stream's first record, and ``num_bytes``
are those that the stream takes in the file. There are no runs, because the place of each record is known.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np

from loaderd.errors import Damage, ShardFormatError
from loaderd.formats.compression import OnRead, front_of, no_callback
from loaderd.formats.fixed import (
    MAX_WHOLE_BYTES,
    compression_of_member,
    detect_wrapping,
    inflate_whole,
    open_fixed,
    refuse_others,
    sample_bytes,
    scan_fixed,
)
from loaderd.formats.kinds import Content
from loaderd.formats.shard_index import MAX_BLOCK_BYTES, ShardIndex, add_damage, shrunk
from loaderd.formats.tar import find_members
from loaderd.kernels.crc import Bytes1D, crc32c
from loaderd.redaction import shown
from loaderd.schema import FixedRecords
from loaderd.storage.access import Access
from loaderd.storage.files import open_shard
from loaderd.storage.shard_file import Compression, OpenFile, ShardFile, is_remote

_MOST_SHOWN = 200  # of a name: those of PAX have no limit
_MAX_AT_ONCE_BYTES = 1 << 20


def build_fixed_index(
    file: ShardFile,
    records: FixedRecords,
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
) -> ShardIndex:
    """Read a shard from front to back, and note its blocks and damage, as ``build_index`` does for TFRecord."""
    with closing(open_shard(file, access)) as opened:
        compression = detect_wrapping(file.uri, opened, file.size_bytes, records)
        builder = _FixedIndexBuilder(file, opened, records, block_records, on_read)
        if compression == "npz":
            builder.add_npz()
        elif compression == "tar":
            builder.add_tar()
        else:
            builder.add_stream(0, file.size_bytes, compression)
        opened.check_unchanged()
    return builder.index(compression)


class _FixedIndexBuilder:
    """The blocks and the damage of a shard, as far as it has been read."""

    def __init__(
        self, file: ShardFile, opened: OpenFile, records: FixedRecords, block_records: int, on_read: OnRead
    ) -> None:
        self._file, self._opened, self._records, self._on_read = file, opened, records, on_read
        self._block_records = max(1, min(block_records, MAX_BLOCK_BYTES // records.record_bytes))
        self._rows: list[tuple[int, int, int, int]] = []
        self._damages: list[Damage] = []
        self._crcs: list[int] = []
        self._next_record = self._digest = 0
        self._other: ShardFormatError | None = None
        """What the first member of another kind is."""

    def add_stream(self, start: int, num_bytes: int, compression: Compression, of: str = "") -> None:
        """Add what a part of the file holds; ``of``: in words, the member of a tar that it is, if it is one."""
        whole = self._whole_records(start, num_bytes) if compression != "none" else None
        if compression != "none" and self._is_other(whole, start, num_bytes, compression, of):
            return
        if whole is not None:
            self._add_digest(whole)
            count = len(whole) // self._records.record_bytes
            if count:
                self._rows.append((start, num_bytes, count, self._next_record))
                if is_remote(self._file.uri):
                    self._crcs.append(crc32c(whole.data))
            self._next_record += count
            self._on_read(start + num_bytes)
            return
        first, count, size, digest = self._next_record, 0, self._records.record_bytes, self._digest
        crcs = _BlockCrcs(self._block_records * size if compression == "none" else 1 << 62)
        stream = open_fixed(self._file.uri, self._opened, start, num_bytes, compression, size, self._on_read)
        for piece in scan_fixed(self._file.uri, stream, self._records, first, 0):
            if isinstance(piece, Damage):
                if stream.is_garbled:
                    self._next_record, self._digest, count = first, digest, 0
                    crcs.crcs.clear()
                self._add_damage(piece, of)
                continue
            self._add_digest(piece.buffer[: piece.num_records * size])
            if is_remote(self._file.uri):
                crcs.add(piece.buffer[: piece.num_records * size].data)
            count += piece.num_records
            self._next_record += piece.num_records
        self._crcs += crcs.crcs
        if compression == "none":
            for begin in range(0, count, self._block_records):
                take = min(self._block_records, count - begin)
                self._rows.append((start + begin * size, take * size, take, first + begin))
        elif count:
            self._rows.append((start, num_bytes, count, first))

    def _is_other(self, whole: Bytes1D | None, start: int, num_bytes: int, compression: Compression, of: str) -> bool:
        """Whether a compressed member of a tar holds a file of another kind, and is noted as damage.

        Raises ShardFormatError where it is no member, but the whole shard. ``whole``: all that it holds, if known.
        """
        shard, records = self._file.uri, self._records
        if whole is not None:
            content = Content.of_bytes(whole.data, is_whole=True)
        else:
            stream = open_fixed(shard, self._opened, start, num_bytes, compression, records.record_bytes)
            content = front_of(stream, sample_bytes(records))
        try:
            refuse_others(shard, content, records, start, f"compressed with {compression}")
        except ShardFormatError as error:
            if not of:
                raise
            self._other = self._other or error
            assert error.damage is not None
            self._add_damage(error.damage, of)
            return True
        return False

    def _whole_records(self, start: int, num_bytes: int) -> Bytes1D | None:
        """The records of a small compressed part, inflated at once; None where it is large, or anything is wrong."""
        if num_bytes > _MAX_AT_ONCE_BYTES:
            return None
        stored = memoryview(bytearray(num_bytes))
        self._opened.read_at(start, stored)
        data = inflate_whole(stored, MAX_WHOLE_BYTES)
        if data is None or len(data) % self._records.record_bytes:
            return None
        return np.frombuffer(data, dtype=np.uint8)

    def add_tar(self) -> None:
        """Add what the members hold. Raises ShardFormatError where none holds records, and one is of another kind."""
        for member in find_members(self._file.uri, self._opened, self._file.size_bytes, on_read=self._on_read):
            if isinstance(member, Damage):
                self._add_damage(member, "")
                continue
            of = f"{shown(member.name, _MOST_SHOWN)}, the member at byte {member.offset} of the tar"
            compression = compression_of_member(self._file.uri, self._opened, member.offset, member.num_bytes)
            if isinstance(compression, Damage):
                self._add_damage(compression, of)
            else:
                self.add_stream(member.offset, member.num_bytes, compression, of)
        if self._other is not None and not self._rows:
            raise self._other

    def add_npz(self) -> None:
        """Add the rows of the arrays, as one block."""
        from loaderd.formats.npz import NpzRows  # and zipfile

        rows = NpzRows(self._file, lambda: self._opened, self._records)
        while rows.row < rows.num_rows:
            self._add_digest(rows.read(rows.num_rows))
            self._on_read(self._file.size_bytes * rows.row // rows.num_rows)
        if rows.num_rows:
            self._rows.append((0, self._file.size_bytes, rows.num_rows, 0))

    def _add_digest(self, data: Bytes1D) -> None:
        self._digest = crc32c(data.data, self._digest)

    def _add_damage(self, damage: Damage, of: str) -> None:
        """A damaged stretch counts as one record, behind those that were found."""
        found = f"{damage.found}, in {of}" if of else damage.found
        add_damage(self._damages, replace(damage, record=self._next_record, found=found))
        self._next_record += 1

    def index(self, compression: Compression) -> ShardIndex:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        offsets, num_bytes, counts, first_records = (shrunk(column) for column in table.T)
        no_runs = np.zeros(0, dtype=np.uint8)
        place = (offsets, num_bytes, counts, first_records)
        crcs = shrunk(np.array(self._crcs, dtype=np.uint32))
        return ShardIndex(self._file, compression, self._digest, tuple(self._damages), *place, no_runs, crcs)


class _BlockCrcs:
    """The CRC32Cs of a stream's blocks, each of ``block_bytes``."""

    def __init__(self, block_bytes: int) -> None:
        self.crcs: list[int] = []
        self._block_bytes, self._left = block_bytes, 0

    def add(self, data: memoryview) -> None:
        while len(data):
            if not self._left:
                self.crcs.append(0)
                self._left = self._block_bytes
            self.crcs[-1] = crc32c(data[: self._left], self.crcs[-1])
            taken = min(self._left, len(data))
            self._left, data = self._left - taken, data[taken:]
