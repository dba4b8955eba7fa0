"""Plain, GZIP or ZLIB: told by a shard's content, and read as one stream of bytes.

A TFRecord file starts with a length and its CRC. Where these match, the file is plain, whatever its first bytes look
like; otherwise its first bytes tell GZIP (RFC 1952) and ZLIB (RFC 1950). A file that is plainly of another kind
(``kinds``), as it is or inflated, is refused; any other file is taken for plain (and its first record for damaged).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from loaderd.errors import Damage
from loaderd.formats.framing import MAX_RECORD_BYTES
from loaderd.formats.kinds import GZIP_MAGIC, HEAD_BYTES, Content, is_frame, kind_of, refused
from loaderd.kernels.crc import HEADER_BYTES
from loaderd.storage.shard_file import Compression, Readable

OnRead = Callable[[int], None]
"""Called after each read of a shard from front to back, with the offset in the file that the reading has reached."""

_EXPECTED = "a TFRecord file, plain, GZIP or ZLIB"
_HINT_FIXED = "Where it holds records of a fixed size, give a schema of FixedRecords, which may be wrapped so."
_READ_BYTES = 1 << 18
# Little at a time: behind each member, an inflater returns what it has not used yet as a copy.
_FED_BYTES = 1 << 16
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
ALL_BYTES = 1 << 62
"""For ``ByteStream.skip``: up to the end."""
MOST_INFLATED = 1032
"""Bytes that deflate can make of one (zlib.net/zlib_tech.html)."""
# A bomb is what hardly any data is: deflate makes 1032 bytes of one where all of them are the same.
_BOMB_RATIO, _SMALL_BYTES = 1000, 512 << 20
_MOST_OFFSET = (1 << 63) - 1 - HEADER_BYTES
# A record is in memory whole. A small compressed file could say that it holds one of 1 GiB.
_ANY_RECORD_BYTES, _RECORD_BYTES_PER_BYTE = 64 << 20, 64


def detect_compression(shard: str, file: Readable, size_bytes: int) -> Compression:
    """How the file is compressed, from its first bytes; ``shard`` is its name.

    Raises ShardFormatError where it is plainly a file of another kind than TFRecord, or holds one, compressed.
    """
    content = Content(file.read_at, size_bytes)
    head = content.head
    if is_frame(head):
        return "none"
    if head.startswith(GZIP_MAGIC):
        compression: Compression = "gzip"
    elif kind := kind_of(content, but="zlib"):
        raise refused(shard, kind, _EXPECTED, also=_HINT_FIXED if kind in ("zstd", "tar", "zip") else "")
    # Half of ZLIB's first byte says "deflate", and its first two bytes are a multiple of 31. One length in 500 looks
    # like that too, but its bytes 4 to 7 are zeros, and no stream that zlib writes has four zeros there.
    elif _begins_like_zlib(head) and (len(head) < 8 or any(head[4:8])):
        compression = "zlib"
    else:
        return "none"
    inside = kind_of(front_of(open_stream(shard, file, compression)), but="tfrecord")
    if inside:
        raise refused(shard, inside, _EXPECTED, inside=f"compressed with {compression}")
    return compression


def _begins_like_zlib(head: bytes) -> bool:
    return len(head) >= 2 and head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0


def front_of(stream: ByteStream, num_bytes: int = HEAD_BYTES) -> Content:
    """What is at the front of a stream, which is read for it."""
    buffer = memoryview(bytearray(num_bytes))
    filled = stream.fill(buffer)
    return Content.of_bytes(buffer[:filled], is_whole=filled < num_bytes and stream.damage is None)


class ByteStream:
    """Bytes from front to back, up to their end or to ``damage``.

    ``is_garbled``: whether what came before the damage may be wrong as well: nobody knows where the damage begins.
    """

    damage: Damage | None = None
    is_garbled = False

    def read_into(self, view: memoryview) -> int:
        """Fill ``view`` as far as one step goes; returns the bytes written, 0 at the end."""
        raise NotImplementedError

    def fill(self, view: memoryview) -> int:
        """Fill ``view``; returns the bytes written, fewer only at the end."""
        filled = 0
        while filled < len(view) and (got := self.read_into(view[filled:])):
            filled += got
        return filled

    def skip(self, num_bytes: int) -> None:
        """Read and forget so many bytes, or all that there are."""
        scratch = memoryview(bytearray(min(num_bytes, _READ_BYTES)))
        while num_bytes and (got := self.read_into(scratch[: min(num_bytes, len(scratch))])):
            num_bytes -= got


def no_callback(offset: int) -> None:
    """An ``OnRead`` for when nobody wants to know."""


def most_record_bytes(compression: Compression, size_bytes: int) -> int:
    """How many bytes a record of a TFRecord file of ``size_bytes`` may have."""
    if compression == "none":
        return MAX_RECORD_BYTES
    return min(MAX_RECORD_BYTES, max(_ANY_RECORD_BYTES, _RECORD_BYTES_PER_BYTE * size_bytes))


def open_stream(shard: str, file: Readable, compression: Compression, on_read: OnRead = no_callback) -> ByteStream:
    """The bytes of a shard from front to back, without their compression; ``shard`` is its name."""
    if compression == "none":
        return PlainStream(file, on_read)
    return InflatedStream(shard, file, compression, on_read)


def bomb(shard: str, inflated_bytes: int, compressed_bytes: int) -> Damage | None:
    """The damage of a compressed stream of records without CRCs that holds next to nothing, over and over."""
    if inflated_bytes <= max(_SMALL_BYTES, _BOMB_RATIO * compressed_bytes):
        return None
    expected = f"at most {_BOMB_RATIO} bytes of each that is compressed"
    found = f"a bomb, {inflated_bytes} bytes of {compressed_bytes}"
    return Damage(shard, -1, inflated_bytes, expected, found, lost_bytes=-1)


class PlainStream(ByteStream):
    """A file from front to back."""

    def __init__(self, file: Readable, on_read: OnRead) -> None:
        self._file = file
        self._on_read = on_read
        self._offset = 0

    def read_into(self, view: memoryview) -> int:
        got = self._file.read_at(self._offset, view)
        self._offset += got
        self._on_read(self._offset)
        return got

    def skip(self, num_bytes: int) -> None:
        self._offset += num_bytes

    def jump_to(self, offset: int) -> bool:
        """Go on at ``offset``, if a frame begins or the file ends there; returns whether."""
        before = bytearray(1 + HEADER_BYTES)
        got = self._file.read_at(offset - 1, memoryview(before)) if offset <= _MOST_OFFSET else 0
        if got == 1 or is_frame(before[1:got]):
            self._offset = offset
            return True
        return False


class InflatedStream(ByteStream):
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
        self._most_fed = _FED_BYTES
        self._member_started = False
        self._is_behind_gzip = False
        self._buffer = bytearray(_READ_BYTES)
        self._inflated_bytes = 0

    def read_into(self, view: memoryview) -> int:
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
                if self._unit_bytes:
                    compressed_bytes = self._compressed_offset - len(self._pending)
                    self.damage = bomb(self._shard, self._inflated_bytes, compressed_bytes)
                    self.is_garbled = self.damage is not None
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
        is_possible = 0 < size <= MOST_INFLATED * self._compressed_offset
        return self._unit_bytes > 0 and is_possible and size % self._unit_bytes == 0

    def _inflate(self, most: int) -> bytes:
        """Inflate a step of what is pending: up to ``most`` bytes, maybe none yet."""
        before = self._inflater.copy() if self._member_started else zlib.decompressobj(self._window_bits)
        fed = self._pending[: self._most_fed]
        try:
            data: bytes = b"" if self._most_fed == _FED_BYTES else self._inflater.decompress(b"", most)
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

    def _fail(self, expected: str, found: str) -> None:
        self.damage = Damage(
            self._shard,
            -1,
            self._inflated_bytes,
            f"{expected} behind compressed byte {self._compressed_offset - len(self._pending)}",
            found,
            lost_bytes=-1,
        )
