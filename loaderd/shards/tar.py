"""Finds the members of a tar that hold records.

**The rule:** members that are files and whose names end in ``.gz`` or ``.zst`` hold records, and all others are
skipped: folders, links, a LICENSE, and the files ``._NAME`` that macOS adds beside others. The tar itself must not be
compressed, so that a member can be read where it is.
"""

from __future__ import annotations

import io
import posixpath
from collections.abc import Callable, Iterator
from typing import NamedTuple

from loaderd.errors import Damage, LoaderdError
from loaderd.shards.shard_file import OpenFile
from loaderd.shards.zstd import FileReader

_ENDINGS = (".gz", ".zst")
_BUFFER_BYTES = 1 << 18


class Member(NamedTuple):
    """A member that holds records: ``num_bytes`` of the tar, from ``offset`` on."""

    name: str
    offset: int
    num_bytes: int


def _holds_records(name: str) -> bool:
    return name.endswith(_ENDINGS) and not posixpath.basename(name).startswith("._")


def find_members(
    shard: str, file: OpenFile, size_bytes: int, on_skipped: Callable[[str], None] | None = None
) -> Iterator[Member | Damage]:
    """The members that hold records, in the tar's order; at the end a Damage if the tar itself is not whole.

    ``on_skipped`` is told the names of the others. Raises ShardReadError and StorageError.
    """
    import tarfile

    reader = io.BufferedReader(FileReader(file, size_bytes), _BUFFER_BYTES)
    offset, why = 0, ""
    try:
        with tarfile.open(fileobj=reader, mode="r:") as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps one for each game
                offset = tar.offset
                if info.isreg() and _holds_records(info.name):
                    left = size_bytes - info.offset_data
                    yield Member(info.name, info.offset_data, min(info.size, left))
                    if info.size > left:
                        return  # reading the member shows that it is cut
                elif on_skipped is not None:
                    on_skipped(info.name)
    except LoaderdError:
        raise
    except (tarfile.TarError, OSError) as error:
        why = f", {error}"
    # ``tarfile`` ends without an error at an invalid header.
    end = bytearray(tarfile.BLOCKSIZE)
    got = file.read_at(offset, memoryview(end)) if offset < size_bytes else 0
    if got < len(end) or any(end):
        found = f"{got} bytes{why}" if got < len(end) else f"something else{why}"
        yield Damage(shard, 0, offset, "a member of the tar, or the zeros at its end", found, lost_bytes=-1)
        return
    reader.seek(offset)
    while rest := reader.read(_BUFFER_BYTES):
        if any(rest):
            found = "something behind the tar's end, as where several were joined"
            yield Damage(shard, 0, offset, "zeros up to the end of the file", found, lost_bytes=size_bytes - offset)
            return
        offset += len(rest)
