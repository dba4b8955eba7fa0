"""Inflates a shard from front to back, for its index, and finds restart points on the way: one every 2 MiB or so.

Where a block of deflate ends, only zlib itself says (``Z_BLOCK``), and Python's zlib does not pass it on. So zlib is
called here by ctypes: the one that Python itself is linked to, or the system's. It takes as long as Python's does,
and so does indexed_gzip. But that knows no zlib streams, gives nothing of what is in front of damage, and keeps all
of each window: ten times as much.

The order of records follows from the points, so they are the same on every machine: which there are depends on
nothing but the bytes that are inflated and where blocks of deflate end, never on a library. Where there is no library
for them, a shard that could have more than one is refused.

A zstd file has points where frames begin; pyarrow inflates them.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from loaderd.errors import ShardFormatError
from loaderd.formats.inflate import READ_BYTES, DeflateReader, ZstdReader, fast_library, open_inflater
from loaderd.formats.kinds import ZSTD_MAGIC
from loaderd.formats.restart_points import WINDOW_BYTES, RestartPoints, trimmed
from loaderd.storage.shard_file import ReadAt

SPAN_BYTES = 2 << 20
"""Points are at least so far apart, in what is inflated: it is the size of a block, too."""
_DOUBLED_AFTER = 1024
"""Windows. Behind so many, the span doubles, and so on: those of 2 GiB take 3 MB as a rule, those of 1 TiB 28 MB."""
_FED_BYTES = 1 << 16
# isal gives the last byte only when it has seen the bits of some more.
_AHEAD_BYTES = 32
_FRAMES_BYTES, _MOST_FRAME_BYTES, _NO_END = 1 << 16, 32 << 20, 1 << 62

_OK, _STREAM_END, _BUF_ERROR = 0, 1, -5
_NO_FLUSH, _BLOCK = 0, 5
_LAST_BLOCK, _BEHIND_BLOCK, _UNUSED_BITS = 64, 128, 7


class _ZStream(ctypes.Structure):
    """z_stream of zlib.h."""

    _fields_ = (
        ("next_in", ctypes.c_void_p),
        ("avail_in", ctypes.c_uint),
        ("total_in", ctypes.c_ulong),
        ("next_out", ctypes.c_void_p),
        ("avail_out", ctypes.c_uint),
        ("total_out", ctypes.c_ulong),
        ("msg", ctypes.c_char_p),
        ("state", ctypes.c_void_p),
        ("zalloc", ctypes.c_void_p),
        ("zfree", ctypes.c_void_p),
        ("opaque", ctypes.c_void_p),
        ("data_type", ctypes.c_int),
        ("adler", ctypes.c_ulong),
        ("reserved", ctypes.c_ulong),
    )


@cache
def _libz() -> ctypes.CDLL | None:
    # A Python without a file of its zlib module has a libz inside: None is the process itself.
    for name in (getattr(zlib, "__file__", None), None, "libz.so.1"):
        try:
            library = ctypes.CDLL(name)
            library.zlibVersion.restype = ctypes.c_char_p
            library.inflateInit2_.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
            library.inflate.argtypes = [ctypes.c_void_p, ctypes.c_int]
            library.inflateReset.argtypes = library.inflateEnd.argtypes = [ctypes.c_void_p]
            return library
        except (OSError, AttributeError):
            continue
    return None


def open_finder(shard: str, read_at: ReadAt, compression: str) -> DeflateFinder | ZstdFinder | PointlessFinder:
    """``shard``: its name."""
    if compression == "zstd":
        return ZstdFinder(read_at)
    library = _libz()
    if library is None:
        return PointlessFinder(shard, open_inflater(read_at, compression, is_exact=True))
    return DeflateFinder(library, read_at, compression == "gzip")


class _Finder:
    """What both kinds have in common: the points, and how far the inflating is."""

    def __init__(self) -> None:
        self.offsets = [0]
        """Of the points so far, in what is inflated."""
        self._bits, self._windows = [0], [b""]
        self._stops: list[int] = []
        """The bytes of the file that hold what is inflated up to 32 KiB behind each point but the first."""
        self._done_bytes = 0

    def tell(self) -> int:
        """How much of the file was taken."""
        raise NotImplementedError

    def points(self) -> RestartPoints:
        """Those of what was read."""
        end = self.tell()
        stops = [min(stop + _AHEAD_BYTES, end) for stop in self._stops]
        stops += [end] * (len(self.offsets) - len(stops))
        offsets, bits, stops_of = (np.array(column, np.int64) for column in (self.offsets, self._bits, stops))
        return RestartPoints(offsets, bits, stops_of, self._windows)

    def _add(self, offset: int, bit: int) -> None:
        self.offsets.append(offset)
        self._bits.append(bit)
        self._windows.append(b"")


class DeflateFinder(_Finder):
    """As ``inflate.DeflateReader``, of gzip or zlib: all comes that is in front of damage."""

    def __init__(self, library: ctypes.CDLL, read_at: ReadAt, is_gzip: bool) -> None:
        super().__init__()
        self._library, self._read_at, self._is_gzip = library, read_at, is_gzip
        # In front stays the last byte that was read before: a point may lie in it.
        self._stored = bytearray(1 + READ_BYTES)
        self._stored_stop = 1
        self._read_bytes = 0
        self._error: Exception | None = None
        self._has_begun = self._in_member = False
        self._tail = b""
        """What is inflated right in front of the next byte, up to 32 KiB."""
        self._fresh: _PointWindow | None = None
        """The last point, until 32 KiB behind it are inflated."""
        self._num_windows = 0
        self._z = _ZStream()
        bits = 31 if is_gzip else 15
        if library.inflateInit2_(ctypes.byref(self._z), bits, library.zlibVersion(), ctypes.sizeof(_ZStream)):
            raise MemoryError
        weakref.finalize(self, library.inflateEnd, ctypes.byref(self._z))

    def tell(self) -> int:
        return self._read_bytes - int(self._z.avail_in)

    def read(self, most: int) -> memoryview:
        """As of ``inflate.DeflateReader``."""
        out = bytearray(most)
        done = self._inflate(out)
        if not done and self._error is not None:
            raise self._error
        self._done_bytes += done
        self._tail = (self._tail + out[max(0, done - WINDOW_BYTES) : done])[-WINDOW_BYTES:]
        return memoryview(out)[:done]

    def points(self) -> RestartPoints:
        self._end_fresh()
        return super().points()

    def _inflate(self, out: bytearray) -> int:
        """Fill ``out``; returns the bytes written, fewer at the end of the file or at an error."""
        z, done, most = self._z, 0, len(out)
        address = ctypes.addressof(ctypes.c_char.from_buffer(out)) if most else 0
        while done < most and self._error is None:
            if not z.avail_in and not self._refill():
                self._error = EOFError("the end of the file") if self._in_member else None
                break
            if not self._in_member and not self._begin(self._done_bytes + done):
                continue
            # Only near where a point is due is zlib asked where blocks end: there may be one in each byte.
            due = self.offsets[-1] + (WINDOW_BYTES if self._fresh else self._span) - self._done_bytes
            to_next = due - done
            is_due = to_next <= 0
            room = most - done if is_due else min(most - done, to_next)
            z.next_out, z.avail_out = address + done, room
            status = self._library.inflate(ctypes.byref(z), _BLOCK if is_due else _NO_FLUSH)
            done += room - z.avail_out
            if status == _STREAM_END:
                self._in_member = False
            elif status not in (_OK, _BUF_ERROR) or (status == _BUF_ERROR and z.avail_in and z.avail_out):
                said = (z.msg or b"").decode(errors="replace")
                self._error = zlib.error(f"Error {status} while decompressing data: {said}")
            # Where a block ends at ``due`` itself, zlib may have gone on into the next one, or not.
            elif done > due and z.data_type & _BEHIND_BLOCK and not z.data_type & _LAST_BLOCK:
                window = (self._tail + out[max(0, done - WINDOW_BYTES) : done])[-WINDOW_BYTES:]
                self._note(self._done_bytes + done, window, z.data_type & _UNUSED_BITS)
            if self._fresh and self._done_bytes + done >= self.offsets[-1] + WINDOW_BYTES:
                self._end_fresh()
        return done

    @property
    def _span(self) -> int:
        return SPAN_BYTES << self._num_windows // _DOUBLED_AFTER

    def _refill(self) -> int:
        self._stored[0] = self._stored[self._stored_stop - 1]
        got = self._read_at(self._read_bytes, memoryview(self._stored)[1:])
        self._read_bytes, self._stored_stop = self._read_bytes + got, 1 + got
        self._z.next_in = ctypes.addressof(ctypes.c_char.from_buffer(self._stored)) + 1
        self._z.avail_in = got
        if self._fresh is not None:
            self._fresh.stored.extend(self._stored[1 : 1 + min(got, _FED_BYTES)])
        return got

    def _begin(self, offset: int) -> bool:
        """Begin the next member; False where there are only zeros behind the last one, so far."""
        z = self._z
        if self._has_begun:
            rest = self._stored[self._stored_stop - z.avail_in : self._stored_stop]
            padding = len(rest) - len(rest.lstrip(b"\0")) if self._is_gzip else 0
            z.next_in, z.avail_in = z.next_in + padding, z.avail_in - padding
            if padding == len(rest):
                return False
            self._library.inflateReset(ctypes.byref(z))
        if offset - self.offsets[-1] >= self._span:
            self._note(offset, b"", 0)
        self._has_begun = self._in_member = True
        return True

    def _note(self, offset: int, window: bytes, unused_bits: int) -> None:
        """Add a point where the inflating is."""
        bit = 8 * self.tell() - unused_bits
        self._add(offset, bit)
        self._num_windows += bool(window)
        first = self._stored_stop - self._z.avail_in - (self.tell() - (bit >> 3))
        self._fresh = _PointWindow(window, self._stored[first : self._stored_stop][:_FED_BYTES], bit % 8)

    def _end_fresh(self) -> None:
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            self._stops.append(self.tell())
            if fresh.window:
                is_whole = len(fresh.stored) < _FED_BYTES
                self._windows[-1] = trimmed(fresh.window, bytes(fresh.stored), fresh.bit, is_whole, fast_library())


class _PointWindow(NamedTuple):
    """A point of which more must be seen: its ``window``, and what is ``stored`` from the byte of its ``bit`` on."""

    window: bytes
    stored: bytearray
    bit: int


class PointlessFinder(_Finder):
    """What there is without a libz: it knows the points of a shard that is too short for more than the first."""

    def __init__(self, shard: str, inflater: DeflateReader | ZstdReader) -> None:
        super().__init__()
        self._shard, self._inflater = shard, inflater

    def tell(self) -> int:
        return self._inflater.tell()

    def read(self, most: int) -> bytes:
        """As of ``inflate.DeflateReader``. Raises ShardFormatError where the shard may have a second point."""
        data = self._inflater.read(most)
        self._done_bytes += len(data)
        if self._done_bytes > SPAN_BYTES:
            raise ShardFormatError(
                f"{self._shard} is compressed, and holds more than {SPAN_BYTES:,} bytes. The order of its records "
                "follows from its restart points, which only the C library zlib finds, and there is none here.",
                hint="Install libz.so.1 (Debian, Ubuntu: zlib1g; Alpine, Fedora: zlib), or write the shard plain.",
            )
        return data


class ZstdFinder(_Finder):
    """As ``inflate.ZstdReader``, some frames at a time."""

    def __init__(self, read_at: ReadAt) -> None:
        super().__init__()
        self._read_at = read_at
        self._begin = self._stop = 0
        """Of the frames that are being inflated."""
        self._reader: ZstdReader | None = None

    def tell(self) -> int:
        return min(self._stop, self._reader.tell()) if self._reader is not None else self._stop

    def read(self, most: int) -> bytes:
        """As of ``inflate.ZstdReader``."""
        while True:
            if self._reader is None:
                begin, self._stop = _next_frames(self._read_at, self._stop)
                if begin == self._stop:
                    return b""
                if self._done_bytes - self.offsets[-1] >= SPAN_BYTES:
                    self._add(self._done_bytes, 8 * begin)
                self._reader = ZstdReader(partial(_read_part, self._read_at, self._stop), True, begin)
            data = self._reader.read(most)
            self._done_bytes += len(data)
            if len(self._stops) < len(self.offsets) - 1 and self._done_bytes >= self.offsets[-1] + WINDOW_BYTES:
                self._stops.append(self._stop if self._stop < _NO_END else self.tell())
            if data:
                return data
            self._reader = None


def _read_part(read_at: ReadAt, stop: int, offset: int, view: memoryview) -> int:
    return read_at(offset, view[: max(0, stop - offset)])


def _next_frames(read_at: ReadAt, offset: int) -> tuple[int, int]:
    """(first byte, byte behind) of whole frames from ``offset`` on: as many as take 64 KiB in the file.

    Where the next one takes very much, or is none, the rest of the file; both are equal at the end (RFC 8878).
    """
    begin = stop = offset
    while stop - begin < _FRAMES_BYTES:
        head = _bytes_at(read_at, stop, 8)
        if len(head) == 8 and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # to be skipped: 3.1.2
            skipped = stop + 8 + int.from_bytes(head[4:], "little")
            begin, stop = skipped if begin == stop else begin, skipped
            continue
        end = _frame_end(read_at, stop) if head else stop
        if end is None:
            return begin, _NO_END if begin == stop else stop
        if end == stop:
            break
        stop = end
    return begin, stop


def _frame_end(read_at: ReadAt, offset: int) -> int | None:
    """The byte behind a zstd frame (RFC 8878, 3.1.1); None where it is none, or takes more than 32 MiB."""
    head = _bytes_at(read_at, offset, 5)
    if len(head) < 5 or not head.startswith(ZSTD_MAGIC):
        return None
    single, has_check = head[4] >> 5 & 1, head[4] >> 2 & 1
    at = offset + 5 + (1 - single) + (0, 1, 2, 4)[head[4] & 3] + (single, 2, 4, 8)[head[4] >> 6]
    is_last = 0
    while not is_last and at - offset < _MOST_FRAME_BYTES:
        block = int.from_bytes(_bytes_at(read_at, at, 3).ljust(3, b"\xff"), "little")
        is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
        if kind == 3:
            return None
        at += 3 + (1 if kind == 1 else size)
    at += 4 * has_check
    return at if is_last and len(_bytes_at(read_at, at - 1, 1)) else None


def _bytes_at(read_at: ReadAt, offset: int, num_bytes: int) -> bytes:
    view = memoryview(bytearray(num_bytes))
    return bytes(view[: read_at(offset, view)])
