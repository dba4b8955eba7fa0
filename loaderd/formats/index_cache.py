"""Indexes on disk, so that a shard is read through once.

A cached index is found by the shard's name, size and time of change, and by the block size, so a shard that changed
has another key. No index is kept of a shard in storage that tells no time. A file is written under another name and
then renamed, so that a reader sees a whole one or none. An index that is damaged or of another version is made again.
A cache that cannot be written costs the next start an index pass, and no more.

A folder of indexes stays bounded. The indexes of shards that were deleted or changed are never asked for again; but
nobody can tell them from those of a disk that is not mounted today. So each use of an index sets its time of change,
and those that were not used for 60 days, and those beyond a total size, are deleted. Several processes may do this at
once, while others read and write: an index that is missing is made again. Those beside shards are never deleted.

To write a file takes 0.4 ms, to read one 0.1 ms: longer than to index a shard of a few records. So small shards that
lie side by side are a **group**, whose indexes are made, kept in one file, and found together.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from loaderd.formats.shard_index import INDEX_VERSION, ShardIndex, decode_indexes
from loaderd.redaction import redacted
from loaderd.schema import FixedRecords
from loaderd.schema.record_values import RecordValues
from loaderd.storage.own_files import delete_least_used, kept_files, read_own, write_whole
from loaderd.storage.shard_file import ShardFile

_logger = logging.getLogger("loaderd")

SUFFIX = ".loaderd-index"

_DAY_S = 86_400.0
_UNUSED_S = 60 * _DAY_S
_MAX_BYTES = 1 << 30
_MARKER = ".pruned"
_FILE = rf"[0-9a-f]{{30}}{re.escape(SUFFIX)}"
_SHARED = 0o022
"""The bits of a folder into which others than its owner may write."""
_MOST_GROUPED = 1024
_MOST_GROUP_BYTES = 4 << 20
_SMALL_BYTES = 256 << 10
# The indexes of a group are one message, too, of at most this size.
_MOST_FILE_BYTES = 256 << 20
_GROUPED = 256
"""How many shards are in a group, in the mean: one name in so many ends it."""


def groups_of(files: Iterable[ShardFile]) -> list[tuple[ShardFile, ...]]:
    """``files`` in the groups that they are indexed in: a large shard alone, small ones of one folder together.

    Where a group ends depends, as a rule, on the name of its last shard alone. So all who list a folder find the same
    groups, and a shard that is added, changed or deleted changes its own group and no other.
    """
    groups: list[tuple[ShardFile, ...]] = []
    group: list[ShardFile] = []
    group_bytes, group_folder = 0, ""
    for file in files:
        folder, _, name = file.path.rpartition("/")
        is_small = file.size_bytes <= _SMALL_BYTES
        fits = group_bytes + file.size_bytes <= _MOST_GROUP_BYTES and len(group) < _MOST_GROUPED
        if group and not (is_small and fits and folder == group_folder):
            groups.append(tuple(group))
            group, group_bytes = [], 0
        group.append(file)
        group_bytes, group_folder = group_bytes + file.size_bytes, folder
        hashed = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=4).digest()
        if not is_small or int.from_bytes(hashed, "little") % _GROUPED == 0:
            groups.append(tuple(group))
            group, group_bytes = [], 0
    return [*groups, tuple(group)] if group else groups


def default_cache_dir() -> Path:
    """``$LOADERD_CACHE_DIR``, or ``loaderd`` in the user's cache folder. Raises OSError for a user without a home."""
    chosen = os.environ.get("LOADERD_CACHE_DIR")
    if chosen:
        return _expanded(chosen)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "loaderd"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Set LOADERD_CACHE_DIR to a folder for the index.") from None


def _make_folders(folder: Path, top: Path) -> int:
    """Make ``folder``, which lies below ``top``; returns the mode of ``top``.

    Where several users may write into ``top``, what is made below gets its mode, and they may write there, too.
    """
    top.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(os.stat(top).st_mode)
    for name in (folder.parent, folder):
        try:
            os.mkdir(name)
        except FileExistsError:
            continue
        if mode & _SHARED:
            # Without the sticky bit, another user may have put a link in its place meanwhile.
            made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(made).st_uid == os.geteuid():
                    os.fchmod(made, mode)
            finally:
                os.close(made)
    return mode


