"""Reading the blocks of an index again: the face of all readers, and the files that they keep open."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn
from weakref import WeakSet

import numpy as np

from loaderd.errors import Damage, ShardReadError
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.framing import RecordChunk
from loaderd.formats.inflate import inflate_into
from loaderd.kernels.crc import Bytes1D
from loaderd.kernels.frames import Ends
from loaderd.machine import max_open_files
from loaderd.stages import Stage, StageTimes
from loaderd.storage.access import Access
from loaderd.storage.fetches import Fetches
from loaderd.storage.files import OpenFile, open_shard, read_shard
from loaderd.storage.shard_file import Block, Compression, ReadAt, ShardFile, is_remote, replaced

_MAX_OPEN_FILES = 64
_OTHER_OPEN_FILES = 16  # sockets, memories, and what a user's function opens
_HINT_SAME_TIME = (
    "If the object was replaced within a second of its writing, its size and time do not tell it from the old one, "
    "whose index is kept. Upload it again, so that it has another time; or make a new loader with another index "
    'folder, or index_cache="none" (and another Storage.cache_dir, if you use one).'
)


@dataclass
class Reading:
    """How files are read: by ``access`` where they are remote.

    ``on_read`` is called while a shard is read from front to back; the ns of each stage are added up in ``spent``.
    """

    on_read: OnRead = no_callback
    access: Access = field(default_factory=Access)
    spent: StageTimes = field(default_factory=lambda: [0] * len(Stage))


class Reader:
    """Reads blocks of a list of files: ``BlockReader`` those of TFRecord, ``FixedBlockReader`` the others.

    Keeps up to 64 files open (fewer if few may be open), and a buffer for the most that was read together.
    """

    header_bytes = footer_bytes = 0
    """Of the frame of each record."""
    # With 8 MiB, the games of a tar take 5 % longer; with 32 MiB, they take no less time.
    most_together_bytes = 16 << 20
    """Blocks of more bytes are not to be read together."""

    def __init__(
        self, files: list[ShardFile], compressions: list[Compression], reading: Reading | None = None
    ) -> None:
        reading = reading or Reading()
        self._files, self._compressions = files, compressions
        self._access, self._on_read, self._spent = reading.access, reading.on_read, reading.spent
        self._fetches = Fetches(files, self._access)
        self._replaced: dict[int, ShardReadError] = {}
        """Of shards of which a block was not the one that was indexed, the error that says so."""
        self._remote = {number for number, file in enumerate(files) if is_remote(file.uri) and not file.columns}
        self._buffer: Bytes1D = np.empty(1 << 20, dtype=np.uint8)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._max_open = max(1, min(_MAX_OPEN_FILES, max_open_files() - _OTHER_OPEN_FILES))
        self._are_many = len(files) > self._max_open
        self._kept: _Kept | None = None
        _all.add(self)

    def close(self) -> None:
        """Close the files, and forget what was fetched."""
        self._fetches.forget()
        self._kept = None
        self.close_files()

    def close_files(self) -> None:
        """Have no file open until the next one is read."""
        while self._open:
            self._open.popitem()[1].close()

    def payloads(self, ends: Ends) -> tuple[Ends, Ends]:
        """Two int64, (n,): where each record's data starts, and how many bytes it has, in frames with these ends."""
        return ends[:-1] + self.header_bytes, np.diff(ends) - self.header_bytes - self.footer_bytes

    # ------------------------------------------------------------------------------------ of each kind its own

    def narrowed(self, block: Block, first: int, stop: int) -> Block:
        """The smallest part of ``block`` that holds its records ``first`` to ``stop - 1`` and can be read alone."""
        raise NotImplementedError

    def memory_bytes(self, block: Block) -> int:
        """Bytes of memory that :meth:`read_together` needs for a block."""
        raise NotImplementedError

    def can_read_together(self, block: Block) -> bool:
        """Whether :meth:`read_together` may be tried."""
        raise NotImplementedError

    def read_together(self, blocks: list[Block]) -> tuple[Bytes1D, Ends] | None:
        """The records of several blocks: the buffer that they are in and the ends of their frames, in order.

        ``ends``: int64, (records + 1,), as in :class:`~loaderd.formats.framing.RecordChunk`. Valid until the next
        call. None where anything at all is wrong: :meth:`read` will say what.
        """
        raise NotImplementedError

    def named(self, damage: Damage, block: Block) -> Damage:
        """The damage of ``block``; where ``offset`` counts from a part of the shard, it says from which."""
        return damage

    def crc_of(self, piece: RecordChunk, crc: int) -> int:
        """The CRC of what earlier records hold, whose CRC is ``crc``, and of those of ``piece`` behind them."""
        raise NotImplementedError

    def read(self, block: Block, first: int, stop: int) -> Iterator[RecordChunk | Damage]:
        """Records ``first`` to ``stop - 1`` of ``block``, in order, and what of them is damaged.

        The pieces may go beyond that range. A Damage comes in front of the piece in which its record would be, or in
        which it is as a ``bad`` one. Raises ShardReadError where the file cannot be read, or is not the one that was
        indexed; if that error comes at the end, what was yielded does not count.
        """
        raise NotImplementedError

    def _read_on(
        self, block: Block, first: int, stop: int, pieces: Callable[[], Iterator[RecordChunk | Damage]]
    ) -> Iterator[RecordChunk | Damage]:
        """As :meth:`read`, of a compressed block that is too large for one read: what ``pieces`` gives, all of it.

        The block that was read last stays open where reading stopped: the next read mostly goes on there.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept[:2] != (block.shard, block.offset) or kept.first > first:
            kept = _Kept(block.shard, block.offset, 0, [], pieces())
        wanted, last = block.first_record + first, block.first_record + stop
        reached, again = block.first_record + kept.first, list[RecordChunk | Damage]()
        for piece in itertools.chain(kept.again, kept.pieces):
            if again and isinstance(again[-1], RecordChunk):
                again = []
            again.append(piece)
            if isinstance(piece, RecordChunk):
                begin, reached = piece.first_record, piece.first_record + piece.num_records
            else:  # of a record in front of the next piece, or of a bad one in it
                begin, reached = reached, reached + (piece.record == reached)
            if (piece.record >= wanted) if isinstance(piece, Damage) else (reached > wanted):
                yield piece
            if reached >= last and stop < block.num_records:  # at the end, what is behind it is looked at, too
                self._kept = _Kept(block.shard, block.offset, begin - block.first_record, again, kept.pieces)
                return

    # -------------------------------------------------------------------------------- shards that are far away

    @property
    def fetches(self) -> bool:
        """Whether any shard is remote: else :meth:`begin` does nothing."""
        return bool(self._remote)

    def begin(self, blocks: list[Block]) -> None:
        """Have blocks of remote shards fetched, each for one :meth:`read_together`."""
        self._fetches.begin(_key(block) for block in blocks if self._is_fetched(block))

    def are_there(self, blocks: list[Block]) -> bool:
        """Whether what was begun has come."""
        return self._fetches.are_there(_key(block) for block in blocks if self._is_fetched(block))

    def _is_fetched(self, block: Block) -> bool:
        return block.shard in self._remote and self.can_read_together(block)

    # ---------------------------------------------------------------------------------------------- the bytes

    def _read_bytes(self, blocks: list[Block], part_of: Callable[[int], memoryview]) -> bool:
        """Read the bytes of block i into ``part_of(i)``; from a restart point on, they are inflated.

        False where a file has become shorter, or is damaged.
        """
        remote: list[tuple[tuple[int, int, int], memoryview]] = []
        stored: list[tuple[Block, memoryview, memoryview]] = []
        began_ns = time.monotonic_ns()
        for number, block in enumerate(blocks):
            part = part_of(number)
            if block.point is not None:
                stored.append((block, memoryview(bytearray(block.stored_range[1])), part))
                part = stored[-1][1]
            if block.shard in self._remote:
                remote.append((_key(block), part))
            elif not self._read_local(block, part):
                return False
        if remote:
            self._fetches.take_into([key for key, _ in remote], [part for _, part in remote])
        self._spent[Stage.READ] += time.monotonic_ns() - began_ns
        with self._inflating():
            for block, read, part in stored:
                assert block.point is not None
                skipped = block.offset - block.point.offset
                if not inflate_into(part, read, self._compressions[block.shard], block.point, skipped):
                    return False
        return True

    def _read_local(self, block: Block, part: memoryview) -> bool:
        """False where the file has become shorter."""
        listed, (offset, num_bytes) = self._files[block.shard], block.stored_range
        if self._are_many and num_bytes == listed.size_bytes:  # it would be closed before it is read again
            return read_shard(listed, part, self._access, _close_all)
        file = self._file(block.shard)
        whole = file.read_at(offset, part) == num_bytes
        if whole:
            file.check_unchanged()
        return whole

    def _read_at(self, shard: int) -> ReadAt:
        """Reads a shard, which may be closed and opened again meanwhile. The time that it takes counts as READ."""

        def read_at(offset: int, view: memoryview) -> int:
            began_ns = time.monotonic_ns()
            try:
                return self._file(shard).read_at(offset, view)
            finally:
                self._spent[Stage.READ] += time.monotonic_ns() - began_ns

        return read_at

    @contextlib.contextmanager
    def _inflating(self) -> Iterator[None]:
        """The time in this context counts as INFLATE, except for the reads in it."""
        began_ns = time.monotonic_ns() - self._spent[Stage.READ]
        try:
            yield
        finally:
            self._spent[Stage.INFLATE] += time.monotonic_ns() - self._spent[Stage.READ] - began_ns

    def _compared(self, block: Block, pieces: Iterator[RecordChunk | Damage]) -> Iterator[RecordChunk]:
        """All of a block that has a CRC. It held no damage when it was indexed: so what holds any is another one."""
        crc = 0
        for piece in pieces:
            if isinstance(piece, Damage):
                self._refuse(block, f"at byte {piece.offset}: {piece.found} in place of {piece.expected}")
            crc = self.crc_of(piece, crc)
            yield piece
        self._check_content(block, crc)

    def _check_content(self, block: Block, crc: int) -> None:
        """Raise ShardReadError where a block, whose records have this CRC, is not the one that was indexed."""
        if crc != block.crc:
            self._refuse(block, f"{crc:#010x}")

    def _refuse(self, block: Block, found: str) -> NoReturn:
        """Raise ShardReadError for a block that is not the one that was indexed: ``found`` is in its place."""
        file = self._files[block.shard]
        records = f"records {block.first_record} to {block.first_record + block.num_records - 1}"
        hint = [_HINT_SAME_TIME] if file.has_version else []  # else no index of it is kept
        error = replaced(file.uri, f"CRC32C {block.crc:#010x} of {records}", found, *hint)
        self._replaced[block.shard] = error
        self._check_unchanged(block)
        raise error

    def _check_unchanged(self, block: Block) -> None:
        """Raise ShardReadError if the shard, of which a block was read, is not the one that was indexed."""
        if block.shard not in self._remote:
            self._file(block.shard).check_unchanged()
            return
        self._access.look_at(self._files[block.shard])
        if block.shard in self._replaced:  # by one of the same size, in the same second
            raise self._replaced[block.shard]

    def _file(self, shard: int) -> OpenFile:
        file = self._open.get(shard)
        if file is None:
            for other in self._remote & self._open.keys():  # each may hold what was fetched ahead: up to 32 MiB
                self._open.pop(other).close()
            while len(self._open) >= self._max_open:
                self._open.popitem(last=False)[1].close()
            file = self._open[shard] = open_shard(self._files[shard], self._access, _close_all)
        self._open.move_to_end(shard)
        return file


class _Kept(NamedTuple):
    """A block that was read in part: ``again``, whose records begin at number ``first``, comes before ``pieces``."""

    shard: int
    offset: int
    first: int
    again: list[RecordChunk | Damage]
    pieces: Iterator[RecordChunk | Damage]


_all: WeakSet[Reader] = WeakSet()
"""Those of this process, of all streams: together they may have more files open than a process may have."""


def _close_all() -> None:
    for one in list(_all):
        one.close_files()


def _key(block: Block) -> tuple[int, int, int]:
    return block.shard, *block.stored_range
