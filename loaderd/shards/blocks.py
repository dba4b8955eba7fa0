"""Reading blocks of an index again: their records in memory, checked.

Plain blocks are read together (:meth:`BlockReader.read_together`): the steps that cost by the call, not by the
record, are then fewer. A compressed block is inflated from the start of its shard and comes in pieces, and so does a
plain one in which something is wrong (:meth:`BlockReader.read`). What was healthy at the index pass may be damaged
now; then the records before and behind the damage are still found, at their old numbers, and those between are named
as damaged. Of a plain block, damage costs at most the records between two anchors.

A file whose size or time is not what it was is not read, be it that records were only appended: those that stand at
the old places may be others, with CRCs as right as the old ones'. So it is looked at after each read. Who has a file
open that was deleted, or replaced by another of its name, goes on reading it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loaderd.errors import Damage
from loaderd.machine import max_open_files
from loaderd.shards.access import Access
from loaderd.shards.compression import Compression, InflatedStream, OnRead, PlainStream, open_stream, tell_nobody
from loaderd.shards.crc import Bytes1D, check_data_crcs, find_bad_length_crc
from loaderd.shards.fetches import Fetches
from loaderd.shards.files import open_shard
from loaderd.shards.framing import CHAIN_SLACK_BYTES, Ends, Piece, scan, walk_chains
from loaderd.shards.index import ANCHOR_RECORDS
from loaderd.shards.shard_file import OpenFile, ShardFile, is_remote
from loaderd.stages import Spent, Stage

_MAX_OPEN_FILES = 64
_OTHER_OPEN_FILES = 16  # sockets, memories, and what a user's function opens

Stream = PlainStream | InflatedStream


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
    """Reads blocks of a list of files; keeps up to 64 files open (fewer if the limit is low) and a block's buffer.

    ``spent``: where the ns of each stage are added up; None: nobody wants to know.
    """

    def __init__(
        self,
        files: list[ShardFile],
        compressions: list[Compression],
        on_read: OnRead = tell_nobody,
        access: Access | None = None,
        spent: Spent | None = None,
    ) -> None:
        self._spent: Spent = [0] * len(Stage) if spent is None else spent
        self._files = files
        self._access = access or Access()
        self._fetches = Fetches(files, self._access)
        self._remote = {number for number, file in enumerate(files) if is_remote(file.uri)}
        self._on_read = on_read
        self._compressions = compressions
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._max_open = max(1, min(_MAX_OPEN_FILES, max_open_files() - _OTHER_OPEN_FILES))
        self._buffer: Bytes1D = np.empty(1 << 20, dtype=np.uint8)

    def close(self) -> None:
        self._fetches.forget()
        self._close_files()

    def _close_files(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    @property
    def fetches(self) -> bool:
        """Whether :meth:`begin` is of use: some of the shards are remote."""
        return bool(self._remote)

    def begin(self, blocks: list[Block]) -> None:
        """Have blocks of remote shards fetched, each for one :meth:`read_together`."""
        self._fetches.begin(_key(block) for block in blocks if self._is_fetched(block))

    def are_there(self, blocks: list[Block]) -> bool:
        """Whether what was begun has come."""
        return self._fetches.are_there(_key(block) for block in blocks if self._is_fetched(block))

    def _is_fetched(self, block: Block) -> bool:
        return block.shard in self._remote and bool(block.anchors)

    def read(self, block: Block, first: int, stop: int) -> Iterator[BlockPiece | Damage]:
        """Records ``first`` to ``stop - 1`` of ``block``, in order; both CRCs of each are checked.

        What is found may go beyond that range. A damage comes in front of the piece that the record would be in, or
        is in as a bad one. Raises ShardReadError where the file cannot be read, or is not the one that was indexed;
        if it comes at the end, what was yielded does not count.
        """
        self._file(block.shard).check_unchanged()
        is_whole = not block.anchors or self._find_frames([block]) is not None
        for part in [block] if is_whole else _parts(block):
            begin = part.first_record - block.first_record
            if begin + part.count <= first or begin >= stop:
                continue
            for found in self._checked(self._read_part(part, block.first_record + stop)):
                if isinstance(found, Damage):
                    yield found
                else:
                    yield BlockPiece(found.first_record - block.first_record, found)
        self._file(block.shard).check_unchanged()

    def _checked(self, pieces: Iterator[Piece | Damage]) -> Iterator[Piece | Damage]:
        """The same; the time until each of them counts as checking, but for what is counted as something else."""
        spent = self._spent
        while True:
            began_ns = time.monotonic_ns() - spent[Stage.READ] - spent[Stage.INFLATE]
            found = next(pieces, None)
            spent[Stage.CHECK] += time.monotonic_ns() - spent[Stage.READ] - spent[Stage.INFLATE] - began_ns
            if found is None:
                return
            yield found

    def can_read_together(self, block: Block) -> bool:
        """Whether :meth:`read_together` may be tried."""
        return bool(block.anchors)

    def read_together(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """The records of several plain blocks: the buffer that they are in and the ends of their frames, in order.

        ``ends``: int64, (records + 1,), as in :class:`~loaderd.shards.framing.Piece`; both CRCs of each record are
        checked. None where anything at all is wrong: :meth:`read` will say what. About 90 ns a record.
        """
        run = self._find_frames(blocks)
        began_ns = time.monotonic_ns()
        is_damaged = run is not None and check_data_crcs(*run)
        self._spent[Stage.CHECK] += time.monotonic_ns() - began_ns
        return None if is_damaged else run

    def _find_frames(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """As :meth:`read_together`, without a look at the data."""
        sizes = [block.num_bytes for block in blocks]
        total = sum(sizes)
        if len(self._buffer) < total + CHAIN_SLACK_BYTES:
            self._buffer = np.empty(total + CHAIN_SLACK_BYTES, dtype=np.uint8)
        buffer = self._buffer[: total + CHAIN_SLACK_BYTES]
        view = buffer.data
        starts: list[npt.NDArray[np.int64]] = []
        counts: list[npt.NDArray[np.int64]] = []
        position = 0
        remote: list[tuple[tuple[int, int, int], memoryview]] = []
        began_ns = time.monotonic_ns()
        for block in blocks:
            part = view[position : position + block.num_bytes]
            if block.shard in self._remote:
                remote.append((_key(block), part))
            elif not self._read_local(block, part):
                return None
            starts.append(np.frombuffer(block.anchors, dtype="<u4").astype(np.int64) + position)
            counts.append(np.full(len(starts[-1]), ANCHOR_RECORDS))
            counts[-1][-1] = block.count - ANCHOR_RECORDS * (len(starts[-1]) - 1)
            position += block.num_bytes
        if remote:
            self._fetches.take_into([key for key, _ in remote], [part for _, part in remote])
        read_ns = time.monotonic_ns()
        self._spent[Stage.READ] += read_ns - began_ns
        chain_starts = np.concatenate(starts)
        chain_stops = np.append(chain_starts[1:], total)
        ends = walk_chains(buffer, chain_starts, chain_stops, np.concatenate(counts))
        is_damaged = ends is None or find_bad_length_crc(buffer, ends) is not None
        self._spent[Stage.FRAMES] += time.monotonic_ns() - read_ns
        return None if ends is None or is_damaged else (buffer, ends)

    def _read_local(self, block: Block, part: memoryview) -> bool:
        """False where the file has become shorter."""
        file = self._file(block.shard)
        whole = file.read_at(block.offset, part) == block.num_bytes
        if whole:
            file.check_unchanged()
        return whole

    def _file(self, shard: int) -> OpenFile:
        file = self._open.get(shard)
        if file is None:
            while len(self._open) >= self._max_open:
                self._open.popitem(last=False)[1].close()
            file = self._open[shard] = open_shard(self._files[shard], self._access, self._close_files)
        self._open.move_to_end(shard)
        return file

    def _read_part(self, part: Block, stop: int) -> Iterator[Piece | Damage]:
        """The records of ``part`` up to number ``stop`` of the shard, and the damage.

        Where a frame is broken, nobody can say how many records the lost stretch held: one, if the numbers come out
        right so. Otherwise records are counted from the front to the first broken frame, and from the end back to
        the last; what lies between is lost.
        """
        stream, found_in_part = self._scan(part, part.offset, part.first_record)
        number, offset = part.first_record, part.offset
        last = reached = part.first_record + part.count
        damages: list[Damage] = []
        tail_count, tail_offset, tail_stop = 0, -1, -1
        for found in found_in_part:
            reached = found.record + 1 if isinstance(found, Damage) else found.first_record + found.num_records
            if isinstance(found, Damage):
                damages.append(found)
            elif found.offset == offset and number + found.num_records <= last:
                # Nothing is missing in front of it: the damages are of bad records in it.
                yield from damages
                damages.clear()
                yield found
                number, offset = number + found.num_records, found.stop_offset
                if number >= stop:
                    return
            else:
                if found.offset != tail_stop:
                    tail_count, tail_offset = 0, found.offset
                tail_count, tail_stop = tail_count + found.num_records, found.stop_offset
        if stream.damage is None and damages and reached == last:
            yield from self._scan(part, offset, number)[1]
            return
        if tail_stop != part.offset + part.num_bytes or tail_count >= last - number:
            tail_count, tail_offset = 0, part.offset + part.num_bytes
        miscounted = Damage(
            "", 0, 0, f"{part.count} records, as when it was indexed", f"{reached - part.first_record}"
        )
        cause = stream.damage or (damages[0] if damages else miscounted)
        lost = Damage(self._files[part.shard].uri, number, offset, cause.expected, cause.found, tail_offset - offset)
        for record in range(number, last - tail_count):
            yield replace(lost, record=record, lost_bytes=lost.lost_bytes if record == number else 0)
        if tail_count:
            yield from self._scan(part, tail_offset, last - tail_count)[1]

    def _scan(self, part: Block, offset: int, record: int) -> tuple[Stream, Iterator[Piece | Damage]]:
        """The shard's stream, and what is in it from ``offset`` (where ``record`` is) to the end of ``part``."""
        uri = self._files[part.shard].uri
        timed = _TimedFile(self._file(part.shard), self._spent)
        stream = open_stream(uri, timed, self._compressions[part.shard], self._on_read)
        with _inflating(self._spent):
            stream.skip(offset)
        left = part.offset + part.num_bytes - offset

        def read_into(view: memoryview) -> int:
            nonlocal left
            with _inflating(self._spent):
                got = stream.read_into(view[:left]) if left else 0
            left -= got
            return got

        return stream, scan(uri, read_into, first_record=record, first_offset=offset)


