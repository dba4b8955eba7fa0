"""Inflating gzip, zlib, raw deflate and zstd, a bounded step at a time: 1 MB of deflate can hold 1 GiB.

Where nothing in front of damage is used, this takes the fastest library that is installed: isal, zlib-ng, or Python's
own. A game of Leela Chess Zero takes isal a third of the time that zlib takes. zstd is inflated by pyarrow, which is
imported only for that.
"""

from __future__ import annotations

import io
import zlib
from functools import cache
from typing import Any

import numpy as np

from loaderd.errors import LoaderdError
from loaderd.formats.restart_points import from_bit, window_of
from loaderd.storage.shard_file import ReadAt, RestartPoint

READ_BYTES = 1 << 18
# Little at a time: an inflater returns what it has not used yet as a copy.
_FED_BYTES = 1 << 16
_MOST_AT_ONCE_BYTES = 1 << 20
_STEP_RATIO = 64
_GZIP_BITS = 31
_WINDOW_BITS = {"gzip": _GZIP_BITS, "zlib": 15, "deflate": -15}
_CHECK_BYTES = {_GZIP_BITS: 8, 15: 4}
"""Behind the deflate stream of a gzip member, or of a zlib one."""
MAX_WHOLE_BYTES = 32 << 20
"""What needs more memory, inflated, comes in pieces."""
MOST_INFLATED = 1032
"""Bytes that deflate can make of one (zlib.net/zlib_tech.html)."""


@cache
def fast_library() -> Any:
    """A module that is like ``zlib``."""
    try:
        from isal import isal_zlib

        return isal_zlib
    except ImportError:
        pass
    try:
        from zlib_ng import zlib_ng

        return zlib_ng
    except ImportError:
        return zlib


def inflate_whole(stored: memoryview, compression: str, most_bytes: int) -> bytes | None:
    """All of a gzip or zstd file that is in memory; None where that is above ``most_bytes``, or anything is wrong."""
    if not len(stored):  # zstd would inflate it to nothing, without an error
        return None
    inflater = open_inflater(read_at_of(stored), compression, is_exact=False)
    parts: list[bytes] = []
    left_bytes, step_bytes = most_bytes + 1, READ_BYTES  # memory for a step is taken before it is known what is there
    try:
        while part := inflater.read(min(step_bytes, left_bytes)):
            parts.append(part)
            left_bytes -= len(part)
            step_bytes *= 4
            if not left_bytes:
                return None
    except Exception:  # each library has errors of its own
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def inflate_member(stored: memoryview, compression: str, most_bytes: int) -> bytes | None:
    """What a gzip or zlib file in memory holds; None as of ``inflate_whole``, or where it has several members."""
    inflater = fast_library().decompressobj(wbits=_WINDOW_BITS[compression])
    try:
        data: bytes = inflater.decompress(stored, most_bytes + 1)
    except Exception:  # each library has errors of its own
        return None
    return data if inflater.eof and not inflater.unused_data and len(data) <= most_bytes else None


def inflate_into(view: memoryview, stored: memoryview, compression: str, point: RestartPoint, skipped: int) -> bool:
    """Fill ``view`` with what is inflated from ``point`` on, without its first ``skipped`` bytes.

    ``stored``: the file from the byte on in which the point is. False where it is damaged, or too short.
    """
    inflater = open_inflater(read_at_of(stored), compression, False, point=point._replace(bit=point.bit % 8))
    place = -skipped
    try:
        while place < len(view):
            part = memoryview(inflater.read(min(len(view) - place, _MOST_AT_ONCE_BYTES)))
            if not part:
                return False
            wanted = part[max(0, -place) :]
            place += len(part)
            view[place - len(wanted) : place] = wanted
    except Exception:  # each library has errors of its own
        return False
    return True


def open_inflater(
    read_at: ReadAt,
    compression: str,
    is_exact: bool,
    read_bytes: int = READ_BYTES,
    point: RestartPoint | None = None,
) -> DeflateReader | ZstdReader:
    """Inflates a file from its front, or from a point, to its end.

    ``is_exact``: where it is damaged, all comes that is in front of that.
    """
    if compression == "zstd":
        return ZstdReader(read_at, is_exact, 0 if point is None else point.bit >> 3)
    return DeflateReader(read_at, is_exact, _WINDOW_BITS[compression], read_bytes, point)


