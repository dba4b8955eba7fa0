"""Reads blocks of records of fixed size again, as ``blocks`` does for TFRecord.

Several blocks are read together, each as a whole: plain ones straight to where their records are wanted, compressed
ones by inflating them to there. A block that is large, damaged or of a table (``table``) comes in pieces. The table
that was read last stays open where reading stopped, and so does the last large compressed block (zstd in one frame):
the next read mostly goes on there. Other tables are kept without a place, up to 64 MiB of them: opening one may take
longer than reading a block, and in a shuffled epoch each block is mostly of another shard.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from loaderd.errors import Damage, ShardReadError
from loaderd.formats.compression import ALL_BYTES, ByteStream, open_stream
from loaderd.formats.fixed import (
    compression_of_member,
    fixed_piece,
    inflate_records,
    open_fixed,
    scan_fixed,
    size_in_stream,
)
from loaderd.formats.framing import RecordChunk
from loaderd.formats.inflate import MAX_WHOLE_BYTES
from loaderd.formats.reader import Reader, Reading
from loaderd.formats.table import Table, open_table
from loaderd.formats.tar import member_at
from loaderd.kernels.crc import Bytes1D, crc32c
from loaderd.kernels.frames import Ends
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import PLAIN, TABLES, Block, Compression, ShardFile

_MOST_KEPT_BYTES = 64 << 20
_TABLE_BYTES = 32 << 10  # of the objects of a table, beside what it says itself


class _Opened(NamedTuple):
    """The table of a shard, and how many records the block has that begins with this record of the shard."""

    shard: int
    table: Table
    counts: dict[int, int]


class FixedBlockReader(Reader):
    """Reads blocks of records of fixed size."""

    def __init__(
        self,
        records: FixedRecords,
        files: list[ShardFile],
        compressions: list[Compression],
        reading: Reading | None = None,
    ) -> None:
        super().__init__(files, compressions, reading)
        self._records = records
        self._table: _Opened | None = None
        """The one that was read last."""
        self._left: OrderedDict[int, tuple[_Opened, int]] = OrderedDict()
        """By shard, the other tables that are kept, and their bytes of memory; the one that was left last is last."""

    def close(self) -> None:
        super().close()
        self._table = None
        self._left.clear()

    def crc_of(self, piece: RecordChunk, crc: int) -> int:
        return crc32c(piece.buffer[: piece.ends[-1]].data, crc)

    def memory_bytes(self, block: Block) -> int:
        stored = 0 if self._is_plain(block) else block.stored_range[1]
        return stored + block.num_records * self._records.record_bytes

    def narrowed(self, block: Block, first: int, stop: int) -> Block:
        """Only these records of a plain shard, the whole block of any other, and of one that has a CRC."""
        if block.crc is not None or not self._is_plain(block):
            return block
        size = self._size_of(block)
        return Block(
            block.shard,
            block.offset + first * size,
            (stop - first) * size,
            stop - first,
            block.first_record + first,
            b"",
        )

    def size_in(self, block: Block) -> int:
        """Bytes of each of its records: of a compressed block, its front is read for it."""
        size, compression = self._size_of(block), self._compression_of(block)
        if self._knows_size(block) or compression in TABLES or isinstance(compression, Damage):
            return size
        with self._inflating():
            return size_in_stream(self._stream(block, compression, size), self._records)

    def can_read_together(self, block: Block) -> bool:
        return self._compressions[block.shard] not in TABLES and self.memory_bytes(block) <= MAX_WHOLE_BYTES

    def read_together(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """As in ``Reader``; None where a compressed block is damaged: :meth:`read` will say how."""
        counts = [block.num_records for block in blocks]
        # How long the records of a compressed block are, its content tells: there is room for the longest ones.
        stored: dict[int, memoryview] = {
            number: memoryview(bytearray(block.num_bytes))
            for number, block in enumerate(blocks)
            if not self._knows_size(block)
        }
        sizes = [self._size_of(block) for block in blocks]
        bounds = [0, *itertools.accumulate(count * size for count, size in zip(counts, sizes, strict=True))]
        if len(self._buffer) < bounds[-1]:
            self._buffer = np.empty(bounds[-1], dtype=np.uint8)
        view = self._buffer.data
        places = [view[start:stop] for start, stop in itertools.pairwise(bounds)]
        if not self._read_bytes(blocks, lambda number: stored.get(number, places[number])):
            return None
        stop = 0
        with self._inflating():
            for number, (block, count) in enumerate(zip(blocks, counts, strict=True)):
                start = stop
                if number in stored:
                    # The last record may be cut.
                    inflated = inflate_records(stored[number], (count + 1) * self._records.record_bytes - 1)
                    if inflated is None:
                        return None
                    sizes[number] = self._records.size_in(inflated)
                    if not count * sizes[number] <= len(inflated) < (count + 1) * sizes[number]:
                        return None
                    stop = start + count * sizes[number]
                    view[start:stop] = memoryview(inflated)[: stop - start]
                else:
                    stop = start + len(places[number])
                    if start < bounds[number]:  # behind records that are not the longest
                        view[start:stop] = places[number]
                if block.crc is not None:
                    self._check_content(block, crc32c(view[start:stop]))
        ends = np.zeros(sum(counts) + 1, np.int64)
        np.cumsum(np.repeat(sizes, counts), out=ends[1:])
        return self._buffer, ends

    def read(self, block: Block, first: int, stop: int) -> Iterator[RecordChunk | Damage]:
        """As in ``Reader``. A cut costs the records behind it, up to the end of the block."""
        self._file(block.shard).check_unchanged()
        if block.crc is not None and (self._is_plain(block) or self.can_read_together(block)):
            first, stop = 0, block.num_records  # so that its CRC can be compared
        if self._compressions[block.shard] in TABLES:
            yield from self._read_table(block, first, stop)
        elif self._is_plain(block) or self.can_read_together(block):
            yield from self._pieces(block, first, stop)
        else:
            yield from self._read_on(block, first, stop, lambda: self._pieces(block, 0, block.num_records))
        self._check_unchanged(block)

    def _pieces(self, block: Block, first: int, stop: int) -> Iterator[RecordChunk | Damage]:
        pieces = self._read_stream(block, first, stop)
        if block.crc is not None:
            return self._compared(block, pieces)
        return (self.named(piece, block) if isinstance(piece, Damage) else piece for piece in pieces)

    def named(self, damage: Damage, block: Block) -> Damage:
        """As in ``Reader``: in a tar, the member."""
        if self._compressions[block.shard] != "tar":
            return damage
        return replace(damage, found=f"{damage.found}, in {member_at(self._read_at(block.shard), block.offset)}")

    def _take_table(self, shard: int) -> _Opened:
        """The table of a shard. The caller keeps it as ``_table`` when it has been read without an error."""
        last, self._table = self._table, None
        if last is not None and last.shard == shard:
            return last
        if last is not None:
            self._left[last.shard] = last, _TABLE_BYTES + last.table.leave()
        del last  # before the next one takes memory
        kept = self._left.pop(shard, None)
        while sum(num_bytes for _, num_bytes in self._left.values()) > _MOST_KEPT_BYTES:
            self._left.popitem(last=False)
        if kept is not None:
            return kept[0]
        kind, file, read_at = self._compressions[shard], self._files[shard], self._read_at(shard)
        table = open_table(kind, file, read_at, self._records, self._on_read)
        counts = [count for _, _, count in table.blocks]
        return _Opened(shard, table, dict(zip(itertools.accumulate(counts, initial=0), counts, strict=False)))

    def _read_table(self, block: Block, first: int, stop: int) -> Iterator[RecordChunk]:
        number, size = block.shard, self._records.record_bytes
        with self._inflating():
            opened = self._take_table(number)
        table = opened.table
        found = opened.counts.get(block.first_record, 0)
        if table.is_plain:
            found = min(block.num_records, max(0, sum(opened.counts.values()) - block.first_record))
        if found != block.num_records:
            expected = f"{block.num_records} rows from row {block.first_record} on (the count when it was indexed)"
            raise _error(Damage(self._files[number].uri, 0, 0, expected, f"{found} rows", lost_bytes=-1))
        row, last = block.first_record + first, block.first_record + stop
        while row < last:
            with self._inflating():
                buffer = table.read(row, last - row)
            yield fixed_piece(buffer, len(buffer) // size, size, row * size, row)
            row += len(buffer) // size
        self._table = opened

    def _read_stream(self, block: Block, first: int, stop: int) -> Iterator[RecordChunk | Damage]:
        uri, is_plain = self._files[block.shard].uri, self._is_plain(block)
        compression = self._compression_of(block)
        if isinstance(compression, Damage):
            yield from self._lost(block, first, stop, replace(compression, lost_bytes=0))
            return
        size = self.size_in(block)
        # Only the end shows whether it is garbled. One too large to be read twice was checked when it was indexed.
        if not is_plain and block.point is None and self.can_read_together(block):
            whole = self._stream(block, compression, size)
            whole.skip(ALL_BYTES)
            if whole.is_garbled and whole.damage is not None:
                yield from self._lost(block, first, stop, replace(whole.damage, lost_bytes=0))
                return
        stream = self._stream(block, compression, size)
        with self._inflating():
            stream.skip(first * size)
        # Offsets count from the start of a compressed stream, or of a plain file.
        start = block.offset if is_plain or block.point is not None else 0
        expected = f"{block.num_records} records (the count when it was indexed)"
        reached = first
        # What is behind the last record shows whether it is the file that was indexed.
        most_records = stop - first if block.point is not None else 1 << 62
        pieces = scan_fixed(
            uri,
            stream,
            self._records,
            size,
            block.first_record + first,
            start + first * size,
            most_records=most_records,
        )
        for piece in pieces:
            if isinstance(piece, Damage):
                yield from self._lost(block, reached, stop, piece)
                return
            if reached + piece.num_records > block.num_records:  # the file is another one
                end = start + block.num_records * size
                raise _error(Damage(uri, block.first_record, end, expected, "more of them", lost_bytes=-1))
            yield piece
            reached += piece.num_records
            if reached >= stop:
                break
        else:
            found = Damage(uri, 0, start + reached * size, expected, f"{reached} records")
            yield from self._lost(block, reached, stop, found)
        if stop == block.num_records and block.point is None:
            stream.skip(ALL_BYTES)
            if stream.damage is not None and stream.is_garbled:  # the CRC at its end says so
                raise _error(self.named(stream.damage, block))

    def _lost(self, block: Block, first: int, stop: int, damage: Damage) -> Iterator[Damage]:
        """``damage`` of records ``first`` to ``stop - 1`` of a block, each; its bytes are lost with the first."""
        for number in range(first, stop):
            lost_bytes = damage.lost_bytes if number == first else 0
            yield replace(damage, record=block.first_record + number, lost_bytes=lost_bytes)

    def _is_plain(self, block: Block) -> bool:
        return self._compressions[block.shard] in PLAIN

    def _compression_of(self, block: Block) -> Compression | Damage:
        """How the block is compressed; in a tar, how its member is."""
        uri, compression = self._files[block.shard].uri, self._compressions[block.shard]
        if compression != "tar":
            return "none" if compression in PLAIN else compression
        return compression_of_member(uri, self._read_at(block.shard), block.offset, block.num_bytes)

    def _knows_size(self, block: Block) -> bool:
        """Whether ``num_bytes`` are those of the records as they are read, and not of a compressed stream."""
        return self._is_plain(block) or block.point is not None

    def _size_of(self, block: Block) -> int:
        """Bytes of each record of a block; where they can be seen in its content alone, the most."""
        size = block.num_bytes // max(1, block.num_records) if self._knows_size(block) else 0
        return size if size in self._records.all_sizes else self._records.record_bytes

    def _stream(self, block: Block, compression: Compression, size: int) -> ByteStream:
        uri, read_at = self._files[block.shard].uri, self._read_at(block.shard)
        if block.point is not None:
            stream = open_stream(uri, read_at, compression, self._on_read, size, block.point)
            stream.skip(block.offset - block.point.offset)
            return stream
        return open_fixed(uri, read_at, block.offset, block.num_bytes, compression, size, self._on_read)


def _error(damage: Damage) -> ShardReadError:
    return ShardReadError(str(damage), damage=damage)
