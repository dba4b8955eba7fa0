"""Prefix codes into the symbols that they stand for: the loop ``prefix``, and numpy in its place.

::

    fixed      (bit, width, symbol) …           a symbol whose place is a number of the record: a king's square
    codes      0 1000 0 0 101 …                 of all other places, in their ``order``, without gaps
    symbols    symbol symbol symbol …           uint8, one for each place

The loop keeps up to 64 bits of a record in a register, and looks up the next eight of them, which say the symbol and
the length of its code. numpy goes through all records at once, a place at a time. Its state is where in its bits each
record stands. ::

    windows    for each bit of a record, the eight bits from there on       uint8, (records, bits)
    lengths    for each eight bits, of the code that they begin with; 0: none       intp, (256,)
    a code     at += lengths[windows[at]]

Both raise WorkerError for the first record that is damaged: bits that are no code, codes that run over the end,
places that do not exist, or are fixed twice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes
from loaderd.kernels.llvm import BITSWAP, compiled, each_record, word_of_bits

NO_SYMBOL = 255
"""What the loop has at a place that it has not seen yet; so there are 255 symbols at most."""


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """Where in a row the codes are, and what they stand for.

    The feature of ``num_bits`` begins at ``first_byte`` of the row, and the codes at its bit ``start``. ``codes``:
    for each symbol its bits, the first one first; None: it has none. ``order``: intp, (places,): the place of each
    code. ``fixed``: (bit of the feature, bits, symbol) of each. ``what``: what the field is called in errors.
    """

    what: str
    first_byte: int
    num_bits: int
    start: int
    codes: Sequence[str | None]
    order: npt.NDArray[np.intp]
    fixed: Sequence[tuple[int, int, int]]
    is_little: bool

    def tables(self, is_little: bool) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint8]]:
        """(lengths, symbols), (256,) each: of the code that eight bits begin with. A length of 0: with none.

        ``is_little``: the first of the bits is the least significant one.
        """
        lengths, symbols = np.zeros(256, np.intp), np.zeros(256, np.uint8)
        windows = [f"{byte:08b}"[:: -1 if is_little else 1] for byte in range(256)]
        for symbol, code in enumerate(self.codes):
            for byte, bits in enumerate(windows):
                if code is not None and bits.startswith(code):
                    lengths[byte], symbols[byte] = len(code), symbol
        return lengths, symbols


def prefix_reader(layout: PrefixLayout) -> PrefixByNumpy | PrefixByLoop:
    """The fastest reader for ``layout``."""
    loop = compiled(PREFIX) if sys.byteorder == "little" else None
    return PrefixByNumpy(layout) if loop is None else PrefixByLoop(layout, loop)


def read_codes(layout: PrefixLayout, rows: Bytes) -> tuple[Bytes, AnyArray]:
    """(symbols, ends) of a few ``rows``, as :meth:`PrefixByNumpy.read` says. Raises WorkerError."""
    reader = PrefixByNumpy(layout)
    reader.reserve(len(rows))
    symbols = np.empty((len(rows), len(layout.order)), np.uint8)
    return symbols, reader.read(rows, symbols)


class PrefixByNumpy:
    is_compiled = False

    def __init__(self, layout: PrefixLayout) -> None:
        self._layout = layout
        self._columns = slice(layout.first_byte, layout.first_byte + -(-layout.num_bits // 8))
        self._num_codes = len(layout.order) - len(layout.fixed)
        self._lengths, self._symbols = layout.tables(layout.is_little)
        self._rank = np.argsort(layout.order)  # of each place, which code it is

    @property
    def scratch_record_bytes(self) -> int:
        num_bytes = self._columns.stop - self._columns.start
        return 10 * num_bytes + (self._num_codes + 2) * (np.dtype(np.intp).itemsize + 1)

    def reserve(self, max_records: int) -> None:
        self._at = np.empty((self._num_codes + 1, max_records), np.intp)
        self._step = np.empty(max_records, np.intp)
        self._codes = np.empty((self._num_codes, max_records), np.uint8)
        self._windows = np.empty((max_records, self._columns.stop - self._columns.start, 8), np.uint8)

    def read(self, rows: Bytes, symbols: Bytes) -> AnyArray:
        """Write the symbols of ``rows``, (n, places); returns of each record the number of the bit behind its codes.

        Raises WorkerError for a record that is damaged.
        """
        layout, n = self._layout, len(rows)
        if not n:
            return np.zeros(0, np.intp)
        windows = self._fill_windows(rows)
        first = np.arange(n) * (8 * windows.shape[1])
        at, codes, step = self._at[:, :n], self._codes[:, :n], self._step[:n]
        at[0] = first + layout.start
        flat, lengths = windows.reshape(-1), self._lengths
        for number in range(self._num_codes):
            # What is behind the last record does not matter: it is an error that it is read.
            flat.take(at[number], out=codes[number], mode="clip")
            lengths.take(codes[number], out=step, mode="clip")
            np.add(at[number], step, out=at[number + 1])
        ends: AnyArray = at[-1] - first
        if (most := int(ends.max())) > layout.num_bits:
            raise self._error(f"codes that end by bit {layout.num_bits}", f"that they end at bit {most} or later")
        if self._num_codes and not lengths.take(codes[-1]).all():  # no record leaves bits that are no code
            raise self._error(f"{self._num_codes} codes", "bits that begin none of them")
        stream, in_order = self._symbols.take(codes).T, symbols
        if layout.fixed:
            in_order, is_fixed = np.empty_like(symbols), np.zeros(symbols.shape, bool)
            for place, (*_, symbol) in zip(self._places(rows), layout.fixed, strict=True):
                is_fixed[np.arange(n), self._rank[place]] = True
                in_order[np.arange(n), self._rank[place]] = symbol
            in_order[~is_fixed] = stream.reshape(-1)
            stream = in_order
        symbols[...] = stream[:, self._rank]
        return ends

    def _fill_windows(self, rows: Bytes) -> Bytes:
        """uint8, (n, bytes, 8): the eight bits from each bit on, as a number. Behind the end, bits are 0."""
        is_little = self._layout.is_little
        words, windows = rows[:, self._columns].astype(np.uint16), self._windows[: len(rows)]
        behind = words[:, 1:].copy()
        if is_little:
            words[:, :-1] |= behind << np.uint16(8)
        else:
            words <<= np.uint16(8)
            words[:, :-1] |= behind
        for bit in range(8):
            windows[:, :, bit] = words >> np.uint16(bit if is_little else 8 - bit)
        return windows

    def _places(self, rows: Bytes) -> list[npt.NDArray[np.intp]]:
        """intp, (n,): where each of ``fixed`` is."""
        layout, num_places = self._layout, len(self._layout.order)
        order = "little" if layout.is_little else "big"
        bits = np.unpackbits(rows[:, self._columns], axis=1, bitorder=order)  # type: ignore[call-overload]
        places: list[npt.NDArray[np.intp]] = []
        for first, width, symbol in layout.fixed:
            powers = 1 << np.arange(width)[:: 1 if layout.is_little else -1]
            place = (bits[:, first : first + width] * powers).sum(axis=1)
            if (most := int(place.max())) >= num_places:
                raise self._error(f"a place from 0 to {num_places - 1} of symbol {symbol}", str(most))
            if any((place == other).any() for other in places):
                raise self._error("each fixed symbol at a place of its own", "two at one")
            places.append(place)
        return places

    def _error(self, expected: str, found: str) -> WorkerError:
        return WorkerError(f"{self._layout.what}: expected {expected}, found {found}")


PREFIX = each_record(
    BITSWAP
    + """declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define i64 @prefix(ptr noalias readonly %rows, i64 %num_records, i64 %row_bytes, i64 %first_bit, i64 %start_bit,
                   i64 %end_bit, i64 %is_big, ptr noalias readonly %table, i64 %num_fixed,
                   ptr noalias readonly %fixed, i64 %num_places, ptr noalias readonly %order,
                   ptr noalias %symbols, ptr noalias writeonly %ends) {
start:
  %reverses = icmp ne i64 %is_big, 0
  %last_word = sub i64 %row_bytes, 8""",
    """  %row_at = mul i64 %number, %row_bytes
  %row = getelementptr i8, ptr %rows, i64 %row_at
  %out_at = mul i64 %number, %num_places
  %out = getelementptr i8, ptr %symbols, i64 %out_at
  call void @llvm.memset.p0.i64(ptr %out, i8 -1, i64 %num_places, i1 false)
  br label %next_fixed

next_fixed:
  %which = phi i64 [0, %record], [%which_behind, %put_fixed]
  %is_fixed = icmp ult i64 %which, %num_fixed
  br i1 %is_fixed, label %fix, label %walk

fix:
  %bit_ptr = getelementptr [3 x i64], ptr %fixed, i64 %which
  %width_ptr = getelementptr [3 x i64], ptr %fixed, i64 %which, i64 1
  %symbol_ptr = getelementptr [3 x i64], ptr %fixed, i64 %which, i64 2
  %bit = load i64, ptr %bit_ptr
  %width = load i64, ptr %width_ptr
  %fixed_symbol = load i64, ptr %symbol_ptr
  %fixed_own_byte = lshr i64 %bit, 3
  %fixed_is_inside = icmp ult i64 %fixed_own_byte, %last_word
  %fixed_byte = select i1 %fixed_is_inside, i64 %fixed_own_byte, i64 %last_word
  %fixed_first = shl i64 %fixed_byte, 3
  %fixed_shift = sub i64 %bit, %fixed_first
  %fixed_ptr = getelementptr i8, ptr %row, i64 %fixed_byte
  %fixed_word = load i64, ptr %fixed_ptr, align 1
  %clear = sub i64 64, %width
  br i1 %reverses, label %fix_big, label %fix_little

fix_big:
  %fixed_swapped = call i64 @llvm.bswap.i64(i64 %fixed_word)
  %fixed_left = shl i64 %fixed_swapped, %fixed_shift
  %place_big = lshr i64 %fixed_left, %clear
  br label %place

fix_little:
  %fixed_right = lshr i64 %fixed_word, %fixed_shift
  %fixed_up = shl i64 %fixed_right, %clear
  %place_little = lshr i64 %fixed_up, %clear
  br label %place

place:
  %fixed_place = phi i64 [%place_big, %fix_big], [%place_little, %fix_little]
  %is_place = icmp ult i64 %fixed_place, %num_places
  br i1 %is_place, label %free, label %bad

free:
  %fixed_out = getelementptr i8, ptr %out, i64 %fixed_place
  %before = load i8, ptr %fixed_out
  %is_free = icmp eq i8 %before, -1
  br i1 %is_free, label %put_fixed, label %bad

put_fixed:
  %fixed_byte_symbol = trunc i64 %fixed_symbol to i8
  store i8 %fixed_byte_symbol, ptr %fixed_out
  %which_behind = add i64 %which, 1
  br label %next_fixed

walk:
  %rank = phi i64 [0, %next_fixed], [%next_rank, %step]
  %at = phi i64 [%start_bit, %next_fixed], [%next_at, %step]
  %word = phi i64 [0, %next_fixed], [%next_word, %step]
  %left = phi i64 [0, %next_fixed], [%next_left, %step]
  %is_more = icmp ult i64 %rank, %num_places
  br i1 %is_more, label %look, label %all_read

look:
  %order_ptr = getelementptr i64, ptr %order, i64 %rank
  %to = load i64, ptr %order_ptr
  %to_ptr = getelementptr i8, ptr %out, i64 %to
  %known = load i8, ptr %to_ptr
  %has_code = icmp eq i8 %known, -1
  br i1 %has_code, label %enough, label %step

enough:
  %is_enough = icmp uge i64 %left, 8
  br i1 %is_enough, label %code, label %reload

reload:
  %is_inside = icmp ult i64 %at, %end_bit
  br i1 %is_inside, label %load, label %bad

load:
  %own_byte = lshr i64 %at, 3
  %is_before = icmp ult i64 %own_byte, %last_word
  %byte = select i1 %is_before, i64 %own_byte, i64 %last_word
  %first = shl i64 %byte, 3
  %shift = sub i64 %at, %first
"""
    + word_of_bits("load", "%byte")
    + """
  %loaded = sub i64 64, %shift
  br label %code

code:
  %bits = phi i64 [%word, %enough], [%shifted, %in_order]
  %num_bits = phi i64 [%left, %enough], [%loaded, %in_order]
  %window = and i64 %bits, 255
  %entry_ptr = getelementptr [2 x i8], ptr %table, i64 %window
  %code_symbol_ptr = getelementptr [2 x i8], ptr %table, i64 %window, i64 1
  %length_byte = load i8, ptr %entry_ptr
  %code_symbol = load i8, ptr %code_symbol_ptr
  %length = zext i8 %length_byte to i64
  %is_code = icmp ne i64 %length, 0
  br i1 %is_code, label %put, label %bad

put:
  store i8 %code_symbol, ptr %to_ptr
  %at_behind = add i64 %at, %length
  %bits_behind = lshr i64 %bits, %length
  %left_behind = sub i64 %num_bits, %length
  br label %step

step:
  %next_at = phi i64 [%at, %look], [%at_behind, %put]
  %next_word = phi i64 [%word, %look], [%bits_behind, %put]
  %next_left = phi i64 [%left, %look], [%left_behind, %put]
  %next_rank = add i64 %rank, 1
  br label %walk

all_read:
  %is_whole = icmp ule i64 %at, %end_bit
  br i1 %is_whole, label %whole, label %bad

whole:
  %end = sub i64 %at, %first_bit
  %end_ptr = getelementptr i64, ptr %ends, i64 %number
  store i64 %end, ptr %end_ptr
  br label %done""",
)


class PrefixByLoop:
    """By the loop. Of a record that it finds to be damaged, numpy says what is wrong."""

    is_compiled = True

    def __init__(self, layout: PrefixLayout, loop: Any) -> None:
        self._plain, self._loop = PrefixByNumpy(layout), loop
        lengths, symbols = layout.tables(is_little=True)
        self._table = np.stack([lengths, symbols], axis=1).astype(np.uint8)
        first_bit = 8 * layout.first_byte
        fixed = [(first_bit + bit, width, symbol) for bit, width, symbol in layout.fixed]
        self._fixed = np.array(fixed, np.int64).reshape(-1, 3)
        self._order = np.ascontiguousarray(layout.order, np.int64)
        self._arguments = (
            *(first_bit, first_bit + layout.start, first_bit + layout.num_bits, int(not layout.is_little)),
            *(self._table.ctypes.data, len(fixed), self._fixed.ctypes.data),
            *(len(self._order), self._order.ctypes.data),
        )

    @property
    def scratch_record_bytes(self) -> int:
        return np.dtype(np.int64).itemsize

    def reserve(self, max_records: int) -> None:
        self._ends = np.empty(max_records, np.int64)

    def read(self, rows: Bytes, symbols: Bytes) -> AnyArray:
        """As :meth:`PrefixByNumpy.read`."""
        addresses = (symbols.ctypes.data, self._ends.ctypes.data)
        bad = self._loop(rows.ctypes.data, len(rows), rows.shape[1], *self._arguments, *addresses)
        if bad >= 0:
            self._plain.reserve(1)
            self._plain.read(rows[bad : bad + 1], symbols[bad : bad + 1])
            raise AssertionError("numpy takes a record that the loop does not")
        return self._ends[: len(rows)]
