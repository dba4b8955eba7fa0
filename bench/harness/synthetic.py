"""Synthetic shards, of the chess_eval record or of plain bits, written fast: the input of the measurements.

A shard is a TFRecord file; each record is framed and holds one ``tf.train.Example`` with two features::

    uint64 length │ uint32 masked CRC32C of length │ Example, length bytes │ uint32 masked CRC32C of Example

    Example { features { "d": bytes_list [194 bytes, or record_size]   "s": int64_list [score] } }

    d, most significant bit first (with a record_size: the number, and random bits, 3/16 of them set):
        bit     0 …   31   the record's number, big-endian, so that no two records are equal
        bit    32 … 1535   the rest of the (8, 8, 24) planes, 3/16 of the bits set
        bit  1536 … 1545   ten flags, likewise
        bit  1546          the score counts moves to mate (3 % of the records)
        bit  1547 … 1551   padding, 0

The varint of a score takes 1, 2 or 3 bytes, or 10 where the score is negative: four lengths of record in all.
Formats: https://www.tensorflow.org/tutorials/load_data/tfrecord and https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import crc32c
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

BOARD_BYTES = 194
COMPRESSIONS = ("", "GZIP", "ZLIB")

_LAST_BYTE = 193  # of d: two flags, the mate bit, five bits of padding
_FLAG_BITS = 0b1100_0000
_MATE_BIT = 0b0010_0000
_NUMBER_BYTES = 4
_CHUNK_BYTES = 32_768 * BOARD_BYTES
_MAX_RECORD_SIZE = 1 << 20
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_WBITS = {"GZIP": 31, "ZLIB": 15}  # zlib's code for the container around the deflate stream


Records = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def make_records(first: int, count: int, seed: int, record_size: int | None = None) -> Records:
    """Records ``first`` … ``first + count - 1``: ``d`` uint8, (count, 194 or record_size), and ``s`` int64, (count,).

    The same arguments give the same records; another ``first`` or ``count`` draws other random bits.
    """
    rng = np.random.default_rng((seed, first, count))
    a, b, c, d = (rng.integers(0, 256, (count, record_size or BOARD_BYTES), np.uint8) for _ in range(4))
    boards = a & b & (c | d)
    numbers = np.arange(first, first + count, dtype=">u4")
    boards[:, :_NUMBER_BYTES] = numbers.view(np.uint8).reshape(count, _NUMBER_BYTES)

    mate = rng.random(count) < 0.03
    if record_size is None:
        boards[:, _LAST_BYTE] &= _FLAG_BITS
        boards[:, _LAST_BYTE] |= np.where(mate, _MATE_BIT, 0).astype(np.uint8)

    centipawns = np.abs(rng.normal(0, 400, count)).astype(np.int64)
    extreme = rng.random(count) < 0.01
    size = np.where(extreme, rng.integers(1 << 14, 100_000, count), centipawns)
    size = np.where(mate, rng.integers(1, 61, count), size)  # some beyond B = 50, where the formula clips
    return boards, np.where(rng.random(count) < 0.25, -size, size)


def shard_records(
    shard: int, num_records: int, num_shards: int, seed: int, record_size: int | None = None
) -> Iterator[Records]:
    """The records of file number ``shard`` of :func:`write_shards`, chunk by chunk, as in :func:`make_records`."""
    start, stop = (num_records * end // num_shards for end in (shard, shard + 1))
    chunk = max(1, _CHUNK_BYTES // (record_size or BOARD_BYTES))
    for first in range(start, stop, chunk):
        yield make_records(first, min(chunk, stop - first), seed, record_size)


def frame_records(boards: npt.NDArray[np.uint8], scores: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The records in TFRecord framing, one behind the other, as uint8, (bytes,).

    ``boards``: uint8, (n, 194 or record_size); ``scores``: int64, (n,). Records of one length are written together,
    each to its own place.
    """
    varints, varint_bytes = _varints(scores)
    heads = {int(width): _example_head(boards.shape[1], int(width)) for width in np.unique(varint_bytes)}
    example_bytes = np.zeros(11, np.int64)
    for width, (before, between) in heads.items():
        example_bytes[width] = len(before) + boards.shape[1] + len(between) + width

    lengths = example_bytes[varint_bytes]
    ends = np.cumsum(lengths + _HEADER_BYTES + _FOOTER_BYTES)
    starts = ends - lengths - _HEADER_BYTES - _FOOTER_BYTES
    out = np.zeros(int(ends[-1]), np.uint8)
    for width, (before, between) in heads.items():
        group = np.flatnonzero(varint_bytes == width)
        length = np.array([example_bytes[width]], "<u8")
        header = np.concatenate([length.view(np.uint8), _mask(np.array([crc32c.crc32c(length.tobytes())]))])
        constant = np.frombuffer(before, np.uint8), np.frombuffer(between, np.uint8)
        parts = [header, constant[0], boards[group], constant[1], varints[group, :width]]
        frames = np.concatenate([np.broadcast_to(part, (len(group), part.shape[-1])) for part in parts], axis=1)
        sliding_window_view(out, frames.shape[1], writeable=True)[starts[group]] = frames

    view = out.data
    data = zip((starts + _HEADER_BYTES).tolist(), (ends - _FOOTER_BYTES).tolist(), strict=True)
    crcs = np.fromiter((crc32c.crc32c(view[start:end]) for start, end in data), np.uint64, len(scores))
    sliding_window_view(out, 4, writeable=True)[ends - _FOOTER_BYTES] = _mask(crcs).reshape(-1, 4)
    return out


