"""The parser of many records at once: serialized ``tf.train.Example`` in, packed rows out.

The records of a file are nearly all laid out in one of a few ways: the keys, tags and lengths are the same bytes in
the same places, and what differs is the values. So a layout is learnt from one record, by the plain parser, and
kept as a **template**::

    record     0a dd 01 0a ce 01 0a 01 'd' 12 …  c2 01  v v v v … v v  0a 0a 0a 01 's' … 01   x  x
    mask       ff ff ff ff ff ff ff ff  ff ff …  ff ff  00 00 …    00  ff ff ff ff  ff … ff  80 80
               └──────── decides the parse ──────────┘  └─ a value ─┘  └──────────────────┘  └ a varint of two bytes

A record of that length with the same bytes under the mask takes the same course through the plain parser, for the
masked bytes are all that it decides by. Its values therefore lie where the template says: they are copied (raw
bytes) or put together (varints) for all such records at once, by compiled code (``compiled_rows``) or by numpy.
Records that match no template go through the plain parser one by one, and new templates are learnt from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.decode.compiled_rows import PUT_LOOP, Memory, PutRows
from loaderd.decode.example import Example, RecordFault, feature_lists, parse_example
from loaderd.machine_code import compiled
from loaderd.schema import Schema

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Triple = tuple[int, int, int]

_WORD_BYTES = 8
_ALL_BITS = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
# Records are taken in groups of about this size, so that the copies of them stay in the cache of a core.
_CHUNK_BYTES = 512 << 10
# A template of more steps than this is slower than the plain parser, unless hundreds of records match it.
_MAX_STEPS = 512
# Applying a template costs 25 µs even if it matches nothing: fewer records than this are faster parsed one by one.
_MIN_MATCHES = 3
# So many records of a length must match no template before one is learnt. Doubled whenever learning was of no use.
_MISSES_TO_LEARN = 4
_MAX_TEMPLATES_PER_LENGTH = 8
_MAX_LENGTHS = 1024


class RowParser:
    """Parses records into rows of ``schema.row_dtype``. Not thread-safe: it owns scratch memory, and it learns."""

    def __init__(self, schema: Schema) -> None:
        self._features = schema.features
        self._row_bytes = schema.row_bytes
        row_fields: Mapping[str, Any] = schema.row_dtype.fields or {}
        self._row_offsets: dict[str, int] = {name: row_fields[name][1] for name in schema.features}
        self._layouts: dict[int, _Layouts] = {}
        self._scratch = np.zeros((0, self._row_bytes), dtype=np.uint8)
        self._loop = compiled(PUT_LOOP)
        self.feature_lists: list[str] | None = None
        """The names of the feature lists of the first record, which are not read; None: no record was parsed."""

    def parse(
        self,
        buffer: Bytes,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: Bytes,
        places: npt.NDArray[np.intp],
    ) -> list[RecordFault]:
        """Write the row of each record to its place in ``out``. Returns the faults, by record (normally none).

        ``buffer``: uint8, 1-D, contiguous. ``starts``, ``lengths``: int64, (n,): where in it each serialized
        Example begins, and how many bytes it has. ``out``: uint8, (any number, row_bytes), C-contiguous.
        ``places``: intp, (n,): the row of ``out`` that each record goes to. A faulty record's row becomes zeros.
        Raises IndexError where a record or a row would lie outside.

        Costs 70 to 110 ns a record for records of 225 bytes in calls of 4,096 to 1,024, all of known layouts, and
        half of that in compiled code; 17 µs for a record that the plain parser must take.
        """
        if len(starts) == 0:
            return []
        memory = Memory(buffer, np.ascontiguousarray(starts, np.int64), out, np.ascontiguousarray(places, np.int64))
        _check_bounds(memory, lengths)
        batch = _Batch(memory, [])
        # Numbers of 16 bits are sorted by radix, five times as fast.
        short = lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
        order = np.argsort(short, kind="stable")
        sorted_lengths = lengths[order]
        bounds = (np.flatnonzero(np.diff(sorted_lengths)) + 1).tolist()
        for first, stop in pairwise((0, *bounds, len(order))):
            left, length = order[first:stop], int(sorted_lengths[first])
            if len(left) >= _MIN_MATCHES:
                left = self._parse_alike(batch, length, left)
            for position in left.tolist():
                self._parse_plain(batch, length, position)
        return sorted(batch.faults, key=lambda fault: fault.record)

    def _parse_alike(self, batch: _Batch, length: int, left: Positions) -> Positions:
        """Parse the records of one length that match templates, known or learnt here. Returns the other positions."""
        if length not in self._layouts and len(self._layouts) >= _MAX_LENGTHS:
            self._layouts.clear()
        layouts = self._layouts.setdefault(length, _Layouts())
        for template in layouts.templates:
            left = self._apply(template, batch, left)
        layouts.misses += len(left)
        while len(left) >= _MIN_MATCHES and layouts.misses >= layouts.misses_to_learn:
            record = batch.record(int(left[0]), length)
            parsed = self._parse_plain(batch, length, int(left[0]))
            new = self._new_template(record, parsed) if isinstance(parsed, Example) else None
            left = left[1:] if new is None else self._apply(new, batch, left)
            layouts.learnt(new)
            layouts.misses = len(left)
        layouts.keep_useful()
        return left

    def _new_template(self, record: Bytes, parsed: Example) -> _Template | None:
        new = _learn(record, parsed, self._row_offsets)
        if new is not None and self._loop is not None:
            new.put_rows = PutRows(self._loop, *new.tables(), self._row_bytes)
        return new

    def _parse_plain(self, batch: _Batch, length: int, position: int) -> Example | RecordFault:
        """Parse a single record, whatever it is like: write its row, and note its fault if it has one."""
        row = batch.memory.out[batch.memory.places[position]]
        row[:] = 0
        record = batch.record(position, length).tobytes()
        if self.feature_lists is None:
            self.feature_lists = feature_lists(record)
        parsed = parse_example(record, self._features, position)
        if isinstance(parsed, RecordFault):
            batch.faults.append(parsed)
            return parsed
        for name, value in parsed.values.items():
            offset = self._row_offsets[name]
            row[offset : offset + len(value.data)] = np.frombuffer(value.data, dtype=np.uint8)
        return parsed

    def _apply(self, template: _Template, batch: _Batch, positions: Positions) -> Positions:
        """Parse those of the records at ``positions`` that match. Returns the positions of the others."""
        if template.put_rows is None:
            left = self._by_numpy(template, batch.memory, positions)
        else:
            left = template.put_rows.put(batch.memory, np.ascontiguousarray(positions))
        template.count(len(positions) - len(left))
        return left

    def _by_numpy(self, template: _Template, memory: Memory, positions: Positions) -> Positions:
        """As ``PutRows.put``, without compiled code.

        For the chess records, ns a record: gather 10, match 12, fill 15, put 8.
        """
        length = template.length
        # To gather void items from overlapping stretches of the buffer is a memcpy for each: two thirds of the time
        # that rows of a two-dimensional view take. The same holds for putting them.
        windows = np.ndarray((len(memory.buffer) - length + 1,), f"V{length}", buffer=memory.buffer, strides=(1,))
        out = memory.out.view(f"V{self._row_bytes}").reshape(-1)
        step = max(1, _CHUNK_BYTES // max(length, self._row_bytes))
        missed = []
        for first in range(0, len(positions), step):
            chunk = positions[first : first + step]
            records = windows[memory.starts[chunk]]
            matches = template.match(records)
            if not matches.all():
                missed.append(chunk[~matches])
                chunk, records = chunk[matches], records[matches]
            rows = self._rows(len(chunk))
            template.fill(records.view(np.uint8).reshape(-1, length), rows)
            np.put(out, memory.places[chunk], rows.view(f"V{self._row_bytes}"), mode="clip")
        return np.concatenate(missed) if missed else positions[:0]

    def _rows(self, num_rows: int) -> Bytes:
        """Scratch, uint8 (num_rows, row_bytes). Its padding is zero; a template writes all other bytes."""
        if num_rows > len(self._scratch):
            self._scratch = np.zeros((num_rows, self._row_bytes), dtype=np.uint8)
        return self._scratch[:num_rows]


class _Batch(NamedTuple):
    """The arguments of one call of ``parse``, and the faults found so far."""

    memory: Memory
    faults: list[RecordFault]

    def record(self, position: int, length: int) -> Bytes:
        start = int(self.memory.starts[position])
        return self.memory.buffer[start : start + length]


def _check_bounds(memory: Memory, lengths: npt.NDArray[np.int64]) -> None:
    """Raise IndexError for what lies outside of the memory: compiled code does not check. Costs 3 ns a record."""
    buffer, starts, out, places = memory
    assert buffer.flags.c_contiguous and out.flags.c_contiguous
    if starts.min() < 0 or lengths.min() < 0 or (starts + lengths).max() > len(buffer):
        raise IndexError(f"a record lies outside of the {len(buffer)} bytes that were read")
    if places.min() < 0 or places.max() >= len(out):
        raise IndexError(f"a row lies outside of the {len(out)} that there are")


class _Layouts:
    """What is known of the records of one length. ``misses``: how many matched no template since one was learnt."""

    def __init__(self) -> None:
        self.templates: list[_Template] = []
        self.misses = 0
        self.misses_to_learn = _MISSES_TO_LEARN

    def learnt(self, template: _Template | None) -> None:
        """Take a new template in, unless hardly a record matched it."""
        if template is not None and template.recent_uses >= _MIN_MATCHES:
            self.templates.append(template)
            self.misses_to_learn = _MISSES_TO_LEARN
        else:
            self.misses_to_learn *= 2

    def keep_useful(self) -> None:
        """Sort the templates, most useful first; drop those that match too little, or are too many."""
        useful = [template for template in self.templates if template.recent_uses >= _MIN_MATCHES]
        useful.sort(key=lambda template: template.recent_uses, reverse=True)
        self.templates = useful[:_MAX_TEMPLATES_PER_LENGTH]


class _VarintRun:
    """``count`` varints of ``width`` bytes each, one behind the other from ``start`` on in the record."""

    def __init__(self, row_offset: int, start: int, width: int) -> None:
        self.row_offset = row_offset
        self.start = start
        self.width = width
        self.count = 1

    def decode(self, records: Bytes, rows: Bytes) -> None:
        """From ``records``, uint8 (n, length), to int64 at ``row_offset`` of ``rows``, uint8 (n, row_bytes)."""
        stop = self.start + self.width * self.count
        values = records[:, self.start + self.width - 1 : stop : self.width].astype("<u8")
        for byte in reversed(range(self.width - 1)):
            values <<= 7
            values |= records[:, self.start + byte : stop : self.width] & np.uint8(0x7F)
        rows[:, self.row_offset : self.row_offset + 8 * self.count].view("<u8")[...] = values


class _Template:
    """How records of ``length`` bytes and one layout become rows.

    ``checks``: (offset, expected, mask) of words; a record matches if ``word & mask == expected`` for each (a
    mask of None: all bits count).
    ``copies``: (row_offset, start, num_bytes). ``constants``: (row_offset, bytes).
    """

    def __init__(
        self,
        length: int,
        checks: list[tuple[int, np.uint64, np.uint64 | None]],
        copies: list[Triple],
        varints: list[_VarintRun],
        constants: list[tuple[int, Bytes]],
    ) -> None:
        self.length = length
        self.checks = checks
        self.copies = copies
        self.varints = varints
        self.constants = constants
        self.recent_uses = 0
        self.put_rows: PutRows | None = None
        """Applies it in compiled code; None: numpy applies it."""

    def match(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """bool, (n,): which of the records, void of ``length`` bytes (n,), have this layout."""
        difference = np.zeros(len(records), dtype=np.uint64)
        for offset, expected, mask in self.checks:
            word = np.ndarray((len(records),), np.uint64, buffer=records, offset=offset, strides=(self.length,))
            difference |= (word ^ expected) if mask is None else (word & mask) ^ expected
        matches: npt.NDArray[np.bool_] = difference == 0
        return matches

    def fill(self, records: Bytes, rows: Bytes) -> None:
        """Write the rows, uint8 (n, row_bytes), of records that match, uint8 (n, length)."""
        for row_offset, start, num_bytes in self.copies:
            rows[:, row_offset : row_offset + num_bytes] = records[:, start : start + num_bytes]
        for run in self.varints:
            run.decode(records, rows)
        for row_offset, data in self.constants:
            rows[:, row_offset : row_offset + len(data)] = data

    def tables(self) -> tuple[npt.NDArray[np.uint64], list[Triple], list[Triple], list[tuple[int, Bytes]]]:
        """Checks, copies, varints and constants, as PutRows takes them."""
        checks = [(at, _ALL_BITS if mask is None else mask, expected) for at, expected, mask in self.checks]
        varints = [
            (run.row_offset + 8 * number, run.start + run.width * number, run.width)
            for run in self.varints
            for number in range(run.count)
        ]
        return np.array(checks, np.uint64), self.copies, varints, self.constants

    def count(self, num_records: int) -> None:
        """Note how many records of a call matched. Those of the call before count half, and so on."""
        self.recent_uses = self.recent_uses // 2 + num_records


def _learn(record: Bytes, parsed: Example, row_offsets: dict[str, int]) -> _Template | None:
    """The template of the layout of ``record``, uint8 (length,), or None where it would not be worth it."""
    template = _Template(len(record), [], [], [], [])
    mask = np.full(len(record), 0xFF, dtype=np.uint8)
    for start, stop in parsed.unread:
        mask[start:stop] = 0
    for name, value in parsed.values.items():
        offset = row_offsets[name]
        stop = offset + len(value.data)
        for span in value.spans:
            mask[span.start : span.stop] = 0x80 if span.is_varint else 0
            width = span.stop - span.start
            if span.is_varint:
                _add_varint(template.varints, offset, span.start, width)
                offset += 8
            else:
                template.copies.append((offset, span.start, width))
                offset += width
        if offset < stop:  # the default, or padding
            template.constants.append((offset, np.frombuffer(value.data[offset - stop :], dtype=np.uint8)))
    steps = np.count_nonzero(mask) // _WORD_BYTES + len(template.copies) + sum(run.width for run in template.varints)
    if len(record) < _WORD_BYTES or steps > _MAX_STEPS:
        return None
    _add_checks(template, record, mask)
    return template


def _add_varint(runs: list[_VarintRun], row_offset: int, start: int, width: int) -> None:
    if runs:
        last = runs[-1]
        follows = last.start + last.width * last.count == start and last.row_offset + 8 * last.count == row_offset
        if follows and last.width == width:
            last.count += 1
            return
    runs.append(_VarintRun(row_offset, start, width))


def _add_checks(template: _Template, record: Bytes, mask: Bytes) -> None:
    """Add words that cover every byte whose mask is not zero."""
    checked = np.flatnonzero(mask)
    while len(checked):
        offset = min(int(checked[0]), len(record) - _WORD_BYTES)
        word, word_mask = (np.ndarray((), np.uint64, buffer=data, offset=offset)[()] for data in (record, mask))
        template.checks.append((offset, word & word_mask, None if word_mask == _ALL_BITS else word_mask))
        checked = checked[np.searchsorted(checked, offset + _WORD_BYTES) :]
