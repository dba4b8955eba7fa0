"""Plain, GZIP or ZLIB: told by a shard's content, and read as one stream of bytes.

A TFRecord file starts with a length and its CRC. Where these match, the file is plain, whatever its first bytes look
like; otherwise its first bytes tell GZIP (RFC 1952) and ZLIB (RFC 1950). A file that begins like one of another known
kind is refused as one of that kind; any other file is taken for plain (and its first record for damaged).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from loaderd.errors import Damage, ShardReadError
from loaderd.shards.crc import HEADER_BYTES, masked_crc
from loaderd.shards.framing import MAX_RECORD_BYTES
from loaderd.shards.shard_file import Compression, Readable

OnRead = Callable[[int], None]
"""Called after each read of a shard from front to back, with the offset in the file that the reading has reached."""

ZIP_MAGIC = b"PK\x03\x04"
_GZIP_MAGIC = b"\x1f\x8b\x08"
_OTHERS = {
    b"\xfd7zXZ\x00": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"\xff\x06\x00\x00sNaPpY": "compressed with snappy",
    ZIP_MAGIC: "a zip archive (as an .npz is)",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x93NUMPY": "an array of numpy's",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"version https://": "a pointer of Git LFS, in place of the file itself",
}
"""How files of other kinds begin, and what they are."""
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
HEAD_BYTES = _TAR_MAGIC_AT + len(_TAR_MAGIC)
A_TFRECORD_FILE = "a TFRecord file, plain, GZIP or ZLIB"
"""What the damage expects that stands for a file of another kind."""
_HINT_OTHER = "Shards are TFRecord files, plain or compressed with GZIP or ZLIB, or what FixedRecords describes."
_HINT_COMPRESSED = "Decompress it, or compress it with gzip instead."
_READ_BYTES = 1 << 18
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_MOST_INFLATED = 1032  # bytes that deflate can make of one: zlib.net/zlib_tech.html
_MOST_OFFSET = (1 << 63) - 1 - HEADER_BYTES
# A record is in memory whole. A small compressed file could say that it holds one of 1 GiB.
_ANY_RECORD_BYTES, _RECORD_BYTES_PER_BYTE = 64 << 20, 64


def detect_compression(shard: str, file: Readable) -> Compression:
    """How the file is compressed, from its first bytes; ``shard`` is its name.

    Raises ShardReadError where it is a file of a kind that loaderd knows, and does not read.
    """
    head = bytearray(HEAD_BYTES)
    got = file.read_at(0, memoryview(head))
    if is_frame(bytes(head[:got])):
        return "none"
    refuse_others(shard, bytes(head[:got]), A_TFRECORD_FILE, _HINT_OTHER)
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    # Half of ZLIB's first byte says "deflate", and its first two bytes are a multiple of 31. One length in 500 looks
    # like that too, but its bytes 4 to 7 are zeros, and no stream that zlib writes has four zeros there.
    looks_like_zlib = got >= 2 and head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return "zlib" if looks_like_zlib and (got < 8 or any(head[4:8])) else "none"


def is_frame(head: bytes | bytearray) -> bool:
    """Whether a file begins with a length and its CRC, as TFRecord does."""
    return len(head) >= HEADER_BYTES and masked_crc(head[:8]) == int.from_bytes(head[8:HEADER_BYTES], "little")


def is_tar(head: bytes | bytearray) -> bool:
    """Whether the first ``HEAD_BYTES`` of a file, or all that it has, are those of a tar."""
    return head[_TAR_MAGIC_AT:HEAD_BYTES] == _TAR_MAGIC


def other_kind(head: bytes | bytearray, least_bytes: int = 0) -> str:
    """What is the file that begins with ``head``, in words; nothing where it is of no known kind.

    ``least_bytes``: kinds that fewer bytes tell are let through.
    """
    for magic, what in _OTHERS.items():
        if head.startswith(magic) and len(magic) >= least_bytes:
            return what
    return "a tar archive" if is_tar(head) else ""


def refuse_others(shard: str, head: bytes, expected: str, hint: str, least_bytes: int = 0) -> None:
    """Raise ShardReadError where ``head`` begins a file of another known kind than what is ``expected``.

    ``least_bytes``: as for :func:`other_kind`.
    """
    kind = other_kind(head, least_bytes)
    if kind:
        damage = Damage(shard, 0, 0, expected, f"one that is {kind}", lost_bytes=-1)
        compressed = kind.startswith("compressed")
        text = f"{shard} is {kind}, {'which loaderd does not read' if compressed else f'not {expected}'}"
        hint = f"{hint} {_HINT_COMPRESSED}" if compressed else hint
        raise ShardReadError(text, hint=hint, damage=damage)


def tell_nobody(offset: int) -> None:
    """An ``OnRead`` for when nobody wants to know."""


def most_record_bytes(compression: Compression, size_bytes: int) -> int:
    """How many bytes a record of a TFRecord file of ``size_bytes`` may have."""
    if compression == "none":
        return MAX_RECORD_BYTES
    return min(MAX_RECORD_BYTES, max(_ANY_RECORD_BYTES, _RECORD_BYTES_PER_BYTE * size_bytes))


def open_stream(
    shard: str, file: Readable, compression: Compression, on_read: OnRead = tell_nobody
) -> PlainStream | InflatedStream:
    """The bytes of a shard from front to back, without their compression; ``shard`` is its name."""
    if compression == "none":
        return PlainStream(file, on_read)
    return InflatedStream(shard, file, compression, on_read)


def read_over(read_into: Callable[[memoryview], int], num_bytes: int) -> None:
    """Read so many bytes, or all that there are, and forget them."""
    scratch = memoryview(bytearray(min(num_bytes, _READ_BYTES)))
    while num_bytes:
        got = read_into(scratch[: min(num_bytes, len(scratch))])
        if not got:
            break
        num_bytes -= got


class PlainStream:
    """A file from front to back."""

    damage: Damage | None = None
    is_garbled = False

    def __init__(self, file: Readable, on_read: OnRead) -> None:
        self._file = file
        self._on_read = on_read
        self._offset = 0

    def read_into(self, view: memoryview) -> int:
        """Fill ``view``; returns the bytes read, 0 at the end."""
        got = self._file.read_at(self._offset, view)
        self._offset += got
        self._on_read(self._offset)
        return got

    def skip(self, num_bytes: int) -> None:
        """Go on ``num_bytes`` further on, without reading them."""
        self._offset += num_bytes

    def jump_to(self, offset: int) -> bool:
        """Go on at ``offset``, if a frame begins or the file ends there; returns whether."""
        before = bytearray(1 + HEADER_BYTES)
        got = self._file.read_at(offset - 1, memoryview(before)) if offset <= _MOST_OFFSET else 0
        if got == 1 or is_frame(before[1:got]):
            self._offset = offset
            return True
        return False


class InflatedStream:
    """A compressed file from front to back, inflated; GZIP members that follow each other are one stream.

    Where the compressed data is damaged or cut, the stream ends there and ``damage`` says so. zlib delivers nothing
    of a call in which it meets damage. So such a call is repeated from the state before it with half of the input,
    down to the single byte that is damaged, and all output before that byte is delivered.
    """

    def __init__(
        self, shard: str, file: Readable, compression: Compression, on_read: OnRead, unit_bytes: int = 0
    ) -> None:
        """``unit_bytes``: the size of the inflated data is a multiple of this; 0: it may be any."""
        self._shard = shard
        self._file = file
        self._on_read = on_read
        self._unit_bytes = unit_bytes
        self._window_bits = _WINDOW_BITS[compression]
        self._inflater = zlib.decompressobj(self._window_bits)
        self._compressed_offset = 0
        self._pending = memoryview(b"")
        self._most_fed = _READ_BYTES
        self._member_started = False
        self._is_behind_gzip = False
        self._buffer = bytearray(_READ_BYTES)
        self._inflated_bytes = 0
        self.damage: Damage | None = None
        self.is_garbled = False
        """Whether what came before the damage may be wrong as well: nobody knows where the damage begins."""

    def read_into(self, view: memoryview) -> int:
        """Fill ``view`` as far as one step goes; returns the bytes written, 0 at the end."""
        while self.damage is None:
            got = self._refill() if not self._pending else 1
            if self._is_behind_gzip and self._pending and self._pending[0] == 0:  # padding, as for gzip(1)
                self._pending = self._pending[len(self._pending) - len(bytes(self._pending).lstrip(b"\0")) :]
                continue
            if not got and not self._member_started:
                return 0
            try:
                data = self._inflate(len(view))
            except zlib.error as error:
                self.is_garbled = True
                self._fail("valid compressed data", str(error))
                return 0
            if data:
                view[: len(data)] = data
                self._inflated_bytes += len(data)
                return len(data)
            if not got and self._member_started:
                self.is_garbled = self._ends_as_written()
                self._fail("more compressed data", "the end of the file")
        return 0

    def _ends_as_written(self) -> bool:
        """Whether the last four bytes are a possible size. GZIP ends with the size, so nothing is cut off then.

        Instead, a damaged bit has hidden the end of the data, and what was inflated behind that end means nothing.
        """
        tail = bytearray(4)
        self._file.read_at(max(0, self._compressed_offset - len(tail)), memoryview(tail))
        size = int.from_bytes(tail, "little")
        # Most files that are cut end in a number that is larger than all that their bytes can be inflated to.
        is_possible = 0 < size <= _MOST_INFLATED * self._compressed_offset
        return self._unit_bytes > 0 and is_possible and size % self._unit_bytes == 0

    def _inflate(self, most: int) -> bytes:
        """Inflate a step of what is pending: up to ``most`` bytes, maybe none yet."""
        before = self._inflater.copy()
        fed = self._pending[: self._most_fed]
        try:
            data: bytes = b"" if self._most_fed == _READ_BYTES else self._inflater.decompress(b"", most)
            if data or self._inflater.eof:
                fed = fed[:0]
            else:
                data = self._inflater.decompress(fed, most)
        except zlib.error:
            if len(fed) <= 1:
                raise
            self._inflater, self._most_fed = before, len(fed) // 2
            return b""
        self._member_started = True
        rest = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
        left = len(self._pending) - len(fed) + len(rest)
        if self._inflater.eof:
            self._inflater = zlib.decompressobj(self._window_bits)
            self._member_started = False
        self._is_behind_gzip = not self._member_started and self._window_bits == _WINDOW_BITS["gzip"]
        self._pending = self._pending[len(self._pending) - left :]
        return data

    def _refill(self) -> int:
        got = self._file.read_at(self._compressed_offset, memoryview(self._buffer))
        self._compressed_offset += got
        self._on_read(self._compressed_offset)
        self._pending = memoryview(bytes(memoryview(self._buffer)[:got]))
        return got

    def skip(self, num_bytes: int) -> None:
        """Inflate and forget so many bytes, or all that there are."""
        read_over(self.read_into, num_bytes)

    def _fail(self, expected: str, found: str) -> None:
        self.damage = Damage(
            self._shard,
            -1,
            self._inflated_bytes,
            f"{expected} behind compressed byte {self._compressed_offset - len(self._pending)}",
            found,
            lost_bytes=-1,
        )
