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

import numpy as np
import numpy.typing as npt

from loaderd.decode.example import Example, RecordFault, feature_lists, parse_example
from loaderd.decode.example_lists import ListParser
from loaderd.kernels.rows import WORD_BYTES, Memory, Template, by_length, check_bounds, row_putter
from loaderd.schema import Schema

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

# A template of more steps than this is slower than the plain parser, unless hundreds of records match it.
_MAX_STEPS = 512
# By numpy, a template costs 25 µs even if it matches nothing: fewer records than this are faster parsed one by one.
_MIN_MATCHES = 3
# So many records of a length must match no template before one is learnt. Doubled whenever learning was of no use.
_MISSES_TO_LEARN = 4
_MAX_TEMPLATES_PER_LENGTH = 8
_MAX_LENGTHS = 1024
_JUDGED_RECORDS = 16_384
"""After so many records, templates are sorted by their use, and those that were of little use are dropped."""


class RowParser:
    """Parses records into rows of ``schema.row_dtype``. Not thread-safe: it learns."""

    def __init__(self, schema: Schema) -> None:
        self._features = schema.features
        self._row_bytes = schema.row_bytes
        self._row_offsets = schema.row_offsets
        self._layouts: dict[int, _Layouts] = {}
        varies = any(feature.varies for feature in self._features.values())
        self._list_parser = ListParser(schema) if varies else None
        self._putter = row_putter([])
        self._unjudged = 0
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
        ``places``: intp, (n,): the row of ``out`` that each record goes to; below 0: it is not wanted. A faulty
        record's row becomes zeros. Raises IndexError where a wanted record, or its row, would lie outside.

        Costs 70 to 110 ns a record for records of 225 bytes in calls of 4,096 to 1,024, all of known layouts, and
        half of that in compiled code; 17 µs for a record that the plain parser must take. Where lists have many
        lengths, :class:`~loaderd.decode.example_lists.ListParser` says what it costs.
        """
        assert buffer.flags.c_contiguous and out.flags.c_contiguous
        starts, lengths, places = (np.ascontiguousarray(each, np.int64) for each in (starts, lengths, places))
        memory = Memory(buffer, starts, lengths, out, places)
        faults: list[RecordFault] = []
        if self._list_parser is not None:
            check_bounds(memory)
            wanted = np.flatnonzero(places >= 0)
            left = wanted[self._list_parser.put(memory.part(wanted))]
            for position in left.tolist():
                self._parse_plain(memory, position, faults)
            return faults
        left = self._putter.put(memory)
        if len(left):
            self._learn_from(memory, left, faults)
        self._unjudged += len(starts)
        if self._unjudged >= _JUDGED_RECORDS:
            self._judge()
        return sorted(faults, key=lambda fault: fault.record)

    def _learn_from(self, memory: Memory, left: Positions, faults: list[RecordFault]) -> None:
        """Parse the records that match no known template."""
        has_learnt = False
        for length, alike in by_length(memory, left):
            if len(alike) >= _MIN_MATCHES:
                before = len(alike)
                alike = self._learn_alike(memory, length, alike, faults)
                has_learnt |= len(alike) < before
            for position in alike.tolist():
                self._parse_plain(memory, position, faults)
        if has_learnt:
            self._judge()

    def _learn_alike(self, memory: Memory, length: int, left: Positions, faults: list[RecordFault]) -> Positions:
        """Parse the records of one length that match templates that are learnt here. Returns the other positions."""
        if length not in self._layouts and len(self._layouts) >= _MAX_LENGTHS:
            self._layouts.clear()
        layouts = self._layouts.setdefault(length, _Layouts())
        layouts.misses += len(left)
        while len(left) >= _MIN_MATCHES and layouts.misses >= layouts.misses_to_learn:
            position = int(left[0])
            parsed = self._parse_plain(memory, position, faults)
            template = None
            if isinstance(parsed, Example):
                template = _learn(memory.record(position), parsed, self._row_offsets, self._row_bytes)
            if template is None:
                left = left[1:]
                layouts.misses_to_learn *= 2
            else:
                before, left = len(left), left[row_putter([template]).put(memory.part(left))]
                layouts.learnt(template, before - len(left))
            layouts.misses = len(left)
        return left

    def _judge(self) -> None:
        """See which templates were of use."""
        uses = self._putter.take_uses()
        for layouts in self._layouts.values():
            layouts.judge(uses)
        templates = tuple(template for layouts in self._layouts.values() for template in layouts.uses)
        if templates != self._putter.templates:
            self._putter = row_putter(templates)
        self._unjudged = 0

    def _parse_plain(self, memory: Memory, position: int, faults: list[RecordFault]) -> Example | RecordFault:
        """Parse a single record, whatever it is like: write its row, and note its fault if it has one."""
        row = memory.out[memory.places[position]]
        row[:] = 0
        record = memory.record(position).tobytes()
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


class _Layouts:
    """What is known of the records of one length. ``misses``: how many matched no template since one was learnt.

    ``uses``: how many records each template matched of late, the most useful template first. Uses before the last
    judgement count half, and so on.
    """

    def __init__(self) -> None:
        self.uses: dict[Template, int] = {}
        self.misses = 0
        self.misses_to_learn = _MISSES_TO_LEARN

    def learnt(self, template: Template, uses: int) -> None:
        """Keep a new template, unless hardly a record matches it."""
        if uses >= _MIN_MATCHES:
            self.uses[template] = 2 * uses  # of which the next judgement takes half
            self.misses_to_learn = _MISSES_TO_LEARN
        else:
            self.misses_to_learn *= 2

    def judge(self, uses: Mapping[Template, int]) -> None:
        """Sort the templates, most useful first; where records of this length came, drop those of little use.

        And where templates are too many. ``uses``: how many records each matched since the last judgement.
        """
        new = {template: uses.get(template, 0) for template in self.uses}
        if not any(new.values()) and not self.misses:
            return
        useful = [(template, self.uses[template] // 2 + count) for template, count in new.items()]
        useful = [(template, count) for template, count in useful if count >= _MIN_MATCHES]
        useful.sort(key=lambda item: item[1], reverse=True)
        self.uses = dict(useful[:_MAX_TEMPLATES_PER_LENGTH])


def _learn(record: Bytes, parsed: Example, row_offsets: Mapping[str, int], row_bytes: int) -> Template | None:
    """The template of the layout of ``record``, uint8 (length,), or None where it would not be worth it."""
    template = Template(len(record), row_bytes, [], [], [], [])
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
    steps += sum(width for _, _, width, _ in template.varint_runs)
    if len(record) < WORD_BYTES or steps > _MAX_STEPS:
        return None
    checked = np.flatnonzero(mask)
    while len(checked):  # words that cover every byte whose mask is not zero
        offset = min(int(checked[0]), len(record) - WORD_BYTES)
        word, word_mask = (int(np.ndarray((), "<u8", buffer=data, offset=offset)) for data in (record, mask))
        template.checks.append((offset, word_mask, word & word_mask))
        checked = checked[np.searchsorted(checked, offset + WORD_BYTES) :]
    return template
