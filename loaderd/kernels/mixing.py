"""Where a permutation puts numbers, by mixing: :mod:`loaderd.plan.permutation` says how, and why.

The loop ``mix`` does for sixteen numbers at a time what ``_mix_by_numpy`` does for all. It

1. makes sixteen numbers that follow each other; those behind the last number of all are the last number;
2. in each round multiplies by the round's factor, adds its summand, keeps the bits that a word has, and
   exclusive-ors each word with its upper half;
3. puts back what was a place before: only words that were none are mixed;
4. mixes again while any word is none of the numbers;
5. stores the words, as integers of 64 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.kernels.llvm import compiled

_LANES = 16

Draws = npt.NDArray[np.uint32]

MIX = """
declare <16 x i32> @llvm.umin.v16i32(<16 x i32>, <16 x i32>)

define void @mix(i64 %first, i64 %num_groups, i64 %last, i64 %bits, ptr noalias readonly %draws, i64 %num_rounds,
                 ptr noalias writeonly %out) {
start:
  %bits_32 = trunc i64 %bits to i32
  %bits_and_1 = add i32 %bits_32, 1
  %half = lshr i32 %bits_and_1, 1
  %half_0 = insertelement <16 x i32> poison, i32 %half, i64 0
  %halves = shufflevector <16 x i32> %half_0, <16 x i32> poison, <16 x i32> zeroinitializer
  %above = shl i64 1, %bits
  %mask = sub i64 %above, 1
  %mask_32 = trunc i64 %mask to i32
  %mask_0 = insertelement <16 x i32> poison, i32 %mask_32, i64 0
  %masks = shufflevector <16 x i32> %mask_0, <16 x i32> poison, <16 x i32> zeroinitializer
  %last_32 = trunc i64 %last to i32
  %last_0 = insertelement <16 x i32> poison, i32 %last_32, i64 0
  %lasts = shufflevector <16 x i32> %last_0, <16 x i32> poison, <16 x i32> zeroinitializer
  br label %group

group:
  %number = phi i64 [0, %start], [%next_number, %group_done]
  %ahead = mul i64 %number, 16
  %begin = add i64 %first, %ahead
  %left = sub i64 %last, %begin
  %left_32 = trunc i64 %left to i32
  %left_0 = insertelement <16 x i32> poison, i32 %left_32, i64 0
  %lefts = shufflevector <16 x i32> %left_0, <16 x i32> poison, <16 x i32> zeroinitializer
  %steps = call <16 x i32> @llvm.umin.v16i32(<16 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7,
      i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>, <16 x i32> %lefts)
  %begin_32 = trunc i64 %begin to i32
  %begin_0 = insertelement <16 x i32> poison, i32 %begin_32, i64 0
  %begins = shufflevector <16 x i32> %begin_0, <16 x i32> poison, <16 x i32> zeroinitializer
  %numbers = add <16 x i32> %begins, %steps
  %all = icmp eq <16 x i32> %numbers, %numbers
  br label %pass

pass:
  %before = phi <16 x i32> [%numbers, %group], [%now, %passed]
  %is_outside = phi <16 x i1> [%all, %group], [%is_outside_now, %passed]
  br label %round

round:
  %round_number = phi i64 [0, %pass], [%next_round, %round]
  %words = phi <16 x i32> [%before, %pass], [%mixed, %round]
  %factor_ptr = getelementptr [2 x i32], ptr %draws, i64 %round_number
  %summand_ptr = getelementptr [2 x i32], ptr %draws, i64 %round_number, i64 1
  %factor = load i32, ptr %factor_ptr
  %summand = load i32, ptr %summand_ptr
  %factor_0 = insertelement <16 x i32> poison, i32 %factor, i64 0
  %factors = shufflevector <16 x i32> %factor_0, <16 x i32> poison, <16 x i32> zeroinitializer
  %summand_0 = insertelement <16 x i32> poison, i32 %summand, i64 0
  %summands = shufflevector <16 x i32> %summand_0, <16 x i32> poison, <16 x i32> zeroinitializer
  %multiplied = mul <16 x i32> %words, %factors
  %added = add <16 x i32> %multiplied, %summands
  %kept = and <16 x i32> %added, %masks
  %upper = lshr <16 x i32> %kept, %halves
  %mixed = xor <16 x i32> %kept, %upper
  %next_round = add i64 %round_number, 1
  %more_rounds = icmp ult i64 %next_round, %num_rounds
  br i1 %more_rounds, label %round, label %passed

passed:
  %now = select <16 x i1> %is_outside, <16 x i32> %mixed, <16 x i32> %before
  %is_outside_now = icmp ugt <16 x i32> %now, %lasts
  %outside = bitcast <16 x i1> %is_outside_now to i16
  %is_any = icmp ne i16 %outside, 0
  br i1 %is_any, label %pass, label %group_done

group_done:
  %places = zext <16 x i32> %now to <16 x i64>
  %out_ptr = getelementptr i64, ptr %out, i64 %ahead
  store <16 x i64> %places, ptr %out_ptr, align 8
  %next_number = add i64 %number, 1
  %more_groups = icmp ult i64 %next_number, %num_groups
  br i1 %more_groups, label %group, label %done

done:
  ret void
}
"""


def mixed(start: int, stop: int, count: int, draws: Draws) -> npt.NDArray[np.int64]:
    """int64, (stop - start,): the places of numbers ``start`` to ``stop - 1`` of ``count``, at most 2**32.

    ``draws``: uint32, (rounds, 2), C-contiguous: an odd factor and a summand for each round.
    """
    assert 0 <= start <= stop <= count <= 1 << 32 and draws.flags.c_contiguous
    bits = (count - 1).bit_length()
    loop = compiled(MIX)
    if loop is None or start == stop:
        return _mixed_by_numpy(start, stop, count, bits, draws)
    num_groups = -(-(stop - start) // _LANES)
    places = np.empty(num_groups * _LANES, np.int64)
    loop(start, num_groups, count - 1, bits, draws.ctypes.data, len(draws), places.ctypes.data)
    return places[: stop - start]


def _mixed_by_numpy(start: int, stop: int, count: int, bits: int, draws: Draws) -> npt.NDArray[np.int64]:
    words = np.arange(start, stop, dtype=np.uint32)
    _mix_by_numpy(words, bits, draws)
    outside = np.flatnonzero(words >= count)
    while len(outside):
        again = words[outside]
        _mix_by_numpy(again, bits, draws)
        words[outside] = again
        outside = outside[again >= count]
    return words.astype(np.int64)


def _mix_by_numpy(words: npt.NDArray[np.uint32], bits: int, draws: Draws) -> None:
    """Permute all words of ``bits`` bits, in place."""
    mask, half = np.uint32((1 << bits) - 1), np.uint32((bits + 1) // 2)
    for factor, summand in draws:
        words *= factor
        words += summand
        words &= mask
        words ^= words >> half
