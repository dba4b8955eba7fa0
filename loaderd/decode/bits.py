"""Engines of numpy that turn packed bits into values, one value a bit: 0, or the scale of the bit's channel.

They are used where ``decode.compiled_bits`` cannot be. None of them handles bits one by one. All of them end with
**expand**: a table has one row of finished values for each value that some bits can have together, and ``take``
copies rows of it into the batch::

    bytes of a record          b0               b1               b2         …     uint8
    index of a row         b0 + offset[0]   b1 + offset[1]   b2 + offset[2] …     intp
    batch                  8 values         8 values         8 values       …     the field's dtype

The offset of a byte says where its rows begin: bytes whose bits have other scales have rows of their own.

=================  ================================================================  ========================
engine             what it can do                                                    what it does to the bits
                                                                                     before it expands them
=================  ================================================================  ========================
ExpandBytes        bits that keep to their byte: no channel order, or one so local   nothing
GatherCodes        any channel order in groups of 2, 3 or 4 whole bytes              some shifts and masks
ReorderBits        everything                                                        unpack, reorder, pack
=================  ================================================================  ========================

``take`` copies items of 1, 2, 4, 8, 16 or 32 bytes at full speed (so eight values of up to four bytes each), and of
48 (twelve values of four bytes) nearly so; with ``mode="clip"`` it writes to ``out`` without a buffer between.
"""

from __future__ import annotations

import math

import numpy as np

from loaderd.decode.compiled_bits import compiled_engine
from loaderd.decode.engine import AnyArray, BitLayout, Bytes, Engine, Indices
from loaderd.schema import Bits

# A larger table would push everything else out of a core's cache.
_MAX_TABLE_BYTES = 1 << 20

# Bits of a code: a table of 4,096 rows of twelve floats (192 KiB) stays in a core's cache beside the batch.
_CODE_BITS = 12
_LANE_BITS = 16
# By the bytes of a group: how many values are expanded together.
_VALUES_PER_CODE = {2: 8, 3: 12, 4: 8}


def bits_engine(field: Bits, feature_offset: int) -> Engine:
    """The fastest engine for ``field``, whose feature starts at byte ``feature_offset`` of a row."""
    layout = BitLayout.of(field, feature_offset)
    compiled = compiled_engine(layout)
    if compiled is not None:
        return compiled
    if layout.keeps_to_bytes and not layout.plane_bytes:
        return ExpandBytes(layout)
    if (
        layout.is_plain
        and layout.lead == 0
        and layout.group_bytes in _VALUES_PER_CODE
        and layout.num_bits % (8 * layout.group_bytes) == 0
    ):
        return GatherCodes(layout)
    return ReorderBits(layout)


class ExpandTable:
    """The rows of values that bytes become: byte ``i`` of the layout becomes ``rows[offsets[i] + byte]``.

    ``rows`` is a 1-D void array whose items have eight values each, ``offsets`` intp, (num_bytes,). Where bytes with
    scales of their own would need too many rows, a row holds masks instead (all bits of a value set, or none), and
    ``masked``, uint8, (num_bytes * bytes of a row,), holds the values to be masked; elsewhere ``masked`` is None.
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
        """Write the rows that ``index`` (of any shape, C-contiguous) names to ``out``, which has just their size."""
        rows = out.reshape(-1).view(self.rows.dtype)
        self.rows.take(index, out=rows.reshape(index.shape), mode="clip")
        if self.masked is not None:
            values = out.reshape(-1).view(np.uint8).reshape(-1, self.masked.size)
            np.bitwise_and(values, self.masked, out=values)


def _rows_of_values(bit: Bytes, scale: Bytes) -> AnyArray:
    """Void, (kinds * 256,): ``bit`` (kinds, 8), which bit a value comes from; ``scale`` (kinds, 8, itemsize)."""
    unpacked = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return _rows_of(unpacked[:, bit].transpose(1, 0, 2), scale[:, None])


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


class GatherCodes:
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
