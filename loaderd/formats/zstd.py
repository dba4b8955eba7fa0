"""Reads a zstd file from front to back, by pyarrow, which is imported only for such a shard."""

from __future__ import annotations

import io
from typing import Any

from loaderd.errors import Damage, LoaderdError
from loaderd.formats.compression import ByteStream, OnRead, bomb
from loaderd.storage.shard_file import Readable

_READ_BYTES = 1 << 18
_STEP_RATIO = 64


def decompress(data: memoryview, most_bytes: int) -> bytes:
    """All of a zstd file that is in memory. Raises OSError, and ValueError where it is more than ``most_bytes``."""
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.BufferReader(data), "zstd")
    parts: list[bytes] = []
    left_bytes, step_bytes = most_bytes + 1, _READ_BYTES  # pyarrow allocates a step before it knows what is there
    while part := stream.read(min(step_bytes, left_bytes)):
        parts.append(part)
        left_bytes -= len(part)
        step_bytes *= 4
        if not left_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


class FileReader(io.RawIOBase):
    """A ``Readable`` as a file object, for Python's libraries."""

    def __init__(self, file: Readable, size_bytes: int) -> None:
        self._file, self._size_bytes, self._offset = file, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = max(0, base + offset)
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any) -> int:
        got = self._file.read_at(self._offset, memoryview(buffer).cast("B"))
        self._offset += got
        return got


class ZstdStream(ByteStream):
    """As ``InflatedStream``. To get all that is before damage, it begins again, in ever shorter steps."""

    def __init__(self, shard: str, file: Readable, size_bytes: int, on_read: OnRead) -> None:
        self._shard = shard
        self._file, self._size_bytes = file, size_bytes
        self._on_read = on_read
        self._step_bytes = _READ_BYTES
        self._inflated_bytes = 0
        self._begin()

    def _begin(self) -> None:
        import pyarrow as pa

        self._reader = FileReader(self._file, self._size_bytes)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._reader, mode="r"), "zstd")

    def read_into(self, view: memoryview) -> int:
        while self.damage is None:
            try:
                data = self._stream.read(min(self._step_bytes, len(view)))
            except LoaderdError:  # from reading the file
                raise
            except OSError as error:  # pyarrow raises it for all damage
                self._step_back(str(error))
                continue
            view[: len(data)] = data
            self._inflated_bytes += len(data)
            self._on_read(self._reader.tell())
            self.damage = bomb(self._shard, self._inflated_bytes, self._reader.tell())
            self.is_garbled = self.damage is not None
            return len(data)
        return 0

    def _step_back(self, said: str) -> None:
        """Go back to where the failed step began, to try a shorter one; a byte that cannot be read is damage."""
        if self._step_bytes == 1:
            expected = f"valid compressed data behind compressed byte {self._reader.tell()}"
            self.is_garbled = "Truncated" not in said
            self.damage = Damage(self._shard, -1, self._inflated_bytes, expected, said, lost_bytes=-1)
            return
        self._step_bytes //= _STEP_RATIO
        self._begin()
        left = self._inflated_bytes
        while left:
            left -= len(self._stream.read(min(left, _READ_BYTES)))
            self._on_read(self._reader.tell())
