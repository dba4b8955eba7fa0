"""Keeps a folder of indexes bounded: deletes those that nobody has used for long, and those beyond a total size.

An index is found by its shard's name, size and time, so the indexes of shards that were deleted or changed are never
asked for again; but nobody can tell them from those of a disk that is not mounted today. So each use of an index sets
its time of change, and those that were not used for the longest time are deleted. Several processes may do this at
once, while others read and write: a file is whole or not there, and an index that is missing is made again.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

SUFFIX = ".loaderd-index"

_DAY_S = 86_400.0
_UNUSED_S = 60 * _DAY_S
_MAX_BYTES = 1 << 30
_MARKER = ".pruned"
_FOLDER = re.compile("[0-9a-f]{2}")
_FILE = re.compile(rf"[0-9a-f]{{30}}{re.escape(SUFFIX)}|\.[0-9a-f]{{16}}\.tmp")


def mark_used(path: Path) -> None:
    """Note that an index is in use, once a day at most. One of another user stays as it is."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY_S:
            os.utime(path)


def prune_if_due(folder: Path) -> None:
    """Prune ``folder`` unless some process has done so within a day."""
    marker = folder / _MARKER
    with contextlib.suppress(OSError):
        if not marker.exists() or time.time() - marker.stat().st_mtime > _DAY_S:
            marker.touch()  # first, so that no other process does the same meanwhile
            prune(folder)


def prune(folder: Path, *, max_bytes: int = _MAX_BYTES) -> None:
    """Delete the indexes below ``folder`` unused for 60 days, and the least recently used beyond ``max_bytes``.

    A temporary file whose process died while writing it counts as an index.
    """
    kept_bytes = 0
    oldest_s = time.time() - _UNUSED_S
    for used_s, num_bytes, path in sorted(_files(folder), reverse=True):
        kept_bytes += num_bytes
        if used_s < oldest_s or kept_bytes > max_bytes:
            with contextlib.suppress(OSError):  # another process was faster; or it is somebody else's
                os.unlink(path)


def _files(folder: Path) -> list[tuple[float, int, str]]:
    """(time of last use, size in bytes, path) of each index. The folder may hold other things of the user, too."""
    found = []
    for inner in os.scandir(folder):
        if _FOLDER.fullmatch(inner.name) and inner.is_dir(follow_symlinks=False):
            for entry in os.scandir(inner):
                if not _FILE.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
    return found