class IndexCache:
    """Where indexes are kept: in one folder (``"user"`` or a path), beside the shards (``"beside"``), or nowhere."""

    def __init__(
        self,
        where: str,
        block_records: int,
        records: FixedRecords | None = None,
        values: RecordValues | None = None,
    ) -> None:
        """``records``: how records of fixed size are stored, because their index depends on it; None: TFRecord.

        ``values``: what the indexes hold of each record. Those without a key are not kept, because nobody can tell
        them from others.
        """
        self._where = where
        self.block_records = block_records
        self.records = records
        self._of = f"{block_records}" if records is None else f"{block_records}\0{records!r}"
        self._arrays = () if values is None else values.arrays
        self._is_kept = where != "none"
        if values is not None:
            self._of += f"\0{values.key}"
            self._is_kept = self._is_kept and values.key is not None

    @property
    def without_values(self) -> IndexCache:
        """Where the same indexes are kept without values of records."""
        return IndexCache(self._where, self.block_records, self.records)

    def path_of(self, *group: ShardFile) -> Path | None:
        """Where the indexes of a group are kept; None if they are not. Raises OSError for a user without a home."""
        if not self._is_kept or not all(file.has_version for file in group):
            return None
        parts = [part for file in group for part in file.parts]
        files = "\0".join(f"{redacted(part.uri)}\0{part.size_bytes}\0{part.mtime_ns}" for part in parts)
        columns = "".join(f"\0{name}" for file in group for name, *_ in file.columns)
        key = f"{INDEX_VERSION}\0{files}\0{self._of}{columns}"
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        if self._where == "beside" and "://" not in group[0].uri:
            shard = Path(group[0].uri)
            return shard.with_name(f".{shard.name}.{digest[:12]}{SUFFIX}")
        folder = default_cache_dir() if self._where in ("user", "beside") else _expanded(self._where)
        return folder / "index" / digest[:2] / (digest[2:] + SUFFIX)

    def load(self, *group: ShardFile) -> list[ShardIndex] | None:
        """The indexes of the shards of a group, or None if there are none that can be used."""
        try:
            path = self.path_of(*group)
            if path is None:
                return None
            data, _ = read_own(path, _MOST_FILE_BYTES)
        except OSError:
            return None
        try:
            indexes = decode_indexes(data, group)
            if any(index.value_arrays != (self._arrays if index.end else ()) for index in indexes):
                raise ValueError(f"it has {indexes[0].value_arrays} of records, not {self._arrays}")
        except Exception as error:  # whatever is wrong with a cached file, the answer is to make it again
            _logger.info("the cached index %s is made again: %s", path, error)
            return None
        _mark_used(path)
        return indexes

    def store(self, group: Sequence[ShardFile], encoded: bytes) -> str | None:
        """Keep the ``encoded`` indexes of a group; returns where and why that failed."""
        path = None
        try:
            path = self.path_of(*group)
            if path is None:
                return None
            is_beside = path.name.startswith(".")
            mode = 0 if is_beside else _make_folders(path.parent, path.parent.parent.parent)
            # Hidden, so that no glob over the shards finds it; with usual permissions, so that others may read it.
            write_whole(path, encoded, 0o600 | mode & 0o044 if mode & _SHARED else 0)
            if not is_beside:
                _prune_if_due(path.parent.parent)
        except OSError as error:
            place = error.filename or (path and path.parent)  # the error of a full disk names no file
            return f"{place}: {error.strerror}" if error.strerror else str(error)
        return None


# ---------------------------------------------------------------------------------------------- pruning


def _mark_used(path: Path) -> None:
    """Note that an index is in use, once a day at most. One of another user stays as it is."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY_S:
            os.utime(path, follow_symlinks=False)


def _prune_if_due(folder: Path) -> None:
    """Prune ``folder`` unless some process has done so within a day."""
    marker = folder / _MARKER
    with contextlib.suppress(OSError):
        if not os.path.lexists(marker) or time.time() - marker.lstat().st_mtime > _DAY_S:
            # First, so that no other process does the same meanwhile. Another user may have put a link there.
            fd = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            try:
                os.utime(fd)
            finally:
                os.close(fd)
            delete_least_used(kept_files(folder, _FILE), time.time() - _UNUSED_S, 0, _MAX_BYTES)
