"""A compiled way to prepare records for one CRC over all of them (see ``crc``): one loop over their seams."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.machine_code import ADDRESS, NUMBER, Loop, compiled

_CODE = """
declare i32 @llvm.fshl.i32(i32, i32, i32)

define void @seam(ptr noalias %buffer, ptr noalias readonly %ends, i64 %num_records, i64 %mask_delta,
                  i64 %reset, i64 %reset_end, ptr noalias writeonly %stored) {
start:
  %delta = trunc i64 %mask_delta to i32
  %last_bytes = trunc i64 %reset_end to i32
  br label %record

record:
  %number = phi i64 [0, %start], [%next_number, %header]
  %next_number = add i64 %number, 1
  %end_ptr = getelementptr i64, ptr %ends, i64 %next_number
  %end = load i64, ptr %end_ptr
  %behind = getelementptr i8, ptr %buffer, i64 %end
  %footer = getelementptr i8, ptr %behind, i64 -4
  %masked = load i32, ptr %footer, align 1
  %rotated = sub i32 %masked, %delta
  %crc = call i32 @llvm.fshl.i32(i32 %rotated, i32 %rotated, i32 15)
  store i32 %crc, ptr %footer, align 1
  %stored_ptr = getelementptr i32, ptr %stored, i64 %number
  store i32 %crc, ptr %stored_ptr
  %more_records = icmp ult i64 %next_number, %num_records
  br i1 %more_records, label %header, label %done

header:
  %header_end = getelementptr i8, ptr %behind, i64 8
  store i64 %reset, ptr %behind, align 1
  store i32 %last_bytes, ptr %header_end, align 1
  br label %record

done:
  ret void
}
"""
SEAM_LOOP = Loop(_CODE, "seam", (ADDRESS, ADDRESS) + (NUMBER,) * 4 + (ADDRESS,))


def seam_by_compiled_code(
    buffer: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], mask_delta: int, reset: bytes
) -> npt.NDArray[np.uint32] | None:
    """uint32, (n,): the stored CRCs, unmasked, which replace those in ``buffer``; ``reset`` replaces headers.

    None where nothing can be compiled. ``ends``: as in ``crc.check_data_crcs``, of at least one record in ``buffer``.
    """
    loop = compiled(SEAM_LOOP)
    if loop is None:
        return None
    ends = np.ascontiguousarray(ends)
    stored = np.empty(len(ends) - 1, np.uint32)
    words = int.from_bytes(reset[:8], "little", signed=True), int.from_bytes(reset[8:], "little")
    loop(buffer.ctypes.data, ends.ctypes.data, len(stored), mask_delta, *words, stored.ctypes.data)
    return stored
