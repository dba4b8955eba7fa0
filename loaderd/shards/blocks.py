"""Reading blocks of an index again: their records in memory, checked.

Plain blocks are read together, several to a piece (:meth:`BlockReader.read_together`): the steps that cost by the
call, not by the record, are then fewer. A compressed block is inflated from the start of its shard and comes in
pieces, and so does a plain one in which something is wrong (:meth:`BlockReader.read`). What was healthy at the index
pass may be damaged now; then the records before and behind the damage are still found, at their old numbers, and
those between are named as damaged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loaderd.errors import CorruptRecordError, Damage
from loaderd.shards.compression import Compression, InflatedStream
from loaderd.shards.crc import Bytes1D, check_data_crcs, find_bad_length_crc
from loaderd.shards.files import OpenFile, ShardFile, open_shard
from loaderd.shards.framing import CHAIN_SLACK_BYTES, Ends, Piece, scan, walk, walk_chains
from loaderd.shards.index import ANCHOR_RECORDS

_MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block is. ``shard`` counts the data set's files from 0; the rest is as in ShardIndex."""

    shard: int
    offset: int
    num_bytes: int
    count: int
    first_record: int
    anchors: bytes = b""
    """uint32, little-endian: the offset in the block of every ``ANCHOR_RECORDS``-th record."""


@dataclass(frozen=True)
class BlockPiece:
    """Some records of a block: ``piece``, whose first is record ``first`` of the block."""

    first: int
    piece: Piece


