"""A compiled engine for packed bits.

One loop does for any layout. It makes values in **runs**: a run is values that lie next to each other in the batch
(they are the **lanes** of one vector) and whose bits are all in one word of four bytes of the row. ::

    runs      byte of the row where the word is, byte of the record's values where the run goes      int32
    masks     for each lane: the bit of the word that it comes from                                  uint32
    values    for each lane: the scale of its channel, as its bytes                                  uint8 … uint64

    lane      word & mask ? value : 0

Runs may overlap: the last one of a record begins earlier instead of being shorter, and writes some values a second
time. How many lanes there are depends on how far apart the bits of neighbours lie: for the chess board it is 24, one
square. A large record is cut into **sections** that are made alike, and maybe a rest, so that the tables of a section
stay in a core's nearest cache.

Values are only chosen, never computed with, so all dtypes of one size share a loop; there is one for each number of
lanes and size of a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.decode.engine import AnyArray, BitLayout, Bytes, Indices
from loaderd.machine_code import ADDRESS, NUMBER, Loop, can_compile, compiled

_WORD_BYTES = 4
_LANES = (32, 24, 16, 8)
# Of a section: its two large tables, masks and values, take 2 KiB each for float32.
_MAX_SECTION_VALUES = 512

_CODE = """
define void @select(ptr noalias readonly %rows, i64 %num_records, i64 %row_bytes, ptr noalias writeonly %out,
                    i64 %record_bytes, i64 %num_sections, i64 %section_row_bytes, i64 %section_out_bytes,
                    i64 %num_runs, ptr noalias readonly %runs, ptr noalias readonly %masks,
                    ptr noalias readonly %values) {
start:
  br label %record

record:
  %record_number = phi i64 [0, %start], [%next_record, %record_done]
  %record_row = phi ptr [%rows, %start], [%next_record_row, %record_done]
  %record_out = phi ptr [%out, %start], [%next_record_out, %record_done]
  br label %section

section:
  %section_number = phi i64 [0, %record], [%next_section, %section_done]
  %row = phi ptr [%record_row, %record], [%next_row, %section_done]
  %section_out = phi ptr [%record_out, %record], [%next_out, %section_done]
  br label %run

run:
  %number = phi i64 [0, %section], [%next, %run]
  %from_ptr = getelementptr [2 x i32], ptr %runs, i64 %number
  %to_ptr = getelementptr [2 x i32], ptr %runs, i64 %number, i64 1
  %from = load i32, ptr %from_ptr
  %to = load i32, ptr %to_ptr
  %word_ptr = getelementptr i8, ptr %row, i32 %from
  %word = load i32, ptr %word_ptr, align 1
  %in_first_lane = insertelement <LANES x i32> poison, i32 %word, i64 0
  %words = shufflevector <LANES x i32> %in_first_lane, <LANES x i32> poison, <LANES x i32> zeroinitializer
  %mask_ptr = getelementptr [LANES x i32], ptr %masks, i64 %number
  %mask = load <LANES x i32>, ptr %mask_ptr, align 1
  %bits = and <LANES x i32> %words, %mask
  %is_set = icmp ne <LANES x i32> %bits, zeroinitializer
  %value_ptr = getelementptr [LANES x VALUE], ptr %values, i64 %number
  %value = load <LANES x VALUE>, ptr %value_ptr, align 1
  %selected = select <LANES x i1> %is_set, <LANES x VALUE> %value, <LANES x VALUE> zeroinitializer
  %out_ptr = getelementptr i8, ptr %section_out, i32 %to
  store <LANES x VALUE> %selected, ptr %out_ptr, align 1
  %next = add i64 %number, 1
  %more_runs = icmp ult i64 %next, %num_runs
  br i1 %more_runs, label %run, label %section_done

section_done:
  %next_section = add i64 %section_number, 1
  %next_row = getelementptr i8, ptr %row, i64 %section_row_bytes
  %next_out = getelementptr i8, ptr %section_out, i64 %section_out_bytes
  %more_sections = icmp ult i64 %next_section, %num_sections
  br i1 %more_sections, label %section, label %record_done

record_done:
  %next_record = add i64 %record_number, 1
  %next_record_row = getelementptr i8, ptr %record_row, i64 %row_bytes
  %next_record_out = getelementptr i8, ptr %record_out, i64 %record_bytes
  %more_records = icmp ult i64 %next_record, %num_records
  br i1 %more_records, label %record, label %done

done:
  ret void
}
"""
_ARGUMENTS = (
    *(ADDRESS, NUMBER, NUMBER),  # rows, num_records, row_bytes
    *(ADDRESS, NUMBER),  # out, record_bytes
    *(NUMBER, NUMBER, NUMBER),  # num_sections, section_row_bytes, section_out_bytes
    *(NUMBER, ADDRESS, ADDRESS, ADDRESS),  # num_runs, runs, masks, values
)


class _Section(NamedTuple):
    """Values of a record from ``first`` on: ``times`` stretches of ``size`` values each, all made alike."""

    first: int
    size: int
    times: int = 1


class SelectBits:
    """The engine. It needs no scratch memory."""

    scratch_record_bytes = 0

    def __init__(self, loop: Any, layout: BitLayout, lanes: int, starts: Mapping[_Section, Indices]) -> None:
        """``loop``: the one for ``lanes``. ``starts``: by section, the first values of its first stretch's runs."""
        itemsize = layout.scale.dtype.itemsize
        self._loop = loop
        self._tables, self._arguments = [], []
        for section, first in starts.items():
            tables = _tables(layout, first[:, None] + np.arange(lanes))
            strides = (layout.plane_bytes or section.size // 8, section.size * itemsize)
            self._tables.append(tables)  # keeps the memory that the pointers point to
            self._arguments.append((section.times, *strides, len(first), *[table.ctypes.data for table in tables]))

    def reserve(self, max_records: int) -> None:
        """Nothing to allocate."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        if len(rows):
            memory = (rows.ctypes.data, len(rows), rows.shape[1], out.ctypes.data, out.strides[0])
            for arguments in self._arguments:
                self._loop(*memory, *arguments)


def _tables(layout: BitLayout, value: Indices) -> tuple[npt.NDArray[np.int32], Bytes, Bytes]:
    """Runs, masks and values (see the module's docstring) of the runs that make ``value``, (num_runs, lanes)."""
    scales = layout.scale.view(np.uint8).reshape(-1, layout.scale.dtype.itemsize)
    byte, bit = np.divmod(8 * layout.first_byte + layout.source[value], 8)
    # A word ends with the byte of its last bit, so that no word reaches past the end of the rows.
    word = np.maximum(byte.max(axis=1, keepdims=True) + 1 - _WORD_BYTES, 0)
    masks = np.where(np.arange(_WORD_BYTES) == (byte - word)[..., None], 0x80 >> bit[..., None], 0).astype(np.uint8)
    runs = np.hstack([word, value[:, :1] * scales.shape[1]]).astype(np.int32)
    return runs, masks, scales[value % len(scales)]


def compiled_engine(layout: BitLayout) -> SelectBits | None:
    """The engine for ``layout``; None where runs cannot make it, or nothing can be compiled."""
    # The row has a byte behind the feature. Up to the end of that byte, it must hold a word.
    if not can_compile() or layout.columns.stop + 1 < _WORD_BYTES:
        return None
    sections = _sections(layout)
    found: dict[int, dict[_Section, Indices]] = {}
    for lanes in _LANES:
        starts = {section: _starts(layout, section, lanes) for section in sections}
        whole = {section: each for section, each in starts.items() if each is not None}
        if len(whole) == len(sections):
            found[lanes] = whole
    if not found:
        return None
    fewest = min(found, key=lambda lanes: sum(section.times * len(each) for section, each in found[lanes].items()))
    loop = compiled(select_loop(fewest, layout.scale.dtype.itemsize))
    return None if loop is None else SelectBits(loop, layout, fewest, found[fewest])


def _sections(layout: BitLayout) -> list[_Section]:
    """The sections of a record. Each begins with a place's first channel; one that is repeated has whole bytes."""
    channels = len(layout.order)
    if layout.plane_bytes:
        # Words lie in each plane as in the first. If the first is near the front of the row, words end behind it, and
        # those of the last plane would reach past the row.
        if layout.first_byte + (layout.plane_bits + 7) // 8 + 1 < _WORD_BYTES:
            return [_Section(0, layout.num_bits)]
        return [_Section(0, layout.plane_bits, layout.num_bits // layout.plane_bits)]
    group = math.lcm(channels, 8)
    groups = layout.num_bits // group
    least = min(groups, -(-groups * group // _MAX_SECTION_VALUES))
    if least < 2:
        return [_Section(0, layout.num_bits)]
    count = next((count for count in range(least, 2 * least) if groups % count == 0), least)
    size = groups // count * group
    rest = layout.num_bits - count * size
    sections = [_Section(0, size, count)]
    if rest:
        rest = max(rest, -(-max(_LANES) // channels) * channels)
        sections.append(_Section(layout.num_bits - rest, rest))
    return sections


def _starts(layout: BitLayout, section: _Section, lanes: int) -> Indices | None:
    """The first values of the fewest runs that make a section; None where the bits of a run are too far apart."""
    found = []
    # Runs through the whole section; or through the channels of each place, so that no run has bits of two places.
    for size in (section.size, len(layout.order)):
        if size >= lanes:
            run = np.minimum(np.arange(0, size, lanes), size - lanes)
            starts = (section.first + np.arange(0, section.size, size)[:, None] + run).reshape(-1)
            byte = (layout.source[starts[:, None] + np.arange(lanes)]) // 8
            if (np.ptp(byte, axis=1) < _WORD_BYTES).all():
                found.append(starts)
    return min(found, key=len, default=None)


def select_loop(lanes: int, itemsize: int) -> Loop:
    """The loop for ``lanes`` lanes, and values of ``itemsize`` bytes."""
    code = _CODE.replace("LANES", str(lanes)).replace("VALUE", f"i{8 * itemsize}")
    return Loop(code, "select", _ARGUMENTS)
