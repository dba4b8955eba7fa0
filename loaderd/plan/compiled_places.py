"""Permuting by mixing (see ``permutation``), compiled: a loop that mixes each word until it is below ``count``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.machine_code import ADDRESS, NUMBER, Loop, compiled

_CODE = """
define void @mix(i64 %first, i64 %num_numbers, i64 %count, i64 %mask_bits, i64 %half_bits,
                 ptr noalias readonly %draws, i64 %num_rounds, ptr noalias writeonly %out) {
start:
  %mask = trunc i64 %mask_bits to i32
  %half = trunc i64 %half_bits to i32
  br label %number

number:
  %offset = phi i64 [0, %start], [%next_offset, %done]
  %unmixed = add i64 %first, %offset
  %unmixed_word = trunc i64 %unmixed to i32
  br label %mix

mix:
  %word = phi i32 [%unmixed_word, %number], [%mixed, %mixed_all]
  br label %round

round:
  %round_number = phi i64 [0, %mix], [%next_round, %round]
  %before = phi i32 [%word, %mix], [%mixed, %round]
  %factor_ptr = getelementptr [2 x i32], ptr %draws, i64 %round_number
  %summand_ptr = getelementptr [2 x i32], ptr %draws, i64 %round_number, i64 1
  %factor = load i32, ptr %factor_ptr
  %summand = load i32, ptr %summand_ptr
  %product = mul i32 %before, %factor
  %sum = add i32 %product, %summand
  %masked = and i32 %sum, %mask
  %upper = lshr i32 %masked, %half
  %mixed = xor i32 %masked, %upper
  %next_round = add i64 %round_number, 1
  %more_rounds = icmp ult i64 %next_round, %num_rounds
  br i1 %more_rounds, label %round, label %mixed_all

mixed_all:
  %place = zext i32 %mixed to i64
  %is_number = icmp ult i64 %place, %count
  br i1 %is_number, label %done, label %mix

done:
  %out_ptr = getelementptr i64, ptr %out, i64 %offset
  store i64 %place, ptr %out_ptr
  %next_offset = add i64 %offset, 1
  %more_numbers = icmp ult i64 %next_offset, %num_numbers
  br i1 %more_numbers, label %number, label %end

end:
  ret void
}
"""
MIX_LOOP = Loop(_CODE, "mix", (NUMBER,) * 5 + (ADDRESS, NUMBER, ADDRESS))


def mix_by_compiled_code(
    start: int, stop: int, count: int, bits: int, draws: npt.NDArray[np.uint32]
) -> npt.NDArray[np.int64] | None:
    """As ``permutation.places``; None if nothing can be compiled here.

    ``draws``: uint32, (rounds, 2), C-contiguous: factors, which are odd, and summands.
    """
    loop = compiled(MIX_LOOP)
    if loop is None:
        return None
    out = np.empty(stop - start, np.int64)
    if len(out):  # the loop makes one number at least
        half = (bits + 1) // 2
        loop(start, len(out), count, (1 << bits) - 1, half, draws.ctypes.data, len(draws), out.ctypes.data)
    return out
