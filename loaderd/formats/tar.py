"""Finds the members of a tar that hold records.

**The rule:** members that are files and whose names end in ``.gz`` or ``.zst`` hold records, and all others are
skipped: folders, links, a LICENSE, and the files ``._NAME`` that macOS adds beside others. The tar itself must not be
compressed, so that a member can be read where it is.

A member is a header of 512 bytes, and its data, filled up to whole blocks of 512. A name or a size that does not fit
in the header comes in a member of its own in front: ``L`` (GNU), or ``x`` and ``g`` (PAX, POSIX.1-2001). Of a sparse
file (``S``, or PAX), the tar has no holes: one that has any is damage, because its bytes do not lie together.

The headers are read here, and not by ``tarfile``. That follows a size below 0 back to where it was (CVE-2025-8194),
takes minutes for some headers of 200 KB (CVE-2024-6232), and recurses for each header in front of another. Here each
step leads further into the file, and what comes in front of a member is limited. A header that is not as it should be
ends the tar; the members before it stay.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import struct
from collections.abc import Iterator
from typing import NamedTuple

from loaderd.errors import Damage
from loaderd.formats.compression import OnRead, no_callback
from loaderd.formats.inflate import FileReader
from loaderd.redaction import shown
from loaderd.storage.shard_file import ReadAt

_ENDINGS = (".gz", ".zst")
_BUFFER_BYTES = 1 << 18
_BLOCK_BYTES = 512
_HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s 12x")
"""name, size, checksum, kind, magic, prefix of the name; not read: mode, owner, time, target of a link, device"""
_CHECKSUM = slice(148, 156)
_POSIX_MAGIC = b"ustar\0"
_FILES, _SPARSE = (b"0", b"\0", b"7", b"S"), b"S"
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = b"L", b"K", (b"x", b"X"), b"g"
_IN_FRONT = (_LONG_NAME, _LONG_LINK, *_PAX, _PAX_OF_ALL)
# Linux has paths of up to 4 KiB, and attributes of up to 64 KiB.
_MOST_IN_FRONT_BYTES = 1 << 20
_MOST_DIGITS = 20
_REAL_SIZE = slice(483, 495)  # of a sparse file of GNU's
_PATH, _SIZE, _SPARSE_PATH = b"path", b"size", b"GNU.sparse.name"
_SPARSE_MAJOR, _SPARSE_SIZES = b"GNU.sparse.major", (b"GNU.sparse.realsize", b"GNU.sparse.size")
_KNOWN = (_PATH, _SIZE, _SPARSE_PATH, _SPARSE_MAJOR, *_SPARSE_SIZES)


class Member(NamedTuple):
    """A member that holds records: ``num_bytes`` of the tar, from ``offset`` on."""

    name: str
    offset: int
    num_bytes: int


def find_members(
    shard: str,
    read_at: ReadAt,
    size_bytes: int,
    on_read: OnRead = no_callback,
) -> Iterator[Member | Damage]:
    """The members that hold records, in the tar's order; at the end a Damage if the tar itself is not whole.

    Of a member that is cut, what there is. ``on_read`` is called now and then with the offset that has been reached.
    Raises ShardReadError and StorageError.
    """
    reader = io.BufferedReader(FileReader(read_at, size_bytes), _BUFFER_BYTES)
    offset = 0
    of_all: dict[bytes, bytes] = {}
    of_next: dict[bytes, bytes] = {}
    said = 0
    try:
        while any(block := _read(reader, offset, _BLOCK_BYTES)):
            if offset - said > _BUFFER_BYTES:
                said = offset
                on_read(offset)
            extended = of_all | of_next
            name, kind, size = _parse(block, extended)
            start = offset + _BLOCK_BYTES
            if kind == _SPARSE:
                start = _behind_sparse_map(reader, block, start)
            if kind in _IN_FRONT:
                if size > _MOST_IN_FRONT_BYTES:
                    raise ValueError(f"a header of {size} bytes")
                data = _read(reader, start, size)
                if kind == _LONG_NAME:
                    of_next[_PATH] = data.partition(b"\0")[0]
                elif kind != _LONG_LINK:
                    (of_all if kind == _PAX_OF_ALL else of_next).update(_pax_records(data))
            elif kind in _WITHOUT_DATA or (kind == b"\0" and name.endswith("/")):  # so old tars write a folder
                size = 0
            stop = start + size
            offset = min(stop + -stop % _BLOCK_BYTES, size_bytes)
            if kind in _IN_FRONT:
                continue
            of_next = {}
            if kind in _FILES and _holds_records(name):
                if extended.get(_SPARSE_MAJOR) == b"1":
                    start += _map_bytes(_read(reader, start, min(size, _MOST_IN_FRONT_BYTES, size_bytes - start)))
                whole = _real_size(block, kind, extended)
                if whole is not None and whole != stop - start:
                    without = f"{whole:,} bytes of {shown(name, 200)}, without holes (tar without --sparse)"
                    yield Damage(shard, 0, start, without, f"{stop - start:,} bytes", lost_bytes=stop - start)
                else:
                    yield Member(name, start, min(stop, size_bytes) - start)
    except ValueError as error:  # of a header that is none
        expected = "a member of the tar, or the zeros at its end"
        yield Damage(shard, 0, offset, expected, str(error), lost_bytes=-1)
        return
    reader.seek(offset)
    while rest := reader.read(_BUFFER_BYTES):
        if any(rest):
            behind = "something behind the tar's end, as where several were joined"
            yield Damage(shard, 0, offset, "zeros up to the end of the file", behind, lost_bytes=size_bytes - offset)
            return
        offset += len(rest)


def member_at(read_at: ReadAt, offset: int) -> str:
    """In words, the member whose data begin at ``offset``; of its name, what the header in front of them holds."""
    view = memoryview(bytearray(_BLOCK_BYTES))
    named = ""
    with contextlib.suppress(ValueError):  # there is a map of a sparse file in front
        if offset >= _BLOCK_BYTES and read_at(offset - _BLOCK_BYTES, view) == _BLOCK_BYTES:
            named = f"{shown(_parse(bytes(view), {})[0], 200)}, "
    return f"{named}the member at byte {offset} of the tar"


def _holds_records(name: str) -> bool:
    return name.endswith(_ENDINGS) and not posixpath.basename(name).startswith("._")


def _read(reader: io.BufferedReader[FileReader], offset: int, num_bytes: int) -> bytes:
    reader.seek(offset)
    data = reader.read(num_bytes)
    if len(data) < num_bytes:
        raise ValueError(f"{len(data)} bytes, and the end of the file")
    return data


def _behind_sparse_map(reader: io.BufferedReader[FileReader], header: bytes, start: int) -> int:
    """Where the data of a sparse file begins: there may be blocks between, each of which tells of the next."""
    goes_on = header[482]
    while goes_on:
        goes_on = _read(reader, start, _BLOCK_BYTES)[504]
        start += _BLOCK_BYTES
    return start


def _map_bytes(data: bytes) -> int:
    """Bytes of the map in front of the data of a sparse file (PAX 1.0): how many pieces, then two numbers of each."""
    pieces = _decimal(data.partition(b"\n")[0])
    lines = data.split(b"\n", 2 * min(pieces, len(data)) + 1)
    if len(lines) < 2 * pieces + 2:
        raise ValueError(f"a map of {pieces} pieces of a sparse file")
    num_bytes = len(data) - len(lines[-1])
    return num_bytes + -num_bytes % _BLOCK_BYTES


def _real_size(block: bytes, kind: bytes, extended: dict[bytes, bytes]) -> int | None:
    """How large a sparse file is with its holes; None: it is not sparse."""
    if kind == _SPARSE:
        return _number(block[_REAL_SIZE])
    said = next((extended[name] for name in _SPARSE_SIZES if name in extended), None)
    return None if said is None else _decimal(said)


def _parse(block: bytes, extended: dict[bytes, bytes]) -> tuple[str, bytes, int]:
    """(name, kind, size) that a header says; ``extended``: what PAX and GNU headers in front of it say."""
    path, size_field, checksum, kind, magic, prefix = _HEADER.unpack(block)
    total = sum(block) - sum(block[_CHECKSUM]) + len(checksum) * ord(" ")
    difference = total - _number(checksum)
    if difference and difference != 256 * sum(byte > 127 for byte in block):  # some old programs had signed bytes
        raise ValueError("something else")
    path = path.partition(b"\0")[0]
    prefix = prefix.partition(b"\0")[0] if magic == _POSIX_MAGIC else b""
    if prefix:
        path = prefix + b"/" + path
    size = _number(size_field)
    if kind not in _IN_FRONT:
        path = extended.get(_SPARSE_PATH, extended.get(_PATH, path))
        size = _decimal(extended[_SIZE]) if _SIZE in extended else size
    name = path.decode(errors="surrogateescape")
    if size < 0:
        raise ValueError(f"a size of {size} bytes of {shown(name, 200)}")
    return name, kind, size


def _number(field: bytes) -> int:
    """A number in octal digits or, as GNU writes large ones and those below 0, in base 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field, "big", signed=True)
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise ValueError(f"{field!r} where a number should be")
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise ValueError(f"{digits[:_MOST_DIGITS]!r} where a number should be")
    return int(digits)


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """What PAX records say of path and size. Each record: its own length, " ", a keyword, "=", a value, "\\n"."""
    values = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + _MOST_DIGITS)
        stop = at + _decimal(data[at : max(at, space)])
        keyword, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if stop > len(data) or not equals or data[stop - 1 : stop] != b"\n":
            raise ValueError(f"{data[at : at + 40]!r} where a PAX record should be")
        if keyword in _KNOWN:
            values[keyword] = value
        at = stop
    return values