class DeflateReader:
    """What gzip members that follow each other hold, or zlib streams, or one raw deflate stream.

    An inflater gives nothing of a call in which it meets damage. Where all is wanted that is in front of it, such a
    call is repeated from the state before it with half of the input, down to the single byte that is damaged.
    """

    def __init__(
        self, read_at: ReadAt, is_exact: bool, window_bits: int, read_bytes: int, point: RestartPoint | None = None
    ) -> None:
        self._read_at, self._read_bytes = read_at, read_bytes
        self._is_exact, self._window_bits = is_exact, window_bits
        self._library = zlib if is_exact else fast_library()
        self._point = point if point is not None and point.window else None
        self._inflater: Any = None
        self._offset = 0 if point is None else point.bit >> 3
        self._pending = memoryview(b"")
        self._most_fed = _FED_BYTES

    def tell(self) -> int:
        """How much of the file was taken."""
        return self._offset - len(self._pending)

    def read(self, most: int) -> bytes:
        """The next bytes, ``most`` at most; none at the end.

        Raises an error of the library's where the data are damaged, EOFError where they are cut.
        """
        while self._has_stream():
            if not self._pending:
                self._refill()
            fed = self._pending[: self._most_fed]
            before = self._inflater.copy() if self._is_exact else None
            try:
                # What is due of the bytes before comes by itself, or the damage behind it would keep it.
                data: bytes = b"" if self._most_fed == _FED_BYTES else self._inflater.decompress(b"", most)
                if data:
                    return data
                if self._inflater.eof:
                    continue
                data = self._inflater.decompress(fed, most)
            except Exception:
                if before is None or len(fed) <= 1:
                    raise
                self._inflater, self._most_fed = before, len(fed) // 2
                continue
            rest = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            self._pending = self._pending[len(fed) - len(rest) :]
            if data:
                return data
            if not fed and not self._inflater.eof:
                raise EOFError("the end of the file")
        return b""

    def _has_stream(self) -> bool:
        """Whether a stream is not at its end, or another one begins behind it."""
        if self._inflater is None and self._point is not None:
            self._enter(self._point)
        if self._inflater is not None and (not self._inflater.eof or self._window_bits < 0):
            return not self._inflater.eof
        if self._point is not None:
            self._pass_check()
        while self._pending or self._refill():
            is_padding = self._inflater is not None and self._window_bits == _GZIP_BITS and not self._pending[0]
            if not is_padding:
                self._inflater = self._library.decompressobj(wbits=self._window_bits)
                return True
            self._pending = self._pending[len(self._pending) - len(bytes(self._pending).lstrip(b"\0")) :]
        return False

    def _enter(self, point: RestartPoint) -> None:
        """Begin in the middle of a member."""
        self._inflater = self._library.decompressobj(wbits=-15, zdict=window_of(point))
        if point.bit % 8 and self._refill():
            self._inflater.decompress(from_bit(point.bit % 8, self._pending[0]))
            self._pending = self._pending[1:]

    def _pass_check(self) -> None:
        """Pass over the check of the member that was entered in the middle: nobody can compare it."""
        self._point = None
        left = _CHECK_BYTES[self._window_bits]
        while left and (self._pending or self._refill()):
            passed = min(left, len(self._pending))
            self._pending, left = self._pending[passed:], left - passed
        if left:
            raise EOFError("the end of the file")

    def _refill(self) -> int:
        stored = np.empty(self._read_bytes, np.uint8).data  # a bytearray would be filled with zeros first
        got = self._read_at(self._offset, stored)
        self._offset += got
        self._pending = stored[:got]
        return got


class ZstdReader:
    """What a zstd file holds. To get all that is in front of damage, it begins again, in ever shorter steps."""

    def __init__(self, read_at: ReadAt, is_exact: bool, first_byte: int = 0) -> None:
        self._read_at, self._first_byte = read_at, first_byte
        self._step_bytes = READ_BYTES if is_exact else 1 << 62
        self._is_exact = is_exact
        self._done_bytes = self._again_bytes = 0
        self._begin()

    def _begin(self) -> None:
        import pyarrow as pa

        self._file = FileReader(self._read_at, first_byte=self._first_byte)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), "zstd")

    def tell(self) -> int:
        """How much of the file was taken."""
        return self._file.tell()

    def read(self, most: int) -> bytes:
        """As of :class:`DeflateReader`. pyarrow raises OSError for all damage."""
        while True:
            try:
                while self._again_bytes and (part := self._stream.read(min(self._again_bytes, READ_BYTES))):
                    self._again_bytes -= len(part)
                data: bytes = self._stream.read(min(self._step_bytes, most))
            except LoaderdError:  # from reading the file
                raise
            except OSError:
                if self._step_bytes == 1 or not self._is_exact:
                    raise
                self._step_bytes //= _STEP_RATIO
                self._again_bytes = self._done_bytes
                self._begin()
                continue
            self._done_bytes += len(data)
            return data


def read_at_of(data: memoryview) -> ReadAt:
    """Reads bytes in memory as if they were a file."""

    def read_at(offset: int, view: memoryview) -> int:
        part = data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)

    return read_at


def crc32(data: bytes, crc: int) -> int:
    """The CRC, as gzip and zip files have it, of earlier data whose CRC is ``crc`` and of ``data`` behind it."""
    value: int = fast_library().crc32(data, crc)
    return value


class FileReader(io.RawIOBase):
    """What ``read_at`` reads as a file object, for the libraries of others."""

    def __init__(
        self, read_at: ReadAt, size_bytes: int = 0, most_at_once: int = _MOST_AT_ONCE_BYTES, first_byte: int = 0
    ) -> None:
        self._read_at, self._size_bytes, self._offset = read_at, size_bytes, first_byte
        self._most_at_once = most_at_once

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = max(0, base + offset)
        return self._offset

    def tell(self) -> int:
        return self._offset

    def read(self, size: int = -1) -> bytes:
        if size > self._most_at_once:  # only libraries ask for as much: what a file says of itself
            raise ValueError(f"a directory of {size} bytes")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        got = self._read_at(self._offset, memoryview(buffer).cast("B"))
        self._offset += got
        return got