def check_record_size(record_size: int) -> None:
    """Raises ValueError for a size that is not 4 bytes to 1 MiB."""
    if not _NUMBER_BYTES <= record_size <= _MAX_RECORD_SIZE:
        raise ValueError(f"record_size must be {_NUMBER_BYTES} to {_MAX_RECORD_SIZE} bytes, got {record_size}")


def write_shards(
    directory: str | os.PathLike[str],
    num_records: int,
    *,
    num_shards: int = 16,
    seed: int = 0,
    compression: str = "",
    record_size: int | None = None,
) -> list[Path]:
    """Write ``num_records`` records into ``num_shards`` files of ``directory`` and return their paths.

    They are chess records, or have ``record_size`` bytes of bits. ``compression`` is "", "GZIP" or "ZLIB", as
    ``tf.data.TFRecordDataset`` names them. Raises ValueError for another compression, for a ``record_size`` that is
    not 4 bytes to 1 MiB, for more shards than records, and for more records than 4 bytes can number.
    """
    if record_size is not None:
        check_record_size(record_size)
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
    if not 0 < num_shards <= num_records < 1 << 32:
        raise ValueError(f"must be 0 < num_shards <= num_records < 2**32, got {num_shards} and {num_records}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(num_shards):
        paths.append(folder / f"{shard:05d}-of-{num_shards:05d}.tfrecord")
        with paths[-1].open("wb") as file:
            made = shard_records(shard, num_records, num_shards, seed, record_size)
            for piece in compressed(compression, (frame_records(*records).data for records in made)):
                file.write(piece)
    return paths


def cached_shards(
    root: str | os.PathLike[str],
    num_records: int,
    *,
    num_shards: int = 16,
    seed: int = 0,
    compression: str = "",
    record_size: int | None = None,
) -> list[Path]:
    """As :func:`write_shards`, into a folder below ``root`` that is written once and used again afterwards."""
    kind = "chess_eval" if record_size is None else f"bits-{record_size}"
    name = f"{kind}-{num_records}-{num_shards}-{seed}{'-' if compression else ''}{compression.lower()}"
    folder = Path(root) / name
    if not folder.is_dir():
        Path(root).mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(prefix=name, dir=root)  # renamed when whole: an interrupted one is not used
        try:
            write_shards(
                unfinished,
                num_records,
                num_shards=num_shards,
                seed=seed,
                compression=compression,
                record_size=record_size,
            )
            Path(unfinished).rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(folder.glob("*.tfrecord"))


def compressed(compression: str, pieces: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    if not compression:
        yield from pieces
        return
    compressor = zlib.compressobj(level=1, wbits=_WBITS[compression])
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def _varints(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(base-128 varints, uint8 (n, 10); how many bytes each of them has, int64 (n,))."""
    bits = values.astype("<i8").view("<u8")[:, None] >> (7 * np.arange(10, dtype=np.uint64))
    num_bytes = np.maximum(1, (bits != 0).sum(axis=1))
    digits = (bits & 0x7F).astype(np.uint8)
    digits[np.arange(10) < num_bytes[:, None] - 1] |= 0x80
    return digits, num_bytes


def _field(number: int, value: bytes) -> bytes:
    """A length-delimited protobuf field (wire type 2)."""
    lengths, num_bytes = _varints(np.array([len(value)]))
    return bytes([number << 3 | 2]) + lengths[0, : num_bytes[0]].tobytes() + value


@functools.cache
def _example_head(board_bytes: int, varint_bytes: int) -> tuple[bytes, bytes]:
    """The constant bytes of an Example before ``d`` and between ``d`` and the score's varint."""
    board, score = b"\xff" * board_bytes, b"\xfe" * varint_bytes
    entries = (
        _field(1, b"d") + _field(2, _field(1, _field(1, board))),  # Feature.bytes_list is field 1
        _field(1, b"s") + _field(2, _field(3, _field(1, score))),  # Feature.int64_list is field 3
    )
    example = _field(1, b"".join(_field(1, entry) for entry in entries))
    before, _, rest = example.partition(board)
    return before, rest.removesuffix(score)


def _mask(crcs: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """TFRecord's masked CRCs as little-endian bytes: uint8, (4 n,)."""
    crc = crcs.astype("<u4")
    masked: npt.NDArray[np.uint32] = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(0xA282EAD8)
    return masked.view(np.uint8)
