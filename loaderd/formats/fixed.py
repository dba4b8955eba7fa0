"""Records of fixed size: how a shard wraps them, and how they are read from front to back.

=======  =================================================  =====================================================
kind     its first bytes                                    blocks
=======  =================================================  =====================================================
npz      ``PK``, as every zip                               one: its arrays are inflated whole (``npz``)
tar      ``ustar`` at byte 257, or a header's checksum      one a member (``tar``)
gzip     ``1f 8b 08``                                       from one restart point to the next (``restart_points``)
zstd     ``28 b5 2f fd``                                    likewise; one, if it is one frame
npy      ``93 NUMPY``                                       as many as ``block_records`` says (``npy``)
parquet  ``PAR1``, and at the end or in front of a page     one a row group (``parquet``)
arrow    ``ARROW1``                                         one a record batch (``arrow_file``)
none     anything else                                      as many as ``block_records`` says
=======  =================================================  =====================================================

A stream has no marks between records and no CRCs of them. If it is cut, the records before the cut are right. If a
compressed stream is garbled, nobody knows which records are right: the damage shows where it cannot be inflated, or
only by the CRC at its end. So none of its records is used, nor are those of a bomb. Nothing tells whether a plain
file is as it was written.

A shard is refused where it plainly is or holds a file of another kind (``kinds``), or records of another version than
``expect`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from loaderd.errors import Damage, ShardFormatError
from loaderd.formats.compression import ByteStream, OnRead, no_callback, open_stream
from loaderd.formats.framing import RecordChunk
from loaderd.formats.inflate import inflate_whole
from loaderd.formats.kinds import (
    GZIP_MAGIC,
    HEAD_BYTES,
    KINDS,
    NPY_MAGICS,
    ZIP_MAGIC,
    ZSTD_MAGIC,
    Content,
    is_tar_header,
    kind_of,
    refused,
)
from loaderd.kernels.crc import Bytes1D
from loaderd.schema import FixedRecords
from loaderd.schema.records import MOST_IN_FRONT
from loaderd.storage.shard_file import Compression, ReadAt

_MAGIC: dict[bytes, Compression] = {
    ZIP_MAGIC: "npz",
    GZIP_MAGIC: "gzip",
    ZSTD_MAGIC: "zstd",
    **dict.fromkeys(NPY_MAGICS, "npy"),
}
_WITH_COLUMNS: tuple[Compression, ...] = ("parquet", "arrow")
_OF_ONE_SIZE: tuple[Compression, ...] = ("npz", "npy", *_WITH_COLUMNS)
_PIECE_BYTES = 1 << 20


def detect_wrapping(shard: str, read_at: ReadAt, size_bytes: int, records: FixedRecords) -> Compression:
    """How the file wraps its records, from its first bytes.

    Raises ShardFormatError where it is plainly a file of another kind, or of other records, or of rows of one size
    where ``records`` have several.
    """
    content = Content(read_at, size_bytes)
    wrapping = wrapping_of(shard, content)
    if wrapping == "none":
        refuse_others(shard, content, records)
    elif records.sizes is not None and wrapping in _OF_ONE_SIZE:
        text = f"{shard} is of the kind {wrapping}, whose rows have one size, and not {records.in_words}"
        raise ShardFormatError(text, hint="Give FixedRecords of one version, without sizes.")
    return wrapping


def wrapping_of(shard: str, content: Content) -> Compression:
    """How the file wraps its records, whatever they are."""
    head = content.head
    for kind in _WITH_COLUMNS:
        if KINDS[kind].matches(content):
            return kind
    is_empty_tar = shard.endswith(".tar") and not any(head)  # one without members is zeros alone
    return _by_magic(head) or ("tar" if is_tar_header(head) or is_empty_tar else "none")


def _by_magic(head: bytes) -> Compression | None:
    return next((wrapping for magic, wrapping in _MAGIC.items() if head.startswith(magic)), None)


def refuse_others(shard: str, content: Content, records: FixedRecords, start: int = 0, inside: str = "") -> None:
    """Raise ShardFormatError where ``content`` is plainly of another kind than ``records``, or of other records.

    ``start``: where in the shard it begins. ``inside``: how it is wrapped, in words.
    """
    expected = " or ".join(f"{size:,}" for size in records.all_sizes)
    expected = f"records of {expected} bytes"
    if kind := kind_of(content, records):
        raise refused(shard, kind, expected, start=start, inside=inside)
    if others := other_records(content, records):
        size_bytes, what = others
        found = f"records of {size_bytes:,} bytes with {what}" + (f", {inside}" if inside else "")
        damage = Damage(shard, 0, start, records.in_words, found, lost_bytes=-1)
        hint = "Give the files of the version that the schema is of, or a schema of these records (FixedRecords)."
        raise ShardFormatError(f"{shard} holds {found}, and not {records.in_words}", hint=hint, damage=damage)


def other_records(content: Content, records: FixedRecords) -> tuple[int, str] | None:
    """(bytes of a record, the values of ``expect`` in words), where ``content`` holds records of another version.

    That is: the first record contradicts ``expect`` or ``sizes``, or the second one does, and what the first one has
    there comes again at all multiples of another size, which divides the whole. None where this does not add up, so
    that it may be damage.
    """
    assert records.dtype.fields is not None
    names = [*([] if records.sizes is None else [records.sizes[0]]), *records.expect]
    spans = [(records.offset_of(name), records.dtype.fields[name][0].itemsize) for name in names]
    end = max((begin + length for begin, length in spans), default=0)
    sample = content.at(0, sample_bytes(records)) if spans else b""
    first = sample[: records.record_bytes].ljust(records.record_bytes, b"\0")
    held = b"".join(first[begin : begin + length] for begin, length in spans)
    known_bytes = records.size_in(sample)
    second = sample[known_bytes : known_bytes + end]
    fits = not records.contradiction(first) and (len(second) < end or not records.contradiction(second))
    # What is filled with one byte is no version: a disk that fails gives zeros.
    if len(sample) < end or len(set(held)) == 1 or fits:
        return None
    data = np.frombuffer(sample, np.uint8)
    again = np.ones(len(data) - end + 1, bool)
    for begin, length in spans:
        for place in range(begin, begin + length):
            again &= data[place : place + len(again)] == data[place]
    sizes = [size for size in np.flatnonzero(again)[1:].tolist() if size >= end and again[::size].all()]
    size_bytes = next((size for size in sizes if not (content.size_bytes or 0) % size), known_bytes)
    row = np.frombuffer(first, records.dtype)[0]
    what = ", ".join(f"{name} {np.asarray(row[name]).tolist()}" for name in names)
    return (size_bytes, what) if size_bytes % known_bytes else None


def sample_bytes(records: FixedRecords) -> int:
    """How many bytes from the front of a stream are enough to tell what it holds: some records."""
    return min(max(HEAD_BYTES, MOST_IN_FRONT * records.record_bytes), _PIECE_BYTES)


def size_in_stream(stream: ByteStream, records: FixedRecords) -> int:
    """Bytes of each record of a stream, which is read for it, from its front."""
    if records.sizes is None:
        return records.record_bytes
    sample = memoryview(bytearray(sample_bytes(records)))
    return records.size_in(sample[: stream.fill(sample)])


def part_of(read_at: ReadAt, start: int, num_bytes: int) -> ReadAt:
    """Bytes ``start`` to ``start + num_bytes - 1`` of a file, as a file of their own."""
    return lambda offset, view: read_at(start + offset, view[: max(0, num_bytes - offset)])


def open_fixed(
    shard: str,
    read_at: ReadAt,
    start: int,
    num_bytes: int,
    compression: Compression,
    record_bytes: int,
    on_read: OnRead = no_callback,
    finds_points: bool = False,
) -> ByteStream:
    """The records in a part of a file, as a stream; ``compression``: for a member of a tar, that of the member.

    ``finds_points``: as of ``open_stream``, for a part that is the whole file.
    """
    part = part_of(read_at, start, num_bytes)
    return open_stream(
        shard, part, compression, lambda offset: on_read(start + offset), record_bytes, finds_points=finds_points
    )


def compression_of_member(shard: str, read_at: ReadAt, start: int, num_bytes: int) -> Compression | Damage:
    """How a member of a tar is compressed, from its first bytes; a Damage where that is neither gzip nor zstd."""
    view = memoryview(bytearray(4))
    head = bytes(view[: part_of(read_at, start, num_bytes)(0, view)])
    wrapping = _by_magic(head)
    if wrapping in ("gzip", "zstd"):
        return wrapping
    return Damage(shard, 0, start, "a gzip or zstd file in the tar", f"one that begins with {head!r}")


def scan_fixed(
    shard: str,
    stream: ByteStream,
    records: FixedRecords,
    size: int,
    first_record: int,
    first_offset: int,
    multiple_of: int = 1,
    most_records: int = 1 << 62,
) -> Iterator[RecordChunk | Damage]:
    """The whole records of a stream, in order, and at the end a Damage if the stream is cut or damaged.

    The stream stands at record ``first_record`` of the shard, ``first_offset`` bytes from its start. ``size``: bytes
    of each record. ``multiple_of``: so is the number of records of each piece but the last. Behind ``most_records``,
    nothing is read.
    """
    unit_bytes = multiple_of * size
    buffer: Bytes1D = np.empty(max(1, _PIECE_BYTES // unit_bytes) * unit_bytes, dtype=np.uint8)
    record, offset, left, contradiction = first_record, first_offset, 0, ""
    while not left and record - first_record < most_records:
        filled = stream.fill(buffer.data[: (most_records + first_record - record) * size])
        count, left = divmod(filled, size)
        if count:
            if record == first_record:
                contradiction = records.contradiction(buffer[:size].tobytes())
            yield fixed_piece(buffer, count, size, offset, record)
            record, offset = record + count, offset + count * size
        if filled < len(buffer):
            break
    if stream.damage is not None:
        yield replace(stream.damage, record=record, offset=offset)
    elif left:
        found = f"{left} bytes" + (f"; the first record has {contradiction}" if contradiction else "")
        yield Damage(shard, record, offset, f"a record of {size} bytes", found, lost_bytes=left)


def inflate_records(stored: memoryview, most_bytes: int) -> bytes | None:
    """All of a gzip or zstd file that is in memory; None where that is above ``most_bytes``, or anything is wrong."""
    wrapping = _by_magic(bytes(stored[:4]))
    return inflate_whole(stored, wrapping, most_bytes) if wrapping in ("gzip", "zstd") else None


def fixed_piece(buffer: Bytes1D, count: int, size: int, offset: int, first_record: int) -> RecordChunk:
    """The first ``count`` records of a buffer, of ``size`` bytes each."""
    ends = np.arange(count + 1, dtype=np.int64) * size
    return RecordChunk(buffer, ends, offset, first_record, header_bytes=0, footer_bytes=0)
