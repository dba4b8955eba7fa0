"""Shards made byte by byte, and everything that is found in one, as plain Python values."""

from __future__ import annotations

import gc
import gzip
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from loaderd.errors import Damage
from loaderd.formats import framing
from loaderd.formats.blocks import Block, BlockReader
from loaderd.formats.shard_index import ANCHOR_RECORDS, ShardIndex
from loaderd.kernels.crc import framed
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile
from tests.helpers.record_bytes import header

Records = dict[int, bytes]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": gzip.compress, "zlib": zlib.compress}


def frames(payloads: Iterable[bytes]) -> bytes:
    return b"".join(map(framed, payloads))


def starts_of(payloads: Sequence[bytes]) -> list[int]:
    """Where each record's frame starts, and where the last one ends."""
    return [0, *itertools.accumulate(len(payload) + 16 for payload in payloads)]


def payloads_of(count: int) -> list[bytes]:
    """``count`` payloads of different lengths, each of which tells its number."""
    return [struct.pack("<I", number) * (1 + number % 7) for number in range(count)]


def random_payloads(count: int, num_bytes: int = 50) -> list[bytes]:
    """Payloads that do not compress."""
    generator = np.random.default_rng(count)
    return [generator.bytes(num_bytes) for _ in range(count)]


def reader(data: bytes, most: int = 1 << 30) -> Callable[[memoryview], int]:
    """Reads ``data``, at most ``most`` bytes at a time."""
    position = 0

    def read_into(view: memoryview) -> int:
        nonlocal position
        part = data[position : position + min(most, len(view))]
        view[: len(part)] = part
        position += len(part)
        return len(part)

    return read_into


def scanned(data: bytes, most: int = 1 << 30) -> tuple[Records, list[Damage]]:
    """What ``scan`` finds: the healthy payloads by record number, and the damage."""
    records: Records = {}
    damages = []
    for found in framing.scan("shard", reader(data, most)):
        if isinstance(found, Damage):
            damages.append(found)
        else:
            take(records, found, found.first_record)
    return records, damages


def take(records: Records, piece: framing.RecordChunk, first_record: int) -> None:
    """Add the healthy payloads of ``piece``, whose first record has that number."""
    for index, (start, length) in enumerate(zip(piece.payload_starts, piece.payload_lengths, strict=True)):
        if index not in piece.bad:
            assert first_record + index not in records, "a record comes once"
            records[first_record + index] = piece.buffer[start : start + length].tobytes()


def make_shard(path: Path, data: bytes) -> ShardFile:
    path.write_bytes(data)
    (file,) = list_shards(path)
    return file


def overwrite(file: ShardFile, data: bytes) -> None:
    """Change a shard's bytes as a failing disk does: the size and the time of change stay."""
    assert len(data) == file.size_bytes
    Path(file.uri).write_bytes(data)
    os.utime(file.uri, ns=(file.mtime_ns, file.mtime_ns))


def write_too_large(path: Path, front: Sequence[bytes], behind: Sequence[bytes]) -> None:
    """A shard with a record of zeros between others that is a byte larger than any may be. It is sparse: 1 GiB."""
    with open(path, "wb") as shard:
        shard.write(frames(front) + header(framing.MAX_RECORD_BYTES + 1))
        shard.seek(framing.MAX_RECORD_BYTES + 1, os.SEEK_CUR)
        shard.write(bytes(4) + frames(behind))


def num_descriptors() -> int:
    """Open descriptors of this process, without those that other tests left to the garbage collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def blocks_of(index: ShardIndex, shard: int = 0) -> list[Block]:
    """The blocks of an index, each with its anchors; checks that none is left over."""
    blocks = [Block(shard, *index.block(number)) for number in range(len(index.counts))]
    anchors = b"".join(block.anchors for block in blocks)
    assert len(anchors) == 4 * len(index.runs)
    assert index.compression != "none" or len(index.runs) == sum(-(-b.num_records // ANCHOR_RECORDS) for b in blocks)
    return blocks


def read_blocks(reader: BlockReader, blocks: Iterable[Block]) -> tuple[Records, list[Damage]]:
    """What ``read`` finds in whole blocks: healthy payloads by record number of the shard, and the damage."""
    records: Records = {}
    damages = []
    for block in blocks:
        for found in reader.read(block, 0, block.num_records):
            if isinstance(found, Damage):
                damages.append(found)
            else:
                first = found.first_record - block.first_record
                assert first >= 0 and first + found.num_records <= block.num_records
                take(records, found, found.first_record)
    return records, damages
