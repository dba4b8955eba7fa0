"""Plain, GZIP or ZLIB: told by a shard's content, and read as one stream of bytes.

A TFRecord file starts with a length and its CRC. Where these match, the file is plain, whatever its first bytes look
like; otherwise its first bytes tell GZIP (RFC 1952) and ZLIB (RFC 1950). A file that is plainly of another kind
(``kinds``), as it is or inflated, is refused; any other file is taken for plain (and its first record for damaged).
"""

from __future__ import annotations

from collections.abc import Callable

from loaderd.errors import Damage, LoaderdError
from loaderd.formats.framing import MAX_RECORD_BYTES
from loaderd.formats.inflate import MOST_INFLATED, READ_BYTES, open_inflater
from loaderd.formats.kinds import GZIP_MAGIC, HEAD_BYTES, Content, is_frame, kind_of, refused
from loaderd.formats.point_finder import open_finder
from loaderd.formats.restart_points import RestartPoints
from loaderd.kernels.crc import HEADER_BYTES
from loaderd.storage.shard_file import Compression, ReadAt, RestartPoint

OnRead = Callable[[int], None]
"""Called after each read of a shard from front to back, with the offset in the file that the reading has reached."""

_EXPECTED = "a TFRecord file, plain, GZIP or ZLIB"
_HINT_FIXED = "Where it holds records of a fixed size, give a schema of FixedRecords, which may be wrapped so."
ALL_BYTES = 1 << 62
"""For ``ByteStream.skip``: up to the end."""
# A bomb is what hardly any data is: deflate makes 1032 bytes of one where all of them are the same.
_BOMB_RATIO, _SMALL_BYTES = 1000, 512 << 20
_MOST_OFFSET = (1 << 63) - 1 - HEADER_BYTES
# A record is in memory whole. A small compressed file could say that it holds one of 1 GiB.
_ANY_RECORD_BYTES, _RECORD_BYTES_PER_BYTE = 64 << 20, 64


def detect_compression(shard: str, read_at: ReadAt, size_bytes: int) -> Compression:
    """How the file is compressed, from its first bytes; ``shard`` is its name.

    Raises ShardFormatError where it is plainly a file of another kind than TFRecord, or holds one, compressed.
    """
    content = Content(read_at, size_bytes)
    compression = compression_of_head(content.head)
    if compression != "gzip" and not is_frame(content.head) and (kind := kind_of(content, but="zlib")):
        raise refused(shard, kind, _EXPECTED, also=_HINT_FIXED if kind in ("zstd", "tar", "zip") else "")
    if compression != "none":
        inside = kind_of(front_of(open_stream(shard, read_at, compression)), but="tfrecord")
        if inside:
            raise refused(shard, inside, _EXPECTED, inside=f"compressed with {compression}")
    return compression


def compression_of_head(head: bytes) -> Compression:
    """How a file that begins with ``head`` is compressed, if it holds TFRecord."""
    if is_frame(head):
        return "none"
    if head.startswith(GZIP_MAGIC):
        return "gzip"
    # Half of ZLIB's first byte says "deflate", and its first two bytes are a multiple of 31. One length in 500 looks
    # like that too, but its bytes 4 to 7 are zeros, and no stream that zlib writes has four zeros there.
    is_zlib = len(head) >= 2 and head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return "zlib" if is_zlib and (len(head) < 8 or any(head[4:8])) else "none"


def front_of(stream: ByteStream, num_bytes: int = HEAD_BYTES) -> Content:
    """What is at the front of a stream, which is read for it."""
    buffer = memoryview(bytearray(num_bytes))
    filled = stream.fill(buffer)
    return Content.of_bytes(buffer[:filled], is_whole=filled < num_bytes and stream.damage is None)


def no_callback(offset: int) -> None:
    """An ``OnRead`` for when nobody wants to know."""


def most_record_bytes(compression: Compression, size_bytes: int) -> int:
    """How many bytes a record of a TFRecord file of ``size_bytes`` may have."""
    if compression == "none":
        return MAX_RECORD_BYTES
    return min(MAX_RECORD_BYTES, max(_ANY_RECORD_BYTES, _RECORD_BYTES_PER_BYTE * size_bytes))


def open_stream(
    shard: str,
    read_at: ReadAt,
    compression: Compression,
    on_read: OnRead = no_callback,
    record_bytes: int = 0,
    point: RestartPoint | None = None,
    finds_points: bool = False,
) -> ByteStream:
    """The bytes of a shard from its front, or from ``point``, to its end, without their compression.

    ``shard`` is its name. ``record_bytes``: of records of a fixed size, which have no CRCs; 0: TFRecord.
    ``finds_points``: whether the stream, from the front, is to have ``points``.
    """
    if compression == "none":
        return ByteStream(read_at, on_read)
    return InflatedStream(shard, read_at, compression, on_read, record_bytes, point, finds_points)


