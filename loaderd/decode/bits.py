"""Engines that turn packed bits into values, one value a bit: 0, or the scale of the bit's channel.

None of them handles bits one by one. What all three end with is **expand**: a table has one row of eight finished
values for each value that a byte can have, and ``take`` copies rows of it into the batch::

    bytes of a record          b0               b1               b2         …     uint8
    index of a row         b0 + offset[0]   b1 + offset[1]   b2 + offset[2] …     intp
    batch                  8 values         8 values         8 values       …     the field's dtype

An offset says which 256 rows are meant: bytes whose bits have other scales have rows of their own.

=================  ================================================================  ========================
engine             what it can do                                                    what it does to the bits
                                                                                     before it expands them
=================  ================================================================  ========================
ExpandBytes        bits that keep to their byte: no channel order, or one so local   nothing
PermuteGroups      any channel order in groups of 2, 3 or 4 whole bytes              one or two look-ups a group
ReorderBits        everything                                                        unpack, reorder, pack
=================  ================================================================  ========================

``take`` copies items of 1, 2, 4, 8, 16 or 32 bytes at full speed (so eight values of up to four bytes each); with
``mode="clip"`` it writes to ``out`` without a buffer between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loaderd.schema import Bits

AnyArray = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]

# A larger table would push everything else out of a core's cache.
_MAX_TABLE_BYTES = 1 << 20

# Bits that PermuteGroups looks up at a time. Tables of 2¹² entries (32 KiB) stay in a core's cache beside the batch;
# those of 2¹⁶ save a look-up, and lose twice that whenever the batch has pushed them out.
_WORD_BITS = 12


class Engine(Protocol):
    """Decodes one field from rows. Not thread-safe: it owns scratch memory."""

    @property
    def scratch_record_bytes(self) -> int:
        """Bytes of scratch memory for each record of a chunk."""

    def reserve(self, max_records: int) -> None:
        """Allocate the scratch memory: from then on ``decode`` takes up to ``max_records`` records a call."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Write the field of ``rows``, uint8 (n, row_bytes), to ``out`` (n, *shape). Both must be C-contiguous."""


def bits_engine(field: Bits, feature_offset: int) -> Engine:
    """The fastest engine for ``field``, whose feature starts at byte ``feature_offset`` of a row."""
    layout = BitLayout.of(field, feature_offset)
    if layout.keeps_to_bytes:
        return ExpandBytes(layout)
    if layout.lead == 0 and layout.group_bytes in (2, 3, 4) and layout.num_bits % (8 * layout.group_bytes) == 0:
        return PermuteGroups(layout)
    return ReorderBits(layout)


