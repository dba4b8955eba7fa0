"""Codes of a few bits into what a table has for them.

Codes of one width that fill bytes are looked up a byte at a time: a row of the table has the values of all its codes.
Others are cut out of words of two bytes. Prefix codes are read by :mod:`loaderd.kernels.prefix`.
"""

from __future__ import annotations

import numpy as np

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.kernels.prefix import prefix_reader
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
        self._reader, self._ends_only = prefix_reader(field.layout(what, start, num_bits)), field.end
        self._num_places = field.num_places
        self._values = None if field.is_of_symbols else _as_items(field.table)
        self.is_compiled = self._reader.is_compiled

    @property
    def scratch_record_bytes(self) -> int:
        return self._reader.scratch_record_bytes + self._num_places

    def reserve(self, max_records: int) -> None:
        self._reader.reserve(max_records)
        self._symbols = np.empty((max_records, self._num_places), np.uint8)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Raises WorkerError for a record that is damaged."""
        symbols = self._symbols[: len(rows)]
        if self._ends_only:
            out[...] = self._reader.read(rows, symbols)
        elif self._values is None:
            self._reader.read(rows, out.reshape(symbols.shape))
        else:
            self._reader.read(rows, symbols)
            room = out.reshape(-1).view(self._values.dtype).reshape(symbols.shape)
            self._values.take(symbols, out=room, mode="clip")
