"""Set bits, or the pieces that stand on them, into padded indices: the loop ``collect``, and numpy in its place.

::

    bits      0 1 0 0 1 1 …                     the squares of the pieces, in the order of the bits
    codes     3   9 0                           one of four bits for each set bit; or each plane of bits is a code
    index     table[bucket, code, square]       -1: the piece is left out; -2: there is no such piece
    batch     index index index -1 -1 …         k of them

The loop takes a word of 64 bits at a time, and of each word one set bit after the other. Where the bucket is the
square of a piece (a king), it goes through the bits of the record twice. Both check what they read, and raise
WorkerError for the first record that is damaged: so many bits that they do not fit, a code or a bucket that the table
does not have.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import WorkerError
from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.kernels.llvm import BITSWAP, compiled, each_record, word_of_bits
from loaderd.kernels.views import places_within

NO_PIECE = -2
"""In a table: the least index. -1 leaves a piece out."""


@dataclass(frozen=True, eq=False)
class SparseLayout:
    """Where in a row the pieces of a field are, and what they become.

    The bits begin at ``first_bit`` of the row. ``table``: int32, (buckets, codes, squares). ``codes_byte`` is the
    first of the bytes that hold ``num_codes`` codes, two each; -1: each plane of ``squares`` bits is a code.
    ``bucket_byte``: the byte that is the bucket; or ``bucket_code``: the square of the first piece of that code is;
    -1 for both: 0 is. ``counts``: the field is the number of the indices. ``what``: what it is called in errors.
    """

    what: str
    first_bit: int
    table: npt.NDArray[np.int32]
    k: int
    dtype: np.dtype[Any]
    is_little: bool
    codes_byte: int = -1
    num_codes: int = 0
    bucket_byte: int = -1
    bucket_code: int = -1
    counts: bool = False

    @property
    def num_bits(self) -> int:
        return int(self.table.shape[2] if self.codes_byte >= 0 else self.table.shape[1] * self.table.shape[2])

    @property
    def pieces(self) -> tuple[Any, ...]:
        """Equal for fields that read the same pieces, and choose a table of one size in the same way."""
        codes, bucket = (self.codes_byte, self.num_codes), (self.bucket_byte, self.bucket_code)
        return self.first_bit, self.is_little, self.table.shape, codes, bucket


def sparse_engine(layout: SparseLayout) -> Engine:
    """The fastest engine for ``layout``."""
    loop = compiled(collect_code(layout.dtype.itemsize)) if sys.byteorder == "little" else None
    return SparseByNumpy(layout) if loop is None else SparseByLoop(layout, loop)


class SparseEngine(Engine):
    _layout: SparseLayout

    def check(self, rows: Bytes) -> None:
        items = () if self._layout.counts else (self._layout.k,)
        self.decode(rows, np.empty((len(rows), *items), self._layout.dtype))


class SparseByNumpy(SparseEngine):
    """All pieces of all records of a chunk at once."""

    def __init__(self, layout: SparseLayout) -> None:
        self._layout = layout
        first, stop = layout.first_bit // 8, -(-(layout.first_bit + layout.num_bits) // 8)
        self._columns = slice(first, stop)
        self._lead = layout.first_bit - 8 * first
        self._leaves_out = bool((layout.table == -1).any())

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Raises WorkerError for a record that is damaged."""
        self._put(rows, out, *self._pieces(rows))

    def _pieces(self, rows: Bytes) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
        """(how many pieces each record has; of each piece its record, its rank there, its code and square)."""
        layout, n = self._layout, len(rows)
        order = "little" if layout.is_little else "big"
        bits = np.unpackbits(rows[:, self._columns], axis=1, bitorder=order)[:, self._lead :][:, : layout.num_bits]  # type: ignore[call-overload]
        counts = np.count_nonzero(bits, axis=1)
        record, rank = np.repeat(np.arange(n), counts), places_within(0, counts)
        position = np.flatnonzero(bits) - record * layout.num_bits
        if layout.codes_byte >= 0:
            position += self._codes(rows, counts, record, rank) * layout.table.shape[2]
        return counts, record, rank, position

    def _put(
        self, rows: Bytes, out: AnyArray, counts: AnyArray, record: AnyArray, rank: AnyArray, position: AnyArray
    ) -> None:
        layout, n = self._layout, len(rows)
        index = layout.table.reshape(-1).take(position + self._slabs(rows, record, position)[record])
        if len(index) and int(index.min()) <= NO_PIECE:
            code, square = divmod(int(position[np.argmin(index)]), layout.table.shape[2])
            raise self._error("a piece that the table has", f"one of code {code} on square {square}")
        if self._leaves_out:
            is_kept = index >= 0
            index, record = index[is_kept], record[is_kept]
            counts = np.bincount(record, minlength=n)
            rank = places_within(0, counts)
        if n and (most := int(counts.max())) > layout.k:
            raise self._error(f"at most {layout.k} indices", str(most), "Give the field a larger k.")
        if layout.counts:
            out[...] = counts
        else:
            out.fill(-1)
            out.reshape(-1)[record * layout.k + rank] = index

    def _codes(self, rows: Bytes, counts: AnyArray, record: AnyArray, rank: AnyArray) -> AnyArray:
        layout = self._layout
        if len(rows) and (most := int(counts.max())) > layout.num_codes:
            raise self._error(f"at most {layout.num_codes} pieces, as there are codes", str(most))
        is_high = rank & 1 if layout.is_little else ~rank & 1
        two = rows[record, layout.codes_byte + (rank >> 1)].astype(np.intp)
        codes: AnyArray = two >> 4 * is_high & 15
        return codes

    def _slabs(self, rows: Bytes, record: AnyArray, position: AnyArray) -> AnyArray:
        """intp, (n,): where in the table the bucket of each record begins."""
        layout, bucket = self._layout, np.zeros(len(rows), np.intp)
        num_buckets, _, squares = layout.table.shape
        if layout.bucket_byte >= 0:
            bucket[:] = rows[:, layout.bucket_byte]
            if len(rows) and (most := int(bucket.max())) >= num_buckets:
                raise self._error(f"a bucket from 0 to {num_buckets - 1}", str(most))
        elif layout.bucket_code >= 0:
            bucket[:] = -1
            is_king = position // squares == layout.bucket_code
            bucket[record[is_king][::-1]] = (position[is_king] - layout.bucket_code * squares)[
                ::-1
            ]  # the first stays
            if (bucket < 0).any():
                raise self._error(f"a piece of code {layout.bucket_code}, whose square is the bucket", "none")
        slabs: AnyArray = bucket * layout.table[0].size
        return slabs

    def _error(self, expected: str, found: str, hint: str = "") -> WorkerError:
        return WorkerError(f"{self._layout.what}: expected {expected}, found {found}", hint=hint)


