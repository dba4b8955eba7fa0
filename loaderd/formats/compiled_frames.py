"""A compiled way to find frames from several known places on: one loop that checks each length as it goes.

It gives up where anything is wrong, or a record has 64 KiB or more. Then numpy looks again, and decides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.formats.crc import FRAME_BYTES, HEADER_BYTES, Bytes1D, masked_crcs_of_short_lengths
from loaderd.machine_code import ADDRESS, NUMBER, Loop, compiled

Int64s = npt.NDArray[np.int64]

_CODE = """
define i64 @walk(ptr noalias readonly %buffer, i64 %last, ptr noalias readonly %chains, i64 %num_chains,
                 ptr noalias readonly %crcs, i64 %num_crcs, ptr noalias writeonly %ends) {
start:
  br label %chain

chain:
  %chain_number = phi i64 [0, %start], [%next_chain, %chain_done]
  %chain_frame = phi i64 [0, %start], [%next_frame, %chain_done]
  %begin_ptr = getelementptr [3 x i64], ptr %chains, i64 %chain_number
  %stop_ptr = getelementptr [3 x i64], ptr %chains, i64 %chain_number, i64 1
  %count_ptr = getelementptr [3 x i64], ptr %chains, i64 %chain_number, i64 2
  %begin = load i64, ptr %begin_ptr
  %stop = load i64, ptr %stop_ptr
  %count = load i64, ptr %count_ptr
  br label %frame

frame:
  %at = phi i64 [%begin, %chain], [%next_at, %frame_done]
  %left = phi i64 [%count, %chain], [%left_now, %frame_done]
  %frame_number = phi i64 [%chain_frame, %chain], [%next_frame, %frame_done]
  %is_inside = icmp ule i64 %at, %last
  br i1 %is_inside, label %header, label %broken

header:
  %end_ptr = getelementptr i64, ptr %ends, i64 %frame_number
  store i64 %at, ptr %end_ptr
  %length_ptr = getelementptr i8, ptr %buffer, i64 %at
  %crc_ptr = getelementptr i8, ptr %length_ptr, i64 8
  %length = load i64, ptr %length_ptr, align 1
  %crc = load i32, ptr %crc_ptr, align 1
  %is_short = icmp ult i64 %length, %num_crcs
  br i1 %is_short, label %check, label %broken

check:
  %expected_ptr = getelementptr i32, ptr %crcs, i64 %length
  %expected = load i32, ptr %expected_ptr
  %frame_bytes = add i64 %length, FRAME_BYTES
  %next_at = add i64 %at, %frame_bytes
  %next_frame = add i64 %frame_number, 1
  %left_now = sub i64 %left, 1
  %is_right = icmp eq i32 %crc, %expected
  br i1 %is_right, label %frame_done, label %broken

frame_done:
  %more_frames = icmp ne i64 %left_now, 0
  br i1 %more_frames, label %frame, label %chain_end

chain_end:
  %is_at_stop = icmp eq i64 %next_at, %stop
  br i1 %is_at_stop, label %chain_done, label %broken

chain_done:
  %next_chain = add i64 %chain_number, 1
  %more_chains = icmp ult i64 %next_chain, %num_chains
  br i1 %more_chains, label %chain, label %done

done:
  %last_end_ptr = getelementptr i64, ptr %ends, i64 %next_frame
  store i64 %stop, ptr %last_end_ptr
  ret i64 %next_frame

broken:
  ret i64 -1
}
"""
WALK_LOOP = Loop(
    _CODE.replace("FRAME_BYTES", str(FRAME_BYTES)), "walk", (ADDRESS, NUMBER, *(ADDRESS, NUMBER) * 2, ADDRESS), NUMBER
)


def walk_by_compiled_code(buffer: Bytes1D, starts: Int64s, stops: Int64s, counts: Int64s) -> Int64s | None:
    """As ``framing.walk_chains``; None where it gave up, or nothing can be compiled.

    ``counts``: at least one, each 1 or more.
    """
    loop = compiled(WALK_LOOP)
    if loop is None:
        return None
    chains = np.stack([starts, stops, counts], axis=1)
    crcs = masked_crcs_of_short_lengths()
    ends = np.empty(int(counts.sum()) + 1, np.int64)
    num_frames = loop(
        *(buffer.ctypes.data, len(buffer) - HEADER_BYTES, chains.ctypes.data, len(chains)),
        *(crcs.ctypes.data, len(crcs), ends.ctypes.data),
    )
    return None if num_frames < 0 else ends
