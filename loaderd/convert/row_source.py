"""Rows of the stored features, from shards of any kind that loaderd reads, in the order that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from loaderd.convert.work_units import BlockSpan
from loaderd.decode.example_rows import RowParser
from loaderd.decode.example_writer import Rows
from loaderd.decode.fixed_rows import FixedParser
from loaderd.errors import CorruptRecordError, Damage, LoaderdError, RecordMismatchError, ShardReadError, at_damage
from loaderd.formats.blocks import BlockReader
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.framing import RecordChunk
from loaderd.formats.reader import Reader
from loaderd.schema import Schema
from loaderd.storage.shard_file import Compression, ShardFile

_GROUP_BYTES = 1 << 20
_HINT = (
    'Pass --on-corrupt "skip_record" to go on without what is damaged or does not fit; '
    "or restore the file, and convert to another folder."
)

RowsOrFault = Rows | LoaderdError


class RowSource:
    """Reads ``files``, whose records have the features of ``schema``; rows: ``schema.row_dtype``, padding 0."""

    def __init__(self, schema: Schema, files: list[ShardFile], compressions: list[Compression]) -> None:
        self._files = files
        self._dtype = schema.row_dtype
        self._reader: Reader
        self._parser: RowParser | FixedParser
        if schema.records is None:
            self._reader, self._parser = BlockReader(files, compressions), RowParser(schema)
        else:
            self._reader = FixedBlockReader(schema.records, files, compressions)
            self._parser = FixedParser(schema)

    def close(self) -> None:
        self._reader.close()

    def read(self, spans: Sequence[BlockSpan]) -> Iterator[RowsOrFault]:
        """The rows of ``spans``, in order, some MB at a time; an error in place of each faulty record.

        Raises StorageError, and ShardReadError where a file cannot be read at all.
        """
        for group in self._groups(spans):
            yield from self._read_together(group) or (row for span in group for row in self._read_one(span))

    def _groups(self, spans: Sequence[BlockSpan]) -> Iterator[list[BlockSpan]]:
        """Groups of spans whose blocks are read together; a span alone if its block cannot be."""
        group: list[BlockSpan] = []
        num_bytes = 0
        for span in spans:
            can = self._reader.can_read_together(span.block)
            if group and (not can or num_bytes >= _GROUP_BYTES):
                yield group
                group, num_bytes = [], 0
            if can:
                group.append(span)
                num_bytes += self._reader.memory_bytes(span.block)
            else:
                yield [span]
        if group:
            yield group

    def _read_together(self, spans: list[BlockSpan]) -> list[RowsOrFault]:
        """The rows of all spans, as one array; [] where anything is wrong, or a block is too large for that."""
        if not all(self._reader.can_read_together(span.block) for span in spans):
            return []
        try:
            run = self._reader.read_together([span.block for span in spans])
        except ShardReadError:
            return []
        if run is None:
            return []
        buffer, ends = run
        starts, lengths = self._reader.payloads(ends)
        bounds = np.cumsum([0, *(span.block.num_records for span in spans)]).tolist()
        places = [
            np.arange(begin + span.first, begin + span.stop) for span, begin in zip(spans, bounds[:-1], strict=True)
        ]
        wanted = np.concatenate(places)
        rows = np.zeros(len(wanted), self._dtype)
        faults = self._parser.parse(buffer, starts[wanted], lengths[wanted], _bytes_of(rows), np.arange(len(wanted)))
        return [] if faults else [rows]

    def _read_one(self, span: BlockSpan) -> Iterator[RowsOrFault]:
        for piece in self._reader.read(span.block, span.first, span.stop):
            if isinstance(piece, Damage):
                if span.first <= piece.record - span.block.first_record < span.stop:
                    yield at_damage(CorruptRecordError, piece, hint=_HINT)
            else:
                yield from self._rows_of(span, piece)

    def _rows_of(self, span: BlockSpan, piece: RecordChunk) -> Iterator[RowsOrFault]:
        first = piece.first_record - span.block.first_record
        numbers = np.arange(max(0, span.first - first), min(piece.num_records, span.stop - first))
        numbers = numbers[~np.isin(numbers, piece.bad)]  # these were named as damage already
        rows = np.zeros(len(numbers), self._dtype)
        starts, lengths = piece.payload_starts[numbers], piece.payload_lengths[numbers]
        faults = self._parser.parse(piece.buffer, starts, lengths, _bytes_of(rows), np.arange(len(numbers)))
        begin = 0
        for fault in faults:
            yield rows[begin : fault.record]
            begin = fault.record + 1
            place = self._place(span, piece, int(numbers[fault.record]))
            yield at_damage(
                RecordMismatchError, Damage(*place, fault.expected, fault.found), hint=f"{fault.remedy} {_HINT}"
            )
        yield rows[begin:]

    def _place(self, span: BlockSpan, piece: RecordChunk, number: int) -> tuple[str, int, int]:
        """(shard, record, offset) of a record of a piece."""
        offset = piece.offset + int(piece.ends[number] - piece.ends[0])
        return self._files[span.block.shard].uri, piece.first_record + number, offset


def _bytes_of(rows: Rows) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The memory of ``rows`` as uint8, (n, row_bytes)."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
