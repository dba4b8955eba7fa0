"""Records in the arrays of an npz: each array has one row for each record, and the name of a field of its dtype.

An npz is a zip of ``.npy`` files, deflated or stored::

    a.npy  ████████████░░░░░░░░░░░░    all arrays that the schema reads are inflated side by side, a few rows at a
    b.npy  ████░░░░                    time: they never lie in memory whole, and what was inflated last is in the
    c.npy  ██████████████░░░░░░░░░░    cache still when it becomes records

An array without rows, of a single value, holds it for all of them: the result of the game, say. Axes of length 1 more
or less don't matter, so (rows, 1) is as good as (rows,). Where ``FixedRecords.padded`` allows it, zeros stand for an
array that is not there, and for entries of the first axis that an array lacks.

So rows are read from front to back. An array's CRC tells, at its end, whether it is as it was written: the index pass
reads all of it before any row is used. Damage of a later time shows where the array cannot be inflated, or with its
last rows.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import LoaderdError, ShardReadError
from loaderd.formats.compression import OnRead
from loaderd.formats.fixed import part_of
from loaderd.formats.inflate import MOST_INFLATED, READ_BYTES, FileReader, crc32, open_inflater
from loaderd.formats.kinds import ZIP_MAGIC, refused
from loaderd.formats.npy import NpyHeader, read_header
from loaderd.formats.table import PIECE_BYTES
from loaderd.formats.table import bad_table as _bad
from loaderd.kernels.crc import Bytes1D
from loaderd.schema import FixedRecords
from loaderd.schema.exact import is_shaped
from loaderd.storage.shard_file import ReadAt, ShardFile, is_remote

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, bytes of the name and of the extra field (PKWARE's APPNOTE, 4.3.7)
_MOST_READ_BYTES = 32 << 20
_MOST_DTYPE_BYTES = (1 << 31) - 1  # of numpy's, which doesn't say so of a structured dtype


class NpzTable:
    """See ``Table``: one block, of all rows. An array's damage shows with its last rows at the latest."""

    digest, is_plain = None, False

    def __init__(self, file: ShardFile, read_at: ReadAt, records: FixedRecords, on_read: OnRead) -> None:
        self._file, self._read_at, self._records, self._on_read = file, read_at, records, on_read
        self._columns: dict[str, _Column] = {}
        self._begin()
        self.blocks = [(0, file.size_bytes, self._num_rows)]
        self._buffer = np.zeros(max(1, min(self._num_rows, PIECE_BYTES // records.record_bytes)), records.dtype)

    def _begin(self) -> None:
        """Stand in front of the first row. What was read before gives up its memory first."""
        shard, self._columns = self._file, {}
        entries = _entries(shard, self._read_at)
        for name in self._records:
            if name in entries:
                self._columns[name] = _Column(shard, self._read_at, entries[name], name, self._records)
            elif self._records.padded.get(name) != 0:
                raise _bad(shard.uri, 0, f"an array {name!r}", f"only {sorted(entries)}")
        rows = {name: column.num_rows for name, column in self._columns.items() if column.num_rows is not None}
        if len(set(rows.values())) != 1:
            found = f"rows: {rows}" if rows else f"no rows, but a single value in each of {list(self._columns)}"
            raise _bad(shard.uri, 0, "arrays with one row a record", found)
        self._num_rows, self._row = next(iter(rows.values())), 0
        self._finish()

    def read(self, first: int, most: int) -> Bytes1D:
        """As in ``Table``."""
        try:
            if first < self._row:
                self._begin()
            while self._row < first:
                self._next(min(first - self._row, len(self._buffer)))
            count = min(most, len(self._buffer))
            for name, values in self._next(count).items():
                column = self._buffer[name][:count]  # zeros behind what the file has: nothing is ever written there
                (column[:, : values.shape[1]] if values.shape != column.shape else column)[...] = values
        except BaseException:
            self._row = self._num_rows + 1  # nothing is known of where the arrays stopped
            raise
        return self._buffer[:count].view(np.uint8).reshape(-1)

    def leave(self) -> int:
        """As in ``Table``."""
        self._columns, self._row = {}, self._num_rows + 1
        return self._buffer.nbytes

    def _next(self, count: int) -> dict[str, npt.NDArray[Any]]:
        values = {name: column.read(count) for name, column in self._columns.items()}
        self._row += count
        self._finish()
        self._on_read(self._file.size_bytes * self._row // max(1, self._num_rows))
        return values

    def _finish(self) -> None:
        if self._row == self._num_rows:
            for column in self._columns.values():
                column.finish()


class _Column:
    """An array of an npz, from front to back; or a single value, which each of its rows has.

    ``num_rows``: None for a single value.
    """

    def __init__(
        self, shard: ShardFile, read_at: ReadAt, entry: zipfile.ZipInfo, name: str, records: FixedRecords
    ) -> None:
        # All at once from storage far away: each read of one array would drop what was fetched ahead of another.
        read_bytes = max(1, min(entry.compress_size, _MOST_READ_BYTES)) if is_remote(shard.uri) else READ_BYTES
        self._entry = _Entry(shard, read_at, entry, read_bytes)
        assert records.dtype.fields is not None
        field, least = records.dtype.fields[name][0], records.padded.get(name)
        header = self._entry.header()
        shape, dtype, in_order = header.shape, header.dtype, header.is_in_order
        self._shape = self._stored_shape = field.shape
        is_single = not shape and is_shaped((), field.shape)
        has_fewer = bool(least) and (least,) <= shape[1:2] < field.shape[:1]
        if has_fewer and shape[2:] == field.shape[1:]:
            self._stored_shape = shape[1:]
        fits = is_single or (shape and is_shaped(shape[1:], self._stored_shape))
        if dtype != field.base or not fits or not in_order:
            dims = "".join(f", {dim}" for dim in field.shape)
            if least and least < field.shape[0]:
                dims = f", {least} to{dims[1:]}"
            expected = f"array {name!r} of {field.base}, (rows{dims}) in C order"
            order = "" if in_order else " in Fortran order"
            raise self._entry.bad(expected, f"{dtype}, {shape}{order}")
        self.num_rows = None if is_single else shape[0]
        self._dtype = dtype
        self._row_bytes = dtype.itemsize * math.prod(self._stored_shape)
        self._buffer = bytearray()
        self._single: npt.NDArray[Any] | None = None
        if is_single:
            self._single = self.read(1)

    def read(self, count: int) -> npt.NDArray[Any]:
        """The next rows, (count, *the field's shape), or with a shorter first axis. Valid until the next call."""
        if self._single is not None:
            return np.broadcast_to(self._single, (count, *self._shape))
        num_bytes = count * self._row_bytes
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        view = memoryview(self._buffer)[:num_bytes]
        self._entry.fill(view)
        return np.frombuffer(view, self._dtype).reshape(count, *self._stored_shape)

    def finish(self) -> None:
        """Call this behind the last row. Raises ShardReadError where the array is not as it was written."""
        self._entry.finish()


class _Entry:
    """What an entry of a zip holds, from front to back. All raise ShardReadError where it is damaged."""

    def __init__(
        self, shard: ShardFile, read_at: ReadAt, info: zipfile.ZipInfo, read_bytes: int = READ_BYTES
    ) -> None:
        self._shard, self._info, self.name = shard.uri, info, info.filename
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            what = "an encrypted entry" if info.flag_bits & 1 else f"compression method {info.compress_type}"
            raise self.bad(f"{self.name} deflated or stored", what)
        is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
        if not 0 <= info.header_offset <= shard.size_bytes - _LOCAL_HEADER.size - info.compress_size:
            stated = f"{self.name}, {info.compress_size} bytes from byte {info.header_offset} on"
            raise self.bad(stated, f"a file of {shard.size_bytes} bytes")
        most = info.compress_size * (MOST_INFLATED if is_deflated else 1)
        if info.file_size > most:
            raise self.bad(f"{self.name} of at most {most} bytes", f"{info.file_size}")
        header = bytearray(_LOCAL_HEADER.size)
        read_at(info.header_offset, memoryview(header))
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if magic != ZIP_MAGIC:
            raise self.bad(f"{self.name}, an entry of a zip", f"{magic!r}")
        begin = info.header_offset + len(header) + name_bytes + extra_bytes
        part = part_of(read_at, begin, info.compress_size)
        self._read: Callable[[int], bytes] = io.BufferedReader(FileReader(part), read_bytes).read
        if is_deflated:
            self._read = open_inflater(part, "deflate", is_exact=False, read_bytes=read_bytes).read
        self._done_bytes = self._crc = 0

    def header(self) -> NpyHeader:
        """The header of an array whose values are the rest of the entry."""
        try:
            header = read_header(self._take)
        except ValueError as error:
            raise self.bad(f"a numpy array in {self.name}", f"{error}") from None
        rest_bytes = self._info.file_size - self._done_bytes
        if (
            rest_bytes != math.prod(header.shape) * header.dtype.itemsize
        ):  # if there are more, they may begin elsewhere
            stated = f"the values of {self.name}, {header.shape} of {header.dtype}"
            raise self.bad(stated, f"{rest_bytes} bytes")
        return header

    def fill(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes."""
        filled = 0
        while filled < len(view):
            data = self._next(len(view) - filled)
            if not data:
                raise self.bad(f"{self.name} of {self._info.file_size} bytes", f"{self._done_bytes}")
            view[filled : filled + len(data)] = data
            filled += len(data)

    def finish(self) -> None:
        """Compare the CRC, behind the last byte that is wanted."""
        while self._done_bytes <= self._info.file_size and self._next(READ_BYTES):
            pass
        if (self._done_bytes, self._crc) != (self._info.file_size, self._info.CRC):
            expected = f"{self.name} of {self._info.file_size} bytes with its CRC"
            raise self.bad(expected, f"{self._done_bytes} bytes whose CRC does not match")

    def _take(self, num_bytes: int) -> bytes:
        """The next bytes, fewer only at the end."""
        data = b""
        while len(data) < num_bytes and (more := self._next(num_bytes - len(data))):
            data += more
        return data

    def _next(self, most: int) -> bytes:
        try:
            data = self._read(min(most, PIECE_BYTES))
        except LoaderdError:
            raise
        except Exception as error:  # each library has errors of its own
            raise self.bad(f"valid compressed data of {self.name}", f"{error}") from None
        self._done_bytes += len(data)
        self._crc = crc32(data, self._crc)
        return data

    def bad(self, expected: str, found: str) -> ShardReadError:
        return _bad(self._shard, self._info.header_offset, expected, found)


def arrays_of(shard: ShardFile, read_at: ReadAt) -> dict[str, np.dtype[Any]]:
    """By name of the array, the dtype of one of its rows, with a shape if that is no scalar.

    Raises ShardReadError where the file is no whole npz, a row of all arrays is too large for a dtype, or none of the
    arrays has rows: each is a single value.
    """
    dtypes = {}
    has_rows = False
    for name, entry in _entries(shard, read_at).items():
        shape, _, dtype, _ = _Entry(shard, read_at, entry).header()
        has_rows = has_rows or bool(shape)
        try:
            dtypes[name] = np.dtype((dtype, shape[1:]))
        except ValueError as error:  # of too many axes, or too large
            raise _bad(shard.uri, entry.header_offset, f"rows in {entry.filename}", f"{shape}: {error}") from None
    record_bytes = sum(dtype.itemsize for dtype in dtypes.values())
    if record_bytes > _MOST_DTYPE_BYTES:
        expected = f"arrays whose rows make a record of at most {_MOST_DTYPE_BYTES} bytes"
        raise _bad(shard.uri, 0, expected, f"one of {record_bytes} bytes")
    if not has_rows:
        raise _bad(
            shard.uri, 0, "arrays with one row a record", f"no rows, but a single value in each of {[*dtypes]}"
        )
    return dtypes


def _entries(shard: ShardFile, read_at: ReadAt) -> dict[str, zipfile.ZipInfo]:
    """What is in the zip, by the names of arrays. Raises ShardFormatError where none of it is an array."""
    try:
        with zipfile.ZipFile(FileReader(read_at, shard.size_bytes)) as archive:
            infos = archive.infolist()
    except (LoaderdError, MemoryError):
        raise
    except Exception as error:  # of a damaged directory: BadZipFile, NotImplementedError, UnicodeDecodeError, …
        if isinstance(error.__context__, LoaderdError):  # zipfile takes storage that failed for a bad archive
            raise error.__context__ from None
        raise _bad(shard.uri, 0, "a whole npz", f"{error}") from None
    if not any(info.filename.endswith(".npy") for info in infos):
        raise refused(shard.uri, "zip", "an npz: it has no .npy")
    return {info.filename.removesuffix(".npy"): info for info in infos}
