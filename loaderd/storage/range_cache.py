"""Parts of remote shards on a local disk, for any number of processes.

A part is up to 256 KiB of a shard, and begins at a multiple of that. It is one file, named by the shard (URI, size,
and time, so that a shard which was replaced has another name) and the part's number, with a CRC behind the
bytes. A file is written under another name and then renamed: a reader sees a whole one or none, even if the writer is
killed. A file that is not what its CRC says, as after a power failure, counts as not there. Nothing here raises an
error: where the disk is full or the folder cannot be written, nothing is kept.

**The size.** Each process counts what it writes; after every 64th of the limit it looks through the folder. If less
than a 32nd of the limit is free, it deletes what was not used for the longest time until an eighth is free. So
several processes together may be above the limit for a moment, by at most a 64th each.

**A cache that is too small.** What was used since the process began, and in the last day, is not deleted for
something else. If the data do not fit, each part is read once an epoch: by the time it is read again, it would have
been deleted, and all that is kept would be kept in vain. So where nothing else can be deleted, the cache is full
for some minutes: it keeps what it has, up to its limit, and nothing new. What is not kept need not be fetched in
whole parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import zlib
from pathlib import Path

from loaderd.redaction import redacted
from loaderd.storage.own_files import delete_least_used, kept_files, read_own, write_whole
from loaderd.storage.shard_file import ShardFile

PART_BYTES = 256 << 10

_CRC_BYTES = 4
_MOST_PART_BYTES = PART_BYTES + _CRC_BYTES
# Noting each use would be a write for each read. So the time of the last use is known only to ten minutes.
_NOTE_USE_S = 600.0
_UNUSED_S = 86_400.0
_FULL_S = 600.0


class RangeCache:
    """A folder of parts, of ``max_bytes`` in all. Any thread may use it."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = Path(folder) / "parts"
        self._max_bytes = max_bytes
        self._unlooked_bytes = max_bytes  # how much is there is not known: the first write looks
        self._pruning = threading.Lock()
        self._began_s = time.time()
        self._full_until_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether nothing new is kept, since all that is here is in use."""
        return time.monotonic() < self._full_until_s

    def _path(self, file: ShardFile, number: int) -> Path:
        # Without the URI's secrets, so that another key to the bucket finds the same parts.
        key = f"{redacted(file.uri)}\0{file.size_bytes}\0{file.mtime_ns}"
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:32]}-{number}.part"

    def load(self, file: ShardFile, number: int) -> bytes | None:
        """Part ``number`` of a shard, or None if it is not here."""
        path = self._path(file, number)
        with contextlib.suppress(OSError):
            data, used_s = read_own(path, _MOST_PART_BYTES)
            body = data[:-_CRC_BYTES]
            if zlib.crc32(body).to_bytes(_CRC_BYTES, "little") == data[-_CRC_BYTES:]:
                if time.time() - used_s > _NOTE_USE_S:
                    with contextlib.suppress(OSError):
                        os.utime(path, follow_symlinks=False)
                return body
            os.unlink(path)
        return None

    def store(self, file: ShardFile, number: int, data: bytes) -> None:
        """Keep part ``number`` of a shard, if that can be done."""
        if self.is_full:
            return
        path = self._path(file, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
        except OSError:
            return
        self._unlooked_bytes += len(data)
        if self._unlooked_bytes > self._max_bytes // 64 and self._pruning.acquire(blocking=False):
            try:
                self._unlooked_bytes = 0
                self._prune()
            finally:
                self._pruning.release()

    def _prune(self) -> None:
        """Delete what was not used for the longest time, if there is more than there may be."""
        try:
            parts = kept_files(self._folder, r"[0-9a-f]{30}-[0-9]+\.part")
        except OSError:
            return
        if sum(num_bytes for _, num_bytes, _ in parts) <= self._max_bytes - self._max_bytes // 32:
            return
        aim = self._max_bytes - self._max_bytes // 8
        in_use_s = max(self._began_s, time.time() - _UNUSED_S)
        if delete_least_used(parts, in_use_s, aim, self._max_bytes) > aim:
            self._full_until_s = time.monotonic() + _FULL_S
            self._unlooked_bytes = self._max_bytes  # the first write after that looks
