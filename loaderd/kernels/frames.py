"""Where the frames of a TFRecord stream are.

A frame (:mod:`loaderd.kernels.crc` says what it is) begins where the one before it ends, so finding them goes step by
step: :func:`walk` does it from one place. The index of a shard knows more places, the **anchors**; from one to the
next goes a **chain** of frames, and :func:`walk_chains` finds the frames of many chains.

The loop ``walk`` goes from chain to chain, and in each from frame to frame. At each frame it

1. notes where the frame begins;
2. reads eight bytes of length, and four of CRC;
3. takes the right CRC of that length from a table of all lengths below 64 KiB, and compares;
4. goes on behind the frame: length + 16 bytes.

A chain must have as many frames as it should, and end where the next one begins. The loop returns the number of
frames; or, where anything is wrong or a record has 64 KiB or more, how many were right, with all bits turned over.
:func:`walk` has one chain that never ends, and passes over long records itself.
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
    masked_crc,
    masked_crcs_of_short_lengths,
)
from loaderd.kernels.llvm import compiled

Ends = npt.NDArray[np.int64]

_NO_END = 1 << 62
# For so many there is room for the ends of empty records, half as many bytes. More are there for large records alone.
_MOST_LOOPED_BYTES = 64 << 20
_unpack_length = struct.Struct("<Q").unpack_from


def walk(buffer: Bytes1D, start: int, stop: int) -> Ends:
    """int64, (n + 1,): the frame boundaries of whole records from ``start`` on, in ``buffer[start:stop]``.

    They end in front of the first record whose length does not match its CRC. No CRC of data is checked. By numpy it
    costs 70 ns a record, all of it Python; compiled, 10.
    """
    loop = compiled(WALK)
    if loop is not None and stop - start <= _MOST_LOOPED_BYTES:
        return _walk_on_by_loop(loop, buffer, start, stop)
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
    found = np.array(ends, dtype=np.int64)
    return found[: find_bad_length_crc(buffer, found) + 1] if len(found) > 1 else found


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
    return ends


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
  %end_ptr = getelementptr i64, ptr %ends, i64 %frame_number
  store i64 %at, ptr %end_ptr
  %is_inside = icmp ule i64 %at, %last
  br i1 %is_inside, label %header, label %broken

header:
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
  %num_right = phi i64 [%frame_number, %frame], [%frame_number, %header], [%frame_number, %check],
                       [%next_frame, %chain_end]
  %turned = xor i64 %num_right, -1
  ret i64 %turned
}
"""


def _walk_by_loop(loop: Any, buffer: Bytes1D, starts: Ends, stops: Ends, counts: Ends) -> Ends | None:
    if len(buffer) < HEADER_BYTES:
        return None
    chains = np.stack([starts, stops, counts], axis=1)
    ends = np.empty(int(counts.sum()) + 1, np.int64)
    return None if _run(loop, buffer, len(buffer), chains, ends) < 0 else ends


def _walk_on_by_loop(loop: Any, buffer: Bytes1D, start: int, stop: int) -> Ends:
    ends: Ends = np.empty(max(0, stop - start) // FRAME_BYTES + 2, np.int64)
    ends[0] = at = start
    count = 0
    while stop - at >= HEADER_BYTES:
        count += ~_run(loop, buffer, stop, np.array([[at, -1, _NO_END]]), ends[count:])
        at = ends.item(count)
        if at > stop:  # the last one is not whole
            count -= 1
            break
        header = bytes(buffer[at : min(at + HEADER_BYTES, stop)])
        if len(header) < HEADER_BYTES or masked_crc(header[:8]) != int.from_bytes(header[8:], "little"):
            break
        at += int.from_bytes(header[:8], "little") + FRAME_BYTES
        if at > stop:
            break
        count += 1
        ends[count] = at
    found: Ends = ends[: count + 1].copy()
    return found


def _run(loop: Any, buffer: Bytes1D, stop: int, chains: Ends, ends: Ends) -> int:
    """What the loop returns for ``buffer[:stop]``, which must hold a header; ``chains``: int64, (chains, 3)."""
    crcs = masked_crcs_of_short_lengths()
    result: int = loop(
        *(buffer.ctypes.data, stop - HEADER_BYTES, chains.ctypes.data, len(chains)),
        *(crcs.ctypes.data, len(crcs), ends.ctypes.data),
    )
    return result
