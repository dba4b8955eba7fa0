"""The parser of many records at once: serialized ``tf.train.Example`` in, packed rows out.

The records of a file are nearly all laid out in one of a few ways: the keys, tags and lengths are the same bytes in
the same places, and what differs is the values. So a layout is learnt from one record, by the plain parser, and
kept as a **template**::

    record     0a dd 01 0a ce 01 0a 01 'd' 12 …  c2 01  v v v v … v v  0a 0a 0a 01 's' … 01   x  x
    mask       ff ff ff ff ff ff ff ff  ff ff …  ff ff  00 00 …    00  ff ff ff ff  ff … ff  80 80
               └──────── decides the parse ──────────┘  └─ a value ─┘  └──────────────────┘  └ a varint of two bytes

A record of that length with the same bytes under the mask takes the same course through the plain parser, for the
masked bytes are all that it decides by. Its values therefore lie where the template says: they are copied (raw
bytes) or put together (varints) for all such records at once (:mod:`loaderd.kernels.rows`).
Records that match no template go through the plain parser one by one, and new templates are learnt from them.

Records whose lists have many lengths have as many layouts: :mod:`loaderd.decode.example_lists` parses them instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.decode.example import Example, RecordFault, feature_lists, parse_example
from loaderd.decode.example_lists import ListParser
from loaderd.kernels.rows import (
    WORD_BYTES,
    Memory,
    PutByLoop,
    PutByNumpy,
    Template,
    row_putter,
    scratch_rows,
    varint_runs,
)
from loaderd.schema import Schema

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

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
        self._scratch = scratch_rows(schema.row_bytes)
        row_fields: Mapping[str, Any] = schema.row_dtype.fields or {}
        self._row_offsets: dict[str, int] = {name: row_fields[name][1] for name in schema.features}
        self._layouts: dict[int, _Layouts] = {}
        varies = any(feature.varies for feature in self._features.values())
        self._list_parser = ListParser(schema, self._row_offsets) if varies else None
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
        half of that in compiled code; 17 µs for a record that the plain parser must take. Where lists have many
        lengths, :class:`~loaderd.decode.example_lists.ListParser` says what it costs.
        """
        if len(starts) == 0:
            return []
        memory = Memory(buffer, np.ascontiguousarray(starts, np.int64), out, np.ascontiguousarray(places, np.int64))
        _check_bounds(memory, lengths)
        faults: list[RecordFault] = []
        if self._list_parser is not None:
            for position in self._list_parser.put(memory, lengths).tolist():
                self._parse_plain(memory, int(lengths[position]), position, faults)
            return faults
        # Numbers of 16 bits are sorted by radix, five times as fast.
        short = lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
        order = np.argsort(short, kind="stable")
        sorted_lengths = lengths[order]
        bounds = (np.flatnonzero(np.diff(sorted_lengths)) + 1).tolist()
        for first, stop in pairwise((0, *bounds, len(order))):
            left, length = order[first:stop], int(sorted_lengths[first])
            if len(left) >= _MIN_MATCHES:
                left = self._parse_alike(memory, length, left, faults)
            for position in left.tolist():
                self._parse_plain(memory, length, position, faults)
        return sorted(faults, key=lambda fault: fault.record)

    def _parse_alike(self, memory: Memory, length: int, left: Positions, faults: list[RecordFault]) -> Positions:
        """Parse the records of one length that match templates, known or learnt here. Returns the other positions."""
        if length not in self._layouts and len(self._layouts) >= _MAX_LENGTHS:
            self._layouts.clear()
        layouts = self._layouts.setdefault(length, _Layouts())
        left = layouts.put(memory, left)
        layouts.misses += len(left)
        while len(left) >= _MIN_MATCHES and layouts.misses >= layouts.misses_to_learn:
            position = int(left[0])
            parsed = self._parse_plain(memory, length, position, faults)
            template = None
            if isinstance(parsed, Example):
                template = _learn(memory.record(position, length), parsed, self._row_offsets, self._scratch)
            left = left[1:] if template is None else layouts.put_new(template, memory, left)
            if template is None:
                layouts.misses_to_learn *= 2
            layouts.misses = len(left)
        layouts.keep_useful()
        return left

    def _parse_plain(
        self, memory: Memory, length: int, position: int, faults: list[RecordFault]
    ) -> Example | RecordFault:
        """Parse a single record, whatever it is like: write its row, and note its fault if it has one."""
        row = memory.out[memory.places[position]]
        row[:] = 0
        record = memory.record(position, length).tobytes()
        if self.feature_lists is None:
            self.feature_lists = feature_lists(record)
        parsed = parse_example(record, self._features, position)
        if isinstance(parsed, RecordFault):
            faults.append(parsed)
            return parsed
        for name, value in parsed.values.items():
            offset = self._row_offsets[name]
            row[offset : offset + len(value.data)] = np.frombuffer(value.data, dtype=np.uint8)
        return parsed


