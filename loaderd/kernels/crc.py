"""CRC32C of many records with few calls.

TFRecord stores, behind a record's length and behind its data, the CRC32C of them, masked:
``((crc >> 15) | (crc << 17)) + 0xa282ead8`` (tensorflow/core/lib/hash/crc32c.h).

One library call a record costs ten times what the CRC itself does (150 ns against 11 for 240 bytes), so a run of
consecutive records is checked by one call over all of it. A message followed by its own, unmasked CRC leaves the
CRC register in a state that does not depend on the message (the *residue*). So, in the buffer::

    … length crc │ data │ crc'   │ length crc │ data │ crc'   │ …
                          stored,  12 bytes            stored,
                          unmasked `_RESET`            unmasked

every stored CRC is replaced by its unmasked self, and every header by the twelve bytes that bring the register
from the residue back to its initial state. Then the CRC of the whole run is a constant if and only if (up to
the 2⁻³² that a CRC misses anyway) that of each record matches. The payloads stay as they are; headers and
footers are overwritten.

The loop ``seam`` does this replacing in one pass over the records. Of each record it

1. finds the footer, the four bytes in front of the record's end, and reads the stored CRC;
2. takes the mask off: subtracts the constant, and rotates by 15 bits;
3. writes the CRC back unmasked, and keeps a copy of it, to name the damaged records with;
4. writes the twelve bytes of ``_RESET`` over the header behind, unless the record is the last.

``_seam_by_numpy`` makes the same steps for all records at once, each in an array of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.kernels.llvm import compiled
from loaderd.kernels.views import items_at

HEADER_BYTES = 12
FOOTER_BYTES = 4
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES

_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL_REFLECTED = 0x82F63B78
_INITIAL = 0xFFFFFFFF
_SHORT_LENGTHS = 1 << 16

Bytes1D = npt.NDArray[np.uint8]
Crcs = npt.NDArray[np.uint32]


def _load_crc32c() -> Callable[..., int]:
    """``crc32c.crc32c``, without its package, which imports all that its command line needs: 20 ms at each start."""
    package = find_spec("crc32c")
    spec = package and PathFinder.find_spec("_crc32c", package.submodule_search_locations)
    if spec is None or spec.loader is None:  # a version that is laid out otherwise
        from crc32c import crc32c as function

        return function
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    loaded: Callable[..., int] = extension.crc32c
    return loaded


crc32c = _load_crc32c()
"""(bytes-like, CRC so far = 0) -> CRC32C."""


def masked_crc(data: Any) -> int:
    """The masked CRC32C of ``data`` (bytes-like), as TFRecord stores it."""
    return mask(crc32c(data))


def mask(crc: int) -> int:
    """A CRC32C as TFRecord stores it."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def framed(record: bytes) -> bytes:
    """A record as it stands in a TFRecord file: its length, its data, and the masked CRC of each."""
    length = struct.pack("<Q", len(record))
    crcs = (struct.pack("<I", masked_crc(part)) for part in (length, record))
    return length + next(crcs) + record + next(crcs)


def _make_byte_table() -> Crcs:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL_REFLECTED), table >> 1)
    return table


_BYTE_TABLE = _make_byte_table()


# What the register holds behind a message and its CRC, and the twelve bytes that lead from there to where it began.
_CRC_OF_HEALTHY_RUN = 0x48674BC7
_RESET = np.frombuffer(bytes.fromhex("0000000000000000f62e80b0"), dtype=np.uint8)


@cache
def masked_crcs_of_short_lengths() -> Crcs:
    """uint32, (65536,): the masked CRC32C of each length below 64 KiB."""
    return _masked_crcs_of_any_lengths(np.arange(_SHORT_LENGTHS))


def masked_crcs_of_lengths(lengths: npt.NDArray[np.int64]) -> Crcs:
    """uint32, (n,): the masked CRC32C of each length written as 8 little-endian bytes.

    Costs 2 ns a length below 64 KiB, and 30 ns a longer one.
    """
    if len(lengths) and lengths.max() < _SHORT_LENGTHS and lengths.min() >= 0:
        return masked_crcs_of_short_lengths()[lengths]
    return _masked_crcs_of_any_lengths(lengths)


def _masked_crcs_of_any_lengths(lengths: npt.NDArray[np.int64]) -> Crcs:
    register = np.full(len(lengths), _INITIAL, dtype=np.uint32)
    for shift in range(0, 64, 8):
        byte = (lengths >> shift).astype(np.uint32) & np.uint32(0xFF)
        register = (register >> np.uint32(8)) ^ _BYTE_TABLE[(register ^ byte) & np.uint32(0xFF)]
    crc = register ^ np.uint32(0xFFFFFFFF)
    masked: Crcs = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK_DELTA)
    return masked


