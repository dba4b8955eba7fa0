"""From records to rows: a **template** says which bytes of records of one layout go where in the row.

Templates are learnt by :mod:`loaderd.decode.example_rows`. A template has ::

    checks     byte of the record, mask, expected: of words of eight bytes; where one differs, the record is missed
    copies     byte of the row, byte of the record, how many
    varints    byte of the row, byte of the record, how many: they become an int64
    constants  byte of the row, bytes: what is the same in every row (absent features, and padding)

The loop ``put`` goes from record to record, as they lie in memory. For each it

1. fetches the cache lines of the row of the eighth record from here, as rows lie anywhere in a window;
2. passes over a record that has no place, and ends where a record or its row lies outside of the memory;
3. finds, by the lower bits of its length, the first template that it may match; behind the last one, it is missed;
4. compares the length, and all checks of the template; if one differs, it goes on to the next template;
5. copies the stretches of bytes that are values, and counts that the template was of use;
6. copies in the same way, from a row that has nothing else, what is the same in every row, zeros of padding included;
7. puts each varint together, seven bits a byte from its last byte to its first, and stores it as eight bytes.

It returns how many records were missed. ``PutByNumpy`` makes the same steps for all records of one length at once: it
gathers them, compares, fills rows, and puts these to their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.kernels.llvm import compiled
from loaderd.kernels.views import items_at

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Triple = tuple[int, int, int]

WORD_BYTES = 8
_ALL_BITS = (1 << 64) - 1
# Records are taken in groups of about this size, so that the copies of them stay in the cache of a core.
_CHUNK_BYTES = 512 << 10
_NUM_HEADS = 1024  # a power of two


class Memory(NamedTuple):
    """Where the records of a call are, and where their rows go.

    ``buffer``: uint8, contiguous. ``starts``, ``lengths``: int64, (n,), contiguous: where in it each record begins,
    and how many bytes it has. ``out``: uint8, (any number, row_bytes), C-contiguous. ``places``: int64, (n,),
    contiguous: the row of ``out`` that each record goes to; below 0: it is not wanted.
    """

    buffer: Bytes
    starts: Int64s
    lengths: Int64s
    out: Bytes
    places: Int64s

    def record(self, position: int) -> Bytes:
        """The bytes of a record."""
        start = int(self.starts[position])
        return self.buffer[start : start + int(self.lengths[position])]

    def part(self, positions: Int64s) -> Memory:
        """The records at ``positions`` alone."""
        return Memory(self.buffer, self.starts[positions], self.lengths[positions], self.out, self.places[positions])


@dataclass(frozen=True, eq=False)
class Template:
    """How records of ``length`` bytes become rows of ``row_bytes``: see the module's docstring."""

    length: int
    row_bytes: int
    checks: list[Triple]
    copies: list[Triple]
    varints: list[Triple]
    constants: list[tuple[int, Bytes]]

    @cached_property
    def tables(self) -> tuple[npt.NDArray[Any], ...]:
        """Checks, copies, varints, and the row of constants, as the loop wants them."""
        row = np.zeros(self.row_bytes, np.uint8)
        is_fixed = np.ones(self.row_bytes, np.bool_)
        for to, _, num_bytes in (*self.copies, *((to, at, 8) for to, at, _ in self.varints)):
            is_fixed[to : to + num_bytes] = False
        for to, data in self.constants:
            row[to : to + len(data)] = data
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_fixed, [False]]).view(np.int8)))
        # They come first, so that they may be whole words, over bytes that are written behind them.
        fixed = [
            (min(start, self.row_bytes - WORD_BYTES), -1, max(stop - start, WORD_BYTES))
            for start, stop in edges.reshape(-1, 2).tolist()
        ]
        checks = np.array(self.checks, np.uint64)
        return checks, *(np.array(table, np.int64) for table in ([*fixed, *self.copies], self.varints)), row

    @cached_property
    def word_checks(self) -> list[tuple[int, np.uint64 | None, np.uint64]]:
        """The checks as numpy wants them; a mask of None: all bits count."""
        return [
            (at, None if mask == _ALL_BITS else np.uint64(mask), np.uint64(expected))
            for at, mask, expected in self.checks
        ]

    @cached_property
    def varint_runs(self) -> list[tuple[int, int, int, int]]:
        """Varints of one width that lie one behind the other, together: the fourth number is how many there are."""
        return varint_runs(self.varints)


