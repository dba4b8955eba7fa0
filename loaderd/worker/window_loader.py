"""From shards to a window: read records, check them, parse them, and write each row to its shuffled place.

The hot path reads many blocks together, and is for records with which nothing is wrong. Where anything is, the blocks
that were read together are gone through again one by one, and what is wrong is named; the rows that are fine are then
written a second time, to the same places.

A record of 240 bytes costs, in ns, in tasks of 4,096: read 35, find frames 40, check CRCs 45, parse and put 200
(on another machine half of that).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.decode.example_rows import RowParser
from loaderd.decode.fixed_rows import FixedParser
from loaderd.errors import (
    CorruptRecordError,
    Damage,
    LoaderdError,
    RecordMismatchError,
    ShardReadError,
    at_damage,
)
from loaderd.formats.blocks import BlockReader
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.framing import RecordChunk
from loaderd.formats.reader import Reader, Reading
from loaderd.randomness import splitmix64
from loaderd.schema import Schema
from loaderd.stages import Stage
from loaderd.storage.shard_file import Block, Compression, ShardFile

_HINT_CORRUPT = 'Restore the file, or pass on_corrupt="skip_record" or "skip_shard" to go on without it.'

Bytes2D = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]
Faults = list[tuple[list[int], LoaderdError]]


class BlockPlacement(NamedTuple):
    """Records of ``block``, from its record ``first`` on, and where their rows go: ``places``, intp, (count,).

    -1: not wanted, as all other records of the block: of an npz, they may be very many. ``key``: 64 bits, of the
    shard and the epoch, from which the keys of its records are drawn.
    """

    block: Block
    places: Places
    key: int = 0
    first: int = 0

    @property
    def all_places(self) -> Places:
        """intp, (records,): the place of each record of the block."""
        if len(self.places) == self.block.num_records:
            return self.places
        places = np.full(self.block.num_records, -1)
        places[self.first : self.first + len(self.places)] = self.places
        return places

    def record_keys(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """uint64, (count,): the keys of the records from number ``first`` of the block on."""
        start = self.block.first_record + first
        return splitmix64(np.uint64(self.key), np.arange(start, start + count, dtype=np.uint64))


def _groups(parts: list[BlockPlacement], reader: Reader) -> Iterator[list[BlockPlacement]]:
    """Groups of parts that are read together: where few records of each block are wanted, a task has very many."""
    group: list[BlockPlacement] = []
    num_bytes = 0
    for part in parts:
        more = reader.memory_bytes(part.block)
        if group and num_bytes + more > reader.most_together_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(part)
        num_bytes += more
    if group:
        yield group


def _at_record(error: ShardReadError, number: int, block_offset: int, uri: str) -> ShardReadError:
    """The error for record ``number`` of a block that cannot be read, of the shard at ``uri``."""
    # An error of the file system itself, such as one for a URI that nothing can open, is of no record yet.
    of_shard = error.damage or Damage(uri, 0, 0, "a file that can be read", error.message, lost_bytes=-1)
    damage = replace(of_shard, record=number, offset=block_offset)
    return ShardReadError(error.message, hint=error.hint, damage=damage)


class WindowLoader:
    """Loads parts of windows. It owns a read buffer, and keeps files open."""

    def __init__(
        self,
        schema: Schema,
        files: list[ShardFile],
        compressions: list[Compression],
        reading: Reading | None = None,
    ) -> None:
        reading = reading or Reading()
        self._files, self._spent = files, reading.spent
        self.reader: Reader
        """What reads blocks; it can begin ahead to fetch those that are far away."""
        self._parser: RowParser | FixedParser
        if schema.records is None:
            self.reader = BlockReader(files, compressions, reading)
            self._parser = RowParser(schema)
        else:
            self.reader = FixedBlockReader(schema.records, files, compressions, reading)
            self._parser = FixedParser(schema)
        self._row_bytes = schema.row_bytes
        self._needs_keys = schema.needs_record_key
        self._record_keys = schema.record_keys

    @property
    def feature_lists(self) -> list[str]:
        """The names of the feature lists of the first record that was parsed. They are not read."""
        return self._parser.feature_lists or [] if isinstance(self._parser, RowParser) else []

    def close(self) -> None:
        self.reader.close()

    def load(self, parts: Sequence[BlockPlacement], window: Bytes2D) -> Faults:
        """Write the rows of ``parts`` to ``window``, uint8 (max_rows, row_bytes).

        Returns the places that could not be written, and why. After a StorageError, nothing is known of the rows.
        """
        alone = [part for part in parts if not self.reader.can_read_together(part.block)]
        can_be_together = [part for part in parts if self.reader.can_read_together(part.block)]
        for together in _groups(can_be_together, self.reader):
            if not self._load_together(together, window):
                alone += together
        return [fault for part in alone for fault in self._load_one(part, window)]

    def check_fits(self, block: Block, numbers: npt.NDArray[np.int64]) -> None:
        """Raise RecordMismatchError where none of the records ``numbers`` (from 0, rising) of a block fit the schema.

        Where all of them are damaged, it raises nothing: damage tells nothing of the schema.
        """
        places = np.full(int(numbers[-1]) + 1, -1)
        places[numbers] = 0  # nobody wants the rows, so one place does for all: a row may have megabytes
        window = np.empty((1, self._row_bytes), dtype=np.uint8)
        faults = self._load_one(BlockPlacement(block, places), window)
        mismatches = [error for _, error in faults if isinstance(error, RecordMismatchError)]
        if mismatches and sum(len(faulty) for faulty, _ in faults) == len(numbers):
            raise mismatches[0]

    def _load_together(self, parts: list[BlockPlacement], window: Bytes2D) -> bool:
        """The hot path; False where anything is wrong with any of the records."""
        try:
            run = self.reader.read_together([part.block for part in parts])
        except ShardReadError:
            return False
        if run is None:
            return False
        buffer, ends = run
        starts, lengths = self.reader.payloads(ends)
        places = np.concatenate([part.all_places for part in parts])
        began_ns = time.monotonic_ns()
        faults = self._parser.parse(buffer, starts, lengths, window, places)
        self._spent[Stage.PARSE] += time.monotonic_ns() - began_ns
        if faults:
            return False
        if self._needs_keys:
            keys = np.concatenate([part.record_keys(0, part.block.num_records) for part in parts])
            wanted = places >= 0
            self._record_keys(window)[places[wanted]] = keys[wanted]
        return True

    # ----------------------------------------------------------------------------------- one block, with care

    def _load_one(self, part: BlockPlacement, window: Bytes2D) -> Faults:
        block, wanted = part.block, np.flatnonzero(part.places >= 0)
        first_record = block.first_record + part.first
        faults: Faults = []
        if not len(wanted):
            return faults
        try:
            for piece in self.reader.read(block, part.first + int(wanted[0]), part.first + int(wanted[-1]) + 1):
                if isinstance(piece, Damage):
                    number = piece.record - first_record
                    place = int(part.places[number]) if 0 <= number < len(part.places) else -1
                    if place >= 0:
                        faults.append(([place], at_damage(CorruptRecordError, piece, hint=_HINT_CORRUPT)))
                else:
                    faults += self._load_piece(part, piece, window)
        except ShardReadError as error:
            # Each record is named, so that a batch counts those that it lacks, and no others.
            uri, numbers = self._files[block.shard].uri, (wanted + first_record).tolist()
            return [
                ([place], _at_record(error, number, block.offset, uri))
                for place, number in zip(part.places[wanted].tolist(), numbers, strict=True)
            ]
        return faults

    def _load_piece(self, part: BlockPlacement, piece: RecordChunk, window: Bytes2D) -> Faults:
        """The wanted records of a piece."""
        piece_first = piece.first_record - part.block.first_record
        begin = max(0, part.first - piece_first)
        in_piece = np.arange(begin, min(len(piece.ends) - 1, part.first + len(part.places) - piece_first))
        places = part.places[in_piece + (piece_first - part.first)]
        # The bad ones were named as damage already, and must not be parsed.
        wanted = (places >= 0) & ~np.isin(in_piece, piece.bad)
        in_piece, places = in_piece[wanted], places[wanted]
        starts, lengths = piece.payload_starts[in_piece], piece.payload_lengths[in_piece]
        faults: Faults = []
        began_ns = time.monotonic_ns()
        mismatches = self._parser.parse(piece.buffer, starts, lengths, window, places)
        self._spent[Stage.PARSE] += time.monotonic_ns() - began_ns
        for mismatch in mismatches:
            number = int(in_piece[mismatch.record])
            damage = Damage(
                self._files[part.block.shard].uri,
                piece.first_record + number,
                piece.offset + int(piece.ends[number] - piece.ends[0]),
                mismatch.expected,
                mismatch.found,
                lost_bytes=int(piece.ends[number + 1] - piece.ends[number]),
            )
            damage = self.reader.named(damage, part.block)
            error = at_damage(RecordMismatchError, damage, hint=mismatch.remedy)
            faults.append(([int(places[mismatch.record])], error))
        if self._needs_keys:
            keys = part.record_keys(piece_first + begin, len(wanted))
            self._record_keys(window)[places] = keys[wanted]
        return faults
