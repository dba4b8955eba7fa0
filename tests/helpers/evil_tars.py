"""Headers of tars with any values, also those that no program writes."""

from __future__ import annotations

import tarfile


def header(name: str, size: int | bytes, kind: bytes = b"0", sparse: bool = False) -> bytes:
    """512 bytes with a right checksum. ``size``: a number, or the field. ``sparse``: another block is to follow."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[156:157] = kind
    block[482] = sparse
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def base_256(number: int) -> bytes:
    """A size as GNU tar writes those of more than 8 GiB, and would write those below 0."""
    return number.to_bytes(12, "big", signed=True) if number < 0 else b"\x80" + number.to_bytes(11, "big")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax_record(keyword: bytes, value: bytes) -> bytes:
    """One record of a PAX header, with its right length."""
    size = len(keyword) + len(value) + 3
    while len(b"%d %b=%b\n" % (size, keyword, value)) != size:
        size += 1
    return b"%d %b=%b\n" % (size, keyword, value)
