"""Shards of records of a fixed size, and what somebody may make of them who means ill: numbers that cannot be, bombs.

What a disk does to any file is in ``mutate``. Everything follows from a ``random.Random``.
"""

from __future__ import annotations

import gzip
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.evil_npz import CENTRAL, END, npy, npz, stating
from tests.helpers.evil_tars import base_256, header, padded, pax_record
from tests.helpers.fixed_files import DTYPE, records_from, zstd
from tests.helpers.record_bytes import header as frame_header
from tests.reliability.mutate import HOSTILE

RECORD_BYTES = DTYPE.itemsize
NAMES = DTYPE.names or ()
NUMBERS = [*HOSTILE, *(-number for number in HOSTILE if number), -512, -1024, -1536, 511, 512, 513]


@dataclass(frozen=True, eq=False)
class FixedShard:
    """A healthy shard. ``members``: of a tar, where each header begins, where its data ends, and its records.

    ``is_checked``: whether CRCs tell each record that is another one.
    """

    wrapping: str
    data: bytes
    records: tuple[bytes, ...]
    members: tuple[tuple[int, int, int], ...] = ()
    is_checked: bool = True


def healthy_shards() -> list[FixedShard]:
    """Each wrapping, of some records."""
    rng, shards = Random("fixed"), []
    for count in (1, 9, 60):
        array = records_from(rng.randrange(1000), count)
        records = tuple(array[number : number + 1].tobytes() for number in range(count))
        whole = b"".join(records)
        arrays = {name: _npy_of(array[name]) for name in NAMES}
        shards += [
            FixedShard("none", whole, records, is_checked=False),
            FixedShard("gzip", gzip.compress(whole, mtime=0), records),
            FixedShard("zstd", zstd(whole), records, is_checked=False),
            FixedShard("npz", npz(arrays), records),
            FixedShard("npz", npz(arrays, zipfile.ZIP_STORED), records),
            _tar(rng, records, ["gz"]),
            _tar(rng, records, ["gz", "zst"]),
        ]
    return shards


def _tar(rng: Random, records: tuple[bytes, ...], endings: list[str]) -> FixedShard:
    data, members, done = b"", [], 0
    while done < len(records):
        game, ending = records[done : done + rng.choice([1, 3, 10])], rng.choice(endings)
        packed = gzip.compress(b"".join(game), mtime=0) if ending == "gz" else zstd(b"".join(game))
        begin = len(data)
        data += header(f"games/{done}.{ending}", len(packed)) + packed
        members.append((begin, len(data), len(game)))
        data = padded(data)
        if rng.randrange(3) == 0:
            data += header("LICENSE", 600) + padded(b"free" * 150)
        done += len(game)
    return FixedShard("tar", data + bytes(1024), records, tuple(members), endings == ["gz"])


def _npy_of(column: npt.NDArray[Any]) -> bytes:
    return npy(str(column.shape), column.tobytes(), column.dtype.base.str)


# ------------------------------------------------------------------------------------------------------- tars

Evil = Callable[[FixedShard, Random], bytes]


def _size(rng: Random, right: int) -> bytes:
    """The field of a size: of a hostile one, of one that is nearly right, or of no number."""
    number = rng.choice([*NUMBERS, *(right + rng.randrange(-600, 600) for _ in range(8))])
    if rng.randrange(8) == 0 or not -(1 << 87) <= number < 1 << 87:
        octal = b"%09o\0" % (abs(number) % 8**9)
        return rng.choice([b"-0" + octal, b"0o" + octal, rng.randbytes(12)])
    if 0 <= number < 8**11 and rng.randrange(2):
        return b"%011o\0" % number
    return base_256(number)


def other_size(shard: FixedShard, rng: Random) -> bytes:
    """The header of a member states another size, and has its right checksum."""
    begin, end, _ = rng.choice(shard.members)
    name = shard.data[begin : begin + 100].split(b"\0")[0].decode()
    kind = rng.choice([*[b"0"] * 6, b"\0", b"7", b"S", b"5", b"1", b"L", b"x", b"g", b"K", rng.randbytes(1)])
    forged = header(name, _size(rng, end - begin - 512), kind, sparse=rng.randrange(4) == 0)
    return shard.data[:begin] + forged + shard.data[begin + 512 :]


def in_front(shard: FixedShard, rng: Random) -> bytes:
    """Headers of PAX and GNU in front of a member: wrong, large, very many, or with numbers that cannot be."""
    begin, end, _ = rng.choice(shard.members)
    number = rng.choice([*NUMBERS, end - begin - 512])
    content = rng.choice(
        [
            pax_record(b"size", b"%d" % number),
            pax_record(b"size", b"9" * rng.randrange(1, 400)),
            pax_record(b"path", b"x/" * rng.randrange(1, 5000) + b"1.gz"),
            pax_record(b"GNU.sparse.name", b"1.gz") + pax_record(b"GNU.sparse.realsize", b"%d" % number),
            b"%d path=1.gz\n" % rng.choice([0, 1, 2, 5, 13, 14, 15, abs(number)]),
            b"1" * rng.choice([10, 600, 200_000]),
            pax_record(b"comment", rng.randbytes(rng.randrange(2000))) * rng.randrange(1, 20),
            rng.randbytes(rng.randrange(1, 2000)),
        ]
    )
    stated = _size(rng, len(content)) if rng.randrange(4) == 0 else len(content)
    one = header("front", stated, rng.choice([b"x", b"x", b"g", b"L", b"K", b"X"])) + padded(content)
    return shard.data[:begin] + one * rng.choice([1, 1, 2, 50]) + shard.data[begin:]


# ------------------------------------------------------------------------------------------- npz, gzip and zstd


