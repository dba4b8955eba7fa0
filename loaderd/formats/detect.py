"""What a shard holds, detected by its content: TFRecord, or the records of a schema that ships.

A loader has a schema, which says what records are. A command that looks at shards may have none; it detects

- **TFRecord**, plain, GZIP or ZLIB, by the CRC of the first length;
- **KataGo's** npz by the names of their arrays, and board and targets by their shapes;
- **Leela Chess Zero's** games, plain, compressed or in a tar, by the version and the input format that the first
  record begins with;
- **boards of NNUE trainers and of shogi, and Ceres' records**, in the same files, by what the first 32 records hold.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from loaderd.errors import Damage, ShardFormatError, ShardReadError
from loaderd.formats.compression import detect_compression
from loaderd.formats.fixed import compression_of_member, open_fixed, wrapping_of
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.kinds import Content, is_frame, refused_columns
from loaderd.formats.npy import VALUES, open_npy, row_dtype
from loaderd.formats.npz import arrays_of
from loaderd.formats.table import table_class
from loaderd.formats.tar import Member, find_members
from loaderd.kernels.crc import HEADER_BYTES
from loaderd.schema import Feature, FixedRecords, Raw, Schema
from loaderd.schemas import ceres, nnue, shogi
from loaderd.schemas.kata import METADATA, NUM_TARGETS, Q_VALUES, katago
from loaderd.schemas.leela import INPUT_FORMATS, SIZES, lc0
from loaderd.storage.access import Access
from loaderd.storage.files import OpenFile, open_shard
from loaderd.storage.shard_file import TABLES, Compression, ShardFile

_MOST_BOARD_SIZE, _ANY_BLOCK = 99, 1024
_MOST_BOARDS = 32
_BOARDS: tuple[tuple[np.dtype[Any], Callable[[], Schema], Callable[[Any], bool]], ...] = (
    (nnue.BULLET, nnue.bullet, nnue.could_be),
    (nnue.MARLIN, nnue.marlin, nnue.could_be),
    (nnue.SFEN, nnue.nnue_bin, nnue.could_be),
    (shogi.HCPE, shogi.hcpe, shogi.could_be),
    (shogi.PSV, shogi.psv, shogi.could_be),
    (ceres.RECORD, ceres.ceres_tpg, ceres.could_be),
)
"""Of records that have no mark: their dtype, their schema, and whether the first ones could be such."""
_POLICY, _TARGETS = "policyTargetsNCMove", "globalTargetsNC"


def detect_records(file: ShardFile, access: Access | None = None) -> FixedRecords | None:
    """The records of the schema that :func:`detect_schema` finds, if any."""
    detected = detect_schema(file, access)
    return None if detected is None else detected[0].records


def detect_schema(file: ShardFile, access: Access | None = None) -> tuple[Schema, str] | None:
    """The schema of the records of fixed size that a shard holds, and the Python that makes it.

    None: TFRecord, or nothing known. Costs opening the file and some reads. Raises ShardFormatError where it is
    plainly a file of another kind, ShardReadError where it cannot be opened, and StorageError.
    """
    if file.columns:  # of these, somebody must say what they are
        raise refused_columns(file.uri)
    with closing(open_shard(file, access)) as opened:
        content = Content(opened.read_at, file.size_bytes)
        if is_frame(content.head):
            return None
        wrapping = wrapping_of(file.uri, content)
        if wrapping == "npz":
            return _detect_npz(opened, file)
        if wrapping in (*TABLES, "npy"):
            return None
        front = _Front(opened, file, wrapping)
        detected = _detect_lc0(front) or _detect_boards(front)
        if detected is None and wrapping in ("none", "gzip"):
            detect_compression(file.uri, opened.read_at, file.size_bytes)
        return detected


def columns_of(file: ShardFile) -> tuple[FixedRecords | None, dict[str, str]] | None:
    """What a row of a file holds, where the file says so itself. None: it does not.

    (Its columns, or None if none of them can be a feature; of those that cannot, why.) Raises as
    :func:`detect_schema`.
    """
    if file.columns:
        return _columns_of_parts(file)
    with closing(open_shard(file)) as opened:
        wrapping = wrapping_of(file.uri, Content(opened.read_at, file.size_bytes))
        if wrapping == "npz":
            fields = list(arrays_of(file, opened.read_at).items())
            return FixedRecords(np.dtype(fields)) if fields else None, {}
        if wrapping in TABLES:
            from loaderd.formats.arrow_columns import records_in  # and pyarrow

            return records_in(table_class(wrapping)(file, opened.read_at, None))
        if wrapping == "npy":
            dtype = row_dtype(open_npy(file, opened.read_at))
            return FixedRecords(dtype) if dtype.names and dtype.itemsize else None, {}
        return None


def _columns_of_parts(file: ShardFile) -> tuple[FixedRecords | None, dict[str, str]]:
    """Of files that belong together. Those of plain bytes are as wide as another one's rows are many."""
    features: dict[str, Feature] = {}
    left_out: dict[str, str] = {}
    plain, rows = [], 0
    for (name, *_), part in zip(file.columns, file.parts, strict=True):
        found = columns_of(part)
        if found is None:
            plain.append((name, part))
            continue
        records, why = found
        left_out |= why
        rows = rows or num_rows_of(part, records)
        if records is None:
            continue
        if list(records) == [VALUES]:
            features[name] = records[VALUES]
        else:
            names = [name, *records.lengths_of(name)] if name in records else list(records)
            features |= {each: records[each] for each in names}
    for name, part in plain:
        with closing(open_shard(part)) as opened:
            wrapping = wrapping_of(part.uri, Content(opened.read_at, part.size_bytes))
        width, left = divmod(part.size_bytes, rows) if rows and wrapping == "none" else (0, 0)
        if width and not left:
            features[name] = Raw("uint8", (width,))
        else:
            how = "" if wrapping == "none" else f" of {wrapping}"
            why_not = f"{part.size_bytes:,} bytes{how}" + (
                f" of {rows:,} rows" if rows else ", of an unknown number of rows"
            )
            left_out[name] = f"{part.name} does not say how wide its rows are: {why_not}"
    return FixedRecords(features) if features else None, left_out


