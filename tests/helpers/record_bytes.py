"""Parts of records, byte by byte: TFRecord's header, and what a tf.train.Example (protobuf) is made of."""

from __future__ import annotations

import struct

from loaderd.kernels.crc import masked_crc


def header(length: int) -> bytes:
    """What stands in front of a record of this length."""
    raw = struct.pack("<Q", length)
    return raw + struct.pack("<I", masked_crc(raw))


def varint(value: int, padding: int = 0) -> bytes:
    """``value`` (of up to 64 bits; negative ones in two's complement), ``padding`` bytes longer than it need be."""
    value = int(value) & (1 << 64) - 1
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)] + [0] * padding
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def field(tag: int, payload: bytes, padding: int = 0) -> bytes:
    """``tag``: its number and type."""
    return bytes([tag]) + varint(len(payload), padding) + payload