def _check_bounds(memory: Memory, lengths: npt.NDArray[np.int64]) -> None:
    """Raise IndexError for what lies outside of the memory: compiled code does not check. Costs 3 ns a record."""
    buffer, starts, out, places = memory
    assert buffer.flags.c_contiguous and out.flags.c_contiguous
    if starts.min() < 0 or lengths.min() < 0 or (starts + lengths).max() > len(buffer):
        raise IndexError(f"a record lies outside of the {len(buffer)} bytes that were read")
    if places.min() < 0 or places.max() >= len(out):
        raise IndexError(f"a row lies outside of the {len(out)} that there are")


class _Layouts:
    """What is known of the records of one length. ``misses``: how many matched no template since one was learnt.

    ``uses``: how many records each template matched of late, the most useful template first. Records of the call
    before count half, and so on. The key is what applies the template.
    """

    def __init__(self) -> None:
        self.uses: dict[PutByLoop | PutByNumpy, int] = {}
        self.misses = 0
        self.misses_to_learn = _MISSES_TO_LEARN

    def put(self, memory: Memory, positions: Positions) -> Positions:
        """Parse those of the records at ``positions`` that match a template. Returns the positions of the others."""
        for putter, uses in self.uses.items():
            left = putter.put(memory, positions)
            self.uses[putter] = uses // 2 + len(positions) - len(left)
            positions = left
        return positions

    def put_new(self, template: Template, memory: Memory, positions: Positions) -> Positions:
        """As :meth:`put`, with a new template. It is kept unless hardly a record matches it."""
        putter = row_putter(template)
        left = putter.put(memory, positions)
        if len(positions) - len(left) >= _MIN_MATCHES:
            self.uses[putter] = len(positions) - len(left)
            self.misses_to_learn = _MISSES_TO_LEARN
        else:
            self.misses_to_learn *= 2
        return left

    def keep_useful(self) -> None:
        """Sort the templates, most useful first; drop those that match too little, or are too many."""
        useful = [(putter, uses) for putter, uses in self.uses.items() if uses >= _MIN_MATCHES]
        useful.sort(key=lambda item: item[1], reverse=True)
        self.uses = dict(useful[:_MAX_TEMPLATES_PER_LENGTH])


def _learn(record: Bytes, parsed: Example, row_offsets: dict[str, int], scratch: Bytes) -> Template | None:
    """The template of the layout of ``record``, uint8 (length,), or None where it would not be worth it."""
    template = Template(len(record), scratch, [], [], [], [])
    mask = np.full(len(record), 0xFF, dtype=np.uint8)
    for start, stop in parsed.unread:
        mask[start:stop] = 0
    for name, value in parsed.values.items():
        offset = row_offsets[name]
        stop = offset + len(value.data)
        for start, end, is_varint in value.spans:
            mask[start:end] = 0x80 if is_varint else 0
            (template.varints if is_varint else template.copies).append((offset, start, end - start))
            offset += 8 if is_varint else end - start
        if offset < stop:  # the default, or padding
            template.constants.append((offset, np.frombuffer(value.data[offset - stop :], dtype=np.uint8)))
    steps = np.count_nonzero(mask) // WORD_BYTES + len(template.copies)
    steps += sum(width for _, _, width, _ in varint_runs(template.varints))
    if len(record) < WORD_BYTES or steps > _MAX_STEPS:
        return None
    checked = np.flatnonzero(mask)
    while len(checked):  # words that cover every byte whose mask is not zero
        offset = min(int(checked[0]), len(record) - WORD_BYTES)
        word, word_mask = (int(np.ndarray((), "<u8", buffer=data, offset=offset)) for data in (record, mask))
        template.checks.append((offset, word_mask, word & word_mask))
        checked = checked[np.searchsorted(checked, offset + WORD_BYTES) :]
    return template
