"""What a shard holds, detected by its content: TFRecord, or the records of a schema that ships.

A loader has a schema, which says what records are. A command that looks at shards may have none; it detects

- **TFRecord**, plain, GZIP or ZLIB, by the CRC of the first length;
- **KataGo's** npz by the names of their arrays, and board and targets by their shapes;
- **Leela Chess Zero's** games, plain, compressed or in a tar, by the version that the first record begins with.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from loaderd.errors import Damage, ShardReadError
from loaderd.formats.compression import detect_compression
from loaderd.formats.fixed import compression_of_member, open_fixed, wrapping_of
from loaderd.formats.kinds import Content, is_frame
from loaderd.formats.npz import arrays_of
from loaderd.formats.tar import Member, find_members
from loaderd.kernels.crc import HEADER_BYTES
from loaderd.schema import FixedRecords, Schema
from loaderd.schemas.kata import katago
from loaderd.schemas.leela import lc0
from loaderd.storage.access import Access
from loaderd.storage.files import open_shard
from loaderd.storage.shard_file import Compression, OpenFile, ShardFile

_MOST_BOARD_SIZE = 99
_POLICY, _TARGETS = "policyTargetsNCMove", "globalTargetsNC"


class DetectedSchema(NamedTuple):
    """A schema that ships, and the Python that makes it."""

    schema: Schema
    made_by: str


def detect_records(file: ShardFile, access: Access | None = None) -> FixedRecords | None:
    """The records of the schema that :func:`detect_schema` finds, if any."""
    detected = detect_schema(file, access)
    return None if detected is None else detected.schema.records


def detect_schema(file: ShardFile, access: Access | None = None) -> DetectedSchema | None:
    """The schema of the records of fixed size that a shard holds; None: TFRecord, or nothing known.

    Costs opening the file and some reads. Raises ShardFormatError where it is plainly a file of another kind,
    ShardReadError where it cannot be opened, and StorageError.
    """
    with closing(open_shard(file, access)) as opened:
        content = Content(opened.read_at, file.size_bytes)
        if is_frame(content.head):
            return None
        wrapping = wrapping_of(file.uri, content.head)
        detected = _detect_npz(opened, file) if wrapping == "npz" else _detect_stream(opened, file, wrapping)
        if detected is None and wrapping in ("none", "gzip"):
            detect_compression(file.uri, opened, file.size_bytes)
        return detected


def _detect_stream(opened: OpenFile, file: ShardFile, wrapping: Compression) -> DetectedSchema | None:
    known = lc0()
    assert known.records is not None
    if wrapping == "none" and file.size_bytes % known.records.record_bytes:
        return None
    parts: Iterable[tuple[int, int]] = [(0, file.size_bytes)] if wrapping != "tar" else _members(opened, file)
    for start, num_bytes in parts:
        of_part = compression_of_member(file.uri, opened, start, num_bytes) if wrapping == "tar" else wrapping
        if isinstance(of_part, Damage):
            continue
        head = bytearray(HEADER_BYTES)
        stream = open_fixed(file.uri, opened, start, num_bytes, of_part, known.records.record_bytes)
        got = stream.read_into(memoryview(head))
        is_lc0 = got >= 4 and int.from_bytes(head[:4], "little") == known.records.expect["version"]
        return DetectedSchema(known, "loaderd.schemas.lc0()") if is_lc0 and not is_frame(bytes(head)) else None
    return None


def _members(opened: OpenFile, file: ShardFile) -> Iterator[tuple[int, int]]:
    """Where in a tar the members are that hold records: (offset, bytes)."""
    for member in find_members(file.uri, opened, file.size_bytes):
        if isinstance(member, Member):
            yield member.offset, member.num_bytes


def _detect_npz(opened: OpenFile, file: ShardFile) -> DetectedSchema | None:
    with contextlib.suppress(ShardReadError, ValueError, KeyError, IndexError):
        arrays = arrays_of(file, opened)
        size, targets = math.isqrt(arrays[_POLICY].shape[1] - 1), arrays[_TARGETS].shape[0]
        if size > _MOST_BOARD_SIZE:  # an array without rows may say any
            return None
        return DetectedSchema(
            katago(size, targets), f"loaderd.schemas.katago(board_size={size}, num_targets={targets})"
        )
    return None
