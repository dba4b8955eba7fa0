"""A bucket, by the file system that ``pyarrow.fs`` knows by the scheme of its URIs, or the one that the user gives.

One file system serves all URIs of one bucket and query: each new one would have connections of its own, and would
ask for the region where none is given. pyarrow is imported only when it is needed.

**Credentials are renewed** while a program runs: a file is written anew, a token expires. A file system keeps those
that it found when it was made (S3's looks into the file again after minutes). So when storage refuses what it has
accepted before, the file system is made anew, as in a process that has just been started.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any
from urllib.parse import unquote

from loaderd.errors import ShardReadError
from loaderd.options import MEMORY_HINT, Storage, pickled_storage
from loaderd.storage.retries import RateLimiter
from loaderd.storage.shard_file import uri_parts

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "hf", "fsspec+…")

_HINT_URI = "A space in a URI is written %20, and a slash in a key %2F."
_CONNECT_S = 5.0
_ANSWER_S = 10.0
# How often pyarrow itself tries a request: with more, loaderd would not know how often storage is asked.
_S3_ATTEMPTS = 1
_GOOGLE = ("gs://", "gcs://")
_GOOGLE_RETRY_S = 1


def root_of(uri: str, storage: Storage) -> str:
    """The URI of the bucket; "" where the user's file system opens all URIs. Raises ShardReadError for a space."""
    if storage.filesystem is not None:
        return ""
    if " " in uri:
        raise ShardReadError(f"{uri}: the URI contains a space", hint=_HINT_URI)
    parts = uri_parts(uri)
    return f"{parts.scheme}://{parts.netloc}" + (f"?{parts.query}" if parts.query else "")


class Store:
    """The file system that opens a bucket, and how the storage behind it answers. Any thread may use it."""

    def __init__(self, storage: Storage, root: str) -> None:
        self.pace = RateLimiter(storage.requests)
        self._storage, self._root = storage, root
        user = uri_parts(root).netloc.rpartition("@")[0]
        self._has_own_key = ":" in user or user == "anonymous"
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._given = storage.filesystem
        self._accepted: Any = None

    def locate(self, uri: str) -> tuple[Any, str]:
        """(file system, path there) of a URI. Raises ShardReadError for what no URI can mean, and OSError."""
        filesystem, base = self._open()
        if self._storage.filesystem is not None:
            return filesystem, self._path_of_given(uri)
        parts = uri_parts(uri)
        path = f"{base.rstrip('/')}{unquote(parts.path)}"
        return filesystem, path.lstrip("/") if parts.scheme in ("abfs", "abfss") else path

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                given = self._storage.filesystem
                self._opened = self._open_given() if given is not None else _from_uri(self._root, self._storage)
            return self._opened

    def _open_given(self) -> tuple[Any, str]:
        """The user's own file system at first; then others that are like it, but have looked for credentials anew."""
        from pyarrow import fs

        filesystem, self._given = self._given, None
        if filesystem is None:
            filesystem = self._storage.filesystem
            if (clear := getattr(type(filesystem), "clear_instance_cache", None)) is not None:
                clear()  # fsspec would give the old one again
            filesystem = pickle.loads(pickled_storage(Storage(filesystem=filesystem))).filesystem
        if not isinstance(filesystem, fs.FileSystem):
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        return filesystem, ""

    def _path_of_given(self, uri: str) -> str:
        strip = getattr(self._storage.filesystem, "_strip_protocol", None)  # fsspec has this
        if strip is None:
            return unquote(uri.partition("://")[2].partition("?")[0])
        path, mark, query = str(strip(uri)).partition("?")
        # The path may still be a URL (fsspec has such paths), and a URL stays quoted.
        return f"{path if '://' in path else unquote(path)}{mark}{query}"

    def accepted(self, filesystem: Any) -> None:
        """Storage has answered a request of this file system."""
        self._accepted = filesystem

    @property
    def has_answered(self) -> bool:
        return self._accepted is not None

    def renew(self, filesystem: Any, again: bool, were_accepted: bool) -> bool:
        """Have the file system made anew, since storage has refused a request of this one.

        ``again``: the request was refused before, by an older one. ``were_accepted``: credentials were, in another
        process. False where a new one would be refused, too: nothing was ever accepted; the credentials are the same
        each time; or other requests of this one are accepted.
        """
        with self._lock:
            if self._opened is not None and filesystem is self._opened[0]:
                is_accepted = filesystem is self._accepted
                was_none = self._accepted is None and not were_accepted
                if self._has_own_key or was_none or (again and is_accepted):
                    return False
                self._opened = None
            return True


def _from_uri(root: str, storage: Storage) -> tuple[Any, str]:
    """(file system, path of the bucket in it). Raises ShardReadError and OSError."""
    import pyarrow
    from pyarrow import fs

    if storage.requests > pyarrow.io_thread_count():
        pyarrow.set_io_thread_count(storage.requests)  # S3 gets as many connections
    if root.startswith(("memory://", "fsspec+memory://", "mock://")):
        raise ShardReadError(f"{root}: workers cannot read it", hint=MEMORY_HINT)
    if root.startswith(_GOOGLE) and "retry_limit_seconds=" not in root:
        root += f"{'&' if '?' in root else '?'}retry_limit_seconds={_GOOGLE_RETRY_S}"
    try:
        filesystem, path = fs.FileSystem.from_uri(root)
        if isinstance(filesystem, fs.S3FileSystem):
            _, (options,) = filesystem.__reduce__()
            limits = {"connect_timeout": _CONNECT_S, "request_timeout": _ANSWER_S}
            options.update({name: limit for name, limit in limits.items() if options.get(name, -1) <= 0})
            retries = fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS)
            filesystem = fs.S3FileSystem(**options, retry_strategy=retries)
    except (ValueError, NotImplementedError, ImportError) as error:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        hint = f"{_HINT_URI} Known are {known}; for others, give what opens them: Storage(filesystem=…)."
        raise ShardReadError(f"{root}: {error}", hint=hint) from None
    return filesystem, str(path)