class ByteStream:
    """A file from front to back, up to its end or to ``damage``.

    ``is_garbled``: whether what came before the damage may be wrong as well: nobody knows where the damage begins.
    """

    damage: Damage | None = None
    is_garbled = False
    point_offsets: list[int] | None = None
    """Of the restart points so far, in what is inflated; None: none are looked for."""

    def __init__(self, read_at: ReadAt, on_read: OnRead = no_callback) -> None:
        self._read_at, self._on_read = read_at, on_read
        self._offset = 0

    def read_into(self, view: memoryview) -> int:
        """Fill ``view`` as far as one step goes; returns the bytes written, 0 at the end."""
        got = self._read_at(self._offset, view)
        self._offset += got
        self._on_read(self._offset)
        return got

    def points(self) -> RestartPoints | None:
        """The restart points of what was read; None: none were looked for."""
        return None

    def fill(self, view: memoryview) -> int:
        """Fill ``view``; returns the bytes written, fewer only at the end."""
        filled = 0
        while filled < len(view) and (got := self.read_into(view[filled:])):
            filled += got
        return filled

    def skip(self, num_bytes: int) -> None:
        """Go on so many bytes, or to the end."""
        self._offset += num_bytes

    def jump_to(self, offset: int) -> bool:
        """Go on at ``offset``, if a frame begins or the file ends there; returns whether."""
        before = bytearray(1 + HEADER_BYTES)
        got = self._read_at(offset - 1, memoryview(before)) if offset <= _MOST_OFFSET else 0
        if got == 1 or is_frame(before[1:got]):
            self._offset = offset
            return True
        return False


class InflatedStream(ByteStream):
    """A compressed file from front to back, inflated. Where it is damaged or cut, it ends, and ``damage`` says so."""

    def __init__(
        self,
        shard: str,
        read_at: ReadAt,
        compression: Compression,
        on_read: OnRead = no_callback,
        record_bytes: int = 0,
        point: RestartPoint | None = None,
        finds_points: bool = False,
    ) -> None:
        super().__init__(read_at, on_read)
        self._shard, self._record_bytes = shard, record_bytes
        self._is_zstd = compression == "zstd"
        self._finder = open_finder(shard, self._read, compression) if finds_points else None
        self._inflater = self._finder or open_inflater(self._read, compression, is_exact=True, point=point)
        if self._finder is not None:
            self.point_offsets = self._finder.offsets
        if point is not None:
            self._offset = point.offset

    def points(self) -> RestartPoints | None:
        return None if self._finder is None else self._finder.points()

    def _read(self, offset: int, view: memoryview) -> int:
        got = self._read_at(offset, view)
        self._on_read(offset + got)
        return got

    def read_into(self, view: memoryview) -> int:
        if self.damage is not None:
            return 0
        try:
            data = self._inflater.read(len(view))
        except LoaderdError:  # from reading the file
            raise
        except Exception as error:  # each library has errors of its own
            is_cut = isinstance(error, EOFError) or (self._is_zstd and "Truncated" in str(error))
            expected = "more" if isinstance(error, EOFError) else "valid"
            expected = f"{expected} compressed data behind compressed byte {self._inflater.tell()}"
            self._end(expected, str(error), is_garbled=not is_cut or self._ends_as_written())
            return 0
        view[: len(data)] = data
        self._offset += len(data)
        compressed_bytes = self._inflater.tell()
        # Records without CRCs that hold next to nothing, over and over.
        if self._record_bytes and self._offset > max(_SMALL_BYTES, _BOMB_RATIO * compressed_bytes):
            expected = f"at most {_BOMB_RATIO} bytes of each that is compressed"
            self._end(expected, f"a bomb, {self._offset} bytes of {compressed_bytes}", is_garbled=True)
        return len(data)

    def _end(self, expected: str, found: str, is_garbled: bool) -> None:
        self.damage = Damage(self._shard, -1, self._offset, expected, found, lost_bytes=-1)
        self.is_garbled = is_garbled

    def _ends_as_written(self) -> bool:
        """Whether the last four bytes are a possible size. GZIP ends with the size, so nothing is cut off then.

        Instead, a damaged bit has hidden the end of the data, and what was inflated behind that end means nothing.
        """
        if self._is_zstd or not self._record_bytes:
            return False
        tail, end = bytearray(4), self._inflater.tell()
        self._read_at(max(0, end - len(tail)), memoryview(tail))
        size = int.from_bytes(tail, "little")
        # Most files that are cut end in a number that is larger than all that their bytes can be inflated to.
        return 0 < size <= MOST_INFLATED * end and size % self._record_bytes == 0

    def skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, READ_BYTES)))
        while num_bytes and (got := self.read_into(scratch[: min(num_bytes, len(scratch))])):
            num_bytes -= got

    def jump_to(self, offset: int) -> bool:
        return False
