"""What readers know of a shard: where it is, its size and time when it was listed, and the errors for what is wrong.

Two errors are kept apart. A **ShardReadError** is about the shard: it is gone, or it is not the one that was indexed;
its records are damaged. A **StorageError** is about the place: it does not answer, or it refuses; the records are
there, and asking again may get them. A StorageError is never counted as damage.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, unquote

from loaderd.errors import Damage, ShardReadError, StorageError
from loaderd.redaction import redacted

HINT_STORAGE = "Check that this machine reaches it: the network, a proxy, the endpoint or region, the credentials."
_HINT_LONGER = (
    "Storage(retry_s=…) says for how long it is tried. Nothing is skipped: ask again to go on, in a loop the same "
    "iterator (next)."
)
_HINT_READ = "Check that the file exists and that this user may read it."
_HINT_CHANGED = "Make a new loader: it will index the file as it is now."


Compression = Literal["none", "gzip", "zlib", "zstd", "tar", "npz", "npy", "parquet", "arrow", "columns"]
"""How a shard wraps its records: the first three are of TFRecord; ``fixed`` has those of fixed records."""

PLAIN: tuple[Compression, ...] = ("none", "npy")
"""Those whose records lie one behind the other as they are, so that a block may begin at any of them."""

TABLES: tuple[Compression, ...] = ("npz", "parquet", "arrow", "columns")
"""Those that are made of columns (``formats.table``)."""

ReadAt = Callable[[int, memoryview], int]
"""Fills a view from an offset of a file, or of a part of one, on; returns the bytes read, fewer only at the end."""


class ShardFile(NamedTuple):
    """A shard as it was when it was listed: a change of size or time means that it is another file.

    ``uri`` may hold secrets. ``mtime_ns`` is 0 where storage gives no time.
    """

    uri: str
    size_bytes: int
    mtime_ns: int
    columns: tuple[tuple[str, str, int, int], ...] = ()
    """Of files that belong together (``storage.columns``), the name, URI, size and time of each. Then the URI is that
    of the first, the size that of all together, and the time that of the newest."""

    def __repr__(self) -> str:
        return f"ShardFile({redacted(self.uri)!r}, {self.size_bytes}, {self.mtime_ns})"

    @property
    def parts(self) -> tuple[ShardFile, ...]:
        """The files that it is made of: mostly itself alone."""
        return tuple(ShardFile(*part[1:]) for part in self.columns) or (self,)

    @property
    def is_far_away(self) -> bool:
        """Whether storage far away has any of it."""
        return any(is_remote(part.uri) for part in self.parts)

    @property
    def name(self) -> str:
        """The file's name, without its folders and without a URI's query: what stays when shards are moved."""
        return posixpath.basename(self.path)

    @property
    def path(self) -> str:
        """The URI, without its query and not quoted; on this machine, the path."""
        return unquote(self.uri.partition("?")[0]) if is_remote(self.uri) else self.uri

    def is_at(self, path: str) -> bool:
        """Whether its path ends with ``path``, from the beginning of a folder's or file's name on."""
        return f"/{self.path}".endswith(f"/{path}")

    @property
    def has_version(self) -> bool:
        """Whether its size and time tell it from another object in its place; if not, no index of it is kept."""
        return not self.is_far_away or self.mtime_ns != 0


class RestartPoint(NamedTuple):
    """Where a compressed shard is entered, to read what is inflated from ``offset`` on.

    That begins at ``bit`` of the file (from the lowest bit of its first byte on). What is inflated up to 32 KiB
    behind the next point is in the bytes before ``stop``. ``window``: what it refers to, compressed; empty: nothing.
    """

    offset: int
    bit: int
    stop: int
    window: bytes


class Block(NamedTuple):
    """Where a block is. ``shard`` counts the data set's files from 0; the rest is as in ShardIndex."""

    shard: int
    offset: int
    num_bytes: int
    num_records: int
    first_record: int
    anchors: bytes
    """uint32, little-endian: the offset in the block of every ``ANCHOR_RECORDS``-th record."""
    crc: int | None = None
    """CRC32C of what its records hold; None: it is not known."""
    point: RestartPoint | None = None
    """Where inflating begins; then ``offset`` and ``num_bytes`` are of what is inflated. None: there is no need."""

    @property
    def stored_range(self) -> tuple[int, int]:
        """(offset, bytes) of the part of the file that is read for it."""
        if self.point is None:
            return self.offset, self.num_bytes
        begin = self.point.bit >> 3
        return begin, self.point.stop - begin


def is_remote(name: str) -> bool:
    """Whether a name is a URI of storage far away, and not of a path of this machine (``file://``)."""
    return "://" in name and not name.startswith("file://")


def uri_parts(uri: str) -> SplitResult:
    """A URI's scheme, netloc (``user@bucket``), path and query. As ``urlsplit``, which refuses some keys."""
    scheme, _, rest = uri.partition("://")
    address, _, query = rest.partition("?")
    netloc, slash, path = address.partition("/")
    return SplitResult(scheme, netloc, slash + path, query, "")


def unreadable(uri: str, why: str, hint: str = "") -> ShardReadError:
    """The error for a shard that is not there, or may not be read."""
    damage = Damage(uri, 0, 0, "a file that can be read", why, lost_bytes=-1)
    return ShardReadError(f"{uri}: {why}", hint=hint or _HINT_READ, damage=damage)


def changed(file: ShardFile, size_bytes: int, mtime_ns: int) -> ShardReadError:
    """The error for a shard that has another size or time than when it was listed."""
    expected, found = _state(file.size_bytes, file.mtime_ns), _state(size_bytes, mtime_ns)
    return replaced(file.uri, expected, found)


def _state(size_bytes: int, mtime_ns: int) -> str:
    if not mtime_ns:
        return f"{size_bytes} bytes"
    seconds, rest_ns = divmod(mtime_ns, 1_000_000_000)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{size_bytes} bytes, written {written}" + (f".{rest_ns:09}" if rest_ns else "")


def replaced(uri: str, expected: str, found: str, hint: str = _HINT_CHANGED) -> ShardReadError:
    """The error for a shard that is not the one that was listed."""
    damage = Damage(uri, 0, 0, f"the file that was indexed, of {expected}", found, lost_bytes=-1)
    text = f"{uri} changed while it was in use: expected {expected}, found {found}"
    return ShardReadError(text, hint=hint, damage=damage)


def unanswered(place: str, said: str, tried_s: float, may_pass: bool, hint: str = HINT_STORAGE) -> StorageError:
    """The error for storage that does not answer, or refuses; ``said``: its own words."""
    tried = f" (tried for {tried_s:.0f} s)" if tried_s >= 1 else ""
    return StorageError(f"{place}: {said}{tried}", hint=f"{hint} {_HINT_LONGER}".lstrip() if may_pass else hint)
