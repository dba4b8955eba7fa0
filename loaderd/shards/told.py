"""What a shard holds, told by its content: TFRecord, or the records of a schema that ships.

A loader has a schema, which says what records are. A command that looks at shards may have none; it tells

- **TFRecord**, plain, GZIP or ZLIB, by the CRC of the first length;
- **KataGo's** npz by the names of their arrays, and board and targets by their shapes;
- **Leela Chess Zero's** games, plain, compressed or in a tar, by the version that the first record begins with.
"""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
import zlib

import numpy as np

from loaderd.schema import FixedRecords
from loaderd.schemas.kata import katago
from loaderd.schemas.leela import lc0
from loaderd.shards.access import Access
from loaderd.shards.crc import HEADER_BYTES, masked_crc
from loaderd.shards.files import open_shard
from loaderd.shards.fixed import detect_wrapping, open_fixed
from loaderd.shards.shard_file import OpenFile, ShardFile
from loaderd.shards.tar import Member, find_members
from loaderd.shards.zstd import FileReader

_POLICY, _TARGETS = "policyTargetsNCMove", "globalTargetsNC"
_NPY_HEAD_BYTES = 1 << 12


def tell_records(file: ShardFile, access: Access | None = None) -> FixedRecords | None:
    """The records of fixed size that a shard holds; None: TFRecord, or what nobody knows.

    Costs opening the file and a read or two. Raises ShardReadError where it cannot be opened, and StorageError.
    """
    opened = open_shard(file, access)
    try:
        head = _read(opened, 0, HEADER_BYTES)
        if _is_frame(head):
            return None
        if head.startswith(b"PK\x03\x04"):
            return _tell_npz(opened, file.size_bytes)
        return _tell_stream(opened, file)
    finally:
        opened.close()


def _tell_stream(opened: OpenFile, file: ShardFile) -> FixedRecords | None:
    known = lc0().records
    assert known is not None
    # As if the size were that of whole records: this is not to refuse any file.
    wrapping = detect_wrapping(file.uri, opened, known.record_bytes, known)
    start, num_bytes = 0, file.size_bytes
    if wrapping == "none" and num_bytes % known.record_bytes:
        return None
    if wrapping == "tar":
        member = next(find_members(file.uri, opened, file.size_bytes), None)
        if not isinstance(member, Member):
            return None
        start, num_bytes = member.offset, member.num_bytes
    head = bytearray(HEADER_BYTES)
    got = open_fixed(file.uri, opened, start, num_bytes, wrapping).read_into(memoryview(head))
    is_lc0 = got >= 4 and int.from_bytes(head[:4], "little") == known.expect["version"]
    return known if is_lc0 and not _is_frame(bytes(head)) else None


def _is_frame(head: bytes) -> bool:
    """Whether these are a length and its CRC, as TFRecord begins with."""
    return len(head) >= HEADER_BYTES and masked_crc(head[:8]) == int.from_bytes(head[8:HEADER_BYTES], "little")


def _tell_npz(opened: OpenFile, size_bytes: int) -> FixedRecords | None:
    with contextlib.suppress(zipfile.BadZipFile, zlib.error, OSError, ValueError, KeyError, IndexError):
        with zipfile.ZipFile(io.BufferedReader(FileReader(opened, size_bytes))) as archive:
            moves, targets = (_shape_of(archive, name) for name in (_POLICY, _TARGETS))
        return katago(math.isqrt(moves[2] - 1), targets[1]).records
    return None


def _shape_of(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """The shape of an array, from the first bytes of its entry. Raises KeyError for one that there is not."""
    with archive.open(f"{name}.npy") as entry:
        header = io.BytesIO(entry.read(_NPY_HEAD_BYTES))
    version = np.lib.format.read_magic(header)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape: tuple[int, ...] = read(header)[0]
    return shape


def _read(opened: OpenFile, offset: int, size: int) -> bytes:
    data = bytearray(size)
    return bytes(data[: opened.read_at(offset, memoryview(data))])