def row_putter(templates: Sequence[Template]) -> PutByLoop | PutByNumpy:
    """What applies ``templates``: of those of one length, the first that matches. ``put`` says how."""
    loop = compiled(PUT)
    return PutByNumpy(templates) if loop is None else PutByLoop(loop, templates)


PUT = """declare i64 @llvm.umin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define i64 @put(ptr noalias readonly %buffer, i64 %buffer_bytes, ptr noalias readonly %starts,
                ptr noalias readonly %lengths, ptr noalias writeonly %out, i64 %row_bytes, i64 %num_rows,
                ptr noalias readonly %places, i64 %num_records, ptr noalias readonly %heads, i64 %heads_mask,
                ptr noalias %templates, ptr noalias writeonly %missed) {
start:
  %last = sub i64 %num_records, 1
  br label %record

record:
  %number = phi i64 [0, %start], [%next_number, %record_done]
  %num_missed = phi i64 [0, %start], [%num_missed_now, %record_done]
  %start_ptr = getelementptr i64, ptr %starts, i64 %number
  %start_byte = load i64, ptr %start_ptr
  %from = getelementptr i8, ptr %buffer, i64 %start_byte
  %length_ptr = getelementptr i64, ptr %lengths, i64 %number
  %length = load i64, ptr %length_ptr
  %place_ptr = getelementptr i64, ptr %places, i64 %number
  %place = load i64, ptr %place_ptr
  %ahead = add i64 %number, 8
  %is_behind_last = icmp ugt i64 %ahead, %last
  %soon = select i1 %is_behind_last, i64 %last, i64 %ahead
  %soon_place_ptr = getelementptr i64, ptr %places, i64 %soon
  %soon_place = load i64, ptr %soon_place_ptr
  %soon_byte = mul i64 %soon_place, %row_bytes
  %soon_row = getelementptr i8, ptr %out, i64 %soon_byte
  br label %prefetch

prefetch:
  %line = phi i64 [0, %record], [%next_line, %prefetch]
  %line_ptr = getelementptr i8, ptr %soon_row, i64 %line
  call void @llvm.prefetch.p0(ptr %line_ptr, i32 1, i32 3, i32 1)
  %next_line = add i64 %line, 64
  %more_lines = icmp ult i64 %next_line, %row_bytes
  br i1 %more_lines, label %prefetch, label %prefetched

prefetched:
  %is_unwanted = icmp slt i64 %place, 0
  br i1 %is_unwanted, label %record_done, label %bounds

bounds:
  %room = sub i64 %buffer_bytes, %start_byte
  %starts_inside = icmp ule i64 %start_byte, %buffer_bytes
  %ends_inside = icmp ule i64 %length, %room
  %is_in_buffer = and i1 %starts_inside, %ends_inside
  %is_in_out = icmp ult i64 %place, %num_rows
  %is_inside = and i1 %is_in_buffer, %is_in_out
  br i1 %is_inside, label %find, label %outside

find:
  %to_byte = mul i64 %place, %row_bytes
  %to = getelementptr i8, ptr %out, i64 %to_byte
  %head = and i64 %length, %heads_mask
  %head_ptr = getelementptr i64, ptr %heads, i64 %head
  %first_template = load i64, ptr %head_ptr
  br label %template

template:
  %template_number = phi i64 [%first_template, %find], [%next_template, %checked], [%next_template, %open]
  %is_template = icmp sge i64 %template_number, 0
  br i1 %is_template, label %open, label %miss

open:
  %template_ptr = getelementptr [10 x i64], ptr %templates, i64 %template_number
  %num_checks_ptr = getelementptr i64, ptr %template_ptr, i64 1
  %copies_ptr = getelementptr i64, ptr %template_ptr, i64 2
  %num_copies_ptr = getelementptr i64, ptr %template_ptr, i64 3
  %varints_ptr = getelementptr i64, ptr %template_ptr, i64 4
  %num_varints_ptr = getelementptr i64, ptr %template_ptr, i64 5
  %row_ptr = getelementptr i64, ptr %template_ptr, i64 6
  %next_template_ptr = getelementptr i64, ptr %template_ptr, i64 7
  %uses_ptr = getelementptr i64, ptr %template_ptr, i64 8
  %own_length_ptr = getelementptr i64, ptr %template_ptr, i64 9
  %checks = load ptr, ptr %template_ptr
  %num_checks = load i64, ptr %num_checks_ptr
  %copies = load ptr, ptr %copies_ptr
  %num_copies = load i64, ptr %num_copies_ptr
  %varints = load ptr, ptr %varints_ptr
  %num_varints = load i64, ptr %num_varints_ptr
  %row = load ptr, ptr %row_ptr
  %next_template = load i64, ptr %next_template_ptr
  %own_length = load i64, ptr %own_length_ptr
  %is_of_length = icmp eq i64 %own_length, %length
  br i1 %is_of_length, label %next_check, label %template

next_check:
  %check_number = phi i64 [0, %open], [%check_after, %check]
  %difference = phi i64 [0, %open], [%difference_now, %check]
  %more_checks = icmp ult i64 %check_number, %num_checks
  br i1 %more_checks, label %check, label %checked

check:
  %at_ptr = getelementptr [3 x i64], ptr %checks, i64 %check_number
  %mask_ptr = getelementptr [3 x i64], ptr %checks, i64 %check_number, i64 1
  %expected_ptr = getelementptr [3 x i64], ptr %checks, i64 %check_number, i64 2
  %at = load i64, ptr %at_ptr
  %mask = load i64, ptr %mask_ptr
  %expected = load i64, ptr %expected_ptr
  %word_ptr = getelementptr i8, ptr %from, i64 %at
  %word = load i64, ptr %word_ptr, align 1
  %masked = and i64 %word, %mask
  %different = xor i64 %masked, %expected
  %difference_now = or i64 %difference, %different
  %check_after = add i64 %check_number, 1
  br label %next_check

checked:
  %matches = icmp eq i64 %difference, 0
  br i1 %matches, label %put, label %template

miss:
  %missed_ptr = getelementptr i64, ptr %missed, i64 %num_missed
  store i64 %number, ptr %missed_ptr
  %one_more = add i64 %num_missed, 1
  br label %record_done

put:
  %uses = load i64, ptr %uses_ptr
  %uses_now = add i64 %uses, 1
  store i64 %uses_now, ptr %uses_ptr
  br label %next_copy

next_copy:
  %copy_number = phi i64 [0, %put], [%copy_after, %copied]
  %more_copies = icmp ult i64 %copy_number, %num_copies
  br i1 %more_copies, label %copy, label %next_varint

copy:
  %copy_to_ptr = getelementptr [3 x i64], ptr %copies, i64 %copy_number
  %copy_from_ptr = getelementptr [3 x i64], ptr %copies, i64 %copy_number, i64 1
  %copy_bytes_ptr = getelementptr [3 x i64], ptr %copies, i64 %copy_number, i64 2
  %copy_to_byte = load i64, ptr %copy_to_ptr
  %copy_from_byte = load i64, ptr %copy_from_ptr
  %copy_bytes = load i64, ptr %copy_bytes_ptr
  %copy_to = getelementptr i8, ptr %to, i64 %copy_to_byte
  %is_fixed = icmp slt i64 %copy_from_byte, 0
  %copy_from_record = getelementptr i8, ptr %from, i64 %copy_from_byte
  %copy_from_row = getelementptr i8, ptr %row, i64 %copy_to_byte
  %copy_from = select i1 %is_fixed, ptr %copy_from_row, ptr %copy_from_record
  %is_long = icmp uge i64 %copy_bytes, 64
  br i1 %is_long, label %long, label %copy_short

long:
  %long_stop = sub i64 %copy_bytes, 64
  br label %line_copy

line_copy:
  %done_bytes = phi i64 [0, %long], [%done_now, %line_copy]
  %copy_line_from = getelementptr i8, ptr %copy_from, i64 %done_bytes
  %copy_line_to = getelementptr i8, ptr %copy_to, i64 %done_bytes
  %copy_line = load <64 x i8>, ptr %copy_line_from, align 1
  store <64 x i8> %copy_line, ptr %copy_line_to, align 1
  %after_line = add i64 %done_bytes, 64
  %done_now = call i64 @llvm.umin.i64(i64 %after_line, i64 %long_stop)
  %is_copied = icmp eq i64 %done_bytes, %long_stop
  br i1 %is_copied, label %copied, label %line_copy

copy_short:
  %is_word = icmp uge i64 %copy_bytes, 8
  br i1 %is_word, label %words, label %next_byte

words:
  %words_stop = sub i64 %copy_bytes, 8
  br label %word_copy

word_copy:
  %word_bytes = phi i64 [0, %words], [%word_bytes_now, %word_copy]
  %copy_word_from = getelementptr i8, ptr %copy_from, i64 %word_bytes
  %copy_word_to = getelementptr i8, ptr %copy_to, i64 %word_bytes
  %copy_word = load i64, ptr %copy_word_from, align 1
  store i64 %copy_word, ptr %copy_word_to, align 1
  %after_word = add i64 %word_bytes, 8
  %word_bytes_now = call i64 @llvm.umin.i64(i64 %after_word, i64 %words_stop)
  %are_copied = icmp eq i64 %word_bytes, %words_stop
  br i1 %are_copied, label %copied, label %word_copy

next_byte:
  %byte_number = phi i64 [0, %copy_short], [%byte_after, %byte_copy]
  %more_to_copy = icmp ult i64 %byte_number, %copy_bytes
  br i1 %more_to_copy, label %byte_copy, label %copied

byte_copy:
  %copy_byte_from = getelementptr i8, ptr %copy_from, i64 %byte_number
  %copy_byte_to = getelementptr i8, ptr %copy_to, i64 %byte_number
  %copy_byte = load i8, ptr %copy_byte_from
  store i8 %copy_byte, ptr %copy_byte_to
  %byte_after = add i64 %byte_number, 1
  br label %next_byte

copied:
  %copy_after = add i64 %copy_number, 1
  br label %next_copy

next_varint:
  %varint_number = phi i64 [0, %next_copy], [%varint_after, %varint_done]
  %more_varints = icmp ult i64 %varint_number, %num_varints
  br i1 %more_varints, label %varint, label %record_done

varint:
  %varint_to_ptr = getelementptr [3 x i64], ptr %varints, i64 %varint_number
  %varint_from_ptr = getelementptr [3 x i64], ptr %varints, i64 %varint_number, i64 1
  %varint_bytes_ptr = getelementptr [3 x i64], ptr %varints, i64 %varint_number, i64 2
  %varint_to_byte = load i64, ptr %varint_to_ptr
  %varint_from_byte = load i64, ptr %varint_from_ptr
  %varint_bytes = load i64, ptr %varint_bytes_ptr
  %varint_to = getelementptr i8, ptr %to, i64 %varint_to_byte
  %varint_from = getelementptr i8, ptr %from, i64 %varint_from_byte
  br label %byte

byte:
  %left = phi i64 [%varint_bytes, %varint], [%left_now, %byte]
  %value = phi i64 [0, %varint], [%value_now, %byte]
  %left_now = sub i64 %left, 1
  %byte_ptr = getelementptr i8, ptr %varint_from, i64 %left_now
  %found = load i8, ptr %byte_ptr
  %found_bits = and i8 %found, 127
  %bits = zext i8 %found_bits to i64
  %shifted = shl i64 %value, 7
  %value_now = or i64 %shifted, %bits
  %more_bytes = icmp ne i64 %left_now, 0
  br i1 %more_bytes, label %byte, label %varint_done

varint_done:
  store i64 %value_now, ptr %varint_to, align 1
  %varint_after = add i64 %varint_number, 1
  br label %next_varint

record_done:
  %num_missed_now = phi i64 [%num_missed, %next_varint], [%one_more, %miss], [%num_missed, %prefetched]
  %next_number = add i64 %number, 1
  %more_records = icmp ult i64 %next_number, %num_records
  br i1 %more_records, label %record, label %done

done:
  ret i64 %num_missed_now

outside:
  ret i64 -1
}
"""


