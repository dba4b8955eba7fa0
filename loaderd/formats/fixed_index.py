"""The index of a shard of records of fixed size. ``fixed`` says how a shard wraps them.

In the terms of ``shard_index``: a block of a plain file is the bytes of its records; one of a compressed file that
has restart points, the bytes of its records as they are inflated. Any other block is a whole compressed stream: the
file itself, or a member of a tar. It begins with the stream's first record, and ``num_bytes`` are those that the
stream takes in the file. There are no runs, because the place of each record is known. Where a block begins at a
restart point, a check at the end of the stream says nothing of it, so it always has a CRC.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from loaderd.errors import Damage, ShardFormatError, ShardReadError
from loaderd.formats import npy
from loaderd.formats.compression import ByteStream, OnRead, front_of, no_callback
from loaderd.formats.fixed import (
    compression_of_member,
    detect_wrapping,
    fixed_piece,
    inflate_records,
    open_fixed,
    other_records,
    refuse_others,
    sample_bytes,
    scan_fixed,
    size_in_stream,
)
from loaderd.formats.framing import RecordChunk
from loaderd.formats.inflate import MAX_WHOLE_BYTES
from loaderd.formats.kinds import Content
from loaderd.formats.restart_points import RestartPoints
from loaderd.formats.shard_index import MAX_BLOCK_BYTES, ShardIndex, ValueSink, add_damage, contents_of, shrunk
from loaderd.formats.table import Table, open_table
from loaderd.formats.tar import find_members
from loaderd.kernels.crc import Bytes1D, crc32c
from loaderd.redaction import shown
from loaderd.schema import FixedRecords
from loaderd.storage.access import Access
from loaderd.storage.files import OpenFile, open_shard
from loaderd.storage.shard_file import TABLES, Compression, ShardFile, is_remote

_MOST_SHOWN = 200  # of a name: those of PAX have no limit
_MAX_AT_ONCE_BYTES = 1 << 20
_ZERO, _NONE = np.zeros(1, np.uint8), np.zeros(0, np.uint8)


def build_fixed_index(
    file: ShardFile,
    records: FixedRecords,
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: ValueSink | None = None,
) -> ShardIndex:
    """Read a shard from front to back, and note its blocks and damage, as ``build_index`` does for TFRecord."""
    with closing(open_shard(file, access)) as opened:
        compression: Compression = "columns"
        if not file.columns:
            compression = detect_wrapping(file.uri, opened.read_at, file.size_bytes, records)
        builder = _FixedIndexBuilder(file, opened, records, block_records, on_read, values)
        if compression in TABLES:
            builder.add_table(compression)
        elif compression == "tar":
            builder.add_tar()
        elif compression == "npy":
            builder.add_npy()
        elif compression == "none":
            size = size_in_stream(builder.stream(0, file.size_bytes, "none"), records)
            builder.add_plain(0, file.size_bytes, size)
        else:
            builder.add_compressed(0, file.size_bytes, compression)
        opened.check_unchanged()
    return builder.index(compression)


def build_fixed_indexes(
    files: Sequence[ShardFile],
    records: FixedRecords,
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: ValueSink | None = None,
) -> list[ShardIndex] | None:
    """As :func:`build_fixed_index`, of small gzip files, such as one of each game, in a fifth of the time.

    None where any of them is of another kind, empty or damaged, or has several members.
    """

    def is_right(data: bytes, compression: Compression) -> bool:
        if compression != "gzip" or not data:
            return False
        refuse_others("", content := Content.of_bytes(data, is_whole=True), records)
        return len(data) % records.size_in(content.at(0, sample_bytes(records))) == 0

    try:
        found = contents_of(files, is_right, on_read, access)
    except ShardFormatError:
        return None
    if found is None:
        return None
    sizes = [records.size_in(data) for data in found[0]]
    counts = [len(data) // size for data, size in zip(found[0], sizes, strict=True)]
    if values is not None:
        buffer: Bytes1D = np.frombuffer(b"".join(found[0]), np.uint8)
        ends = np.append(0, np.cumsum(np.repeat(sizes, counts)))
        values.add(RecordChunk(buffer, ends, 0, 0, header_bytes=0, footer_bytes=0))
    stored, of_blocks = (shrunk(np.array(each)[:, None]) for each in ([file.size_bytes for file in files], counts))
    indexes = []
    for file, data, num_bytes, count in zip(files, found[0], stored, of_blocks, strict=True):
        digest = crc32c(data)
        crcs = np.array([digest], np.uint32) if is_remote(file.uri) else _NONE
        indexes.append(ShardIndex(file, "gzip", digest, (), _ZERO, num_bytes, count, _ZERO, _NONE, crcs))
    return indexes


class _FixedIndexBuilder:
    """The blocks and the damage of a shard, as far as it has been read."""

    def __init__(
        self,
        file: ShardFile,
        opened: OpenFile,
        records: FixedRecords,
        block_records: int,
        on_read: OnRead,
        values: ValueSink | None,
    ) -> None:
        self._file, self._read_at, self._records, self._on_read = file, opened.read_at, records, on_read
        self._values = values
        self._block_records = max(1, min(block_records, MAX_BLOCK_BYTES // records.record_bytes))
        self._has_crcs = is_remote(file.uri)
        self._rows: list[tuple[int, int, int, int]] = []
        self._damages: list[Damage] = []
        self._crcs: list[int] = []
        self._next_record = self._digest = 0
        self._points: RestartPoints | None = None
        self._other: ShardFormatError | None = None
        """What the first member of another kind is."""

    def add_npy(self) -> None:
        """Add the rows of an array, as far as the file holds those that its header states."""
        start, stated = npy.rows_in(self._file, self._read_at, self._records)
        size, left = self._records.record_bytes, self._file.size_bytes - start
        count = min(stated, left // size)
        self.add_plain(start, count * size, size)
        left -= count * size
        if count < stated or left:
            found = f"{count} rows and {left} bytes" if count < stated else f"{left} bytes behind them"
            expected = f"{stated} rows, as the array's header says"
            self._add_damage(Damage(self._file.uri, 0, start + count * size, expected, found, lost_bytes=left), "")

    def add_plain(self, start: int, num_bytes: int, size: int) -> None:
        """Add the records in a part of the file, of ``size`` bytes each, one behind the other."""
        stream = self.stream(start, num_bytes, "none")
        most = self._block_records
        for piece in scan_fixed(self._file.uri, stream, self._records, size, 0, start, multiple_of=most):
            if isinstance(piece, Damage):
                self._add_damage(piece, "")
                continue
            self._add_values(piece)
            for begin in range(0, piece.num_records, self._block_records):
                count = min(self._block_records, piece.num_records - begin)
                block = piece.buffer[begin * size : (begin + count) * size]
                self._add_digest(block)
                offset = start + (piece.first_record + begin) * size
                self._add_block(offset, count * size, count, self._crc(block, 0))

    def add_compressed(self, start: int, num_bytes: int, compression: Compression, of: str = "") -> None:
        """Add what a part of the file holds; ``of``: in words, the member of a tar that it is, if it is one."""
        whole = self._whole_records(start, num_bytes)
        if whole is not None:
            content = Content.of_bytes(whole.data, is_whole=True)
        else:
            content = front_of(self.stream(start, num_bytes, compression), sample_bytes(self._records))
        if self._is_other(content, start, num_bytes, compression, of):
            return
        digest, size = self._digest, self._records.size_in(content.at(0, sample_bytes(self._records)))
        stream: ByteStream | None = None
        pieces: Iterable[RecordChunk | Damage]
        if whole is not None:
            pieces = [fixed_piece(whole, len(whole) // size, size, 0, self._next_record)]
        else:
            stream = self.stream(start, num_bytes, compression, size, finds_points=not of)
            pieces = scan_fixed(self._file.uri, stream, self._records, size, self._next_record, 0)
        count = crc = 0
        damage = None
        blocks = _PointedBlocks(size, [0] if stream is None else stream.point_offsets or [0])
        for piece in pieces:
            if isinstance(piece, Damage):
                damage = piece
                continue
            data = piece.buffer[: piece.num_records * size]
            self._add_digest(data)
            self._add_values(piece)
            crc, count = self._crc(data, crc), count + piece.num_records
            if stream is not None and stream.point_offsets is not None:
                blocks.add(piece.offset, data)
        if stream is not None and stream.is_garbled:
            self._digest, count = digest, 0
            if self._values is not None:
                self._values.drop(self._next_record)
        if count and stream is not None and stream.point_offsets is not None and len(stream.point_offsets) > 1:
            self._points, self._has_crcs = stream.points(), True
            for offset, of_block, crc in blocks.rows:
                self._add_block(offset, of_block * size, of_block, crc)
        elif count:
            self._add_block(start, num_bytes, count, crc)
        if damage is not None:
            self._add_damage(damage, of)
        self._on_read(start + num_bytes)

    def stream(
        self, start: int, num_bytes: int, compression: Compression, size: int = 0, finds_points: bool = False
    ) -> ByteStream:
        """A part of the file; ``size``: bytes of a record; 0: not known yet."""
        size = size or self._records.record_bytes
        return open_fixed(
            self._file.uri, self._read_at, start, num_bytes, compression, size, self._on_read, finds_points
        )

    def _crc(self, data: Bytes1D, crc: int) -> int:
        return crc32c(data.data, crc) if self._has_crcs else 0

    def _add_values(self, piece: RecordChunk) -> None:
        if self._values is not None:
            self._values.add(piece)

    def _add_digest(self, data: Bytes1D) -> None:
        self._digest = crc32c(data.data, self._digest)

    def _add_block(self, offset: int, num_bytes: int, count: int, crc: int | None) -> None:
        self._rows.append((offset, num_bytes, count, self._next_record))
        self._next_record += count
        if self._has_crcs and crc is not None:
            self._crcs.append(crc)

    def _add_damage(self, damage: Damage, of: str) -> None:
        """A damaged stretch counts as one record, behind those that were found."""
        found = f"{damage.found}, in {of}" if of else damage.found
        add_damage(self._damages, replace(damage, record=self._next_record, found=found))
        self._next_record += 1

    def _is_other(self, content: Content, start: int, num_bytes: int, compression: Compression, of: str) -> bool:
        """Whether a compressed member of a tar holds a file of another kind, and is noted as damage.

        Raises ShardFormatError where it is no member, but the whole shard. ``content``: what it holds.
        """
        try:
            refuse_others(self._file.uri, content, self._records, start, f"compressed with {compression}")
        except ShardFormatError as error:
            if not of:
                raise
            self._other = self._other or error
            assert error.damage is not None
            others = other_records(content, self._records)
            num_others = 0 if others is None else self._count(start, num_bytes, compression, others[0])
            self._add_damage(replace(error.damage, other_records=num_others), of)
            return True
        return False

    def _count(self, start: int, num_bytes: int, compression: Compression, size: int) -> int:
        """How many records of ``size`` bytes a part of the file holds."""
        stream = self.stream(start, num_bytes, compression, size)
        pieces = scan_fixed(self._file.uri, stream, self._records, size, 0, 0)
        return sum(piece.num_records for piece in pieces if not isinstance(piece, Damage))

    def _whole_records(self, start: int, num_bytes: int) -> Bytes1D | None:
        """The records of a small compressed part, inflated at once; None where it is large, or anything is wrong."""
        if num_bytes > _MAX_AT_ONCE_BYTES:
            return None
        stored = memoryview(bytearray(num_bytes))
        self._read_at(start, stored)
        data = inflate_records(stored, MAX_WHOLE_BYTES)
        if data is None or len(data) % self._records.size_in(data):
            return None
        return np.frombuffer(data, dtype=np.uint8)

    def add_tar(self) -> None:
        """Add what the members hold. Raises ShardFormatError where none holds records, and one is of another kind."""
        for member in find_members(self._file.uri, self._read_at, self._file.size_bytes, on_read=self._on_read):
            if isinstance(member, Damage):
                self._add_damage(member, "")
                continue
            of = f"{shown(member.name, _MOST_SHOWN)}, the member at byte {member.offset} of the tar"
            compression = compression_of_member(self._file.uri, self._read_at, member.offset, member.num_bytes)
            if isinstance(compression, Damage):
                self._add_damage(compression, of)
            else:
                self.add_compressed(member.offset, member.num_bytes, compression, of)
        if self._other is not None and not self._rows:
            raise self._other

    def add_table(self, kind: Compression) -> None:
        """Add the blocks of a table. It is read only for values, and where nothing less tells its content."""
        table = open_table(kind, self._file, self._read_at, self._records, self._on_read)
        self._digest = table.digest or 0
        for offset, num_bytes, count in table.blocks:
            if table.digest is None:
                for piece in self._pieces(table, count):
                    self._add_digest(piece.buffer)
                    self._add_values(piece)
            elif self._values is not None:
                try:
                    for piece in self._pieces(table, count):
                        self._add_values(piece)
                except ShardReadError as error:
                    if error.damage is None:
                        raise
                    # This block alone is damaged: the loader will meet it.
            step = self._block_records if table.is_plain else max(1, count)
            for begin in range(0, count, step):
                self._add_block(offset, num_bytes, min(step, count - begin), None)

    def _pieces(self, table: Table, count: int) -> Iterator[RecordChunk]:
        """The next ``count`` records of a table."""
        size, first, stop = self._records.record_bytes, self._next_record, self._next_record + count
        while first < stop:
            data = table.read(first, stop - first)
            yield fixed_piece(data, len(data) // size, size, first * size, first)
            first += len(data) // size

    def index(self, compression: Compression) -> ShardIndex:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        no_runs = np.zeros(0, dtype=np.uint8)
        arrays = [*(shrunk(column) for column in table.T), no_runs, shrunk(np.array(self._crcs, dtype=np.uint32))]
        return ShardIndex(self._file, compression, self._digest, tuple(self._damages), *arrays, points=self._points)


class _PointedBlocks:
    """Cuts the records of a compressed stream into blocks, where it has restart points."""

    def __init__(self, record_bytes: int, cuts: list[int]) -> None:
        """``cuts``: where the points are, as far as it was read."""
        self._record_bytes, self._cuts = record_bytes, cuts
        self.rows: list[tuple[int, int, int]] = []
        """(offset in what is inflated, records, CRC32C) of each block."""

    def add(self, offset: int, data: Bytes1D) -> None:
        """Take in the records that begin at ``offset``."""
        while len(data):
            if not self.rows or offset >= self._limit():
                self.rows.append((offset, 0, 0))
            start, count, crc = self.rows[-1]
            take = min(len(data) // self._record_bytes, -(-(self._limit() - offset) // self._record_bytes))
            part, data = data[: take * self._record_bytes], data[take * self._record_bytes :]
            self.rows[-1] = (start, count + take, crc32c(part.data, crc))
            offset += len(part)

    def _limit(self) -> int:
        """Where the first record begins, at the earliest, that is not in the last block any more."""
        start = self.rows[-1][0]
        number = bisect_right(self._cuts, start)
        return self._cuts[number] if number < len(self._cuts) else 1 << 62
