"""Packed bits into values, one value a bit: 0, or the scale of the bit's channel.

**The loop** ``select`` does for any layout. It makes values in **runs**: a run is values that lie next to each other
in the batch (they are the **lanes** of one vector) and whose bits are all in one word of four bytes of the row. ::

    runs      byte of the row where the word is, byte of the record's values where the run goes      int32
    masks     for each lane: the bit of the word that it comes from                                  uint32
    values    for each lane: the scale of its channel, as its bytes                                  uint8 … uint64

For each record, for each section of it, for each run, it

1. loads the word, and copies it into all lanes;
2. keeps of each lane the one bit that its mask names;
3. chooses for each lane the value where that bit is set, and 0 where it is not;
4. stores all lanes with one instruction.

Runs may overlap: the last one of a record begins earlier instead of being shorter, and writes some values a second
time. How many lanes there are depends on how far apart the bits of neighbours lie: for the chess board it is 24, one
square. A large record is cut into **sections** that are made alike, and maybe a rest, so that the tables of a section
stay in a core's nearest cache. Values are only chosen, never computed with, so all dtypes of one size share a loop;
there is one for each number of lanes and size of a value.

**By numpy**, a table has one row of finished values for each value that some bits can have together, and ``take``
copies rows of it into the batch::

    bytes of a record          b0               b1               b2         …     uint8
    index of a row         b0 + offset[0]   b1 + offset[1]   b2 + offset[2] …     intp
    batch                  8 values         8 values         8 values       …     the field's dtype

``ExpandBytes`` does it for bits that keep to their byte. ``GatherCodes`` does it for any channel order in groups of
2, 3 or 4 whole bytes, with codes that are put together of their bits. ``PickBits`` does everything else: it unpacks
a byte a bit, which takes three times as long.

``take`` copies items of 1, 2, 4, 8, 16 or 32 bytes at full speed (so eight values of up to four bytes each), and of
48 (twelve values of four bytes) nearly so; with ``mode="clip"`` it writes to ``out`` without a buffer between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.kernels.engine import AnyArray, Bytes, Engine, Indices
from loaderd.kernels.llvm import can_compile, compiled

# ---------------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True, eq=False)
class BitLayout:
    """Where the bits of a field are in a row, and what they become.

    The bits start ``lead`` bits (0…7) into byte ``first_byte``. ``order`` gives the stored channel of each channel of
    the output, and ``scale`` what a set bit of it becomes: intp and the field's dtype, (num_channels,).

    ``is_little``: the least significant bit of a byte comes first. Where ``plane_bytes`` is not 0, each
    ``plane_bytes`` bytes hold ``plane_bits`` values, and padding behind them.
    """

    first_byte: int
    lead: int
    num_bits: int
    order: Indices
    scale: AnyArray
    is_little: bool = False
    plane_bits: int = 0
    plane_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes the bits touch."""
        if not self.plane_bytes:
            return (self.lead + self.num_bits + 7) // 8
        num_planes = self.num_bits // self.plane_bits
        return (num_planes - 1) * self.plane_bytes + (self.plane_bits + 7) // 8

    @property
    def columns(self) -> slice:
        """The bytes that the bits touch, as columns of the rows."""
        return slice(self.first_byte, self.first_byte + self.num_bytes)

    @property
    def values(self) -> slice:
        """The bits of the field among all bits of ``columns``."""
        return slice(self.lead, self.lead + self.num_bits)

    @property
    def group_bytes(self) -> int:
        """The fewest whole bytes that hold all channels a whole number of times."""
        return math.lcm(len(self.order), 8) // 8

    @property
    def source(self) -> Indices:
        """intp, (num_bits,): from which bit of ``columns`` each value comes; 0 is a byte's most significant bit."""
        value = np.arange(self.num_bits)
        channel = value % len(self.order)
        source: Indices = self.lead + value - channel + self.order[channel]
        if self.plane_bytes:
            source += value // self.plane_bits * (8 * self.plane_bytes - self.plane_bits)
        if self.is_little:
            source += 7 - 2 * (source % 8)
        return source

    @property
    def keeps_to_bytes(self) -> bool:
        """Whether each value comes from the very byte that holds its place."""
        place = self.lead + np.arange(self.num_bits)
        return np.array_equal(self.source // 8, place // 8)


def bits_engine(layout: BitLayout) -> Engine:
    """The fastest engine for ``layout``."""
    by_loop = _select_bits(layout)
    if by_loop is not None:
        return by_loop
    if layout.keeps_to_bytes and not layout.plane_bytes:
        expand = ExpandBytes(layout)
        return expand if expand.table_bytes <= _MAX_TABLE_BYTES else PickBits(layout)
    is_in_groups = (
        not layout.is_little
        and not layout.plane_bytes
        and layout.lead == 0
        and layout.group_bytes in _VALUES_PER_CODE
        and layout.num_bits % (8 * layout.group_bytes) == 0
    )
    return GatherCodes(layout) if is_in_groups else PickBits(layout)


# --------------------------------------------------------------------------------------------------- the loop

_WORD_BYTES = 4
_LANES = (32, 24, 16, 8)
# Of a section: its two large tables, masks and values, take 2 KiB each for float32.
_MAX_SECTION_VALUES = 512

SELECT = """
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


def select_code(lanes: int, itemsize: int) -> str:
    """The loop for ``lanes`` lanes, and values of ``itemsize`` bytes."""
    return SELECT.replace("LANES", str(lanes)).replace("VALUE", f"i{8 * itemsize}")


class _Section(NamedTuple):
    """Values of a record from ``first`` on: ``times`` stretches of ``size`` values each, all made alike."""

    first: int
    size: int
    times: int = 1


class SelectBits(Engine):
    """The engine of the loop."""

    is_compiled = writes_apart = True

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


def _select_bits(layout: BitLayout) -> SelectBits | None:
    """The engine for ``layout``; None where runs cannot make it, or nothing can be compiled."""
    # The row has a byte behind the feature. Up to the end of that byte, it must hold a word.
    if not can_compile() or layout.columns.stop + 1 < _WORD_BYTES:
        return None
    sections = _sections(layout)
    by_lanes: dict[int, dict[_Section, Indices]] = {}
    for lanes in _LANES:
        starts = {section: _starts(layout, section, lanes) for section in sections}
        whole = {section: each for section, each in starts.items() if each is not None}
        if len(whole) == len(sections):
            by_lanes[lanes] = whole
    if not by_lanes:
        return None

    def num_runs(lanes: int) -> int:
        return sum(section.times * len(each) for section, each in by_lanes[lanes].items())

    fewest = min(by_lanes, key=num_runs)
    loop = compiled(select_code(fewest, layout.scale.dtype.itemsize))
    return None if loop is None else SelectBits(loop, layout, fewest, by_lanes[fewest])


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
    choices = []
    # Runs through the whole section; or through the channels of each place, so that no run has bits of two places.
    for size in (section.size, len(layout.order)):
        if size >= lanes:
            run = np.minimum(np.arange(0, size, lanes), size - lanes)
            starts = (section.first + np.arange(0, section.size, size)[:, None] + run).reshape(-1)
            byte = (layout.source[starts[:, None] + np.arange(lanes)]) // 8
            if (np.ptp(byte, axis=1) < _WORD_BYTES).all():
                choices.append(starts)
    return min(choices, key=len, default=None)


# -------------------------------------------------------------------------------------------------- by numpy

# A larger table would push everything else out of a core's cache.
_MAX_TABLE_BYTES = 1 << 20
# Bits of a code: a table of 4,096 rows of twelve floats (192 KiB) stays in a core's cache beside the batch.
_CODE_BITS = 12
_LANE_BITS = 16
# By the bytes of a group: how many values are expanded together.
_VALUES_PER_CODE = {2: 8, 3: 12, 4: 8}


def _rows_of_values(bit: Bytes, scale: Bytes) -> AnyArray:
    """Void, (kinds * 256,): ``bit`` (kinds, 8), which bit a value comes from; ``scale`` (kinds, 8, itemsize)."""
    unpacked = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return _rows_of(unpacked[:, bit].transpose(1, 0, 2), scale[:, None])


class ExpandBytes(Engine):
    """Values straight from the bytes. Where the bits start or end inside a byte, via scratch memory.

    Byte ``i`` of the layout becomes row ``offsets[i] + byte`` of the table, a void of eight values. Bytes whose bits
    have other scales have rows of their own.
    """

    def __init__(self, layout: BitLayout) -> None:
        self._layout = layout
        itemsize = layout.scale.dtype.itemsize
        bit = np.zeros(layout.num_bytes * 8, np.uint8)
        bit[layout.values] = layout.source % 8
        scale = np.zeros(layout.num_bytes * 8, layout.scale.dtype)
        scale[layout.values] = np.resize(layout.scale, layout.num_bits)
        # Scales are told apart by their bytes: numpy cannot sort every dtype of ml_dtypes, and NaN equals nothing.
        bits_and_scales = np.hstack([bit.reshape(-1, 8), scale.view(np.uint8).reshape(-1, 8 * itemsize)])
        kinds, kind = np.unique(bits_and_scales, axis=0, return_inverse=True)
        self._offsets: Indices = kind.reshape(-1) * 256
        self._has_offsets = bool(self._offsets.any())
        self.table_bytes = len(kinds) * 256 * 8 * itemsize
        if self.table_bytes <= _MAX_TABLE_BYTES:
            self._table = _rows_of_values(kinds[:, :8], kinds[:, 8:].reshape(-1, 8, itemsize))
        self._fills_bytes = layout.num_bits == 8 * layout.num_bytes

    @property
    def scratch_record_bytes(self) -> int:
        values = 0 if self._fills_bytes else 8 * self._layout.scale.dtype.itemsize
        return self._layout.num_bytes * (np.dtype(np.intp).itemsize + values)

    def reserve(self, max_records: int) -> None:
        num_bytes = self._layout.num_bytes
        self._index = np.empty((max_records, num_bytes), np.intp)
        if not self._fills_bytes:
            self._values = np.empty((max_records, 8 * num_bytes), self._layout.scale.dtype)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        index = self._index[: len(rows)]
        # Copy, then add: one np.add of mixed dtypes would go through a buffer, and takes longer.
        index[...] = rows[:, self._layout.columns]
        if self._has_offsets:
            np.add(index, self._offsets, out=index)
        values = out if self._fills_bytes else self._values[: len(rows)]
        expanded = values.reshape(-1).view(self._table.dtype)
        self._table.take(index, out=expanded.reshape(index.shape), mode="clip")
        if not self._fills_bytes:
            out.reshape(len(rows), -1)[...] = values[:, self._layout.values]


class GatherCodes(Engine):
    """Values from groups of 2, 3 or 4 bytes, eight or twelve together, wherever in the group their bits are.

    A table has a row for each combination of the bits of eight or twelve values, and the rows may have any order. So
    the bits need not be put in order: any code of at most twelve bits will do that tells the combinations apart. To
    move bits by one distance takes one shift and one mask for all groups of a chunk, so a code is chosen that needs
    few distances. The codes of a group lie side by side in lanes of 16 bits, above each the number of its table. ::

        stored group     24 bits, as one word of 32                                  (24 channels)
        codes            (word & mask0) | (word >> 14 & mask1) | …     lane 0 │ lane 1
        index            lane 0, lane 1                                each: table and code
        batch            12 values, 12 values

    For the chess board it takes four distances, and 110 ns a record for the index.
    """

    def __init__(self, layout: BitLayout) -> None:
        self._layout = layout
        size = layout.group_bytes
        together = _VALUES_PER_CODE[size]
        self._num_groups = layout.num_bytes // size
        self._num_codes = 8 * size // together
        self._word = np.dtype(f"<u{2 * self._num_codes}")
        # Groups of three bytes are read as words of four, one byte past the end of the last.
        self._stored = "<u2" if size == 2 else "<u4"
        source = layout.source[: 8 * size].reshape(-1, together)
        scales = np.resize(layout.scale, layout.num_bits)[: 8 * size].reshape(-1, together)
        masks: dict[int, int] = {}
        tables: list[AnyArray] = []
        lanes = 0
        for lane, (bits, scale) in enumerate(zip(source, scales, strict=True)):
            positions = [8 * (bit // 8) + 7 - bit % 8 for bit in bits.tolist()]  # the most significant comes first
            code = _code_of(positions)
            for position, place in zip(positions, code, strict=True):
                shift = place + _LANE_BITS * lane - position
                masks[shift] = masks.get(shift, 0) | 1 << place + _LANE_BITS * lane
            table = _rows_of_codes(code, scale)
            same = [number for number, other in enumerate(tables) if other.tobytes() == table.tobytes()]
            lanes |= (same[0] if same else len(tables)) << _CODE_BITS + _LANE_BITS * lane
            if not same:
                tables.append(table)
        self._terms = [(shift, self._word.type(mask)) for shift, mask in masks.items()]
        self._table_numbers = self._word.type(lanes)
        self._table = np.concatenate(tables)

    @property
    def scratch_record_bytes(self) -> int:
        return self._num_groups * (3 * self._word.itemsize + self._num_codes * np.dtype(np.intp).itemsize)

    def reserve(self, max_records: int) -> None:
        self._words, self._codes, self._moved = np.empty((3, max_records, self._num_groups), self._word)
        self._index = np.empty((max_records, self._num_groups * self._num_codes), np.intp)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        n = len(rows)
        words, codes, moved, index = self._words[:n], self._codes[:n], self._moved[:n], self._index[:n]
        strides = (rows.shape[1], self._layout.group_bytes)
        # Words at any address: no slice of rows gives that view.
        words[...] = np.ndarray(words.shape, self._stored, rows, self._layout.first_byte, strides)
        codes[...] = self._table_numbers
        for shift, mask in self._terms:
            if shift > 0:
                np.left_shift(words, shift, out=moved)
            else:
                np.right_shift(words, -shift, out=moved)
            np.bitwise_and(moved, mask, out=moved)
            np.bitwise_or(codes, moved, out=codes)
        index[...] = codes.view("<u2")
        self._table.take(index, out=out.reshape(-1).view(self._table.dtype).reshape(index.shape), mode="clip")


def _code_of(positions: list[int]) -> list[int]:
    """For each bit of a word, the bit of a code of ``_CODE_BITS`` bits to which it is moved, by few distances in all.

    Again and again, the distance is chosen that moves most of the remaining bits to free bits of the code.
    """
    code: dict[int, int] = {}
    while len(code) < len(positions):
        left = [position for position in positions if position not in code]
        free = set(range(_CODE_BITS)) - set(code.values())

        def moved(distance: int, left: list[int] = left, free: set[int] = free) -> list[int]:
            return [position for position in left if position + distance in free]

        best = max(range(-max(left), _CODE_BITS), key=lambda distance: len(moved(distance)))
        code.update({position: position + best for position in moved(best)})
    return [code[position] for position in positions]


def _rows_of_codes(code: list[int], scale: AnyArray) -> AnyArray:
    """Void, (2**_CODE_BITS,): for each code the values: ``scale`` where the value's bit ``code`` is set, else 0."""
    is_set = np.arange(1 << _CODE_BITS)[:, None] >> np.array(code) & 1
    scales = scale.view(np.uint8).reshape(len(code), -1)  # by their bytes, for numpy knows little of some dtypes
    return _rows_of(is_set, scales)


def _rows_of(is_set: AnyArray, scale: Bytes) -> AnyArray:
    """Void, (rows,): the bytes ``scale`` (…, row's values, itemsize) where ``is_set`` (…, row's values), else 0."""
    values = np.where(is_set[..., None], scale, np.uint8(0))
    return values.ravel().view(np.dtype((np.void, math.prod(values.shape[-2:]))))


class PickBits(Engine):
    """Any order at any place: a byte a bit, each times the bytes of its scale as an unsigned integer."""

    def __init__(self, layout: BitLayout) -> None:
        self._layout = layout
        self._source = layout.source
        self._unsigned = f"u{layout.scale.dtype.itemsize}"
        self._scale = np.resize(layout.scale, layout.num_bits).view(self._unsigned)

    @property
    def scratch_record_bytes(self) -> int:
        return 2 * self._layout.num_bits

    def reserve(self, max_records: int) -> None:
        self._bits = np.empty((max_records, self._layout.num_bits), np.uint8)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        bits = self._bits[: len(rows)]
        np.unpackbits(rows[:, self._layout.columns], axis=1).take(self._source, axis=1, out=bits, mode="clip")
        np.multiply(bits, self._scale, out=out.reshape(bits.shape).view(self._unsigned))