class CheckPieces(Engine):
    """Checks fields whose ``pieces`` are equal by counting pieces once. Where one may be damaged, it decodes each."""

    def __init__(self, layouts: list[SparseLayout]) -> None:
        self._each = [sparse_engine(layout) for layout in layouts]
        tables = np.stack([layout.table for layout in layouts])
        # As many pieces as in the field that has most of them, and a fault where any field has one.
        table = np.where((tables <= NO_PIECE).any(0), NO_PIECE, np.minimum(tables.max(0), 0)).astype(np.int32)
        most = min(layout.k for layout in layouts)
        self._count = sparse_engine(replace(layouts[0], table=table, k=most, counts=True))
        self._dtype = layouts[0].dtype

    def check(self, rows: Bytes) -> None:
        try:
            self._count.decode(rows, np.empty(len(rows), self._dtype))
        except WorkerError:
            for engine in self._each:
                engine.check(rows)


PUT_COUNT = """
put_count:
  %count_item = COUNT
  store ITEM %count_item, ptr %place
  br label %done"""

COLLECT = each_record(
    BITSWAP
    + """declare i64 @llvm.cttz.i64(i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define i64 @collectITEM(ptr noalias readonly %rows, i64 %num_records, i64 %row_bytes, ptr noalias %out, i64 %k,
                        i64 %counts, i64 %num_words, ptr noalias readonly %words, i64 %is_big,
                        ptr noalias readonly %table, i64 %num_buckets, i64 %slab_items, i64 %squares,
                        i64 %codes_byte, i64 %num_codes, i64 %bucket_byte, i64 %bucket_code) {
start:
  %has_codes = icmp sge i64 %codes_byte, 0
  %in_byte = icmp sge i64 %bucket_byte, 0
  %by_code = icmp sge i64 %bucket_code, 0
  %is_count = icmp ne i64 %counts, 0
  %reverses = icmp ne i64 %is_big, 0
  %items = select i1 %is_count, i64 1, i64 %k
  %room = select i1 %is_count, i64 0, i64 %k
  %room_bytes = mul i64 %room, BYTES
  %swap = select i1 %reverses, i64 1, i64 0
  %first_of_code = mul i64 %bucket_code, %squares""",
    """  %row_at = mul i64 %number, %row_bytes
  %row = getelementptr i8, ptr %rows, i64 %row_at
  %out_at = mul i64 %number, %items
  %place = getelementptr ITEM, ptr %out, i64 %out_at
  call void @llvm.memset.p0.i64(ptr %place, i8 -1, i64 %room_bytes, i1 false)
  br i1 %in_byte, label %bucket, label %pass

bucket:
  %bucket_ptr = getelementptr i8, ptr %row, i64 %bucket_byte
  %stored = load i8, ptr %bucket_ptr
  %value = zext i8 %stored to i64
  %is_bucket = icmp ult i64 %value, %num_buckets
  br i1 %is_bucket, label %pass, label %bad

pass:
  %is_search = phi i1 [%by_code, %record], [false, %bucket], [false, %king]
  %slab_number = phi i64 [0, %record], [%value, %bucket], [%king_square, %king]
  %slab_at = mul i64 %slab_number, %slab_items
  %slab = getelementptr i32, ptr %table, i64 %slab_at
  br label %word

word:
  %word_number = phi i64 [0, %pass], [%next_word, %word_done]
  %word_rank = phi i64 [0, %pass], [%rank, %word_done]
  %word_count = phi i64 [0, %pass], [%count, %word_done]
  %offset_ptr = getelementptr [4 x i64], ptr %words, i64 %word_number
  %shift_ptr = getelementptr [4 x i64], ptr %words, i64 %word_number, i64 1
  %mask_ptr = getelementptr [4 x i64], ptr %words, i64 %word_number, i64 2
  %base_ptr = getelementptr [4 x i64], ptr %words, i64 %word_number, i64 3
  %offset = load i64, ptr %offset_ptr
  %shift = load i64, ptr %shift_ptr
  %mask = load i64, ptr %mask_ptr
  %base = load i64, ptr %base_ptr
"""
    + word_of_bits("word", "%offset")
    + """
  %first_bits = and i64 %shifted, %mask
  br label %bit

bit:
  %left = phi i64 [%first_bits, %in_order], [%fewer, %next]
  %rank = phi i64 [%word_rank, %in_order], [%next_rank, %next]
  %count = phi i64 [%word_count, %in_order], [%next_count, %next]
  %is_empty = icmp eq i64 %left, 0
  br i1 %is_empty, label %word_done, label %piece

piece:
  %trailing = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %less = sub i64 %left, 1
  %fewer = and i64 %left, %less
  %bit_number = add i64 %base, %trailing
  %next_rank = add i64 %rank, 1
  br i1 %has_codes, label %code, label %found

code:
  %has_code = icmp ult i64 %rank, %num_codes
  br i1 %has_code, label %read, label %bad

read:
  %half = lshr i64 %rank, 1
  %code_at = add i64 %codes_byte, %half
  %code_ptr = getelementptr i8, ptr %row, i64 %code_at
  %two = load i8, ptr %code_ptr
  %wide = zext i8 %two to i64
  %parity = and i64 %rank, 1
  %which = xor i64 %parity, %swap
  %code_shift = shl i64 %which, 2
  %code_high = lshr i64 %wide, %code_shift
  %code_value = and i64 %code_high, 15
  %code_first = mul i64 %code_value, %squares
  %of_code = add i64 %code_first, %bit_number
  br label %found

found:
  %position = phi i64 [%bit_number, %piece], [%of_code, %read]
  br i1 %is_search, label %search, label %emit

search:
  %king_square = sub i64 %position, %first_of_code
  %is_king = icmp ult i64 %king_square, %squares
  br i1 %is_king, label %king, label %next

king:
  br label %pass

emit:
  %index_ptr = getelementptr i32, ptr %slab, i64 %position
  %index = load i32, ptr %index_ptr
  %is_piece = icmp sgt i32 %index, -2
  br i1 %is_piece, label %fits, label %bad

fits:
  %is_kept = icmp sge i32 %index, 0
  %more = zext i1 %is_kept to i64
  %kept = add i64 %count, %more
  %is_room = icmp ult i64 %count, %room
  br i1 %is_room, label %store, label %full

store:
  %item_ptr = getelementptr ITEM, ptr %place, i64 %count
  %item = CAST i32 %index to ITEM
  store ITEM %item, ptr %item_ptr
  br label %next

full:
  %is_most = icmp ule i64 %kept, %k
  br i1 %is_most, label %next, label %bad

next:
  %next_count = phi i64 [%count, %search], [%kept, %store], [%kept, %full]
  br label %bit

word_done:
  %next_word = add i64 %word_number, 1
  %are_more = icmp ult i64 %next_word, %num_words
  br i1 %are_more, label %word, label %row_done

row_done:
  br i1 %is_search, label %bad, label %count_or_not

count_or_not:
  br i1 %is_count, label %put_count, label %done
"""
    + PUT_COUNT,
)


