"""The symbols of squares, as prefix codes give them, into padded indices: the loop ``place``, and numpy in its place.

::

    symbols   0 3 0 0 9 …                       one for each square, also for those that are empty
    index     table[bucket, symbol, square]     -1: the square is left out; -2: there is no such piece
    batch     index index index -1 -1 …         k of them

The loop compares 64 squares at once with the symbol that is always left out, the empty square's, and goes through the
others; of the last squares, if they are fewer than 64, through all. It writes the index of each behind those before
it, also where that is -1, and the next one over it: so it has no branch that a processor would guess wrong for every
piece. Both check what they read, and raise WorkerError for the first record that is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from loaderd.kernels.engine import AnyArray, Bytes, Engine
from loaderd.kernels.llvm import compiled, each_record
from loaderd.kernels.prefix import NO_SYMBOL
from loaderd.kernels.sparse import PUT_COUNT, SparseByNumpy, SparseEngine, SparseLayout, of_items


def places_engine(layout: SparseLayout, symbols: Callable[[], Bytes]) -> Engine:
    """The fastest engine for ``layout``. ``symbols``: uint8, (n, squares), of the chunk that is being decoded."""
    loop = compiled(place_code(layout.dtype.itemsize)) if sys.byteorder == "little" else None
    return PlacesByNumpy(layout, symbols) if loop is None else PlacesByLoop(layout, loop, symbols)


class PlacesByNumpy(SparseByNumpy):
    """All squares of all records of a chunk at once; most of them are left out."""

    def __init__(self, layout: SparseLayout, symbols: Callable[[], Bytes]) -> None:
        super().__init__(layout)
        self._symbols = symbols

    def _pieces(self, rows: Bytes) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
        symbols = self._symbols()
        n, squares = symbols.shape
        position = symbols.astype(np.intp)
        position *= squares
        position += np.arange(squares)
        rank = np.tile(np.arange(squares), n)
        return np.full(n, squares), np.repeat(np.arange(n), squares), rank, position.reshape(-1)


PLACE = each_record(
    """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare i32 @llvm.smin.i32(i32, i32)
declare i64 @llvm.cttz.i64(i64, i1)