class PutByLoop:
    """Templates, as the loop wants them."""

    def __init__(self, loop: Any, templates: Sequence[Template]) -> None:
        self._loop = loop
        self.templates = tuple(templates)
        heads = np.full(_NUM_HEADS, -1, np.int64)
        self._words = np.full((len(templates), 10), -1, np.int64)
        last: dict[int, int] = {}
        for number, template in enumerate(templates):
            *tables, row = template.tables
            of_tables = [word for table in tables for word in (table.ctypes.data, len(table))]
            self._words[number] = *of_tables, row.ctypes.data, -1, 0, template.length
            head = template.length % _NUM_HEADS
            before = last.get(head)
            if before is None:
                heads[head] = number
            else:
                self._words[before, 7] = number
            last[head] = number
        self._heads = heads
        self._arguments = heads.ctypes.data, _NUM_HEADS - 1, self._words.ctypes.data

    def take_uses(self) -> dict[Template, int]:
        """How many records each template was applied to since this was asked last."""
        uses: list[int] = self._words[:, 8].tolist()
        self._words[:, 8] = 0
        return dict(zip(self.templates, uses, strict=True))

    def put(self, memory: Memory) -> Int64s:
        """Write the rows of the wanted records that match a template. Returns the positions of the others.

        Raises IndexError where a wanted record, or its row, would lie outside; rows before it are written then.
        """
        buffer, starts, lengths, out, places = memory
        missed = np.empty(len(starts), np.int64)
        if not len(starts):  # the loop takes at least one record
            return missed
        num_missed = self._loop(
            *(buffer.ctypes.data, len(buffer), starts.ctypes.data, lengths.ctypes.data),
            *(out.ctypes.data, out.shape[1], len(out), places.ctypes.data, len(starts)),
            *self._arguments,
            missed.ctypes.data,
        )
        if num_missed < 0:
            check_bounds(memory)
        return missed[:num_missed]


