"""Where the frames of a TFRecord stream are.

A frame (:mod:`loaderd.kernels.crc` says what it is) begins where the one before it ends, so finding them goes step by
step: :func:`walk` does it from one place. The index of a shard knows more places, the **anchors**; from one to the
next goes a **chain** of frames, and :func:`walk_chains` finds the frames of many chains.

The loop ``walk`` goes from chain to chain, and in each from frame to frame. At each frame it

1. reads eight bytes of length, and four of CRC;
2. takes the right CRC of that length from a table of all lengths below 64 KiB, and compares;
3. notes where the frame begins, and goes on behind it: length + 16 bytes.

A chain must have as many frames as it should, and end where the next one begins. The loop returns the number of
frames, or -1 where anything is wrong or a record has 64 KiB or more. Then :func:`walk` decides.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.kernels.crc import (
    FRAME_BYTES,
    HEADER_BYTES,
    Bytes1D,
    find_bad_length_crc,
    masked_crcs_of_short_lengths,
)
from loaderd.kernels.llvm import compiled

Ends = npt.NDArray[np.int64]

_unpack_length = struct.Struct("<Q").unpack_from


def walk(buffer: Bytes1D, start: int, stop: int) -> Ends:
    """int64, (n + 1,): the frame boundaries of the whole records in ``buffer[start:stop]``; no CRC is checked.

    Costs 70 ns a record, all of it Python: where a record starts is known only from the one before.
    """
    ends = [start]
    append = ends.append
    position = start
    last_header = stop - HEADER_BYTES
    view = buffer.data
    while position <= last_header:
        position += _unpack_length(view, position)[0] + FRAME_BYTES
        if position > stop:
            break
        append(position)
    return np.array(ends, dtype=np.int64)


def walk_chains(buffer: Bytes1D, starts: Ends, stops: Ends, counts: Ends) -> Ends | None:
    """int64, (n + 1,): as :func:`walk`, from several known places at a time; the CRC of each length is checked.

    None where the frames don't add up, or a CRC does not match. ``starts``, ``stops``, ``counts``: int64, (chains,):
    chain i is ``counts[i]`` frames from ``starts[i]`` to ``stops[i]``, where chain i + 1 begins.
    """
    if not len(counts) or counts.min() < 1:
        return None
    loop = compiled(WALK)
    if loop is not None and (ends := _walk_by_loop(loop, buffer, starts, stops, counts)) is not None:
        return ends
    ends = walk(buffer, int(starts[0]), int(stops[-1]))
    begins = np.cumsum([0, *counts])
    if begins[-1] != len(ends) - 1 or not np.array_equal(ends[begins], [*starts, stops[-1]]):
        return None
    return None if find_bad_length_crc(buffer, ends) is not None else ends


WALK = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

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
  %frame_bytes = add i64 %length, 16
  %next_at = add i64 %at, %frame_bytes
  %ahead = mul i64 %frame_bytes, 8
  %soon = add i64 %at, %ahead
  %soon_ptr = getelementptr i8, ptr %buffer, i64 %soon
  call void @llvm.prefetch.p0(ptr %soon_ptr, i32 0, i32 3, i32 1)
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


def _walk_by_loop(loop: Any, buffer: Bytes1D, starts: Ends, stops: Ends, counts: Ends) -> Ends | None:
    chains = np.stack([starts, stops, counts], axis=1)
    crcs = masked_crcs_of_short_lengths()
    ends = np.empty(int(counts.sum()) + 1, np.int64)
    num_frames = loop(
        *(buffer.ctypes.data, len(buffer) - HEADER_BYTES, chains.ctypes.data, len(chains)),
        *(crcs.ctypes.data, len(crcs), ends.ctypes.data),
    )
    return None if num_frames < 0 else ends