define i64 @placeITEM(ptr noalias readonly %rows, i64 %num_records, i64 %row_bytes, ptr noalias %out,
                      ptr noalias readonly %symbols, i64 %k, i64 %counts, ptr noalias readonly %table,
                      i64 %num_buckets, i64 %slab_items, i64 %squares, i64 %bucket_byte, i64 %bucket_code,
                      i64 %skipped) {
start:
  %skip = trunc i64 %skipped to i8
  %one_skip = insertelement <64 x i8> poison, i8 %skip, i64 0
  %skips = shufflevector <64 x i8> %one_skip, <64 x i8> poison, <64 x i32> zeroinitializer
  %in_byte = icmp sge i64 %bucket_byte, 0
  %by_code = icmp sge i64 %bucket_code, 0
  %is_count = icmp ne i64 %counts, 0
  %items = select i1 %is_count, i64 1, i64 %k
  %room = select i1 %is_count, i64 0, i64 %k
  %room_bytes = mul i64 %room, BYTES
  %king_code = trunc i64 %bucket_code to i8
  %one_king = insertelement <64 x i8> poison, i8 %king_code, i64 0
  %kings = shufflevector <64 x i8> %one_king, <64 x i8> poison, <64 x i32> zeroinitializer""",
    """  %symbols_at = mul i64 %number, %squares
  %board = getelementptr i8, ptr %symbols, i64 %symbols_at
  %out_at = mul i64 %number, %items
  %place = getelementptr ITEM, ptr %out, i64 %out_at
  call void @llvm.memset.p0.i64(ptr %place, i8 -1, i64 %room_bytes, i1 false)
  br i1 %in_byte, label %bucket, label %search_or_not

bucket:
  %row_at = mul i64 %number, %row_bytes
  %bucket_at = add i64 %row_at, %bucket_byte
  %bucket_ptr = getelementptr i8, ptr %rows, i64 %bucket_at
  %stored = load i8, ptr %bucket_ptr
  %value = zext i8 %stored to i64
  %is_bucket = icmp ult i64 %value, %num_buckets
  br i1 %is_bucket, label %squares_of, label %bad

search_or_not:
  br i1 %by_code, label %search_block, label %squares_of

search_block:
  %search_first = phi i64 [0, %search_or_not], [%search_stop, %search_compare]
  %search_stop = add i64 %search_first, 64
  %is_search_block = icmp ule i64 %search_stop, %squares
  br i1 %is_search_block, label %search_compare, label %search

search_compare:
  %search_ptr = getelementptr i8, ptr %board, i64 %search_first
  %searched = load <64 x i8>, ptr %search_ptr, align 1
  %are_kings = icmp eq <64 x i8> %searched, %kings
  %king_bits = bitcast <64 x i1> %are_kings to i64
  %king_trailing = call i64 @llvm.cttz.i64(i64 %king_bits, i1 false)
  %block_king = add i64 %search_first, %king_trailing
  %has_king = icmp ne i64 %king_bits, 0
  br i1 %has_king, label %squares_of, label %search_block

search:
  %king = phi i64 [%search_first, %search_block], [%next_king, %other]
  %is_there = icmp ult i64 %king, %squares
  br i1 %is_there, label %is_it, label %bad

is_it:
  %king_ptr = getelementptr i8, ptr %board, i64 %king
  %king_symbol = load i8, ptr %king_ptr
  %is_king = icmp eq i8 %king_symbol, %king_code
  br i1 %is_king, label %squares_of, label %other

other:
  %next_king = add i64 %king, 1
  br label %search

squares_of:
  %slab_number = phi i64 [%value, %bucket], [0, %search_or_not], [%block_king, %search_compare],
                       [%king, %is_it]
  %slab_at = mul i64 %slab_number, %slab_items
  %slab = getelementptr i32, ptr %table, i64 %slab_at
  br label %block

block:
  %block_first = phi i64 [0, %squares_of], [%block_stop, %bits]
  %block_count = phi i64 [0, %squares_of], [%count, %bits]
  %block_least = phi i32 [0, %squares_of], [%least, %bits]
  %block_stop = add i64 %block_first, 64
  %is_block = icmp ule i64 %block_stop, %squares
  br i1 %is_block, label %compare, label %rest

compare:
  %block_ptr = getelementptr i8, ptr %board, i64 %block_first
  %stored_symbols = load <64 x i8>, ptr %block_ptr, align 1
  %are_others = icmp ne <64 x i8> %stored_symbols, %skips
  %others = bitcast <64 x i1> %are_others to i64
  br label %bits

bits:
  %left = phi i64 [%others, %compare], [%rest_bits, %all_of_rest], [%fewer, %next]
  %count = phi i64 [%block_count, %compare], [%block_count, %all_of_rest], [%next_count, %next]
  %least = phi i32 [%block_least, %compare], [%block_least, %all_of_rest], [%next_least, %next]
  %is_empty = icmp eq i64 %left, 0
  br i1 %is_empty, label %block, label %bit

bit:
  %trailing = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %less = sub i64 %left, 1
  %fewer = and i64 %left, %less
  %square = add i64 %block_first, %trailing
  %symbol_ptr = getelementptr i8, ptr %board, i64 %square
  %symbol_byte = load i8, ptr %symbol_ptr
  %symbol = zext i8 %symbol_byte to i64
  %first = mul i64 %symbol, %squares
  %position = add i64 %first, %square
  %index_ptr = getelementptr i32, ptr %slab, i64 %position
  %index = load i32, ptr %index_ptr
  %next_least = call i32 @llvm.smin.i32(i32 %least, i32 %index)
  %has_room = icmp ult i64 %count, %room
  br i1 %has_room, label %store, label %next

store:
  %item_ptr = getelementptr ITEM, ptr %place, i64 %count
  %item = CAST i32 %index to ITEM
  store ITEM %item, ptr %item_ptr
  br label %next

next:
  %is_kept = icmp sge i32 %index, 0
  %more = zext i1 %is_kept to i64
  %next_count = add i64 %count, %more
  br label %bits

rest:
  %has_rest = icmp ult i64 %block_first, %squares
  br i1 %has_rest, label %all_of_rest, label %row_done

all_of_rest:
  %behind = sub i64 %block_stop, %squares
  %rest_bits = lshr i64 -1, %behind
  br label %bits

row_done:
  %are_pieces = icmp sge i32 %block_least, -1
  br i1 %are_pieces, label %fits, label %bad

fits:
  %is_most = icmp ule i64 %block_count, %k
  br i1 %is_most, label %count_or_not, label %bad

count_or_not:
  br i1 %is_count, label %put_count, label %done
"""
    + PUT_COUNT,
)


def place_code(itemsize: int) -> str:
    """The loop for indices of 2, 4 or 8 bytes. It returns the first record that is damaged, or -1."""
    return of_items(PLACE, itemsize, "%block_count")


class PlacesByLoop(SparseEngine):
    """By the loop. Of a record that it finds to be damaged, numpy says what is wrong."""

    is_compiled = True

    def __init__(self, layout: SparseLayout, loop: Any, symbols: Callable[[], Bytes]) -> None:
        self._layout, self._loop, self._symbols = layout, loop, symbols
        self._table = np.ascontiguousarray(layout.table, np.int32)
        num_buckets, num_codes, squares = self._table.shape
        left_out = np.flatnonzero((self._table == -1).all(axis=(0, 2)))
        self._arguments = (
            *(layout.k, int(layout.counts), self._table.ctypes.data, num_buckets, num_codes * squares, squares),
            *(layout.bucket_byte, layout.bucket_code, int(left_out[0]) if len(left_out) else NO_SYMBOL),
        )

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Raises WorkerError for a record that is damaged."""
        symbols = self._symbols()
        addresses = (out.ctypes.data, symbols.ctypes.data)
        bad = self._loop(rows.ctypes.data, len(rows), rows.shape[1], *addresses, *self._arguments)
        if bad >= 0:
            one = slice(bad, bad + 1)
            PlacesByNumpy(self._layout, lambda: symbols[one]).decode(rows[one], out[one])
            raise AssertionError("numpy takes a record that the loop does not")