@dataclass(frozen=True, eq=False)
class BitLayout:
    """Where the bits of a field are in a row, and what they become.

    They start ``lead`` bits (0…7) into byte ``first_byte``. ``order`` gives the stored channel of each channel of
    the output, and ``scale`` what a set bit of it becomes: intp and the field's dtype, (num_channels,).
    """

    first_byte: int
    lead: int
    num_bits: int
    order: Indices
    scale: AnyArray

    @classmethod
    def of(cls, field: Bits, feature_offset: int) -> BitLayout:
        return cls(
            first_byte=feature_offset + field.start // 8,
            lead=field.start % 8,
            num_bits=field.num_bits,
            order=field.order,
            scale=field.channel_scale.astype(field.dtype),
        )

    @property
    def num_bytes(self) -> int:
        """How many bytes the bits touch."""
        return (self.lead + self.num_bits + 7) // 8

    @property
    def columns(self) -> slice:
        """Those bytes, as columns of the rows."""
        return slice(self.first_byte, self.first_byte + self.num_bytes)

    @property
    def values(self) -> slice:
        """The bits of the field among all bits of those bytes."""
        return slice(self.lead, self.lead + self.num_bits)

    @property
    def group_bytes(self) -> int:
        """The fewest whole bytes that hold all channels a whole number of times."""
        return math.lcm(len(self.order), 8) // 8

    @property
    def source(self) -> Indices:
        """intp, (num_bits,): from which of all bits of those bytes each value comes."""
        value = np.arange(self.num_bits)
        channel = value % len(self.order)
        return self.lead + value - channel + self.order[channel]

    @property
    def keeps_to_bytes(self) -> bool:
        """Whether each value comes from the very byte that holds its place."""
        place = self.lead + np.arange(self.num_bits)
        return np.array_equal(self.source // 8, place // 8)

    def in_stored_order(self, first_byte: int, num_bits: int) -> BitLayout:
        """The layout of the first ``num_bits`` bits once they are in order, from ``first_byte`` on."""
        return replace(self, first_byte=first_byte, lead=0, num_bits=num_bits, order=np.arange(len(self.order)))


class ExpandTable:
    """The rows of values that bytes become: byte ``i`` of the layout becomes ``rows[offsets[i] + byte]``.

    ``rows`` is a 1-D void array whose items have eight values each, ``offsets`` intp, (num_bytes,). Where each
    byte would need rows of its own and there are too many, a row holds masks instead (all bits of a value set, or
    none) and ``masked``, uint8, (num_bytes * bytes of a row,), what is to be masked; elsewhere that is None.
    """

    def __init__(self, layout: BitLayout) -> None:
        itemsize = layout.scale.dtype.itemsize
        bit = np.zeros(layout.num_bytes * 8, np.uint8)
        bit[layout.values] = layout.source % 8
        scale = np.zeros(layout.num_bytes * 8, layout.scale.dtype)
        scale[layout.values] = np.resize(layout.scale, layout.num_bits)
        bits, scales = bit.reshape(-1, 8), scale.view(np.uint8).reshape(-1, 8 * itemsize)
        # Scales are told apart by their bytes: numpy cannot sort every dtype of ml_dtypes, and NaN equals nothing.
        kinds, kind = np.unique(np.hstack([bits, scales]), axis=0, return_inverse=True)
        self.masked: Bytes | None = None
        if kinds.shape[0] * 256 * 8 * itemsize > _MAX_TABLE_BYTES:
            self.masked = scales.reshape(-1)
            kinds, kind = np.unique(np.hstack([bits, np.full_like(scales, 0xFF)]), axis=0, return_inverse=True)
        self.offsets: Indices = kind.reshape(-1) * 256
        self.rows = _rows_of_values(kinds[:, :8], kinds[:, 8:].reshape(-1, 8, itemsize))

    def expand(self, index: Indices, out: AnyArray) -> None:
        """Write the rows that ``index`` (of any shape, C-contiguous) names to ``out``, that many rows in bytes."""
        rows = out.reshape(-1).view(self.rows.dtype)
        self.rows.take(index, out=rows.reshape(index.shape), mode="clip")
        if self.masked is not None:
            values = out.reshape(-1).view(np.uint8).reshape(-1, self.masked.size)
            np.bitwise_and(values, self.masked, out=values)


def _rows_of_values(bit: Bytes, scale: Bytes) -> AnyArray:
    """Void, (kinds * 256,): ``bit`` (kinds, 8), which bit a value comes from; ``scale`` (kinds, 8, itemsize)."""
    unpacked = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    is_set = unpacked[:, bit].transpose(1, 0, 2)  # (kinds, 256, 8)
    values = np.where(is_set[..., None], scale[:, None], np.uint8(0))  # (kinds, 256, 8, itemsize)
    rows = np.ascontiguousarray(values).reshape(len(bit) * 256, -1)
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)


class ExpandBytes:
    """Values straight from the bytes. Where the bits start or end inside a byte, via scratch memory."""

    def __init__(self, layout: BitLayout) -> None:
        self._layout = layout
        self._table = ExpandTable(layout)
        self._has_offsets = bool(self._table.offsets.any())
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
            np.add(index, self._table.offsets, out=index)
        if self._fills_bytes:
            self._table.expand(index, out)
        else:
            values = self._values[: len(rows)]
            self._table.expand(index, values)
            out.reshape(len(rows), -1)[...] = values[:, self._layout.values]


