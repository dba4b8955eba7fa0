"""A Parquet file as a table: pyarrow reads it, one row group after the other.

Two things are looked at before pyarrow takes memory: what the footer says of a row group, and what the header of each
page in it says (``PageHeader`` of parquet-format's parquet.thrift, in Thrift's compact protocol). pyarrow takes as
much memory as a page's header states, and a footer may say less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from loaderd.formats.arrow_columns import HINT_LARGE, BatchTable
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.inflate import read_at_of
from loaderd.kernels.crc import crc32c
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import ReadAt, ShardFile

_MOST_FOOTER_BYTES = 768 << 10  # pyarrow takes up to 240 times as much memory for one: 180 MiB
# In each list: what is said of a column takes more than 32 bytes.
_LIMITS = {"thrift_string_size_limit": _MOST_FOOTER_BYTES, "thrift_container_size_limit": _MOST_FOOTER_BYTES // 32}
_SAMPLE_BYTES = 1 << 10
_DELTA_LENGTHS, _DELTA, _OF_DICTIONARY = 6, 7, {2, 8}  # encodings
_DICTIONARY_PAGE = 2
_OF_PAGE = {0: (5, 2), 2: (7, 2), 3: (8, 4)}  # by type of page: the field with its header, the field of its encoding
_BATCH_BYTES = 64 << 20  # that the values of a batch may take beyond what their pages have
_LEVEL_BYTES = 12  # of each value: a number, and whether and in which list it is
_MOST_BITS, _MOST_DEPTH = 70, 8
_HINT_FOOTER = "Write larger row groups, or fewer columns in each file; write_statistics=False makes it smaller, too."
_HINT_PREFIXES = (
    "How long text in DELTA_BYTE_ARRAY is, only reading it shows. Write the file with another column_encoding=, or "
    "with fewer rows in each row group: row_group_size=…."
)
_TIMES_FOOTER = 12  # of 135 KiB, pyarrow makes 1.3 MiB; of one that means ill, 20 times as much


class ParquetTable(BatchTable):
    """See ``Table``. A block is a row group; its digest is of the footer, and of how each row group begins."""

    def __init__(
        self, file: ShardFile, read_at: ReadAt, records: FixedRecords | None, on_read: OnRead = no_callback
    ) -> None:
        self._stored: dict[int, bytearray] = {}
        super().__init__(file, _of_stored(self._stored, read_at), records, on_read)
        footer = self._footer()
        self._held_bytes = _TIMES_FOOTER * len(footer)
        try:
            self._metadata = pq.ParquetFile(self._open(), **_LIMITS).metadata
            schema = self._metadata.schema
            self._names = self._names_in(schema.to_arrow_schema())
            paths = [schema.column(number).path for number in range(len(schema))]
            self._columns = [number for number, path in enumerate(paths) if _is_in(path, set(self._names))]
            self._text = {
                paths[number] for number in self._columns if schema.column(number).physical_type == "BYTE_ARRAY"
            }
            self._file = self._opened(self._text)
            self._chunks = [self._chunks_of(number) for number in range(self._metadata.num_row_groups)]
            self.digest = crc32c(footer)
            for number, chunks in enumerate(self._chunks):
                begin = min(begin for _, begin, _ in chunks)
                size = max(begin + size for _, begin, size in chunks) - begin
                self.blocks.append((begin, size, self._metadata.row_group(number).num_rows))
                self.digest = crc32c(self._bytes(begin, min(_SAMPLE_BYTES, size)), self.digest)
        except Exception as error:
            raise self._failed("a Parquet file", error) from None
        if any(count < 0 for _, _, count in self.blocks):
            self._refuse(0, "numbers of rows", "some below 0")

    def _opened(self, dictionaries: set[str]) -> pq.ParquetFile:
        """``dictionaries``: the paths of text to read as a dictionary: else one value of it fills gigabytes."""
        return pq.ParquetFile(
            self._open(),
            metadata=self._metadata,
            read_dictionary=sorted(dictionaries),
            pre_buffer=False,
            page_checksum_verification=True,
            **_LIMITS,
        )

    def _bytes(self, begin: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        if self._read_at(begin, memoryview(data)) < num_bytes:
            self._refuse(0, f"{num_bytes} bytes from byte {begin} on", "the end of the file")
        return data

    def _footer(self) -> bytes:
        size = int.from_bytes(self._bytes(max(0, self._size - 8), min(8, self._size))[:4], "little")
        if not 0 < size <= min(_MOST_FOOTER_BYTES, self._size - 8):
            self._refuse(0, f"a footer of at most {_MOST_FOOTER_BYTES:,} bytes", f"{size:,}", _HINT_FOOTER)
        return bytes(self._bytes(self._size - 8 - size, size))

    def _chunks_of(self, group: int) -> list[tuple[int, int, int]]:
        """(number of the column, offset, bytes) of the columns of a row group that are read."""
        of, chunks = self._metadata.row_group(group), []
        for number in self._columns:
            column = of.column(number)
            starts = [column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]
            begin, size = min(start for start in starts if start > 0), column.total_compressed_size
            if column.file_path or not 0 <= size <= self._size - begin:
                self._refuse(0, f"column {column.path_in_schema!r} in the file", f"{size} bytes from byte {begin} on")
            chunks.append((number, begin, size))
        return chunks

    def batches_of(self, block: int) -> Iterator[pa.RecordBatch]:
        self._check_size(block, sum(size for _, _, size in self._chunks[block]))
        try:
            for _, begin, size in self._chunks[block]:
                self._stored[begin] = self._bytes(begin, size)
            needed = [self._needed(block, *chunk) for chunk in self._chunks[block]]
            left = self._metadata.row_group(block).num_rows
            row_bytes = sum(column.row_bytes for column in needed)
            rows = max(1, min(self._rows, left, _BATCH_BYTES // max(1, row_bytes)))
            hint = _HINT_PREFIXES if any(column.plain_path for column in needed) else HINT_LARGE
            self._check_size(block, sum(column.num_bytes for column in needed) + rows * row_bytes, hint)
            text = self._text.difference(column.plain_path for column in needed)
            file = self._file if text == self._text else self._opened(text)
            batches = file.iter_batches(rows, row_groups=[block], columns=self._names, use_threads=False)
            for batch in batches:
                left -= batch.num_rows
                if left <= 0:  # nobody may ask for what comes after it, and both keep the columns
                    batches.close()
                    self._stored.clear()
                yield batch
        except Exception as error:
            raise self._failed(f"row group {block} of a Parquet file", error, block) from None
        finally:
            self._stored.clear()

    def _needed(self, block: int, number: int, begin: int, size: int) -> _Needed:
        """How much memory pyarrow may need for a column, by the headers of its pages."""
        column, kind = self._metadata.row_group(block).column(number), self._metadata.schema.column(number)
        num_bytes = values = longest = 0
        encodings = set()
        for page in pages_in(self._stored[begin]):
            num_bytes += page.inflated_bytes
            longest = max(longest, page.inflated_bytes)
            if page.is_dictionary:
                continue
            values += page.num_values
            encodings.add(page.encoding)
            if values >= column.num_values:
                break
        num_bytes += _LEVEL_BYTES * values
        # A value may be another one, or begin as the one before it does, for no more than a number.
        has_shared = bool(encodings & {_DELTA, *_OF_DICTIONARY})
        # pyarrow reads no dictionary from these; else text is in memory once.
        plain_path = kind.path if encodings & {_DELTA, _DELTA_LENGTHS} else ""
        value_bytes = 0
        if kind.physical_type == "FIXED_LEN_BYTE_ARRAY" and has_shared:
            value_bytes = kind.length
        elif kind.physical_type == "BYTE_ARRAY" and has_shared and plain_path:
            value_bytes = longest
        if kind.max_repetition_level:  # a row may have all of them
            return _Needed(num_bytes + value_bytes * values, 0, plain_path)
        return _Needed(num_bytes, value_bytes, plain_path)


class _Needed(NamedTuple):
    """Memory of a column: for the row group, and for each row of a batch. ``plain_path``: it has no dictionary."""

    num_bytes: int
    row_bytes: int
    plain_path: str


def _of_stored(stored: dict[int, bytearray], read_at: ReadAt) -> ReadAt:
    """Reads from columns that were fetched, or else from the file: storage far away is asked once for a column.

    No method of the table: pyarrow holds what reads its file where Python's collector does not see it, so the table
    would never be freed.
    """

    def read_stored(offset: int, view: memoryview) -> int:
        for begin, data in stored.items():
            if begin <= offset < begin + len(data):
                return read_at_of(memoryview(data))(offset - begin, view)
        return read_at(offset, view)

    return read_stored


class Page(NamedTuple):
    """What the header of a page states."""

    inflated_bytes: int
    is_dictionary: bool
    num_values: int
    encoding: int


def pages_in(data: bytearray) -> Iterator[Page]:
    """The pages of a column, one behind the other. Raises ValueError where there is no header of one."""
    at = 0
    while at < len(data):
        try:
            header, end = _struct(data, at, 0)
            field, encoding = _OF_PAGE[header[1]]
            of = header[field]
            page = Page(header[2], header[1] == _DICTIONARY_PAGE, of[1], of[encoding])
            if min(page.inflated_bytes, header[3], page.num_values) < 0:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"no header of a page at byte {at} of a column") from None
        yield page
        at = end + header[3]


def _varint(data: bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < _MOST_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _struct(data: bytearray, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """(its i32 and structs by the numbers of their fields, where it ends); what has another type is passed over.

    Thrift takes the last of several fields of one number, of the right type. So such a struct is refused.
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        number += head >> 4
        if not head >> 4:
            zigzag, at = _varint(data, at)
            number = zigzag >> 1 ^ -(zigzag & 1)
        if number in fields or not 0 < number < 1 << 15:
            raise ValueError(f"field {number} twice, or no field")
        kind = head & 15
        # A flag's value is in its type; that of one in a list is a byte.
        fields[number], at = (None, at) if kind in (1, 2) else _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: bytearray, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > _MOST_DEPTH or at >= len(data):
        raise ValueError("structs in structs, or the end")
    if kind in (1, 2, 3):
        return None, at + 1
    if kind in (4, 5, 6):
        zigzag, at = _varint(data, at)
        if kind == 5 and zigzag >> 32:
            raise ValueError("an i32 of more than 32 bits")
        return zigzag >> 1 ^ -(zigzag & 1) if kind == 5 else None, at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return None, at + length
    if kind == 12:
        return _struct(data, at, depth + 1)
    if kind not in (9, 10):
        raise ValueError(f"a value of type {kind}")
    head = data[at]
    length, at = (head >> 4, at + 1) if head >> 4 < 15 else _varint(data, at + 1)
    for _ in range(length):
        _, at = _value(data, at, head & 15, depth + 1)
    return None, at


def _is_in(path: str, names: set[str]) -> bool:
    """Whether a column of Parquet, such as ``name.list.element``, is one of these columns, or a part of one."""
    parts = path.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))
