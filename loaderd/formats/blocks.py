"""Reads the blocks of an index again, and checks their records.

Several blocks are read in one call (:meth:`BlockReader.read_together`), because many steps have a cost for each call
and not for each record; compressed ones are inflated from their restart points. Other blocks come in pieces
(:meth:`BlockReader.read`): those in which something is wrong, and those of a compressed shard that are large, because
it has few restart points; the one that was read last stays open where reading stopped. Records may have been damaged
since the index pass. Then the records before and behind the damage are still found, with their old numbers, and those
between are named as damaged: in a plain block at most those between two anchors.

A file whose size or time has changed is not read, even if records were only appended: there may be other records at
the old places, with right CRCs of their own. So size and time are compared after each read. A worker that has a file
open goes on reading it after it was deleted, or replaced by another file of its name.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from loaderd.errors import Damage
from loaderd.formats.compression import ByteStream, most_record_bytes, open_stream
from loaderd.formats.framing import RecordChunk, scan
from loaderd.formats.inflate import MAX_WHOLE_BYTES
from loaderd.formats.reader import Reader
from loaderd.formats.shard_index import ANCHOR_RECORDS
from loaderd.kernels.crc import FOOTER_BYTES, HEADER_BYTES, Bytes1D, chain_crcs, check_data_crcs
from loaderd.kernels.frames import Ends, walk_chains
from loaderd.stages import Stage
from loaderd.storage.shard_file import Block

_ANCHOR_BYTES = 4


class BlockReader(Reader):
    """Reads blocks of TFRecord files."""

    header_bytes, footer_bytes = HEADER_BYTES, FOOTER_BYTES
    # What was read is gone through three more times, out of a cache: with 16 MiB, records take a seventh more time.
    most_together_bytes = 2 << 20

    def crc_of(self, piece: RecordChunk, crc: int) -> int:
        return chain_crcs(piece.buffer, piece.ends, crc)

    def memory_bytes(self, block: Block) -> int:
        return block.num_bytes + (block.stored_range[1] if block.point is not None else 0)

    def narrowed(self, block: Block, first: int, stop: int) -> Block:
        """From one anchor to another; all of a block that has a CRC."""
        if block.crc is not None or len(block.anchors) <= _ANCHOR_BYTES or not self.can_read_together(block):
            return block
        offsets = np.frombuffer(block.anchors, dtype="<u4")
        begin, end = first // ANCHOR_RECORDS, min(-(-stop // ANCHOR_RECORDS), len(offsets))
        start_byte = int(offsets[begin])
        stop_byte = int(offsets[end]) if end < len(offsets) else block.num_bytes
        skipped = begin * ANCHOR_RECORDS
        return Block(
            block.shard,
            block.offset + start_byte,
            stop_byte - start_byte,
            min(end * ANCHOR_RECORDS, block.num_records) - skipped,
            block.first_record + skipped,
            (offsets[begin:end] - np.uint32(start_byte)).tobytes(),
            point=block.point,
        )

    def read(self, block: Block, first: int, stop: int) -> Iterator[RecordChunk | Damage]:
        """As in ``Reader``; both CRCs of each record are checked, and that of a block which has one."""
        self._file(block.shard).check_unchanged()
        is_compressed = self._compressions[block.shard] != "none"
        if block.crc is not None or (is_compressed and not self.can_read_together(block)):
            if self.can_read_together(block):
                yield from self._read_all(block)
            else:
                yield from self._read_on(block, first, stop, lambda: self._read_all(block))
            self._check_unchanged(block)
            return
        # To inflate a part takes as long as all in front of it.
        is_whole = not block.anchors or block.point is not None or self._find_frames([block]) is not None
        for part in [block] if is_whole else _parts(block):
            begin = part.first_record - block.first_record
            if begin + part.num_records <= first or begin >= stop:
                continue
            yield from self._checked(self._read_part(part, block.first_record + stop))
        self._check_unchanged(block)

    def _read_all(self, block: Block) -> Iterator[RecordChunk | Damage]:
        pieces = self._checked(self._read_part(block, block.first_record + block.num_records))
        return pieces if block.crc is None else self._compared(block, pieces)

    def _checked(self, pieces: Iterator[RecordChunk | Damage]) -> Iterator[RecordChunk | Damage]:
        """The same. The time until each of them comes counts as CHECK, except for what counts as READ or INFLATE."""
        spent = self._spent
        while True:
            began_ns = time.monotonic_ns() - spent[Stage.READ] - spent[Stage.INFLATE]
            piece = next(pieces, None)
            spent[Stage.CHECK] += time.monotonic_ns() - spent[Stage.READ] - spent[Stage.INFLATE] - began_ns
            if piece is None:
                return
            yield piece

    def can_read_together(self, block: Block) -> bool:
        return bool(block.anchors) and (block.point is None or self.memory_bytes(block) <= MAX_WHOLE_BYTES)

    def read_together(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """As in ``Reader``; both CRCs of each record are checked. About 90 ns a record."""
        run = self._find_frames(blocks)
        began_ns = time.monotonic_ns()
        if run is not None and check_data_crcs(*run):
            run = None
        if run is not None and self.fetches:
            buffer, ends = run
            bounds = [0, *itertools.accumulate(block.num_records for block in blocks)]
            for block, (first, stop) in zip(blocks, itertools.pairwise(bounds), strict=True):
                if block.crc is not None:
                    self._check_content(block, chain_crcs(buffer, ends[first : stop + 1], 0))
        self._spent[Stage.CHECK] += time.monotonic_ns() - began_ns
        return run

    def _find_frames(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """As :meth:`read_together`, but the CRCs of the data are not checked."""
        bounds = [0, *itertools.accumulate(block.num_bytes for block in blocks)]
        total = bounds[-1]
        if len(self._buffer) < total:
            self._buffer = np.empty(total, dtype=np.uint8)
        buffer = self._buffer[:total]
        if not self._read_bytes(blocks, lambda number: buffer.data[bounds[number] : bounds[number + 1]]):
            return None
        began_ns = time.monotonic_ns()
        # A chain goes from each anchor to the next, and all have as many records, except for the last of each block.
        num_chains = np.array([len(block.anchors) for block in blocks]) // 4
        anchors = np.frombuffer(b"".join([block.anchors for block in blocks]), dtype="<u4")
        starts = anchors + np.repeat(np.array(bounds[:-1]), num_chains)
        counts = np.full(len(starts), ANCHOR_RECORDS)
        counts[np.cumsum(num_chains) - 1] -= num_chains * ANCHOR_RECORDS - [block.num_records for block in blocks]
        ends = walk_chains(buffer, starts, np.append(starts[1:], total), counts)
        self._spent[Stage.FRAMES] += time.monotonic_ns() - began_ns
        return None if ends is None else (buffer, ends)

    def _read_part(self, part: Block, stop: int) -> Iterator[RecordChunk | Damage]:
        """The records of ``part`` up to number ``stop`` of the shard, and the damage.

        Where a frame is broken, nobody knows how many records the lost stretch held. It counts as one if the number
        of all records comes out right then. Otherwise records are counted from the front to the first broken frame,
        and from the end back to the last; what lies between is lost.
        """
        stream, found_in_part = self._scan(part, part.offset, part.first_record)
        number, offset = part.first_record, part.offset
        last = reached = part.first_record + part.num_records
        damages: list[Damage] = []
        tail_count, tail_offset, tail_stop = 0, -1, -1
        for piece in found_in_part:
            reached = piece.record + 1 if isinstance(piece, Damage) else piece.first_record + piece.num_records
            if isinstance(piece, Damage):
                damages.append(piece)
            elif piece.offset == offset and number + piece.num_records <= last:
                # Nothing is missing in front of it: the damages are of damaged records in it.
                yield from damages
                damages.clear()
                yield piece
                number, offset = number + piece.num_records, piece.stop_offset
                if number >= stop:
                    return
            else:
                if piece.offset != tail_stop:
                    tail_count, tail_offset = 0, piece.offset
                tail_count, tail_stop = tail_count + piece.num_records, piece.stop_offset
        if stream.damage is None and damages and reached == last:
            yield from self._scan(part, offset, number)[1]
            return
        if tail_stop != part.offset + part.num_bytes or tail_count >= last - number:
            tail_count, tail_offset = 0, part.offset + part.num_bytes
        expected = f"{part.num_records} records (the count when it was indexed)"
        miscounted = Damage("", 0, 0, expected, f"{reached - part.first_record} records")
        cause = stream.damage or (damages[0] if damages else miscounted)
        lost = Damage(self._files[part.shard].uri, number, offset, cause.expected, cause.found, tail_offset - offset)
        for record in range(number, last - tail_count):
            yield replace(lost, record=record, lost_bytes=lost.lost_bytes if record == number else 0)
        if tail_count:
            yield from self._scan(part, tail_offset, last - tail_count)[1]

    def _scan(self, part: Block, offset: int, record: int) -> tuple[ByteStream, Iterator[RecordChunk | Damage]]:
        """The shard's stream, and what it holds from ``offset``, where ``record`` begins, to the end of ``part``."""
        uri, point = self._files[part.shard].uri, part.point
        compression = self._compressions[part.shard]
        stream = open_stream(uri, self._read_at(part.shard), compression, self._on_read, point=point)
        with self._inflating():
            stream.skip(offset if point is None else offset - point.offset)
        left = part.offset + part.num_bytes - offset

        def read_into(view: memoryview) -> int:
            nonlocal left
            with self._inflating():
                got = stream.read_into(view[:left]) if left else 0
            left -= got
            return got

        most_bytes = most_record_bytes(compression, self._files[part.shard].size_bytes)
        return stream, scan(uri, read_into, first_record=record, first_offset=offset, most_bytes=most_bytes)


def _parts(block: Block) -> Iterator[Block]:
    """The parts of ``block`` between its anchors. Damage in one does not hide where the others are."""
    anchors = [0, *np.frombuffer(block.anchors, dtype="<u4")[1:].tolist()]
    for number, (start, end) in enumerate(itertools.pairwise([*anchors, block.num_bytes])):
        first = number * ANCHOR_RECORDS
        count = block.num_records - first if number == len(anchors) - 1 else ANCHOR_RECORDS
        yield Block(block.shard, block.offset + start, end - start, count, block.first_record + first, b"")
