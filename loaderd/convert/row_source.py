"""Rows of the stored features, from shards of any kind that loaderd reads, in the order that is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from loaderd.convert.work_units import BlockSpan
from loaderd.decode.example_rows import RowParser
from loaderd.decode.example_writer import Rows
from loaderd.decode.fixed_rows import FixedParser
from loaderd.errors import CorruptRecordError, Damage, LoaderdError, RecordMismatchError, at_damage
from loaderd.formats.blocks import BlockReader
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.framing import RecordChunk
from loaderd.formats.reader import Reader
from loaderd.schema import Schema
from loaderd.storage.shard_file import Compression, ShardFile

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
        for span in spans:
            for piece in self._pieces_of(span):
                if not isinstance(piece, Damage):
                    yield from self._rows_of(span, piece)
                elif span.first <= piece.record - span.block.first_record < span.stop:
                    yield at_damage(CorruptRecordError, piece, hint=_HINT)

    def _pieces_of(self, span: BlockSpan) -> Iterable[RecordChunk | Damage]:
        """A block at once, if it can be and nothing is wrong in it: ``Reader.read`` would read and walk it twice."""
        block, reader = span.block, self._reader
        run = reader.read_together([block]) if reader.can_read_together(block) else None
        if run is None:
            return reader.read(block, span.first, span.stop)
        return [RecordChunk(*run, block.offset, block.first_record, (), reader.header_bytes, reader.footer_bytes)]

    def _rows_of(self, span: BlockSpan, piece: RecordChunk) -> Iterator[RowsOrFault]:
        first = piece.first_record - span.block.first_record
        numbers = np.arange(max(0, span.first - first), min(piece.num_records, span.stop - first))
        numbers = numbers[~np.isin(numbers, piece.bad)]  # these were named as damage already
        rows = np.zeros(len(numbers), self._dtype)
        starts, lengths = piece.payload_starts[numbers], piece.payload_lengths[numbers]
        row_bytes = rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
        begin = 0
        for fault in self._parser.parse(piece.buffer, starts, lengths, row_bytes, np.arange(len(numbers))):
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
