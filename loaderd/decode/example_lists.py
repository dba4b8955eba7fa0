"""The parser of many records whose lists have many lengths: serialized ``tf.train.Example`` in, packed rows out.

Where lists vary, hardly two records of a file are laid out alike, and templates (:mod:`loaderd.decode.example_rows`)
are of no use. So each step is made for all records at once, whatever they look like::

    records ──find_features──► where each feature lies ──► where its list lies ──► values, padding, length in a row

A step that meets what it does not know leaves the record to the plain parser.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.kernels.lists import (
    Bools,
    Int64s,
    Names,
    copy_bytes,
    delimited,
    find_features,
    put_integers,
)
from loaderd.kernels.rows import Memory
from loaderd.kernels.views import items_at, places_within
from loaderd.schema import Feature, Length, Schema

Bytes = npt.NDArray[np.uint8]

_LIST_TAGS = {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}
_PACKED = _BYTES = 0x0A
_TAGS = {"float": 0x0D, "int64": 0x08}  # of values that are not packed
# Records, rows and indices of bytes for so many at once, so that they stay in the cache of a core.
_CHUNK_BYTES = 512 << 10
_MAX_RECORD_BYTES = 1 << 20
"""Of a longer record, indices of bytes would take much memory: it is left to the plain parser."""


class ListParser:
    """Parses records into rows of ``schema.row_dtype``. Not thread-safe: it owns scratch memory."""

    def __init__(self, schema: Schema) -> None:
        self._features = {name: each for name, each in schema.features.items() if not isinstance(each, Length)}
        self._names = Names(list(self._features))
        self._offsets = row_offsets = schema.row_offsets
        self._lengths = {
            each.feature: row_offsets[name] for name, each in schema.features.items() if isinstance(each, Length)
        }
        self._blank = np.zeros(schema.row_bytes, np.uint8)
        """A row of padding, which also defaults are written to."""
        for name, feature in self._features.items():
            if feature.pad is not None:
                self._put_blank(name, feature.padded(b"") or b"")
        self._rows = np.empty((max(1, _CHUNK_BYTES // schema.row_bytes), schema.row_bytes), np.uint8)

    def _put_blank(self, name: str, data: bytes) -> None:
        offset = self._offsets[name]
        self._blank[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def put(self, memory: Memory) -> Int64s:
        """Write the rows of the records that can be read; all are wanted. Returns the other positions."""
        lengths = memory.lengths
        missed = [np.flatnonzero(lengths > _MAX_RECORD_BYTES)]
        some = np.flatnonzero(lengths <= _MAX_RECORD_BYTES)
        out = items_at(memory.out, memory.out.shape[1], 0, memory.out.shape[1])
        ends = np.cumsum(lengths[some])
        first = 0
        while first < len(some):
            begun = int(ends[first - 1]) if first else 0
            fitting = int(np.searchsorted(ends, begun + _CHUNK_BYTES, side="right"))
            stop = min(max(fitting, first + 1), first + len(self._rows))
            chunk = some[first:stop]
            rows, is_read = self._rows_of(memory.buffer, memory.starts[chunk], lengths[chunk])
            if not is_read.all():
                missed.append(chunk[~is_read])
                chunk, rows = chunk[is_read], rows[is_read]
            out[memory.places[chunk]] = items_at(rows, rows.shape[1], 0, rows.shape[1])
            first = stop
        return np.sort(np.concatenate(missed))

    def _rows_of(self, buffer: Bytes, starts: Int64s, lengths: Int64s) -> tuple[Bytes, Bools]:
        """(rows, is_read): uint8, (n, row_bytes), in scratch memory; bool, (n,)."""
        rows = self._rows[: len(starts)]
        rows[...] = self._blank
        places, is_read = find_features(buffer, starts, lengths, self._names)
        for number, (name, feature) in enumerate(self._features.items()):
            found = places[:, number]
            is_there = found[:, 1] > 0
            column = _Column(buffer, feature, rows, self._offsets[name])
            counts = column.put(np.where(is_there[:, None], found, 0), is_there)
            if feature.pad is None:
                counts[counts != column.room] = -1
            if not is_there.all():
                counts[~is_there] = self._put_default(rows, ~is_there, name, feature)
            is_read &= counts >= 0
            if name in self._lengths:
                offset = self._lengths[name]
                rows[:, offset : offset + 4].view("<i4")[:, 0] = counts
        return rows, is_read

    def _put_default(self, rows: Bytes, which: Bools, name: str, feature: Feature) -> int:
        """Write the default to some rows; returns its length, or -1 if there is none."""
        data, offset = feature.default_bytes, self._offsets[name]
        if data is None:
            return -1
        rows[which, offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return feature.default_length


class _Column:
    """One feature of records that are read together. ``room``: how many values it has room for."""

    def __init__(self, buffer: Bytes, feature: Feature, rows: Bytes, offset: int) -> None:
        self._buffer, self._feature, self._rows, self._offset = buffer, feature, rows, offset
        self._last = len(buffer) - 1
        self._cut = feature.cut
        self._item_bytes = feature.length_bytes
        self.room = feature.num_bytes // self._item_bytes

    def put(self, places: Int64s, is_there: Bools) -> Int64s:
        """Write the values of ``Feature`` messages at ``places``, (n, 2), to the rows; returns how many, or -1."""
        kind = self._feature.wire_kind
        start, stop = delimited(self._buffer, places[:, 0], places[:, 1], _LIST_TAGS[kind])
        is_list = is_there & (stop <= places[:, 1])
        start, stop = np.where(is_list, start, 0), np.where(is_list, stop, 0)
        if kind == "bytes":
            put_bytes = self._put_list if self._feature.as_list else self._put_value
            return np.where(is_list, put_bytes(start, stop), -1)
        head = self._buffer[np.minimum(start, self._last)]
        is_filled, is_tagged = start < stop, head == _TAGS[kind]
        packed = np.flatnonzero(is_filled & (head == _PACKED))
        if len(packed):
            start[packed], packed_stop = delimited(self._buffer, start[packed] + 1, stop[packed])
            is_list[packed[packed_stop > stop[packed]]] = False
            stop[packed] = packed_stop
            is_tagged[packed] = False
        is_list &= ~is_filled | (head == _PACKED) | is_tagged
        places = np.where((is_list & is_filled)[:, None], np.stack([start, stop], axis=1), 0)
        put = self._put_floats if kind == "float" else self._put_integers
        return np.where(is_list, put(places, is_tagged & is_filled), -1)

    def _put_integers(self, places: Int64s, is_tagged: Bools) -> Int64s:
        return put_integers(self._buffer, places, is_tagged, self._rows, self._offset, self.room, self._cut)

    def _put_floats(self, places: Int64s, is_tagged: Bools) -> Int64s:
        sizes = places[:, 1] - places[:, 0]
        stride = np.where(is_tagged, 5, 4)
        counts, rest = np.divmod(sizes, stride)
        stored = np.minimum(counts, self.room)
        is_read = (rest == 0) & ((counts == stored) | self._cut)
        stored[~is_read] = 0
        plain = np.flatnonzero(~is_tagged & (stored > 0))
        copied = np.stack([places[plain, 0], places[plain, 0] + 4 * stored[plain]], axis=1)
        copy_bytes(self._buffer, copied, self._rows, self._row_starts(plain))
        tagged = np.flatnonzero(is_tagged & (stored > 0))
        if len(tagged):
            number = places_within(0, stored[tagged])
            owner = np.repeat(tagged, stored[tagged])
            at = places[owner, 0] + 5 * number
            is_read[owner[self._buffer[at] != _TAGS["float"]]] = False
            to = self._row_starts(owner) + 4 * number
            items_at(self._rows, 4)[to] = items_at(self._buffer, 4)[at + 1]
        return np.where(is_read, stored, -1)

    def _put_value(self, start: Int64s, stop: Int64s) -> Int64s:
        """A single bytes value."""
        value, value_stop = delimited(self._buffer, start, stop, _BYTES)
        return self._put_items(np.arange(len(start)), 0, value, value_stop, value_stop == stop, self.room)

    def _put_list(self, start: Int64s, stop: Int64s) -> Int64s:
        """Several bytes values, each of which has its place in the row: one of all records after the other."""
        counts = np.zeros(len(start), np.int64)
        left, at = np.arange(len(start)), start
        for number in range(self.room):
            more = at < stop[left]
            left, at = left[more], at[more]
            if not len(left):
                return counts
            value, at = delimited(self._buffer, at, stop[left], _BYTES)
            put = self._put_items(left, number, value, at, at <= stop[left], 1)
            counts[left] = np.where(put < 0, -1, number + 1)
            left, at = left[put >= 0], at[put >= 0]
        if not self._cut:
            counts[left[at < stop[left]]] = -1
        return counts

    def _put_items(
        self, which: Int64s, number: int, start: Int64s, stop: Int64s, is_value: Bools, places: int
    ) -> Int64s:
        """Write a bytes value to ``places`` of row ``which``, (n,), from ``number`` on; returns how many, or -1."""
        feature, num_bytes = self._feature, places * self._item_bytes
        sizes = np.where(is_value, stop - start, 0)
        kept = np.minimum(sizes, num_bytes)
        is_read = is_value & ((sizes == kept) | self._cut) & (kept % feature.unit_bytes == 0)
        if feature.pad is None:
            is_read &= kept == num_bytes
        some = np.flatnonzero(is_read & (kept > 0))
        copied = np.stack([start[some], start[some] + kept[some]], axis=1)
        copy_bytes(self._buffer, copied, self._rows, self._row_starts(which[some]) + number * self._item_bytes)
        return np.where(is_read, kept // self._item_bytes, -1)

    def _row_starts(self, which: Int64s) -> Int64s:
        """Where in the rows the feature begins."""
        starts: Int64s = which * self._rows.shape[1] + self._offset
        return starts