def num_rows_of(file: ShardFile, records: FixedRecords | None) -> int:
    """How many of ``records``, which is what :func:`columns_of` found, a file holds."""
    return 0 if records is None else build_fixed_index(file, records, _ANY_BLOCK).num_records


class _Front:
    """The bytes that the records of a file, or of the first member of a tar that may hold some, begin with.

    Each is read once. ``size_bytes``: of all records, if a plain file says so.
    """

    def __init__(self, opened: OpenFile, file: ShardFile, wrapping: Compression) -> None:
        self.shard = file.uri
        self.size_bytes = file.size_bytes if wrapping == "none" else None
        place = (0, file.size_bytes, wrapping) if wrapping != "tar" else _first_member(opened, file)
        self._stream = None if place is None else open_fixed(file.uri, opened.read_at, *place, max(SIZES.values()))
        self._head = bytearray()

    def read(self, count: int) -> bytes:
        """The first ``count`` of them, or as many as there are."""
        if self._stream is not None and count > len(self._head):
            more = bytearray(count - len(self._head))
            self._head += more[: self._stream.fill(memoryview(more))]
        return bytes(self._head[:count])

    def may_hold(self, record_bytes: int) -> bool:
        """Whether records of so many bytes can be all that there is."""
        return self.size_bytes is None or self.size_bytes % record_bytes == 0


def _detect_lc0(front: _Front) -> tuple[Schema, str] | None:
    head = front.read(2 * max(SIZES.values()))
    version, input_format = (int.from_bytes(head[start : start + 4], "little") for start in (0, 4))
    size = SIZES.get(version)
    if len(head) < HEADER_BYTES or size is None or is_frame(head) or not front.may_hold(size):
        return None
    if input_format not in INPUT_FORMATS and head[:8] == head[size : size + 8]:  # else the first record is damaged
        raise ShardFormatError(
            f"{front.shard} holds records of lc0 with input_format {input_format}, which no schema reads",
            hint=f"loaderd.schemas.lc0() reads the input formats {', '.join(map(str, INPUT_FORMATS))}.",
        )
    option = f"input_format={input_format}" if input_format in INPUT_FORMATS and input_format != 1 else ""
    return lc0(input_format=input_format if option else 1), f"loaderd.schemas.lc0({option})"


def _detect_boards(front: _Front) -> tuple[Schema, str] | None:
    for dtype, schema, could_be in _BOARDS:
        if front.may_hold(dtype.itemsize):
            head = front.read(_MOST_BOARDS * dtype.itemsize)
            boards = np.frombuffer(head, dtype, len(head) // dtype.itemsize)
            if len(boards) and could_be(boards):
                return schema(), f"loaderd.schemas.{schema.__name__}()"
    return None


def _first_member(opened: OpenFile, file: ShardFile) -> tuple[int, int, Compression] | None:
    """(offset, bytes, compression) of the first member of a tar that may hold records."""
    for member in find_members(file.uri, opened.read_at, file.size_bytes):
        if isinstance(member, Member):
            compression = compression_of_member(file.uri, opened.read_at, member.offset, member.num_bytes)
            if not isinstance(compression, Damage):
                return member.offset, member.num_bytes, compression
    return None


def _detect_npz(opened: OpenFile, file: ShardFile) -> tuple[Schema, str] | None:
    with contextlib.suppress(ShardReadError, ValueError, KeyError, IndexError):
        arrays = arrays_of(file, opened.read_at)
        size, targets = math.isqrt(arrays[_POLICY].shape[1] - 1), arrays[_TARGETS].shape[0]
        if size > _MOST_BOARD_SIZE:  # an array without rows may say any
            return None
        options: dict[str, Any] = {"board_size": size}
        options |= {"num_targets": targets} if targets > NUM_TARGETS else {}
        options |= {name: True for name, array in (("q_values", Q_VALUES), ("metadata", METADATA)) if array in arrays}
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        return katago(**options), f"loaderd.schemas.katago({text})"
    return None
