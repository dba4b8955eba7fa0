"""Files that belong together, row by row, as a table: each is read by a reader of its own.

::

    read_at   ████ a.detection.b8 ████▒▒ a.obs.b8 ▒▒     the files of a shard, one behind the other
    record    [ features │ labels ]                       row n of each

Where all of them can be entered anywhere, so can the shard. Else a block ends where a block ends in each of them.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from loaderd.formats import npy
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.fixed import detect_wrapping, part_of
from loaderd.formats.inflate import MAX_WHOLE_BYTES, inflate_whole, read_at_of
from loaderd.formats.table import PIECE_BYTES, Table, bad_table, open_table
from loaderd.kernels.crc import Bytes1D
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import TABLES, ReadAt, ShardFile

_HINT_LENGTHS = "Write them anew: row n of each belongs to the same record."
_HINT_INFLATE = "Decompress it: its rows must be found by their number."
_HINT_TWICE = "Give Columns another file for one of them; where the file holds both, write it as npz or Parquet."


class ColumnsTable:
    """See ``Table``. Raises ShardReadError where the files have unequal numbers of rows, or one is damaged."""

    digest = None

    def __init__(
        self, file: ShardFile, read_at: ReadAt, records: FixedRecords, on_read: OnRead = no_callback
    ) -> None:
        self._file, self._records, self._on_read = file, records, on_read
        self._parts: list[tuple[FixedRecords, Table]] = []
        of_parts = records.by_columns([name for name, *_ in file.columns])
        begin, plain = 0, dict[str, str]()
        for (name, *_), part in zip(file.columns, file.parts, strict=True):
            own, read_part = of_parts[name], part_of(read_at, begin, part.size_bytes)
            self._parts.append((own, _open(part, read_part, own)))
            begin += part.size_bytes
            has_names = not isinstance(self._parts[-1][1], _PlainTable)
            other = name if has_names else plain.setdefault(part.uri, name)
            if other != name:
                expected = f"a file of its own for column {name!r}, as it has no named columns"
                raise bad_table(part.uri, 0, expected, f"that of column {other!r}, too", _HINT_TWICE)
        ends = [list(accumulate(count for _, _, count in table.blocks)) for _, table in self._parts]
        lengths = [of_part[-1] if of_part else 0 for of_part in ends]
        for part, length in zip(file.parts, lengths, strict=True):
            if length != lengths[0]:
                expected = f"as many rows as {file.parts[0].uri}, which belongs to it, {lengths[0]:,}"
                raise bad_table(part.uri, 0, expected, f"{length:,} rows", _HINT_LENGTHS)
        fixed = [set(end) for end, (_, table) in zip(ends, self._parts, strict=True) if not table.is_plain]
        self.is_plain = not fixed
        common = sorted(set.intersection(*fixed) if fixed else {lengths[0]})
        counts = np.diff([0, *common]).tolist()
        self.blocks = [(0, file.size_bytes, count) for count in counts if count]
        self._num_rows = lengths[0]
        self._rows = max(1, PIECE_BYTES // records.record_bytes)

    def read(self, first: int, most: int) -> Bytes1D:
        """As in ``Table``."""
        out = np.zeros(min(most, self._rows), self._records.dtype)
        for own, table in self._parts:
            done = 0
            while done < len(out):
                rows = np.frombuffer(table.read(first + done, len(out) - done), own.dtype)
                for name in own:
                    out[name][done : done + len(rows)] = rows[name]
                done += len(rows)
        self._on_read(self._file.size_bytes * (first + len(out)) // max(1, self._num_rows))
        return out.view(np.uint8).reshape(-1)

    def leave(self) -> int:
        """As in ``Table``."""
        return sum(table.leave() for _, table in self._parts)


class _PlainTable:
    """Rows one behind the other as they are: a plain file, or the values of an npy."""

    digest, is_plain = None, True
    _held_bytes = 0

    def __init__(self, file: ShardFile, read_at: ReadAt, record_bytes: int, start: int, num_rows: int) -> None:
        self._file, self._read_at, self._record_bytes, self._start = file, read_at, record_bytes, start
        rows, left = divmod(file.size_bytes - start, record_bytes)
        if left or rows != num_rows:
            expected = f"{num_rows:,} whole rows of {record_bytes} bytes"
            raise bad_table(file.uri, start, expected, f"{rows:,} rows and {left} bytes")
        self.blocks = [(start, file.size_bytes - start, num_rows)]

    def read(self, first: int, most: int) -> Bytes1D:
        data = np.empty(min(most * self._record_bytes, max(PIECE_BYTES, self._record_bytes)), np.uint8)
        data = data[: len(data) // self._record_bytes * self._record_bytes]
        offset = self._start + first * self._record_bytes
        got = self._read_at(offset, data.data)
        if got < len(data):
            raise bad_table(self._file.uri, offset, f"{len(data)} bytes", f"{got}", record=first)
        return data

    def leave(self) -> int:
        return self._held_bytes


class _InflatedTable(_PlainTable):
    """Such rows of a compressed file, which is in memory: so all of them are one block."""

    is_plain = False

    def __init__(self, file: ShardFile, read_at: ReadAt, kind: str, record_bytes: int) -> None:
        stored = bytearray(min(file.size_bytes, MAX_WHOLE_BYTES + 1))
        got = read_at(0, memoryview(stored))
        is_small = len(stored) <= MAX_WHOLE_BYTES
        data = inflate_whole(memoryview(stored)[:got], kind, MAX_WHOLE_BYTES) if is_small else None
        if data is None:
            expected = f"a column in {kind} of at most {MAX_WHOLE_BYTES:,} bytes, inflated, without damage"
            raise bad_table(file.uri, 0, expected, f"{file.size_bytes:,} bytes that are not", _HINT_INFLATE)
        inflated = file._replace(size_bytes=len(data))
        super().__init__(inflated, read_at_of(memoryview(data)), record_bytes, 0, len(data) // record_bytes)
        self._held_bytes = len(data)


def _open(file: ShardFile, read_at: ReadAt, records: FixedRecords) -> Table:
    kind = detect_wrapping(file.uri, read_at, file.size_bytes, records)
    if kind in TABLES:
        return open_table(kind, file, read_at, records)
    size = records.record_bytes
    if kind == "npy":
        return _PlainTable(file, read_at, size, *npy.rows_in(file, read_at, records))
    if kind == "none":
        return _PlainTable(file, read_at, size, 0, file.size_bytes // size)
    if kind in ("gzip", "zstd"):
        return _InflatedTable(file, read_at, kind, size)
    expected = "a column in a plain file, one in gzip or zstd, an npy, npz, Parquet or Arrow"
    raise bad_table(file.uri, 0, expected, kind, _HINT_INFLATE)
