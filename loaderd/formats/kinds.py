"""What kind of file a shard is, by its content: one table for all readers and commands.

A reader asks :func:`kind_of` where a file is not what the schema says. A file that is plainly of another kind is
refused as a whole, whatever ``on_corrupt`` says: none of it is damage that could be left out.

**Records of a fixed size may hold any bytes**, and a glob may name a million shards. So each test in the table asks
for at least 37 bits that random bytes hold only by chance, once in 10^11 files: a magic of 5 bytes or more, or a
shorter one and a structure that it announces. Of data that inflate for 4 KiB: random data fail after some ten bytes,
since one symbol in five is a reference, mostly to where nothing has been inflated yet. Of text: two of five random
bytes are part of valid UTF-8 without control characters, so 32 bytes are worth 41 bits. Records may be text
themselves: where the schema says what they are, only numbers of several bytes count. TFRecord begins with a length of
8 bytes, some of them zeros: there, 5 bytes of text are enough.

Damage to the first bytes of a file hides its kind. Then it is read as before, as far as that goes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from loaderd.errors import Damage, ShardFormatError
from loaderd.formats.inflate import read_at_of
from loaderd.kernels.crc import HEADER_BYTES, masked_crc
from loaderd.schema import FixedRecords
from loaderd.storage.shard_file import ReadAt

HEAD_BYTES = 4096
_TAR_BYTES = 512
_MOST_SAMPLE_BYTES = 1 << 17
_ENOUGH_INFLATED_BYTES = 1 << 20
_ENOUGH_STORED_BYTES = 4096
_LEAST_TEXT_BYTES, _LEAST_TEXT_BYTES_OF_TFRECORD = 32, 5
_MOST_BLOCK_BYTES = 1 << 17
_MOST_CHUNK_BYTES = 100 << 20  # by Stockfish's reader
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")

GZIP_MAGIC = b"\x1f\x8b\x08"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZIP_MAGIC = b"PK\x03\x04"
NPY_MAGICS = tuple(b"\x93NUMPY" + bytes([version, 0]) for version in (1, 2, 3))


class Content:
    """Bytes of which the kind is asked: a file, or as much as is known of what a compressed one holds.

    ``read_at``: that of an open file, of which no more is read than is needed. ``size_bytes`` None: only the front is
    known.
    """

    def __init__(self, read_at: ReadAt, size_bytes: int | None) -> None:
        self._read_at = read_at
        self.size_bytes = size_bytes
        self.head = self.at(0, HEAD_BYTES)

    @classmethod
    def of_bytes(cls, data: Any, is_whole: bool) -> Content:
        """Bytes in memory; ``is_whole``: whether nothing is behind them."""
        return cls(read_at_of(memoryview(data)), len(data) if is_whole else None)

    def at(self, offset: int, num_bytes: int) -> bytes:
        """So many bytes from ``offset`` on; fewer where no more are known."""
        data = bytearray(num_bytes)
        return bytes(data[: self._read_at(offset, memoryview(data))])

    def ends_with(self, magic: bytes, behind_bytes: int = 0) -> bool:
        """Whether ``magic`` stands at the end, in front of so many bytes."""
        begin = -1 if self.size_bytes is None else self.size_bytes - len(magic) - behind_bytes
        return begin >= 0 and self.at(begin, len(magic)) == magic


class Kind(NamedTuple):
    """``what``: the file, in words, behind "is" or "holds"; ``cure``: what to do with it."""

    what: str
    cure: str
    matches: Callable[[Content], bool]


def is_frame(head: bytes | bytearray) -> bool:
    """Whether ``head`` begins with a length and its CRC, as a TFRecord file does."""
    return len(head) >= HEADER_BYTES and masked_crc(head[:8]) == int.from_bytes(head[8:HEADER_BYTES], "little")


def is_tar_header(head: bytes | bytearray) -> bool:
    """Whether a tar begins with ``head``: with ``ustar``, or, as those of 1979 do, with the checksum alone."""
    if head[257:262] == b"ustar":
        return True
    block = bytes(head[:_TAR_BYTES])
    stated = re.fullmatch(rb" *([0-7]{1,6}) *(\0 | \0|\0\0)", block[148:156])
    return stated is not None and int(stated[1], 8) == sum(block) - sum(block[148:156]) + 8 * ord(" ")


def _is_tfrecord(content: Content) -> bool:
    return is_frame(content.head) and not any(content.head[5:8])


def _is_gzip(content: Content) -> bool:
    head = content.head
    return head.startswith(GZIP_MAGIC) and len(head) > 3 and head[3] < 0x20 and _inflates(content, 31)


def _is_zlib(content: Content) -> bool:
    head = content.head
    is_header = len(head) > 2 and head[0] & 0x8F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return is_header and _inflates(content, 15)


def _inflates(content: Content, window_bits: int) -> bool:
    """Whether the front of ``content`` can be inflated, and is enough to tell."""
    inflater, stored = zlib.decompressobj(window_bits), content.at(0, _MOST_SAMPLE_BYTES)
    left, inflated_bytes = stored, 0
    try:
        while left and not inflater.eof and inflated_bytes < _ENOUGH_INFLATED_BYTES:
            inflated_bytes += len(inflater.decompress(left, _ENOUGH_INFLATED_BYTES))
            left = inflater.unconsumed_tail
    except zlib.error:
        return False
    is_enough = len(stored) >= _ENOUGH_STORED_BYTES or inflated_bytes >= _ENOUGH_INFLATED_BYTES
    return inflater.eof or is_enough


def _is_zstd(content: Content) -> bool:
    head = content.head
    if not head.startswith(ZSTD_MAGIC) or len(head) < 5 or head[4] & 0x08:
        return False
    is_single, size_flag, dictionary_flag = head[4] >> 5 & 1, head[4] >> 6, head[4] & 3
    size_bytes = (1 if is_single else 0, 2, 4, 8)[size_flag]
    block = 5 + (not is_single) + (0, 1, 2, 4)[dictionary_flag] + size_bytes
    header = int.from_bytes(head[block : block + 3], "little")
    return len(head) >= block + 3 and header >> 1 & 3 != 3 and header >> 3 <= _MOST_BLOCK_BYTES


def _is_lz4(content: Content) -> bool:
    head = content.head
    is_magic = head.startswith(b"\x04\x22\x4d\x18") and len(head) >= 7
    return is_magic and head[4] >> 6 == 1 and not head[4] & 2 and not head[5] & 0x8F and head[5] >> 4 >= 4


def _is_zip(content: Content) -> bool:
    head = content.head
    version, method = head[4:6], head[8:10]
    is_header = len(head) >= 30 and version[1] == 0 and version[0] < 64 and method[1] == 0 and method[0] < 100
    return head.startswith(ZIP_MAGIC) and is_header


def _is_parquet(content: Content) -> bool:
    # Behind the magic: a page's type and two sizes, each behind the byte by which Thrift says that an i32 follows.
    begins_with_page = re.match(rb"PAR1\x15[\x00-\x06]\x15", content.head)
    magic = content.head[:4]
    return bool(begins_with_page) or (magic in (b"PAR1", b"PARE") and content.ends_with(magic))


def _is_orc(content: Content) -> bool:
    return content.head.startswith(b"ORC") and content.ends_with(b"ORC", 1)


def _is_binpack(content: Content) -> bool:
    if not content.head.startswith(b"BINP") or len(content.head) < 8:
        return False
    end = 8 + int.from_bytes(content.head[4:8], "little")
    if content.size_bytes is None:
        return end <= _MOST_CHUNK_BYTES
    is_cut = content.size_bytes < end <= _MOST_CHUNK_BYTES
    return is_cut or end == content.size_bytes or content.at(end, 4) == b"BINP"


def _is_viriformat(content: Content) -> bool:
    head = content.head
    if len(head) < 32 or head[30] > 2 or head[24] & 127 > 64:  # as of nearly all other files
        return False
    from loaderd.schemas.nnue import begins_with_game  # needed only for these

    return begins_with_game(head)


def _is_pickle(content: Content) -> bool:
    head, size_bytes = content.head, content.size_bytes
    end = 11 + int.from_bytes(head[3:11], "little")
    is_magic = len(head) >= 11 and head[0] == 0x80 and head[1] in (4, 5) and head[2] == 0x95
    return is_magic and (end <= size_bytes if size_bytes is not None else end < 1 << 40)


def _begins(*magics: bytes) -> Callable[[Content], bool]:
    return lambda content: content.head.startswith(magics)


def _like(pattern: bytes, flags: int = 0) -> Callable[[Content], bool]:
    head = re.compile(pattern, flags)
    return lambda content: head.match(content.head) is not None


_ANOTHER_COMPRESSION = "Decompress it, or compress it with gzip instead."
_UNPACK = "Unpack it, and name the files in it that are shards."
_AS_NPZ = (
    "Read it with {reader}, and write its columns as an npz (np.savez_compressed), with one row for each record: "
    "FixedRecords reads that."
)
_COLUMNS = "FixedRecords reads it, as it is and uncompressed: `loaderd inspect SHARD --features` proposes a schema."
_NO_SHARD = "If it is no shard, name the shards so that it does not match."

KINDS: dict[str, Kind] = {
    "tfrecord": Kind(
        "a TFRecord file",
        "Give a schema of the features of its tf.train.Examples: `loaderd inspect SHARD --features` proposes one.",
        _is_tfrecord,
    ),
    "gzip": Kind("a gzip file", "Decompress it once.", _is_gzip),
    "zlib": Kind("a zlib stream", "Inflate it, or compress it with gzip instead.", _is_zlib),
    "zstd": Kind("a zstd file", _ANOTHER_COMPRESSION, _is_zstd),
    "xz": Kind("an xz file", _ANOTHER_COMPRESSION, _begins(b"\xfd7zXZ\0")),
    "bzip2": Kind("a bzip2 file", _ANOTHER_COMPRESSION, _like(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")),
    "lz4": Kind("an lz4 file", _ANOTHER_COMPRESSION, _is_lz4),
    "snappy": Kind("a snappy file", _ANOTHER_COMPRESSION, _begins(b"\xff\x06\0\0sNaPpY")),
    "7z": Kind("a 7z archive", _UNPACK, _begins(b"7z\xbc\xaf\x27\x1c")),
    "rar": Kind("a rar archive", _UNPACK, _begins(b"Rar!\x1a\x07")),
    "zip": Kind("a zip archive (as an .npz is)", _UNPACK, _is_zip),
    "tar": Kind("a tar archive", _UNPACK, lambda content: is_tar_header(content.head)),
    "parquet": Kind("a Parquet file", _COLUMNS, _is_parquet),
    "orc": Kind("an ORC file", _AS_NPZ.format(reader="pyarrow.orc"), _is_orc),
    "arrow": Kind("an Arrow file", _COLUMNS, _begins(b"ARROW1\0\0")),
    "avro": Kind("an Avro file", _AS_NPZ.format(reader="fastavro"), _like(rb"Obj\x01.*avro\.schema", re.DOTALL)),
    "hdf5": Kind("an HDF5 file", _AS_NPZ.format(reader="h5py"), _begins(b"\x89HDF\r\n\x1a\n")),
    "matlab": Kind(
        "a file of MATLAB's",
        _AS_NPZ.format(reader="scipy.io.loadmat"),
        _begins(b"MATLAB 5.0 MAT-file", b"MATLAB 7.3 MAT-file"),
    ),
    "npy": Kind(
        "an array of numpy's (.npy)",
        _COLUMNS,
        _begins(*NPY_MAGICS),
    ),
    "sqlite": Kind("an SQLite database", _AS_NPZ.format(reader="sqlite3"), _begins(b"SQLite format 3\0")),
    "riegeli": Kind(
        "an ArrayRecord or Riegeli file",
        "Read it with array_record, and write its records with tf.io.TFRecordWriter.",
        _begins(b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"),
    ),
    "pickle": Kind("a pickle of Python's", _AS_NPZ.format(reader="pickle"), _is_pickle),
    "binpack": Kind(
        "a binpack of Stockfish's",
        "Convert it to a .bin with Stockfish's tools (convert FROM TO): loaderd.schemas.nnue_bin() reads that.",
        _is_binpack,
    ),
    "viriformat": Kind(
        "games of viriformat",
        "Unroll them to boards: loaderd.convert.viriformat.unroll(FROM, TO). loaderd.schemas.marlin() reads those.",
        _is_viriformat,
    ),
    "png": Kind("a PNG image", _NO_SHARD, _begins(b"\x89PNG\r\n\x1a\n")),
    "jpeg": Kind("a JPEG image", _NO_SHARD, _begins(b"\xff\xd8\xff\xe0\0\x10JFIF\0")),
    "pdf": Kind("a PDF", _NO_SHARD, _begins(b"%PDF-1.", b"%PDF-2.")),
    "lfs": Kind(
        "a pointer of Git LFS, in place of the file itself",
        "Get the file: git lfs pull.",
        _begins(b"version https://git-lfs.github.com/", b"version https://hawser.github.com/"),
    ),
    "html": Kind(
        "a page of HTML",
        f"If it was downloaded, it may be a login or an error: download it again. {_NO_SHARD}",
        _like(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)[\s>]", re.IGNORECASE),
    ),
    "xml": Kind(
        "an XML document",
        f"If it was downloaded, it may be an error of the storage: download it again. {_NO_SHARD}",
        _begins(b"<?xml "),
    ),
    "text": Kind(
        "text", f"{_NO_SHARD} Of games in PGN, examples/chess/convert_pgn.py makes shards.", _like(rb"(?!)")
    ),
}
"""By a short name; in the order in which they are tried: text last, by :func:`_is_text`, which needs the records."""


def kind_of(content: Content, records: FixedRecords | None = None, but: str = "") -> str:
    """The name in :data:`KINDS` of what ``content`` plainly is; "" where nothing is plain, or where it is ``but``.

    ``records``: what the schema says that it holds; None: nothing that could be text.
    """
    for name, kind in KINDS.items():
        if kind.matches(content):
            return "" if name == but else name
    return "text" if _is_text(content, records) else ""


def _is_text(content: Content, records: FixedRecords | None) -> bool:
    sample = content.head
    if _CONTROL.search(sample):  # as nearly always: no more need be read
        return False
    counted_bytes, least_bytes = len(sample), _LEAST_TEXT_BYTES_OF_TFRECORD if records is None else _LEAST_TEXT_BYTES
    if records is not None and (content.size_bytes is None or content.size_bytes >= records.record_bytes):
        assert records.dtype.fields is not None
        numbers = [records.dtype.fields[name][0] for name in records]
        wide_bytes = sum(
            field.itemsize for field in numbers if field.base.kind in "iufcmM" and field.base.itemsize > 1
        )
        count = max(_MOST_SAMPLE_BYTES // records.record_bytes, 1)
        sample = content.at(0, min(count * records.record_bytes, _MOST_SAMPLE_BYTES)) if wide_bytes else b""
        counted_bytes = len(sample) // records.record_bytes * wide_bytes
    if counted_bytes < least_bytes or _CONTROL.search(sample):
        return False
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start > len(sample) - 4  # a character is cut
    return True


def refused(
    shard: str, kind: str, expected: str, *, start: int = 0, inside: str = "", also: str = ""
) -> ShardFormatError:
    """The error for a shard of another ``kind`` than what is ``expected``.

    ``start``: where in the shard it begins. ``inside``: how it is wrapped, in words. ``also``: for the hint.
    """
    what, cure, _ = KINDS[kind]
    what = f"{what}, {inside}" if inside else what
    damage = Damage(shard, 0, start, expected, f"one that {'holds' if inside else 'is'} {what}", lost_bytes=-1)
    text = f"{shard} {'holds' if inside else 'is'} {what}, and not {expected}"
    return ShardFormatError(text, hint=" ".join(filter(None, (cure, also))), damage=damage)


def refused_columns(shard: str) -> ShardFormatError:
    """The error for files that belong together (``Columns``), where no schema says what they hold."""
    text = f"{shard} and the files that belong to it need a schema of FixedRecords"
    return ShardFormatError(text, hint="`loaderd inspect --columns NAME=GLOB … --features` proposes one.")
