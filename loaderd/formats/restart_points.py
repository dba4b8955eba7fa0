"""Where a compressed shard can be entered: its restart points, and how inflating begins at one.

::

    file       │ member or frame                              │ member or frame     …
    inflated   │ block │ block │ block │ block │ …            │ block │ …
    points     ▲               ▲               ▲              ▲
               window: none    32 KiB          32 KiB         none

What deflate writes refers to the 32 KiB in front of it, its window. A point at the start of a gzip member, of a zlib
stream or of a zstd frame needs none. Any other point lies between two blocks of deflate, and carries its window. Only
some 2 KB of the 32 are referred to from behind the point: the other bytes are set to 0, so that the compressed window
takes 2 to 3 KB (chess records; 22 KB with all bytes).

A block of deflate begins at any bit. zlib has inflatePrime for that, which Python's zlib and isal lack. In its place,
an inflater is fed empty blocks of deflate first, as many as make the next bit the one that the point names.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.storage.shard_file import RestartPoint

WINDOW_BYTES = 1 << 15
_MOST_POINTS = 1 << 22
_EMPTY_FIXED = (10, 0b10)
"""(bits, their value, the first one lowest) of a block of the fixed code that holds nothing (RFC 1951, 3.2.6)."""
# 97 bits of a block of a code of its own: a literal and the end of the block, which comes at once; no distances.
_EMPTY_DYNAMIC = (97, 0x15ABFF810000000000901E004)

Int64s = npt.NDArray[np.int64]

_START: Int64s = np.zeros(1, np.int64)
_NO_WINDOW = (b"",)


@dataclass(eq=False)
class RestartPoints:
    """The points of a shard, in order; the first is its start.

    ``offsets``, ``bits``, ``stops``: int64, (points,): as in :class:`RestartPoint`. ``windows``: compressed, each.
    """

    offsets: Int64s
    bits: Int64s
    stops: Int64s
    windows: Sequence[bytes]

    @classmethod
    def of_start(cls, stop: int) -> RestartPoints:
        """The start alone, of a file whose last byte that is read lies in front of ``stop``."""
        return cls(_START, _START, np.array((stop,), np.int64), _NO_WINDOW)

    def at(self, offset: int) -> RestartPoint:
        """The last point that is not behind ``offset`` of what is inflated."""
        number = max(int(np.searchsorted(self.offsets, offset, side="right")) - 1, 0)
        offset, bit, stop = (column.item(number) for column in (self.offsets, self.bits, self.stops))
        return RestartPoint(offset, bit, stop, self.windows[number])

    def to_wire(self) -> Any:
        """Plain values; of the start alone, its ``stop``: small shards are many."""
        if len(self.windows) == 1:
            return self.stops.item(0)
        columns = (self.offsets, self.bits, self.stops)
        return [*(np.diff(column, prepend=0).astype("<i8").tobytes() for column in columns), list(self.windows)]

    @classmethod
    def from_wire(cls, wire: Any, size_bytes: int) -> RestartPoints:
        """Of a shard of ``size_bytes``. Raises ValueError or TypeError where they cannot be its points."""
        if isinstance(wire, int):
            if not 0 <= wire <= size_bytes:
                raise ValueError("its restart point is not of this file")
            return cls.of_start(wire)
        *columns, windows = wire
        offsets, bits, stops = (np.cumsum(np.frombuffer(column, "<i8"), dtype=np.int64) for column in columns)
        count = len(windows)
        if not 0 < count <= _MOST_POINTS or not len(offsets) == len(bits) == len(stops) == count:
            raise ValueError("its restart points are incomplete")
        if offsets[0] or bits[0] or any((np.diff(column) < 0).any() for column in (offsets, bits, stops)):
            raise ValueError("its restart points are in no order")
        if (bits >> 3 >= np.maximum(stops, 1)).any() or stops[-1] > size_bytes:
            raise ValueError("its restart points are not of this file")
        if not all(isinstance(window, bytes) and len(window) <= WINDOW_BYTES + 64 for window in windows):
            raise ValueError("its windows are too large")
        return cls(offsets, bits, stops, windows)


def window_of(point: RestartPoint) -> bytes:
    """Up to 32 KiB. Raises zlib.error where the point lies."""
    return zlib.decompressobj().decompress(point.window, WINDOW_BYTES)


def from_bit(bit: int, first_byte: int) -> bytes:
    """What to feed an inflater of raw deflate in place of ``first_byte``, of which bits 0 to ``bit - 1`` are past."""
    num_bits, value = _empty_blocks(bit)
    return (value | first_byte >> bit << num_bits).to_bytes((num_bits + 8 - bit) // 8, "little")


@cache
def _empty_blocks(bit: int) -> tuple[int, int]:
    """(bits, value) of empty blocks that end in front of bit number ``bit`` of a byte."""
    num_bits, value = _EMPTY_DYNAMIC if bit % 2 else (0, 0)
    while num_bits % 8 != bit:
        value |= _EMPTY_FIXED[1] << num_bits
        num_bits += _EMPTY_FIXED[0]
    return num_bits, value


_LOW = bytes(range(256)) * (WINDOW_BYTES // 256)
_NOT_LOW = bytes(255 - value for value in _LOW)
_HIGH = b"".join(bytes([value]) * 256 for value in range(WINDOW_BYTES // 256))


def trimmed(window: bytes, stored: bytes, bit: int, is_whole: bool, library: Any) -> bytes:
    """``window``, compressed, without the bytes that nothing refers to.

    ``stored``: the file from the byte on in which the point's ``bit`` is, as much as holds the next 32 KiB; if not
    ``is_whole``, there is more. To see what is referred to, the bytes are inflated behind other windows: behind one
    that has its own place in each byte, and behind its complement.
    """
    window = window.rjust(WINDOW_BYTES, b"\0")
    try:
        low, not_low, high = (
            np.frombuffer(_inflated(stored, bit, other, library), np.uint8) for other in (_LOW, _NOT_LOW, _HIGH)
        )
        if not is_whole and len(low) < WINDOW_BYTES:
            raise ValueError
        refers = low != not_low
        kept = np.zeros(WINDOW_BYTES, np.uint8)
        places = low[refers] | high[refers].astype(np.intp) << 8
        kept[places] = np.frombuffer(window, np.uint8)[places]
        window = kept.tobytes()
    except Exception:  # each library has errors of its own: there is damage behind the point
        pass
    return zlib.compress(window)


def _inflated(stored: bytes, bit: int, window: bytes, library: Any) -> bytes:
    inflater = library.decompressobj(wbits=-15, zdict=window)
    data: bytes = inflater.decompress(from_bit(bit, stored[0]) + stored[1:], WINDOW_BYTES)
    return data