class PermuteGroups:
    """Values from groups of 2, 3 or 4 bytes whose bits are put in order while they are packed.

    The group is looked up in words of twelve bits, and what they yield is OR-ed. A look-up yields 64 bits: a lane of
    16 bits for each byte of the group in order, which holds that byte plus its offset in the expand table. So a lane
    is ready to be copied to the index; adding the offset afterwards would double the cost of that copy. ::

        stored group     b0 b1 b2                                            (24 channels)
        words            w0 = low 12 bits of (b0, b1), w1 = high 12 bits of (b1, b2), little-endian
        look-ups         T0[w0] | T1[w1]  =     lane 0 │ lane 1 │ lane 2 │ unused
        index            lane 0, lane 1, lane 2    each: offset + byte in order
    """

    def __init__(self, layout: BitLayout) -> None:
        self._layout = layout
        size = layout.group_bytes
        self._num_groups = layout.num_bytes // size
        self._table = ExpandTable(layout.in_stored_order(0, 8 * size))
        self._words = [_Word.of(first_bit, 8 * size) for first_bit in range(0, 8 * size, _WORD_BITS)]
        order = layout.source[: 8 * size]
        self._lookups = [_permuted_lanes(order, word) for word in self._words]
        offsets = np.zeros(4, "<u2")
        offsets[:size] = self._table.offsets
        self._lookups[0] |= offsets.view("<u8")

    @property
    def scratch_record_bytes(self) -> int:
        return self._num_groups * 8 * (self._layout.group_bytes + 2)

    def reserve(self, max_records: int) -> None:
        size, groups = self._layout.group_bytes, self._num_groups
        self._index = np.empty(max_records * groups * size, np.intp)
        # A word is done with when the index is made: they share memory.
        self._word_index = self._index[: max_records * groups].reshape(max_records, groups)
        self._lanes = np.empty((2, max_records, groups), "<u8")

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        n, size = len(rows), self._layout.group_bytes
        lanes, more = self._lanes[0, :n], self._lanes[1, :n]
        words = self._word_index[:n]
        for number, (word, lookup) in enumerate(zip(self._words, self._lookups, strict=True)):
            # Words of two bytes at any address: no slice of rows gives that view.
            start, strides = self._layout.first_byte + word.first_byte, (rows.shape[1], size)
            words[...] = np.ndarray(words.shape, word.dtype, rows, start, strides)
            if word.shift:
                np.right_shift(words, word.shift, out=words)
            if word.mask:
                np.bitwise_and(words, word.mask, out=words)
            if number == 0:
                lookup.take(words, out=lanes, mode="clip")
            else:
                lookup.take(words, out=more, mode="clip")
                np.bitwise_or(lanes, more, out=lanes)
        row_index = self._index[: n * self._num_groups * size].reshape(-1, size)
        lane = lanes.view("<u2").reshape(-1, 4)
        # Column by column: in one call, the inner loop would have 2 to 4 steps and take seven times as long.
        for byte in range(size):
            row_index[:, byte] = lane[:, byte]
        self._table.expand(row_index, out)


@dataclass(frozen=True)
class _Word:
    """Some bits of a group, counted in little-endian order: those of ``(dtype at first_byte) >> shift & mask``.

    ``shift`` and ``mask`` are 0 where there is nothing to shift or to mask.
    """

    first_byte: int
    dtype: str
    shift: int
    mask: int
    num_bits: int

    @classmethod
    def of(cls, first_bit: int, group_bits: int) -> _Word:
        """The word that begins at ``first_bit``: of ``_WORD_BITS`` bits, or those that the group has left."""
        first_byte, shift = divmod(first_bit, 8)
        num_bits = min(_WORD_BITS, group_bits - first_bit)
        width = -(-(shift + num_bits) // 8)
        rest = 8 * width - shift - num_bits
        return cls(first_byte, f"<u{width}", shift, (1 << num_bits) - 1 if rest else 0, num_bits)


def _permuted_lanes(order: Indices, word: _Word) -> AnyArray:
    """<u8, (2**num_bits,): the lanes that each value of a word contributes.

    ``order``, intp, (bits of a group,): from which bit of the group each bit comes.
    """
    values = np.arange(1 << word.num_bits, dtype="<u4") << np.uint32(8 * word.first_byte + word.shift)
    group = values.view(np.uint8).reshape(-1, 4)[:, : len(order) // 8]
    lanes = np.zeros((len(values), 4), "<u2")
    lanes[:, : group.shape[1]] = np.packbits(np.unpackbits(group, axis=1)[:, order], axis=1)
    return lanes.view("<u8").reshape(-1)


class ReorderBits:
    """Any order at any place: unpack to a byte a bit, reorder, pack, and go on as :class:`ExpandBytes`."""

    def __init__(self, layout: BitLayout) -> None:
        self._layout = layout
        self._source = layout.source
        self._expand = ExpandBytes(layout.in_stored_order(0, layout.num_bits))

    @property
    def scratch_record_bytes(self) -> int:
        return 2 * self._layout.num_bits + self._expand.scratch_record_bytes

    def reserve(self, max_records: int) -> None:
        self._bits = np.empty((max_records, self._layout.num_bits), np.uint8)
        self._expand.reserve(max_records)

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        bits = self._bits[: len(rows)]
        stored = np.unpackbits(rows[:, self._layout.columns], axis=1)
        stored.take(self._source, axis=1, out=bits, mode="clip")
        self._expand.decode(np.packbits(bits, axis=1), out)