def _key(block: Block) -> tuple[int, int, int]:
    return block.shard, block.offset, block.num_bytes


class _TimedFile:
    """A file whose reads are counted."""

    def __init__(self, file: OpenFile, spent: Spent) -> None:
        self._file = file
        self._spent = spent

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()

    def read_at(self, offset: int, view: memoryview) -> int:
        began_ns = time.monotonic_ns()
        try:
            return self._file.read_at(offset, view)
        finally:
            self._spent[Stage.READ] += time.monotonic_ns() - began_ns


@contextlib.contextmanager
def _inflating(spent: Spent) -> Iterator[None]:
    """What passes in it counts as inflating, but for what is counted as reading meanwhile."""
    began_ns = time.monotonic_ns() - spent[Stage.READ]
    try:
        yield
    finally:
        spent[Stage.INFLATE] += time.monotonic_ns() - spent[Stage.READ] - began_ns


def _parts(block: Block) -> Iterator[Block]:
    """The parts of ``block`` whose places and counts the anchors tell: damage in one says nothing of the others."""
    anchors = [0, *np.frombuffer(block.anchors, dtype="<u4")[1:].tolist()]
    for number, (start, end) in enumerate(itertools.pairwise([*anchors, block.num_bytes])):
        first = number * ANCHOR_RECORDS
        count = block.count - first if number == len(anchors) - 1 else ANCHOR_RECORDS
        yield Block(block.shard, block.offset + start, end - start, count, block.first_record + first)