def words_at(buffer: Bytes1D, offsets: npt.NDArray[np.int64]) -> Crcs:
    """uint32, (n,): the little-endian 32-bit word at each byte offset. About 3 ns a word."""
    words: Crcs = items_at(buffer, 4)[offsets].view("<u4")
    return words


def find_bad_length_crc(buffer: Bytes1D, ends: npt.NDArray[np.int64]) -> int:
    """The first record whose length does not match its CRC; n: there is none.

    ``ends``: int64, (n + 1,): where each record's framing starts, and where the last one ends.
    """
    starts = ends[:-1]
    stored = words_at(buffer, starts + 8)
    bad = np.flatnonzero(stored != masked_crcs_of_lengths(np.diff(ends) - FRAME_BYTES))
    return int(bad[0]) if len(bad) else len(starts)


def check_data_crcs(buffer: Bytes1D, ends: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """The records whose data does not match its CRC: (record, stored CRC, CRC found), unmasked.

    ``buffer``: uint8, writable; the headers and footers between ``ends[0]`` and ``ends[-1]`` are overwritten.
    ``ends``: as in :func:`find_bad_length_crc`, the lengths having been checked. About 30 ns a record of 240
    bytes, and half of that where it is compiled. Raises IndexError where ``ends`` do not rise, or lie outside.
    """
    if len(ends) < 2:
        return []
    if ends[0] < 0 or ends[-1] > len(buffer) or np.diff(ends).min() < FRAME_BYTES:
        raise IndexError(f"frames must follow each other within {len(buffer)} bytes")
    assert buffer.flags.c_contiguous and buffer.flags.writeable
    loop = compiled(SEAM)
    stored = _seam_by_numpy(buffer, ends) if loop is None else _seam_by_loop(loop, buffer, ends)
    run = buffer.data[int(ends[0]) + HEADER_BYTES : int(ends[-1])]
    if crc32c(run) == _CRC_OF_HEALTHY_RUN:
        return []
    return _find_bad_records(buffer, ends, stored)


SEAM = """
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


def _seam_by_loop(loop: Any, buffer: Bytes1D, ends: npt.NDArray[np.int64]) -> Crcs:
    """Replace stored CRCs and headers as the module's docstring says; returns these CRCs, unmasked."""
    ends = np.ascontiguousarray(ends)
    stored = np.empty(len(ends) - 1, np.uint32)
    reset = _RESET.tobytes()
    words = int.from_bytes(reset[:8], "little", signed=True), int.from_bytes(reset[8:], "little")
    loop(buffer.ctypes.data, ends.ctypes.data, len(stored), _MASK_DELTA, *words, stored.ctypes.data)
    return stored


def _seam_by_numpy(buffer: Bytes1D, ends: npt.NDArray[np.int64]) -> Crcs:
    footers = ends[1:] - FOOTER_BYTES
    stored: Crcs = words_at(buffer, footers) - np.uint32(_MASK_DELTA)
    stored = (stored >> np.uint32(17)) | (stored << np.uint32(15))
    seams = np.empty((len(footers), FRAME_BYTES), dtype=np.uint8)
    seams[:, :FOOTER_BYTES] = stored.astype("<u4", copy=False).view(np.uint8).reshape(-1, FOOTER_BYTES)
    seams[:, FOOTER_BYTES:] = _RESET
    items_at(buffer, FRAME_BYTES)[footers[:-1]] = seams[:-1].view(f"V{FRAME_BYTES}")[:, 0]
    last = int(footers[-1])
    buffer[last : last + FOOTER_BYTES] = seams[-1, :FOOTER_BYTES]
    return stored


def stored_crcs(buffer: Bytes1D, ends: npt.NDArray[np.int64]) -> Crcs:
    """uint32, (n,): the CRCs of records' data that are stored in ``buffer``, as it is."""
    return words_at(buffer, ends[1:] - FOOTER_BYTES)


def chain_crcs(buffer: Bytes1D, ends: npt.NDArray[np.int64], previous: int) -> int:
    """A CRC32C over the stored CRCs of consecutive records, ``previous`` being that of the records before.

    ``buffer`` must have been through :func:`check_data_crcs`, which leaves them unmasked. About 5 ns a record.
    """
    crc: int = crc32c(stored_crcs(buffer, ends).data, previous)
    return crc


def _find_bad_records(buffer: Bytes1D, ends: npt.NDArray[np.int64], stored: Crcs) -> list[tuple[int, int, int]]:
    view = buffer.data
    bad = []
    for record, expected in enumerate(stored.tolist()):
        found = crc32c(view[int(ends[record]) + HEADER_BYTES : int(ends[record + 1]) - FOOTER_BYTES])
        if found != expected:
            bad.append((record, expected, found))
    return bad
