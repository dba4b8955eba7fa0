"""From records of one layout to rows: a **template** says which bytes of the record go where in the row.

Templates are learnt by :mod:`loaderd.decode.example_rows`. A template has ::

    checks     byte of the record, mask, expected: of words of eight bytes; where one differs, the record is missed
    copies     byte of the row, byte of the record, how many
    varints    byte of the row, byte of the record, how many: they become an int64
    constants  byte of the row, bytes: what is the same in every row (absent features, and padding)

The loop ``put`` goes from record to record. For each it

1. fetches the cache lines of the row of the eighth record from here, as rows lie anywhere in a window;
2. compares all checks; a record that differs in any is noted as missed, and the loop goes on to the next;
3. copies the stretches of bytes that are values;
4. copies in the same way, from a row that has nothing else, what is the same in every row, zeros of padding included;
5. puts each varint together, seven bits a byte from its last byte to its first, and stores it as eight bytes.

It returns how many records were missed. ``PutByNumpy`` makes the same steps for many records at once: it gathers
them, compares, fills rows, and puts these to their places.
"""

from __future__ import annotations

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


class Memory(NamedTuple):
    """Where the records of a call are, and where their rows go.

    ``buffer``: uint8, contiguous. ``starts``: int64, (n,): where in it each record begins. ``out``: uint8,
    (any number, row_bytes), C-contiguous. ``places``: int64, (n,): the row of ``out`` that each record goes to.
    """

    buffer: Bytes
    starts: Int64s
    out: Bytes
    places: Int64s

    def record(self, position: int, length: int) -> Bytes:
        """The bytes of a record."""
        start = int(self.starts[position])
        return self.buffer[start : start + length]


class Template(NamedTuple):
    """How records of ``length`` bytes become rows: see the module's docstring.

    ``scratch``: from :func:`scratch_rows`, for all templates of a parser. Its padding is zero; a template writes all
    other bytes.
    """

    length: int
    scratch: Bytes
    checks: list[Triple]
    copies: list[Triple]
    varints: list[Triple]
    constants: list[tuple[int, Bytes]]

    @property
    def row_bytes(self) -> int:
        return int(self.scratch.shape[1])


def scratch_rows(row_bytes: int) -> Bytes:
    """uint8, (rows, row_bytes): as many rows as are made at once, zeros."""
    return np.zeros((max(1, _CHUNK_BYTES // row_bytes), row_bytes), np.uint8)


def row_putter(template: Template) -> PutByLoop | PutByNumpy:
    """What applies ``template``: :meth:`PutByLoop.put` says how."""
    loop = compiled(PUT)
    return PutByNumpy(template) if loop is None else PutByLoop(loop, template)


PUT = """declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define i64 @put(ptr noalias readonly %buffer, ptr noalias readonly %starts,
                ptr noalias writeonly %out, i64 %row_bytes, ptr noalias readonly %places,
                ptr noalias readonly %positions, i64 %num_records,
                ptr noalias readonly %checks, i64 %num_checks, ptr noalias readonly %copies, i64 %num_copies,
                ptr noalias readonly %varints, i64 %num_varints,
                ptr noalias readonly %row, ptr noalias writeonly %missed) {
start:
  %last = sub i64 %num_records, 1
  br label %record

record:
  %number = phi i64 [0, %start], [%next_number, %record_done]
  %num_missed = phi i64 [0, %start], [%num_missed_now, %record_done]
  %position_ptr = getelementptr i64, ptr %positions, i64 %number
  %position = load i64, ptr %position_ptr
  %start_ptr = getelementptr i64, ptr %starts, i64 %position
  %start_byte = load i64, ptr %start_ptr
  %from = getelementptr i8, ptr %buffer, i64 %start_byte
  %ahead = add i64 %number, 8
  %is_behind_last = icmp ugt i64 %ahead, %last
  %soon = select i1 %is_behind_last, i64 %last, i64 %ahead
  %soon_position_ptr = getelementptr i64, ptr %positions, i64 %soon
  %soon_position = load i64, ptr %soon_position_ptr
  %soon_place_ptr = getelementptr i64, ptr %places, i64 %soon_position
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
  br i1 %more_lines, label %prefetch, label %check

check:
  %check_number = phi i64 [0, %prefetch], [%next_check, %check]
  %difference = phi i64 [0, %prefetch], [%difference_now, %check]
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
  %next_check = add i64 %check_number, 1
  %more_checks = icmp ult i64 %next_check, %num_checks
  br i1 %more_checks, label %check, label %checked

checked:
  %matches = icmp eq i64 %difference_now, 0
  br i1 %matches, label %put, label %miss

miss:
  %missed_ptr = getelementptr i64, ptr %missed, i64 %num_missed
  store i64 %position, ptr %missed_ptr
  %one_more = add i64 %num_missed, 1
  br label %record_done

put:
  %place_ptr = getelementptr i64, ptr %places, i64 %position
  %place = load i64, ptr %place_ptr
  %to_byte = mul i64 %place, %row_bytes
  %to = getelementptr i8, ptr %out, i64 %to_byte
  br label %next_copy

next_copy:
  %copy_number = phi i64 [0, %put], [%copy_after, %copy]
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
  call void @llvm.memcpy.p0.p0.i64(ptr %copy_to, ptr %copy_from, i64 %copy_bytes, i1 false)
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
  %num_missed_now = phi i64 [%num_missed, %next_varint], [%one_more, %miss]
  %next_number = add i64 %number, 1
  %more_records = icmp ult i64 %next_number, %num_records
  br i1 %more_records, label %record, label %done

done:
  ret i64 %num_missed_now
}
"""


class PutByLoop:
    """A template, as the loop wants it."""

    def __init__(self, loop: Any, template: Template) -> None:
        self._loop = loop
        self._row = np.zeros(template.row_bytes, np.uint8)
        is_fixed = np.ones(template.row_bytes, np.bool_)
        for to, _, num_bytes in (*template.copies, *((to, at, 8) for to, at, _ in template.varints)):
            is_fixed[to : to + num_bytes] = False
        for to, data in template.constants:
            self._row[to : to + len(data)] = data
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_fixed, [False]]).view(np.int8)))
        fixed = [(start, -1, stop - start) for start, stop in edges.reshape(-1, 2).tolist()]
        checks = np.array(template.checks, np.uint64)
        tables = (checks, *(np.array(table, np.int64) for table in ([*template.copies, *fixed], template.varints)))
        self._tables = [np.ascontiguousarray(table) for table in tables]
        self._arguments = [each for table in self._tables for each in (table.ctypes.data, len(table))]
        self._arguments.append(self._row.ctypes.data)

    def put(self, memory: Memory, positions: Int64s) -> Int64s:
        """Write the rows of the records at ``positions``, (n,), that match. Returns the other positions."""
        if not len(positions):  # the loop takes at least one record
            return positions
        positions = np.ascontiguousarray(positions)
        buffer, starts, out, places = memory
        missed = np.empty(len(positions), np.int64)
        num_missed = self._loop(
            *(buffer.ctypes.data, starts.ctypes.data, out.ctypes.data, out.shape[1], places.ctypes.data),
            *(positions.ctypes.data, len(positions)),
            *self._arguments,
            missed.ctypes.data,
        )
        return missed[:num_missed]