def check_bounds(memory: Memory) -> None:
    """Raise IndexError where a wanted record, or its row, lies outside of the memory."""
    buffer, starts, lengths, out, places = memory
    wanted = places >= 0
    if (((starts < 0) | (lengths < 0) | (lengths > len(buffer) - starts)) & wanted).any():
        raise IndexError(f"a record lies outside of the {len(buffer)} bytes that were read")
    if (places >= len(out)).any():
        raise IndexError(f"a row lies outside of the {len(out)} that there are")


class PutByNumpy:
    """The same by numpy. For the chess records, ns a record: gather 10, match 12, fill 15, put 8."""

    def __init__(self, templates: Sequence[Template]) -> None:
        self.templates = tuple(templates)
        self._uses = [0] * len(templates)
        self._by_length: dict[int, list[int]] = {}
        for number, template in enumerate(templates):
            self._by_length.setdefault(template.length, []).append(number)
        row_bytes = templates[0].row_bytes if templates else 1
        self._scratch = np.zeros((max(1, _CHUNK_BYTES // row_bytes), row_bytes), np.uint8)

    def take_uses(self) -> dict[Template, int]:
        """As :meth:`PutByLoop.take_uses`."""
        uses, self._uses = self._uses, [0] * len(self.templates)
        return dict(zip(self.templates, uses, strict=True))

    def put(self, memory: Memory) -> Int64s:
        """As :meth:`PutByLoop.put`."""
        if not len(memory.starts):
            return np.empty(0, np.int64)
        check_bounds(memory)
        wanted = memory.places >= 0
        if len(self.templates) == 1 and wanted.all() and _is_copied(memory, template := self.templates[0]):
            self._uses[0] += len(memory.starts)
            _copy(memory, template)
            return np.empty(0, np.int64)
        missed = [np.empty(0, np.int64)]
        for length, positions in by_length(memory, np.flatnonzero(wanted)):
            for number in self._by_length.get(length, ()):
                left = self._put(memory, self.templates[number], positions)
                self._uses[number] += len(positions) - len(left)
                positions = left
            missed.append(positions)
        return np.sort(np.concatenate(missed))

    def _put(self, memory: Memory, template: Template, positions: Int64s) -> Int64s:
        """Put those of the records at ``positions``, of the template's length, that match. Returns the others."""
        length, row_bytes = template.length, template.row_bytes
        windows = items_at(memory.buffer, length)
        out = memory.out.view(f"V{row_bytes}").reshape(-1)
        step = max(1, _CHUNK_BYTES // max(length, row_bytes))
        missed = [positions[:0]]
        for first in range(0, len(positions), step):
            chunk = positions[first : first + step]
            records = windows[memory.starts[chunk]]
            matches = _match(template, records)
            if not matches.all():
                missed.append(chunk[~matches])
                chunk, records = chunk[matches], records[matches]
            rows = self._rows_of(template, records.view(np.uint8).reshape(-1, length))
            np.put(out, memory.places[chunk], rows.view(f"V{row_bytes}"), mode="clip")
        return np.concatenate(missed)

    def _rows_of(self, template: Template, records: Bytes) -> Bytes:
        """uint8, (n, row_bytes), in scratch memory: the rows of ``records``, uint8 (n, length).

        The padding of rows in scratch memory is zero; a template writes all other bytes.
        """
        rows = self._scratch[: len(records)]
        for to, at, num_bytes in template.copies:
            rows[:, to : to + num_bytes] = records[:, at : at + num_bytes]
        for to, at, width, count in template.varint_runs:
            stop = at + width * count
            values = records[:, at + width - 1 : stop : width].astype("<u8")
            for byte in reversed(range(width - 1)):
                values <<= 7
                values |= records[:, at + byte : stop : width] & np.uint8(0x7F)
            rows[:, to : to + 8 * count].view("<u8")[...] = values
        for to, data in template.constants:
            rows[:, to : to + len(data)] = data
        return rows


def by_length(memory: Memory, positions: Int64s) -> list[tuple[int, Int64s]]:
    """The records at ``positions``, in groups of one length each: (length, positions)."""
    lengths = memory.lengths[positions]
    if not len(lengths):
        return []
    # Numbers of 16 bits are sorted by radix, five times as fast.
    order = np.argsort(lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths, kind="stable")
    in_order = lengths[order]
    bounds = (np.flatnonzero(np.diff(in_order)) + 1).tolist()
    return [
        (int(in_order[first]), positions[order[first:stop]]) for first, stop in pairwise((0, *bounds, len(order)))
    ]


def _match(template: Template, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """bool, (n,): which of the records, void of ``length`` bytes (n,), have this layout."""
    difference = np.zeros(len(records), dtype=np.uint64)
    strides = (template.length,)
    for at, mask, expected in template.word_checks:
        word = np.ndarray((len(records),), np.uint64, buffer=records, offset=at, strides=strides)
        difference |= (word ^ expected) if mask is None else (word & mask) ^ expected
    matches: npt.NDArray[np.bool_] = difference == 0
    return matches


def _is_copied(memory: Memory, template: Template) -> bool:
    """Whether the records follow each other, and a template does nothing but copy: then nothing need be gathered."""
    does_more = template.checks or template.varints or template.constants
    starts = memory.starts
    return not does_more and bool(
        (memory.lengths == template.length).all() and (np.diff(starts) == template.length).all()
    )


def _copy(memory: Memory, template: Template) -> None:
    """Put records that follow each other, by copies alone; padding stays as it is."""
    for to, at, num_bytes in template.copies:
        first = int(memory.starts[0]) + at
        stored = items_at(memory.buffer, num_bytes, first, template.length)[: len(memory.starts)]
        items_at(memory.out, num_bytes, to, memory.out.shape[1])[memory.places] = stored


def varint_runs(varints: list[Triple]) -> list[tuple[int, int, int, int]]:
    """Varints of one width that lie one behind the other, together: the fourth number is how many there are."""
    runs: list[tuple[int, int, int, int]] = []
    for to, at, width in varints:
        if runs:
            first_to, first_at, first_width, count = runs[-1]
            if (first_to + 8 * count, first_at + width * count, first_width) == (to, at, width):
                runs[-1] = (first_to, first_at, width, count + 1)
                continue
        runs.append((to, at, width, 1))
    return runs
