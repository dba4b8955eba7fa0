"""A value that the supervisor writes, and all of its processes read: plain values, in memory that they share."""

from __future__ import annotations

import os
import struct
import time
import zlib
from typing import Any

import msgpack

_HEAD = struct.Struct("<QI")  # the length of what follows, and its checksum

_FIRST_READS, _READ_AGAIN_S = 1000, 0.001


class SharedValue:
    """A map in an anonymous file, for use in several threads. ``fd``: that of another process; None: a new one."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("loaderd-shared") if fd is None else fd
        self._read: tuple[bytes, dict[str, Any]] = b"", {}

    def write(self, value: dict[str, Any]) -> None:
        """For one process."""
        packed = msgpack.packb(value)
        os.pwrite(self.fd, _HEAD.pack(len(packed), zlib.crc32(packed)) + packed, 0)

    def read(self) -> dict[str, Any]:
        """What was written last; or what was written before that, if it is just being written."""
        for _ in range(_FIRST_READS):
            head, value = self._read
            now = os.pread(self.fd, _HEAD.size, 0)
            if len(now) == _HEAD.size and now != head:
                length, checksum = _HEAD.unpack(now)
                packed = os.pread(self.fd, length, _HEAD.size)
                if zlib.crc32(packed) == checksum:
                    value = msgpack.unpackb(packed)
                    self._read = now, value
            if self._read[0]:
                break
            time.sleep(_READ_AGAIN_S)  # nothing was written before that
        return value