def other_shape(shard: FixedShard, rng: Random) -> bytes:
    """An array whose header says something else than its values are."""
    count = len(shard.records)
    array, name = np.frombuffer(b"".join(shard.records), DTYPE), rng.choice(NAMES)
    rows = rng.choice([*NUMBERS, -count, count + 1, count - 1, 10**400])
    shape = rng.choice(
        [
            f"({', '.join(map(str, (rows, *array[name].shape[1:])))},)",
            f"({rows})",
            f"({count}, {rows})",
            f"({', '.join(['1'] * rng.choice([0, 33, 65, 300]))})",
            "(" * rng.choice([10, 300, 9000]),
            f"({'-' * rng.choice([1, 300, 9000])}1, 5)",
            "[1]",
            f"({count}.0, 5)",
        ]
    )
    right = array[name].dtype.base.str
    dtype = rng.choice([*[right] * 6, "O", "<f3", "V4000000000", "<U999999999", "M8[ns]", "[('a','u1')]"])
    arrays = {one: _npy_of(array[one]) for one in NAMES}
    length = rng.choice([None, None, None, rng.randrange(1 << 16)])
    arrays[name] = npy(shape, array[name].tobytes(), dtype, length, rng.choice([1, 1, 2, 3]))
    return npz(arrays, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))


def other_entry(shard: FixedShard, rng: Random) -> bytes:
    """A zip that states another size or place of an entry, or of its directory."""
    value = rng.choice([*NUMBERS, rng.randrange(len(shard.data) + 10)])
    if rng.randrange(3):
        return stating(shard.data, rng.choice(list(CENTRAL)), value)
    return stating(shard.data, rng.choice(list(END)), value, of_end=True)


def other_trailer(shard: FixedShard, rng: Random) -> bytes:
    """A gzip whose last four bytes are another size."""
    return shard.data[:-4] + struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)


def other_members(shard: FixedShard, rng: Random) -> bytes:
    """Members behind the first, many of them: empty, cut, of the same records, or no gzip."""
    more = rng.choice(
        [
            gzip.compress(b"", mtime=0),
            shard.data[: rng.randrange(1, len(shard.data))],
            bytes(rng.randrange(1, 50)),
            b"\x1f\x8b\x08" + rng.randbytes(1),
            shard.data,
        ]
    )
    return shard.data + more * rng.choice([1, 3, 70, 300])


def rle(total: int, window_log: int = 17, content: int | None = None, byte: int = 0) -> bytes:
    """A zstd frame (RFC 8878) that repeats a byte: four bytes for each 128 KiB.

    ``window_log``: what memory it states to need; ``content``: what size it states instead.
    """
    blocks = []
    for done in range(0, total, 1 << 17):
        size = min(1 << 17, total - done)
        is_last = done + size == total
        blocks.append(struct.pack("<I", size << 3 | 2 | is_last)[:3] + bytes([byte]))
    front = bytes([0, (window_log - 10) << 3]) if content is None else bytes([0xE0]) + struct.pack("<Q", content)
    return b"\x28\xb5\x2f\xfd" + front + b"".join(blocks)


def other_frame(shard: FixedShard, rng: Random) -> bytes:
    """A zstd frame that states another window or size, alone, in front of the records, or behind them."""
    size = RECORD_BYTES * rng.randrange(1, 200)
    frame = rng.choice(
        [
            rle(size, rng.randrange(10, 42)),
            rle(size, content=rng.choice([size, *HOSTILE, size + 1])),
            b"\x50\x2a\x4d\x18" + struct.pack("<I", rng.choice(HOSTILE) & 0xFFFFFFFF) + bytes(20),  # to be skipped
            b"\x28\xb5\x2f\xfd" + rng.randbytes(rng.randrange(1, 30)),
        ]
    )
    return rng.choice([frame, frame + shard.data, shard.data + frame, shard.data + frame * 50])


EVIL: dict[str, dict[str, Evil]] = {
    "none": {},
    "gzip": {"gzip, another size in the trailer": other_trailer, "gzip, many members": other_members},
    "zstd": {"zstd, another frame": other_frame},
    "npz": {"npz, another header of an array": other_shape, "npz, another entry of the zip": other_entry},
    "tar": {"tar, another size of a member": other_size, "tar, headers in front of a member": in_front},
}

# ------------------------------------------------------------------------------------------------------ bombs


def _deflated(front: bytes, mib: int, window_bits: int) -> bytes:
    deflater = zlib.compressobj(9, wbits=window_bits)
    parts = [deflater.compress(front), *(deflater.compress(bytes(1 << 20)) for _ in range(mib)), deflater.flush()]
    return b"".join(parts)


def bomb(rng: Random) -> tuple[str, bytes, bool]:
    """What it is, a file, and whether it is of TFRecord. Of 40 MiB and more, to be quick."""
    mib = rng.choice([40, 40, 70, 150])
    what = rng.choice(
        ["gzip", "zstd", "zstd in a tar", "zstd, a large window", "npz", "gzip, TFRecord", "zlib, TFRecord"]
    )
    if what.endswith("TFRecord"):
        front = frame_header(rng.choice([mib << 20, (mib << 20) - 28, 1 << 30, (1 << 30) + 1, 1 << 40]))
        return what, _deflated(front, mib, 31 if what.startswith("gzip") else 15), True
    if what == "npz":
        rows = (mib << 20) // RECORD_BYTES
        return what, npz({name: _npy_of(np.zeros(rows, DTYPE[name])) for name in NAMES}), False
    if what == "gzip":
        return what, _deflated(b"", mib, 31), False
    data = rle(mib << 20, rng.choice([26, 27]) if "window" in what else 17, byte=rng.randrange(2))
    return what, data if "tar" not in what else header("a.zst", len(data)) + padded(data) + bytes(1024), False
