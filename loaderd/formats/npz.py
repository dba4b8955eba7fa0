"""Records in the arrays of an npz: each array has one row for each record, and the name of a field of its dtype.

An npz is a zip of ``.npy`` files, deflated or stored::

    a.npy  ████████████░░░░░░░░░░░░    all arrays that the schema reads are inflated side by side, a few rows at a
    b.npy  ████░░░░                    time: they never lie in memory whole, and what was inflated last is in the
    c.npy  ██████████████░░░░░░░░░░    cache still when it becomes records

An array without rows, of a single value, holds it for all of them: the result of the game, say. Axes of length 1 more
or less don't matter, so (rows, 1) is as good as (rows,).

So rows are read from front to back. An array's CRC tells, at its end, whether it is as it was written: the index pass
reads all of it before any row is used. Damage of a later time shows where the array cannot be inflated, or with its
last rows.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import Damage, LoaderdError, ShardReadError
from loaderd.formats.compression import MOST_INFLATED, ByteStream
from loaderd.formats.inflate import crc32, raw_inflater
from loaderd.formats.kinds import ZIP_MAGIC, refused
from loaderd.formats.zstd import FileReader
from loaderd.kernels.crc import Bytes1D
from loaderd.schema import FixedRecords
from loaderd.schema.exact import is_shaped
from loaderd.storage.shard_file import Readable, ShardFile, is_remote

_HINT = "Check that the schema's dtype is what the file holds; or restore the file."
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, bytes of the name and of the extra field (PKWARE's APPNOTE, 4.3.7)
_PIECE_BYTES = 1 << 21
_READ_BYTES = 1 << 18
# Little at a time: an inflater returns what it has not used yet as a copy.
_FED_BYTES = 1 << 15
_MOST_READ_BYTES = 32 << 20
_MOST_HEADER_BYTES = 1 << 16
_MOST_DIRECTORY_BYTES = 1 << 20  # some 10,000 arrays
# numpy.lib.format writes a dict. numpy evaluates it: of some, that takes all memory of Python's parser.
_NPY_MAGIC = b"\x93NUMPY"
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[a-zA-Z]\d{0,9}(?:\[\w{1,9}\])?)['"]""")
_FORTRAN_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)\b""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([\d,L\s]{0,999})\)""")

Open = Callable[[], Readable]


class NpzRows:
    """The rows of an npz as records, from front to back."""

    def __init__(self, shard: ShardFile, file: Open, records: FixedRecords) -> None:
        """``file`` returns the open file: it may have been closed and opened again since the last read.

        Raises ShardReadError where an array is missing, of another dtype or shape, or has another number of rows.
        """
        self._records = records
        entries = _entries(shard, file())
        self._columns: dict[str, _Column] = {}
        for name in records:
            if name not in entries:
                raise _bad(shard.uri, 0, f"an array {name!r}", f"only {sorted(entries)}")
            self._columns[name] = _Column(shard, file, entries[name], name, records)
        rows = {name: column.num_rows for name, column in self._columns.items() if column.num_rows is not None}
        if len(set(rows.values())) != 1:
            found = f"rows: {rows}" if rows else f"no rows, but a single value in each of {list(self._columns)}"
            raise _bad(shard.uri, 0, "arrays with one row a record", found)
        self.num_rows = next(iter(rows.values()))
        self.row = 0
        """The row that is read next."""
        self._buffer = np.zeros(max(1, min(self.num_rows, _PIECE_BYTES // records.record_bytes)), records.dtype)
        self._finish()

    def skip_to(self, row: int) -> Iterator[int]:
        """Go on to ``row``, which must not have been passed; yields each row that is reached on the way."""
        while self.row < row:
            self._read(min(row - self.row, len(self._buffer)))
            yield self.row

    def read(self, most: int) -> Bytes1D:
        """uint8, (rows * record_bytes,): the next rows, ``most`` or fewer. Valid until the next call.

        Raises ShardReadError where an array is damaged: with the last rows at the latest.
        """
        count = min(most, len(self._buffer), self.num_rows - self.row)
        for name, values in self._read(count).items():
            self._buffer[name][:count] = values
        return self._buffer[:count].view(np.uint8).reshape(-1)

    def _read(self, count: int) -> dict[str, npt.NDArray[Any]]:
        values = {name: column.read(count) for name, column in self._columns.items()}
        self.row += count
        self._finish()
        return values

    def _finish(self) -> None:
        if self.row == self.num_rows:
            for column in self._columns.values():
                column.finish()


class _Column:
    """An array of an npz, from front to back; or a single value, which each of its rows has.

    ``num_rows``: None for a single value.
    """

    def __init__(
        self, shard: ShardFile, file: Open, entry: zipfile.ZipInfo, name: str, records: FixedRecords
    ) -> None:
        self._shard, self._entry = shard.uri, entry
        # All at once from storage far away: each read of one array would drop what was fetched ahead of another.
        read_bytes = max(1, min(entry.compress_size, _MOST_READ_BYTES)) if is_remote(shard.uri) else _READ_BYTES
        self._stream = _EntryStream(shard, file, entry, read_bytes)
        assert records.dtype.fields is not None
        field = records.dtype.fields[name][0]
        shape, is_fortran, dtype = _header(self._stream, entry, shard.uri)
        in_order = not is_fortran or is_shaped(shape, (math.prod(shape),))
        is_single = not shape and is_shaped((), field.shape)
        if dtype != field.base or not (is_single or (shape and is_shaped(shape[1:], field.shape))) or not in_order:
            dims = "".join(f", {dim}" for dim in field.shape)
            expected = f"array {name!r} of {field.base}, (rows{dims}) in C order"
            order = "" if in_order else " in Fortran order"
            raise self._bad(expected, f"{dtype}, {shape}{order}")
        self.num_rows = None if is_single else shape[0]
        self._shape, self._dtype = field.shape, dtype
        self._row_bytes = field.itemsize
        self._buffer = bytearray()
        self._single: npt.NDArray[Any] | None = None
        if is_single:
            self._single = self.read(1)

    def read(self, count: int) -> npt.NDArray[Any]:
        """The next rows, (count, *the field's shape). Valid until the next call."""
        if self._single is not None:
            return np.broadcast_to(self._single, (count, *self._shape))
        num_bytes = count * self._row_bytes
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        view = memoryview(self._buffer)[:num_bytes]
        if self._stream.fill(view) < num_bytes:
            raise self._bad(f"{self._entry.filename} of {self._entry.file_size} bytes", f"{self._stream.done_bytes}")
        return np.frombuffer(view, self._dtype).reshape(count, *self._shape)

    def finish(self) -> None:
        """Call this behind the last row. Raises ShardReadError where the array is not as it was written."""
        scratch = memoryview(bytearray(_READ_BYTES))
        while self._stream.done_bytes <= self._entry.file_size and self._stream.read_into(scratch):
            pass
        if self._stream.done_bytes != self._entry.file_size or self._stream.crc != self._entry.CRC:
            expected = f"{self._entry.filename} of {self._entry.file_size} bytes with its CRC"
            raise self._bad(expected, f"{self._stream.done_bytes} bytes whose CRC does not match")

    def _bad(self, expected: str, found: str) -> ShardReadError:
        return _bad(self._shard, self._entry.header_offset, expected, found)


class _EntryStream(ByteStream):
    """The bytes of a zip's entry, from front to back; ``crc``: that of the bytes read so far."""

    def __init__(self, shard: ShardFile, file: Open, entry: zipfile.ZipInfo, read_bytes: int = _READ_BYTES) -> None:
        self._shard, self._file, self._entry = shard.uri, file, entry
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            is_secret = entry.flag_bits & 1
            what = "an encrypted entry" if is_secret else f"compression method {entry.compress_type}"
            raise _bad(shard.uri, entry.header_offset, f"{entry.filename} deflated or stored", what)
        is_deflated = entry.compress_type == zipfile.ZIP_DEFLATED
        self._inflater: Any = raw_inflater() if is_deflated else None
        if not 0 <= entry.header_offset <= shard.size_bytes - _LOCAL_HEADER.size - entry.compress_size:
            stated = f"{entry.filename}, {entry.compress_size} bytes from byte {entry.header_offset} on"
            raise _bad(shard.uri, 0, stated, f"a file of {shard.size_bytes} bytes")
        most = entry.compress_size * (MOST_INFLATED if is_deflated else 1)
        if entry.file_size > most:
            expected = f"{entry.filename} of at most {most} bytes"
            raise _bad(shard.uri, entry.header_offset, expected, f"{entry.file_size}")
        header = bytearray(_LOCAL_HEADER.size)
        file().read_at(entry.header_offset, memoryview(header))
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if magic != ZIP_MAGIC:
            raise _bad(shard.uri, entry.header_offset, f"{entry.filename}, an entry of a zip", f"{magic!r}")
        self._offset = entry.header_offset + len(header) + name_bytes + extra_bytes
        self._left_bytes = entry.compress_size
        self._read_bytes = read_bytes
        self._pending = memoryview(b"")
        self._fed: Any = b""
        self.done_bytes = self.crc = 0

    def read_into(self, view: memoryview) -> int:
        """As in ``ByteStream``. Raises ShardReadError where the entry is damaged."""
        data = self._step(len(view))
        while not data and (self._fed or self._pending or self._left_bytes):
            data = self._step(len(view))
        view[: len(data)] = data
        self.done_bytes += len(data)
        self.crc = crc32(data, self.crc)
        return len(data)

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, fewer only at the end. Raises ShardReadError."""
        data = bytearray(num_bytes)
        return bytes(data[: self.fill(memoryview(data))])

    def _step(self, most: int) -> bytes | memoryview:
        return self._stored(most) if self._inflater is None else self._inflate(most)

    def _inflate(self, most: int) -> bytes:
        if self._inflater.eof:  # what the entry has behind that would be kept by the inflater
            self._left_bytes, self._pending = 0, memoryview(b"")
            return b""
        if not self._fed:
            self._fed = self._stored(_FED_BYTES)
        try:
            data: bytes = self._inflater.decompress(self._fed, most)
        except Exception as error:  # each library has errors of its own
            expected = f"valid compressed data of {self._entry.filename}"
            raise _bad(self._shard, self._entry.header_offset, expected, f"{error}") from None
        self._fed = self._inflater.unconsumed_tail
        return data

    def _stored(self, most: int) -> memoryview:
        """The next bytes as they are in the file: at least one, unless none are left."""
        if not self._pending and self._left_bytes:
            stored = memoryview(bytearray(min(self._left_bytes, self._read_bytes)))
            if (got := self._file().read_at(self._offset, stored)) < len(stored):
                what = f"{self._entry.compress_size} bytes of {self._entry.filename}"
                raise _bad(self._shard, self._offset, what, f"{self._entry.compress_size - self._left_bytes + got}")
            self._offset += got
            self._left_bytes -= got
            self._pending = stored
        taken, self._pending = self._pending[:most], self._pending[most:]
        return taken


def arrays_of(shard: ShardFile, file: Readable) -> dict[str, np.dtype[Any]]:
    """By name of the array, the dtype of one of its rows, with a shape if that is no scalar.

    Raises ShardReadError where the file is no whole npz, or none of the arrays has rows: each is a single value.
    """
    dtypes = {}
    has_rows = False
    for name, entry in _entries(shard, file).items():
        shape, _, dtype = _header(_EntryStream(shard, lambda: file, entry, _FED_BYTES), entry, shard.uri)
        has_rows = has_rows or bool(shape)
        try:
            dtypes[name] = np.dtype((dtype, shape[1:]))
        except ValueError as error:  # of too many axes, or too large
            raise _bad(shard.uri, entry.header_offset, f"rows in {entry.filename}", f"{shape}: {error}") from None
    if not has_rows:
        raise _bad(
            shard.uri, 0, "arrays with one row a record", f"no rows, but a single value in each of {[*dtypes]}"
        )
    return dtypes


def _header(stream: _EntryStream, entry: zipfile.ZipInfo, uri: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether it is in Fortran order, dtype) of an array whose values are the rest of the entry."""
    front = stream.read(len(_NPY_MAGIC) + 2)
    length_bytes = 2 if front[-2:-1] == b"\1" else 4  # the format's first version, or a later one
    header_bytes = int.from_bytes(stream.read(length_bytes), "little")
    header = stream.read(min(header_bytes, _MOST_HEADER_BYTES)).decode("latin-1").strip()
    is_dict = front.startswith(_NPY_MAGIC) and header[:1] == "{" and header[-1:] == "}"
    matches = [pattern.search(header) for pattern in (_DESCR, _FORTRAN_ORDER, _SHAPE)]
    descr, order, dims = (match and match[1] for match in matches)
    try:
        if descr is None or order is None or dims is None or not is_dict:
            raise ValueError(f"{front + header.encode('latin-1')!r:.250}")
        shape, dtype = tuple(map(int, re.findall(r"\d+", dims))), np.dtype(descr)
    except (TypeError, ValueError) as error:
        raise _bad(uri, entry.header_offset, f"a numpy array in {entry.filename}", f"{error}") from None
    rest_bytes = entry.file_size - stream.done_bytes
    if rest_bytes != math.prod(shape) * dtype.itemsize:  # if there are more, they may begin elsewhere
        stated = f"the values of {entry.filename}, {shape} of {dtype}"
        raise _bad(uri, entry.header_offset, stated, f"{rest_bytes} bytes")
    return shape, order == "True", dtype


class _DirectoryReader(FileReader):
    """A zip, as ``zipfile`` reads its directory. Raises ValueError for one that is too large."""

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size} bytes")
        return super().read(size) or b""


def _entries(shard: ShardFile, file: Readable) -> dict[str, zipfile.ZipInfo]:
    """What is in the zip, by the names of arrays. Raises ShardFormatError where none of it is an array."""
    try:
        with zipfile.ZipFile(_DirectoryReader(file, shard.size_bytes)) as archive:
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


def _bad(shard: str, offset: int, expected: str, found: str) -> ShardReadError:
    damage = Damage(shard, 0, offset, expected, found, lost_bytes=-1)
    return ShardReadError(str(damage), hint=_HINT, damage=damage)
