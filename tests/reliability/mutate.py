"""Shards, and what can happen to their bytes. Everything follows from a ``random.Random``."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from random import Random

from loaderd.kernels.crc import framed
from tests.helpers.record_bytes import field, header, varint

HOSTILE = [0, 1, 16, 2**20, 2**30, 2**30 + 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 17, 2**64 - 1]

Compress = Callable[[bytes], bytes]


def example(number: int, comment: bytes = b"", packed: bool = True) -> bytes:
    """A tf.train.Example of ``bits`` (four bytes), ``id``, two floats ``f`` and maybe a comment."""
    ids = field(0x0A, varint(number)) if packed else b"\x08" + varint(number)
    features = {
        b"bits": field(0x0A, field(0x0A, struct.pack(">I", number))),
        b"id": field(0x1A, ids),
        b"f": field(0x12, field(0x0A, struct.pack("<2f", number, -number))),
    }
    if comment:
        features[b"comment"] = field(0x0A, field(0x0A, comment))
    entries = [field(0x0A, field(0x0A, name) + field(0x12, value)) for name, value in features.items()]
    return field(0x0A, b"".join(entries))


@dataclass(frozen=True, eq=False)
class Shard:
    """A healthy shard: its records, and how it is compressed."""

    payloads: tuple[bytes, ...]
    compression: str = "none"

    @cached_property
    def stream(self) -> bytes:
        """The bytes without compression."""
        return b"".join(map(framed, self.payloads))

    @cached_property
    def starts(self) -> list[int]:
        """Where each record's frame starts, and where the last one ends."""
        return [0, *accumulate(len(payload) + 16 for payload in self.payloads)]


def compress_members(stream: bytes) -> bytes:
    """GZIP members, one behind the other, which end anywhere."""
    return b"".join(gzip.compress(stream[at : at + 300], mtime=0) for at in range(0, len(stream), 300))


COMPRESS: dict[str, Compress] = {
    "none": bytes,
    "gzip": lambda stream: gzip.compress(stream, mtime=0),
    "zlib": zlib.compress,
    "members": compress_members,
}


def healthy_shards() -> list[Shard]:
    """Records alike and of many sizes, in runs around the 32 of an anchor."""
    rng = Random("shards")
    shards = []
    for count in (1, 2, 9, 31, 33, 50):
        alike = tuple(example(rng.randrange(1 << 20, 1 << 21)) for _ in range(count))
        varied = tuple(
            example(rng.getrandbits(rng.randrange(1, 33)), rng.randbytes(rng.choice([0, 0, 3, 40, 130])), n % 3 > 0)
            for n in range(count)
        )
        shards += [Shard(alike), Shard(varied)]
        if count > 2:
            shards += [
                Shard(varied if count % 2 else alike, compression) for compression in ("gzip", "zlib", "members")
            ]
    return shards


# ------------------------------------------------------------------------------------------------ any bytes

Mutation = Callable[[bytes, Random, bytes], bytes]
"""From the data, and other data to take from, to damaged data."""


def _stretch(data: bytes, rng: Random, most: int = 400) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(
        len(data), start + rng.choice([1, 2, 4, 8, 12, 16, rng.randrange(1, 40), rng.randrange(1, most)])
    )


def flip_bit(data: bytes, rng: Random, other: bytes) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_bits(data: bytes, rng: Random, other: bytes) -> bytes:
    for _ in range(rng.randrange(2, 9)):
        data = flip_bit(data, rng, other)
    return data


def overwrite(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(data, rng)
    return data[:start] + rng.randbytes(stop - start) + data[stop:]


def zero(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(data, rng, 5000)
    return data[:start] + bytes(stop - start) + data[stop:]


def truncate(data: bytes, rng: Random, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def delete(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(data, rng)
    return data[:start] + data[stop:]


def insert(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(data, rng)
    return data[:start] + rng.randbytes(stop - start) + data[start:]


def duplicate(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(data, rng)
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[start:stop] + data[at:]


def copy_over(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(data, rng)
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[start:stop] + data[at + stop - start :]


def transplant(data: bytes, rng: Random, other: bytes) -> bytes:
    start, stop = _stretch(other, rng, 3000)
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[start:stop] + data[at + rng.choice([0, stop - start]) :]


BYTES: dict[str, Mutation] = {
    "one bit flipped": flip_bit,
    "2 to 8 bits flipped": flip_bits,
    "a stretch overwritten": overwrite,
    "a stretch zeroed": zero,
    "truncated": truncate,
    "a stretch deleted": delete,
    "a stretch inserted": insert,
    "a stretch duplicated": duplicate,
    "a stretch copied over another": copy_over,
    "a stretch of another shard": transplant,
}

# ------------------------------------------------------------------------------------- lengths and payloads


def _with_header(shard: Shard, rng: Random, change: Callable[[bytes], bytes]) -> bytes:
    stream, start = shard.stream, rng.choice(shard.starts[:-1])
    return stream[:start] + change(stream[start : start + 12]) + stream[start + 12 :]


def hostile_length(shard: Shard, rng: Random) -> bytes:
    """Another length, its CRC left as it was."""
    return _with_header(shard, rng, lambda head: struct.pack("<Q", rng.choice(HOSTILE)) + head[8:])


def forged_length(shard: Shard, rng: Random) -> bytes:
    """Another length, and its right CRC."""

    def forge(head: bytes) -> bytes:
        length = int.from_bytes(head[:8], "little")
        near = [max(0, length + rng.randrange(-40, 40)), length + rng.randrange(1, 3000)]
        return header(rng.choice(HOSTILE + near * 6))

    return _with_header(shard, rng, forge)


def hostile_varint(data: bytes, rng: Random, other: bytes) -> bytes:
    hostile = rng.choice([varint(rng.choice(HOSTILE)), b"\xff" * rng.randrange(1, 12), b"\x80" * 9 + b"\x7f"])
    at = rng.randrange(len(data) + 1)
    return data[:at] + hostile + data[at + rng.choice([0, 1, len(hostile)]) :]


def any_tag(data: bytes, rng: Random, other: bytes) -> bytes:
    """A byte that is a tag of some wire type, groups and the two that do not exist among them."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(4) << 3 | rng.randrange(8)]) + data[at + 1 :]


def nest(data: bytes, rng: Random, other: bytes) -> bytes:
    for _ in range(rng.choice([1, 2, 5, 200])):
        data = field(rng.choice([0x0A, 0x12]), data)
    return data


def join(data: bytes, rng: Random, other: bytes) -> bytes:
    """Two Examples in one: every key comes twice."""
    return data + other if rng.randrange(2) else field(0x0A, data[2:] + other[2:])


EXAMPLE: list[Mutation] = [*BYTES.values(), *[hostile_varint] * 4, *[any_tag] * 3, nest, join]


def mutated_examples(shard: Shard, rng: Random) -> bytes:
    """Examples that are malformed, in frames whose lengths and CRCs are right."""
    payloads = list(shard.payloads)
    for _ in range(rng.choice([1, 1, 3, len(payloads)])):
        at = rng.randrange(len(payloads))
        if payloads[at]:
            payloads[at] = rng.choice(EXAMPLE)(payloads[at], rng, rng.choice(shard.payloads))
    return Shard(tuple(payloads)).stream


STREAM: dict[str, Callable[[Shard, Random], bytes]] = {
    "a hostile length, old CRC": hostile_length,
    "a hostile length, right CRC": forged_length,
    "malformed Examples, right CRCs": mutated_examples,
}