def collect_code(itemsize: int) -> str:
    """The loop for indices of 2, 4 or 8 bytes. It returns the first record that is damaged, or -1."""
    return of_items(COLLECT, itemsize, "%count")


def of_items(code: str, itemsize: int, count: str) -> str:
    """A loop for indices of so many bytes; ``count``: what has their number in it."""
    item = f"i{8 * itemsize}"
    cast = {2: "trunc", 4: "bitcast", 8: "sext"}[itemsize]
    counted = f"add i64 {count}, 0" if itemsize == 8 else f"trunc i64 {count} to {item}"
    code = code.replace("ITEM", item).replace("BYTES", str(itemsize))
    return code.replace("CAST", cast).replace("COUNT", counted)


class SparseByLoop(SparseEngine):
    """By the loop. Of a record that it finds to be damaged, numpy says what is wrong."""

    is_compiled = True

    def __init__(self, layout: SparseLayout, loop: Any) -> None:
        self._layout, self._loop, self._plain = layout, loop, SparseByNumpy(layout)
        self._words = _words(layout)
        self._table = np.ascontiguousarray(layout.table, np.int32)
        num_buckets, num_codes, squares = self._table.shape
        self._before = (
            layout.k,
            int(layout.counts),
            len(self._words),
            self._words.ctypes.data,
            int(not layout.is_little),
        )
        self._behind = (
            *(self._table.ctypes.data, num_buckets, num_codes * squares, squares),
            *(layout.codes_byte, layout.num_codes, layout.bucket_byte, layout.bucket_code),
        )

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Raises WorkerError for a record that is damaged."""
        bad = self._loop(rows.ctypes.data, len(rows), rows.shape[1], out.ctypes.data, *self._before, *self._behind)
        if bad >= 0:
            self._plain.decode(rows[bad : bad + 1], out[bad : bad + 1])
            raise AssertionError("numpy takes a record that the loop does not")


def _words(layout: SparseLayout) -> npt.NDArray[np.int64]:
    """int64, (words, 4): the byte of a row where a word begins, a shift and a mask that leave its bits, the first's
    number.

    No word reaches behind the byte of the last bit, unless that is one of the first eight of the row.
    """
    stop = layout.first_bit + layout.num_bits
    last = max(0, -(-stop // 8) - 8)
    words, bit = [], layout.first_bit
    while bit < stop:
        byte = min(bit // 8, last)
        shift = bit - 8 * byte
        count = min(64 - shift, stop - bit)
        words.append((byte, shift, (1 << count) - 1, bit - layout.first_bit))
        bit += count
    return np.array(words, np.uint64).view(np.int64)
