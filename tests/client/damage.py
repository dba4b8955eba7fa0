"""Damaging shards as a disk does."""

from __future__ import annotations

import os
from pathlib import Path


def damage_data(path: Path, number: int) -> int:
    """Flip a bit in the data of a record; returns where its frame starts."""
    data = bytearray(path.read_bytes())
    offset = 0
    for _ in range(number):
        offset += int.from_bytes(data[offset : offset + 8], "little") + 16
    data[offset + 20] ^= 4
    path.write_bytes(data)
    return offset


def damage_unseen(path: Path, number: int) -> None:
    """As :func:`damage_data`, but the file's size and time say nothing of it."""
    status = path.stat()
    damage_data(path, number)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
