"""Indexes on disk, so that a shard is read through once.

A cached index is found by the shard's name, size and time of change, and by the block size, so a shard that changed
has another key. No index is kept of a shard in storage that tells no time. A file is written under another name and
then renamed, so that a reader sees a whole one or none. An index that is damaged or of another version is made again.
A cache that cannot be written costs the next start an index pass, and no more. A folder of indexes stays bounded
(``index_pruning``); indexes beside their shards are never deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path

from loaderd.redaction import redacted
from loaderd.schema import FixedRecords
from loaderd.shards.index_pruning import SUFFIX, mark_used, prune_if_due
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import INDEX_VERSION, ShardIndex, decode_index

_logger = logging.getLogger("loaderd")


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


class IndexCache:
    """Where indexes are kept: in one folder (``"user"`` or a path), beside the shards (``"beside"``), or nowhere."""

    def __init__(self, where: str, block_records: int, records: FixedRecords | None = None) -> None:
        """``records``: how records of fixed size are stored, because their index depends on it; None: TFRecord."""
        self._where = where
        self.block_records = block_records
        self._of = f"{block_records}" if records is None else f"{block_records}\0{records!r}"

    def path_of(self, file: ShardFile) -> Path | None:
        """Where the index of ``file`` is kept; None if it is not kept. Raises OSError for a user without a home."""
        if self._where == "none" or not file.has_version:
            return None
        key = f"{INDEX_VERSION}\0{redacted(file.uri)}\0{file.size_bytes}\0{file.mtime_ns}\0{self._of}"
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        if self._where == "beside" and "://" not in file.uri:
            shard = Path(file.uri)
            return shard.with_name(f".{shard.name}.{digest[:12]}{SUFFIX}")
        folder = default_cache_dir() if self._where in ("user", "beside") else _expanded(self._where)
        return folder / "index" / digest[:2] / (digest[2:] + SUFFIX)

    def load(self, file: ShardFile) -> ShardIndex | None:
        """The index of ``file``, or None if there is none that can be used."""
        try:
            path = self.path_of(file)
            if path is None:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        try:
            index = decode_index(data)
        except Exception as error:  # whatever is wrong with a cached file, the answer is to make it again
            _logger.info("the cached index %s is made again: %s", path, error)
            return None
        if index.file != file._replace(uri=redacted(file.uri)):
            return None
        mark_used(path)
        return replace(index, file=file)

    def store(self, index: ShardIndex) -> OSError | None:
        """Keep ``index``; returns the error, which names the folder, where the cache could not be written."""
        path = None
        try:
            path = self.path_of(index.file)
            if path is None:
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            # Hidden, so that no glob over the shards finds it; with usual permissions, so that others may read it.
            temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
            try:
                with open(temporary, "xb") as out:
                    out.write(index.encode())
                os.replace(temporary, path)
                if not path.name.startswith("."):  # it is in a folder of indexes
                    prune_if_due(path.parent.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            if error.filename is None and path is not None:  # the error of a full disk names no file
                error.filename = str(path.parent)
            return error
        return None