class BlockReader:
    """Reads blocks of a list of files; keeps up to 64 files open and one buffer of a block's size."""

    def __init__(self, files: list[ShardFile], compressions: list[Compression]) -> None:
        self._files = files
        self._compressions = compressions
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._buffer: Bytes1D = np.empty(1 << 20, dtype=np.uint8)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, block: Block, first: int, stop: int) -> Iterator[BlockPiece | Damage]:
        """Records ``first`` to ``stop - 1`` of ``block``, in order; both CRCs of each are checked.

        A piece may hold records outside that range too. Raises ShardReadError where the file cannot be read.
        """
        self._file(block.shard).check_unchanged()
        if self._compressions[block.shard] == "none":
            yield from self._read_plain(block)
        else:
            yield from self._read_inflated(block, stop)

    def can_read_together(self, block: Block) -> bool:
        """Whether :meth:`read_together` may be tried."""
        return bool(block.anchors)

    def read_together(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """The records of several plain blocks: the buffer that they are in and the ends of their frames, in order.

        ``ends``: int64, (records + 1,), as in :class:`~loaderd.shards.framing.Piece`; both CRCs of each record are
        checked. None where anything at all is wrong: :meth:`read` will say what. About 90 ns a record.
        """
        sizes = [block.num_bytes for block in blocks]
        total = sum(sizes)
        if len(self._buffer) < total + CHAIN_SLACK_BYTES:
            self._buffer = np.empty(total + CHAIN_SLACK_BYTES, dtype=np.uint8)
        buffer = self._buffer[: total + CHAIN_SLACK_BYTES]
        view = buffer.data
        starts: list[npt.NDArray[np.int64]] = []
        counts: list[npt.NDArray[np.int64]] = []
        position = 0
        for block in blocks:
            part = view[position : position + block.num_bytes]
            if self._file(block.shard).read_at(block.offset, part) < block.num_bytes:
                return None
            starts.append(np.frombuffer(block.anchors, dtype="<u4").astype(np.int64) + position)
            counts.append(np.full(len(starts[-1]), ANCHOR_RECORDS))
            counts[-1][-1] = block.count - ANCHOR_RECORDS * (len(starts[-1]) - 1)
            position += block.num_bytes
        chain_starts = np.concatenate(starts)
        chain_stops = np.append(chain_starts[1:], total)
        ends = walk_chains(buffer, chain_starts, chain_stops, np.concatenate(counts))
        if ends is None or find_bad_length_crc(buffer, ends) is not None or check_data_crcs(buffer, ends):
            return None
        return buffer, ends

    def _file(self, shard: int) -> OpenFile:
        file = self._open.get(shard)
        if file is None:
            while len(self._open) >= _MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            file = self._open[shard] = open_shard(self._files[shard])
        self._open.move_to_end(shard)
        return file

    def _read_plain(self, block: Block) -> Iterator[BlockPiece | Damage]:
        if len(self._buffer) < block.num_bytes:
            self._buffer = np.empty(block.num_bytes, dtype=np.uint8)
        view = self._buffer.data[: block.num_bytes]
        got = self._file(block.shard).read_at(block.offset, view)
        ends = walk(self._buffer, 0, got)
        healthy = len(ends) == block.count + 1 and int(ends[-1]) == block.num_bytes
        if healthy and find_bad_length_crc(self._buffer, ends) is None:
            bad = check_data_crcs(self._buffer, ends)
            yield from _name_bad(self._files[block.shard].uri, block, ends, bad)
            yield BlockPiece(
                0, Piece(self._buffer, ends, block.offset, block.first_record, tuple(i for i, _, _ in bad))
            )
        else:
            yield from _salvage(self._files[block.shard].uri, block, self._buffer[:got].copy())

    def _read_inflated(self, block: Block, stop: int) -> Iterator[BlockPiece | Damage]:
        uri = self._files[block.shard].uri
        stream = InflatedStream(uri, self._file(block.shard), self._compressions[block.shard])
        try:
            stream.skip(block.offset)
        except CorruptRecordError as error:
            damage = error.damage or Damage(uri, block.first_record, 0, "compressed data", "the end")
            yield from (_lost(uri, block, number, damage.expected, damage.found) for number in range(block.count))
            return
        done = 0
        for found in scan(uri, stream.read_into, first_record=block.first_record):
            if isinstance(found, Damage):
                if found.record < block.first_record + block.count:
                    yield found
                continue
            done = found.first_record + len(found.ends) - 1 - block.first_record
            yield BlockPiece(found.first_record - block.first_record, found)
            if done >= stop:
                return
        ended = stream.damage
        expected, what = (ended.expected, ended.found) if ended else ("more records", "the end of the stream")
        yield from (_lost(uri, block, number, expected, what) for number in range(done, block.count))


def _lost(uri: str, block: Block, number: int, expected: str, found: str) -> Damage:
    return Damage(uri, block.first_record + number, block.offset, expected, found)


def _name_bad(uri: str, block: Block, ends: Ends, bad: list[tuple[int, int, int]]) -> Iterator[Damage]:
    for number, stored, found in bad:
        yield Damage(
            uri,
            block.first_record + number,
            block.offset + int(ends[number]),
            f"data with CRC32C {stored:#010x}",
            f"{found:#010x}",
            lost_bytes=int(ends[number + 1] - ends[number]),
        )


def _salvage(uri: str, block: Block, data: Bytes1D) -> Iterator[BlockPiece | Damage]:
    """The records in front of a broken frame, and those behind it up to the block's end.

    Records behind the damage are numbered from the block's end, which is sure only for the last stretch of them
    and only if it reaches the end; what lies between is lost.
    """
    cursor = 0

    def read_into(view: memoryview) -> int:
        nonlocal cursor
        part = data[cursor : cursor + len(view)]
        view[: len(part)] = part.data
        cursor += len(part)
        return len(part)

    # The scan reuses its buffer, and a salvaged block is rare: copies keep this simple.
    pieces = [
        Piece(found.buffer.copy(), found.ends, found.offset, found.first_record, found.bad)
        for found in scan(uri, read_into)
        if isinstance(found, Piece)
    ]
    kept: list[tuple[int, Piece]] = []
    front = 0
    end_offset = 0
    while pieces and pieces[0].offset == end_offset:
        piece = pieces.pop(0)
        kept.append((front, piece))
        front += len(piece.ends) - 1
        end_offset += int(piece.ends[-1] - piece.ends[0])
    back = block.count
    begin_offset = block.num_bytes
    behind: list[tuple[int, Piece]] = []
    while pieces and pieces[-1].offset + int(pieces[-1].ends[-1] - pieces[-1].ends[0]) == begin_offset:
        piece = pieces.pop()
        back -= len(piece.ends) - 1
        begin_offset = piece.offset
        behind.append((back, piece))
    if front > back:  # more records than the index counted: the file is another one, nothing in it can be placed
        kept, behind, front, back = [], [], 0, block.count
    for first, piece in (*kept, *reversed(behind)):
        for bad in piece.bad:
            yield _lost(uri, block, first + bad, "data with a matching CRC32C", "another CRC32C")
        yield BlockPiece(first, piece)
    where = Damage(uri, block.first_record + front, block.offset + end_offset, "a whole frame", "a broken one")
    for number in range(front, back):
        yield Damage(uri, block.first_record + number, where.offset, where.expected, where.found)
