"""Records of fixed size: how a shard wraps them, and how they are read from front to back.

=======  =================================================  =====================================================
kind     its first bytes                                    blocks
=======  =================================================  =====================================================
npz      ``PK``, as every zip                               one: its arrays are inflated whole (``npz``)
tar      ``ustar`` at byte 257                              one a member (``tar``)
gzip     ``1f 8b 08``                                       one: it cannot be entered in the middle
zstd     ``28 b5 2f fd``                                    one
none     anything else                                      as many as ``block_records`` says
=======  =================================================  =====================================================

A stream has no marks between records and no CRCs of them. If it is cut, the records before the cut are right. If a
compressed stream is garbled, nobody knows which records are right: the damage shows where it cannot be inflated, or
only by the CRC at its end. So none of its records is used. Nothing tells whether a plain file is as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from loaderd.errors import Damage, ShardReadError
from loaderd.schema import FixedRecords
from loaderd.shards.compression import (
    HEAD_BYTES,
    ZIP_MAGIC,
    InflatedStream,
    OnRead,
    PlainStream,
    is_tar,
    other_kind,
    refuse_others,
    tell_nobody,
)
from loaderd.shards.crc import Bytes1D
from loaderd.shards.framing import Piece
from loaderd.shards.inflate import gunzip
from loaderd.shards.shard_file import Compression, Readable
from loaderd.shards.zstd import ZstdStream, decompress

_MAGIC: dict[bytes, Compression] = {ZIP_MAGIC: "npz", b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_PIECE_BYTES = 1 << 20
_SURE_BYTES = 6  # that tell another kind of file: no records begin with them by chance
_HINT = "Records of fixed size are read from plain, GZIP and zstd files, from tars of these, and from npz."

Stream = PlainStream | InflatedStream | ZstdStream


def detect_wrapping(shard: str, file: Readable, size_bytes: int, records: FixedRecords) -> Compression:
    """How the file wraps its records, from its first bytes.

    Raises ShardReadError where it begins like a file of another known kind. (Plain records may begin with any bytes:
    where the size is that of whole records, a few bytes do not tell.)
    """
    head = bytearray(HEAD_BYTES)
    got = file.read_at(0, memoryview(head))
    for magic, wrapping in _MAGIC.items():
        if head[:got].startswith(magic):
            return wrapping
    if is_tar(head[:got]) or (shard.endswith(".tar") and not any(head)):  # one without members is zeros alone
        return "tar"
    least_bytes = 0 if size_bytes % records.record_bytes else _SURE_BYTES
    refuse_others(shard, bytes(head[:got]), f"records of {records.record_bytes} bytes", _HINT, least_bytes)
    return "none"


def refuse_inside(
    shard: str, data: Bytes1D, start: int, compression: Compression, records: FixedRecords, of: str
) -> Damage | None:
    """What is wrong with a compressed part of a shard whose ``data`` begins like a file of another known kind.

    ``start``: the part's first byte; ``of``: in words, the member of a tar that it is. Raises ShardReadError where
    it is the whole shard.
    """
    kind = other_kind(data[:HEAD_BYTES].tobytes(), _SURE_BYTES)
    if not kind:
        return None
    expected = f"records of {records.record_bytes} bytes, compressed with {compression}"
    damage = Damage(shard, 0, start, expected, f"{kind}, compressed", lost_bytes=-1)
    if of:
        return damage
    text = f"{shard} is {kind}, compressed with {compression}, and not records of {records.record_bytes} bytes"
    raise ShardReadError(text, hint=f"{_HINT} Decompress it.", damage=damage)


class FilePart:
    """Bytes ``start`` to ``start + num_bytes - 1`` of an open file, as a file of its own."""

    def __init__(self, file: Readable, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes = file, start, num_bytes

    def read_at(self, offset: int, view: memoryview) -> int:
        return self._file.read_at(self._start + offset, view[: max(0, self._num_bytes - offset)])


def open_fixed(
    shard: str,
    file: Readable,
    start: int,
    num_bytes: int,
    compression: Compression,
    record_bytes: int,
    on_read: OnRead = tell_nobody,
) -> Stream:
    """The records in a part of a file, as a stream; ``compression``: for a member of a tar, that of the member."""
    part = FilePart(file, start, num_bytes)

    def on_part(offset: int) -> None:
        on_read(start + offset)

    if compression == "none":
        return PlainStream(part, on_part)
    if compression == "zstd":
        return ZstdStream(shard, part, num_bytes, on_part)
    return InflatedStream(shard, part, compression, on_part, record_bytes)


def compression_of_member(shard: str, file: Readable, start: int, num_bytes: int) -> Compression | Damage:
    """How a member of a tar is compressed, from its first bytes; a Damage where that is neither gzip nor zstd."""
    head = bytearray(4)
    got = FilePart(file, start, num_bytes).read_at(0, memoryview(head))
    wrapping = next((wrapping for magic, wrapping in _MAGIC.items() if head.startswith(magic)), None)
    if wrapping in ("gzip", "zstd"):
        return wrapping
    return Damage(shard, 0, start, "a gzip or zstd file in the tar", f"one that begins with {bytes(head[:got])!r}")


def scan_fixed(
    shard: str, stream: Stream, records: FixedRecords, first_record: int, first_offset: int
) -> Iterator[Piece | Damage]:
    """The whole records of a stream, in order, and at the end a Damage if the stream is cut or damaged.

    The stream stands at record ``first_record`` of the shard, ``first_offset`` bytes from its start.
    """
    size = records.record_bytes
    buffer: Bytes1D = np.empty(max(1, _PIECE_BYTES // size) * size, dtype=np.uint8)
    record, offset, left, contradiction = first_record, first_offset, 0, ""
    while not left:
        filled = _fill(stream, buffer)
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


def inflate_whole(stored: memoryview) -> bytes | None:
    """All of a gzip or zstd file that is in memory; None where anything is wrong with it."""
    if not len(stored):  # zstd would inflate it to nothing, without an error
        return None
    try:
        return gunzip(stored) if _MAGIC.get(bytes(stored[:3])) == "gzip" else decompress(stored)
    except Exception:  # each library has errors of its own
        return None


def is_garbled(stream: Stream) -> bool:
    """Read a stream to its end; returns whether it is garbled, so that none of its records may be used."""
    scratch: Bytes1D = np.empty(_PIECE_BYTES, dtype=np.uint8)
    while _fill(stream, scratch) == len(scratch):
        pass
    return stream.is_garbled


def _fill(stream: Stream, buffer: Bytes1D) -> int:
    """Fill the buffer; returns the bytes read, fewer only at the end."""
    filled = 0
    while filled < len(buffer):
        got = stream.read_into(buffer.data[filled:])
        if not got:
            break
        filled += got
    return filled


def fixed_piece(buffer: Bytes1D, count: int, size: int, offset: int, first_record: int) -> Piece:
    """The first ``count`` records of a buffer, of ``size`` bytes each."""
    ends = np.arange(count + 1, dtype=np.int64) * size
    return Piece(buffer, ends, offset, first_record, header_bytes=0, footer_bytes=0)
