"""Codes of a few bits into what a table has for them.

Codes of one width that fill bytes are looked up a byte at a time: a row of the table has the values of all its codes.
Others are cut out of words of two bytes.

Prefix codes are read by a state machine that goes through all records at once, a place at a time. Its state is where
in its bits each record stands. ::

    windows    for each bit of a record, the eight bits from there on       uint8, (records, bits)
    lengths    for each eight bits, of the code that they begin with; 0: none       intp, (256,)
    a code     at += lengths[windows[at]]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.schema import Codes, PrefixCodes


class LookUpCodes(Engine):
    """Of one width. ``first_bit``: of the row. ``decode`` raises WorkerError for a code that the table lacks."""

    def __init__(self, what: str, field: Codes, first_bit: int) -> None:
        self._what, self._num_codes = what, len(field.values)
        self._is_whole = self._num_codes == 1 << field.width
        first, num_bits = first_bit // 8, field.num_places * field.width
        self._columns = slice(first, -(-(first_bit + num_bits) // 8))
        self._values = _as_items(field.table)
        self._by_bytes: AnyArray | None = None
        place = first_bit - 8 * first + field.width * np.arange(field.num_places)
        self._pick = field.words_of(place, self._columns.stop - first)
        if first_bit % 8 == 0 and num_bits % 8 == 0 and 8 % field.width == 0:
            codes = _codes(np.arange(256, dtype=np.uint8)[:, None], *field.words_of(np.arange(0, 8, field.width), 1))
            self._is_known = np.asarray((codes < self._num_codes).all(axis=1))
            self._by_bytes = _as_items(self._values[np.minimum(codes, self._num_codes - 1)])

    def check(self, rows: Bytes) -> None:
        stored = rows[:, self._columns]
        if not (self._is_whole or (self._by_bytes is not None and self._is_known[stored].all())):
            self._known_codes(stored)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        if self._by_bytes is not None:
            self.check(rows)
            table, index = self._by_bytes, rows[:, self._columns]
        else:
            table, index = self._values, self._known_codes(rows[:, self._columns])
        room = out.reshape(-1).view(table.dtype).reshape(index.shape)
        table.take(index.astype(np.intp), out=room, mode="clip")

    def _known_codes(self, stored: Bytes) -> AnyArray:
        """uint16, (n, codes). Raises WorkerError."""
        codes = _codes(stored, *self._pick)
        most = int(codes.max(initial=0))
        if most >= self._num_codes:
            raise WorkerError(f"{self._what}: expected codes from 0 to {self._num_codes - 1}, found {most}")
        return codes


def _as_items(table: AnyArray) -> AnyArray:
    """void, (entries,): each entry of a table as one item."""
    items: AnyArray = np.ascontiguousarray(table).reshape(len(table), -1).view(f"V{table[0].nbytes}")[:, 0]
    return items


def _codes(stored: Bytes, high: AnyArray, low: AnyArray, shift: AnyArray, mask: int) -> AnyArray:
    """uint16, (n, codes)"""
    words = stored[:, high].astype(np.uint16)
    words <<= np.uint16(8)
    words |= stored[:, low]
    words >>= shift
    words &= np.uint16(mask)
    return words


class ReadPrefixCodes(Engine):
    """Of any lengths. ``start``: the byte of a row where the feature of ``num_bits`` begins."""

    def __init__(self, what: str, field: PrefixCodes, start: int, num_bits: int) -> None:
        self._what, self._field, self._num_bits = what, field, num_bits
        self._columns = slice(start, start + -(-num_bits // 8))
        self._num_codes = field.num_places - len(field.fixed)
        self._lengths, self._symbols = np.zeros(256, np.intp), np.zeros(256, np.uint8)
        windows = [f"{byte:08b}"[:: -1 if field.bit_order == "little" else 1] for byte in range(256)]
        for symbol, code in enumerate(field.codes):
            for byte, bits in enumerate(windows):
                if code is not None and bits.startswith(code):
                    self._lengths[byte], self._symbols[byte] = len(code), symbol
        self._values = _as_items(field.table)

    @property
    def scratch_record_bytes(self) -> int:
        num_bytes = self._columns.stop - self._columns.start
        return 10 * num_bytes + (self._num_codes + 2) * (np.dtype(np.intp).itemsize + 1)

    def reserve(self, max_records: int) -> None:
        self._at = np.empty((self._num_codes + 1, max_records), np.intp)
        self._step = np.empty(max_records, np.intp)
        self._codes = np.empty((self._num_codes, max_records), np.uint8)
        self._windows = np.empty((max_records, self._columns.stop - self._columns.start, 8), np.uint8)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Raises WorkerError for a record that is damaged."""
        field, n = self._field, len(rows)
        if not n:
            return
        windows = self._fill_windows(rows)
        first = np.arange(n) * (8 * windows.shape[1])
        at, codes, step = self._at[:, :n], self._codes[:, :n], self._step[:n]
        at[0] = first + field.start
        flat, lengths = windows.reshape(-1), self._lengths
        for number in range(self._num_codes):
            # What is behind the last record does not matter: it is an error that it is read.
            flat.take(at[number], out=codes[number], mode="clip")
            lengths.take(codes[number], out=step, mode="clip")
            np.add(at[number], step, out=at[number + 1])
        ends = at[-1] - first
        if (most := int(ends.max())) > self._num_bits:
            raise self._error(f"codes that end by bit {self._num_bits}", f"that they end at bit {most} or later")
        if self._num_codes and not lengths.take(codes[-1]).all():  # no record leaves bits that are no code
            raise self._error(f"{self._num_codes} codes", "bits that begin none of them")
        if field.end:
            self._places(rows)
            out[...] = ends
            return
        symbols = self._symbols.take(codes).T
        if field.fixed:
            stream, places = symbols, self._places(rows)
            symbols, is_fixed = np.empty((n, field.num_places), np.uint8), np.zeros((n, field.num_places), bool)
            for place, (*_, symbol) in zip(places, field.fixed, strict=True):
                is_fixed[np.arange(n), place] = True
                symbols[np.arange(n), place] = symbol
            symbols[~is_fixed] = stream.reshape(-1)
        room = out.reshape(-1).view(self._values.dtype).reshape(symbols.shape)
        self._values.take(symbols, out=room, mode="clip")

    def _fill_windows(self, rows: Bytes) -> Bytes:
        """uint8, (n, bytes, 8): the eight bits from each bit on, as a number. Behind the end, bits are 0."""
        is_little = self._field.bit_order == "little"
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
        field = self._field
        bits = np.unpackbits(rows[:, self._columns], axis=1, bitorder=field.bit_order)  # type: ignore[call-overload]
        places: list[npt.NDArray[np.intp]] = []
        for first, width, symbol in field.fixed:
            powers = 1 << np.arange(width)[:: 1 if field.bit_order == "little" else -1]
            place = (bits[:, first : first + width] * powers).sum(axis=1)
            if (most := int(place.max())) >= field.num_places:
                raise self._error(f"a place from 0 to {field.num_places - 1} of symbol {symbol}", str(most))
            if any((place == other).any() for other in places):
                raise self._error("each fixed symbol at a place of its own", "two at one")
            places.append(place)
        return places

    def _error(self, expected: str, found: str) -> WorkerError:
        return WorkerError(f"{self._what}: expected {expected}, found {found}")