class PutByNumpy:
    """The same by numpy. For the chess records, ns a record: gather 10, match 12, fill 15, put 8."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._checks = [
            (at, None if mask == _ALL_BITS else np.uint64(mask), np.uint64(expected))
            for at, mask, expected in template.checks
        ]
        self._varints = varint_runs(template.varints)

    def put(self, memory: Memory, positions: Int64s) -> Int64s:
        """As :meth:`PutByLoop.put`."""
        length, row_bytes = self._template.length, self._template.row_bytes
        windows = items_at(memory.buffer, length)
        out = memory.out.view(f"V{row_bytes}").reshape(-1)
        step = max(1, _CHUNK_BYTES // max(length, row_bytes))
        missed = [positions[:0]]
        for first in range(0, len(positions), step):
            chunk = positions[first : first + step]
            records = windows[memory.starts[chunk]]
            matches = self._match(records)
            if not matches.all():
                missed.append(chunk[~matches])
                chunk, records = chunk[matches], records[matches]
            rows = self._rows_of(records.view(np.uint8).reshape(-1, length))
            np.put(out, memory.places[chunk], rows.view(f"V{row_bytes}"), mode="clip")
        return np.concatenate(missed)

    def _match(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """bool, (n,): which of the records, void of ``length`` bytes (n,), have this layout."""
        difference = np.zeros(len(records), dtype=np.uint64)
        strides = (self._template.length,)
        for at, mask, expected in self._checks:
            word = np.ndarray((len(records),), np.uint64, buffer=records, offset=at, strides=strides)
            difference |= (word ^ expected) if mask is None else (word & mask) ^ expected
        matches: npt.NDArray[np.bool_] = difference == 0
        return matches

    def _rows_of(self, records: Bytes) -> Bytes:
        """uint8, (n, row_bytes), in scratch memory: the rows of ``records``, uint8 (n, length)."""
        rows = self._template.scratch[: len(records)]
        for to, at, num_bytes in self._template.copies:
            rows[:, to : to + num_bytes] = records[:, at : at + num_bytes]
        for to, at, width, count in self._varints:
            stop = at + width * count
            values = records[:, at + width - 1 : stop : width].astype("<u8")
            for byte in reversed(range(width - 1)):
                values <<= 7
                values |= records[:, at + byte : stop : width] & np.uint8(0x7F)
            rows[:, to : to + 8 * count].view("<u8")[...] = values
        for to, data in self._template.constants:
            rows[:, to : to + len(data)] = data
        return rows


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
