"""An Arrow file (IPC, Feather) as a table: pyarrow reads it, one record batch after the other.

Where the batches are, and how much memory each needs, is read from the file's own messages before pyarrow takes any:
flatbuffers, as arrow's File.fbs and Message.fbs have them. A compressed buffer begins with its inflated size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from loaderd.formats.arrow_columns import BatchTable
from loaderd.formats.compression import OnRead, no_callback
from loaderd.kernels.crc import crc32c
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import ReadAt, ShardFile

_MOST_MESSAGE_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 10
_BATCH_BYTES = 1 << 9  # of what is kept of a batch that is not read
_BLOCK, _BUFFER = struct.Struct("<qi4xq"), struct.Struct("<qq")
_DICTIONARY, _RECORDS = 2, 3
"""Kinds of messages that have a body."""


class _Message(NamedTuple):
    """A record batch, or the values of a dictionary: ``rows``, and the memory that its body needs, inflated."""

    rows: int
    num_bytes: int


class ArrowTable(BatchTable):
    """See ``Table``. A block is a record batch; its digest is of all messages, and of how each batch begins."""

    def __init__(
        self, file: ShardFile, read_at: ReadAt, records: FixedRecords | None, on_read: OnRead = no_callback
    ) -> None:
        super().__init__(file, read_at, records, on_read)
        try:
            tail = self._bytes(max(0, self._size - 10), min(10, self._size))
            size = int.from_bytes(tail[:4], "little")
            footer = _Flat(self._bytes(self._size - 10 - size, size, _MOST_MESSAGE_BYTES))
            dictionaries, batches = (
                [(at, of, body) for at, of, body in footer.root().structs(number, _BLOCK)] for number in (2, 3)
            )
            self.digest = crc32c(footer.data)
            of_dictionaries = [self._message(block, _DICTIONARY) for block in dictionaries]
            self._needed = [self._message(block, _RECORDS) for block in batches]
            of_values = sum(message.num_bytes for message in of_dictionaries)
            self._check_size(0, of_values)
            self._held_bytes = of_values + len(footer.data) + _BATCH_BYTES * len(batches)
            schema = pa.ipc.open_file(self._open()).schema
            read = sorted(map(schema.get_field_index, self._names_in(schema)))
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=read)
            self._file = pa.ipc.open_file(self._open(), options=options)
        except Exception as error:
            raise self._failed("an Arrow file", error) from None
        self.blocks = [
            (offset, header + body, message.rows)
            for (offset, header, body), message in zip(batches, self._needed, strict=True)
        ]

    def _bytes(self, begin: int, num_bytes: int, most: int = 1 << 62) -> bytes:
        if not (begin >= 0 and 0 <= num_bytes <= min(most, self._size - begin)):
            raise ValueError(f"{num_bytes} bytes from byte {begin} on, of {self._size}")
        data = bytearray(num_bytes)
        self._read_at(begin, memoryview(data))
        return bytes(data)

    def _message(self, block: tuple[int, int, int], kind: int) -> _Message:
        """``block``: (offset, bytes of the message, bytes of its body)."""
        offset, header_bytes, body_bytes = block
        data = self._bytes(offset, header_bytes, _MOST_MESSAGE_BYTES)
        flat = _Flat(data[8:] if data[:4] == b"\xff\xff\xff\xff" else data[4:])
        message = flat.root()
        batch = message.table(2)
        if message.number(1, "B") != kind or not 0 <= body_bytes <= self._size - offset - header_bytes:
            raise ValueError(f"no message with a body of {body_bytes} bytes at byte {offset}")
        self.digest = crc32c(data, self.digest)
        body = offset + header_bytes
        self.digest = crc32c(self._bytes(body, min(_SAMPLE_BYTES, body_bytes)), self.digest)
        batch = batch.table(1) if kind == _DICTIONARY else batch
        needed = body_bytes
        if batch.has(3):  # it is compressed
            for begin, num_bytes in batch.structs(2, _BUFFER):
                if num_bytes:
                    stated = int.from_bytes(self._bytes(body + begin, 8), "little", signed=True)
                    needed += max(0, stated)
        rows = batch.number(0, "q")
        if rows < 0 or rows > 8 * needed:
            raise ValueError(f"a batch of {rows} rows in {needed} bytes")
        return _Message(rows, needed)

    def batches_of(self, block: int) -> Iterator[pa.RecordBatch]:
        self._check_size(block, self._needed[block].num_bytes)
        try:
            batch = self._file.get_batch(block)
            batch.validate(full=True)  # pyarrow takes from dictionaries without looking
        except Exception as error:
            raise self._failed(f"record batch {block} of an Arrow file", error, block) from None
        yield batch


class _Flat:
    """A flatbuffer that may be hostile: what is read lies in it, or ValueError is raised."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def unpack(self, form: str | struct.Struct, at: int) -> tuple[Any, ...]:
        of = struct.Struct(f"<{form}") if isinstance(form, str) else form
        if not 0 <= at <= len(self.data) - of.size:
            raise ValueError(f"byte {at} of a message of {len(self.data)}")
        return of.unpack_from(self.data, at)

    def root(self) -> _FlatTable:
        return _FlatTable(self, self.unpack("I", 0)[0])


class _FlatTable:
    """A table in it: its fields by their numbers."""

    def __init__(self, flat: _Flat, at: int) -> None:
        self._flat, self._at = flat, at
        self._fields = at - flat.unpack("i", at)[0]
        self._end = flat.unpack("H", self._fields)[0]

    def _place(self, number: int) -> int:
        """Where a field's value is; 0: it is left out."""
        at = 4 + 2 * number
        offset: int = self._flat.unpack("H", self._fields + at)[0] if at + 2 <= self._end else 0
        return self._at + offset if offset else 0

    def has(self, number: int) -> bool:
        return self._place(number) > 0

    def number(self, number: int, form: str) -> int:
        place = self._place(number)
        value: int = self._flat.unpack(form, place)[0] if place else 0
        return value

    def table(self, number: int) -> _FlatTable:
        place = self._place(number)
        if not place:
            raise ValueError(f"no field {number}")
        return _FlatTable(self._flat, place + self._flat.unpack("I", place)[0])

    def structs(self, number: int, of: struct.Struct) -> Iterator[tuple[Any, ...]]:
        place = self._place(number)
        if place:
            begin = place + self._flat.unpack("I", place)[0]
            for item in range(self._flat.unpack("I", begin)[0]):
                yield self._flat.unpack(of, begin + 4 + item * of.size)
