"""The file systems behind URIs: those that ``pyarrow.fs`` knows by the scheme, or the one that the user gives.

One file system serves all URIs of one bucket and query: each new one would have connections of its own, and would
ask for the region where none is given. pyarrow is imported only when it is needed.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import unquote

from loaderd.errors import ShardReadError
from loaderd.options import Storage

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "hf", "fsspec+…")

_HINT_URI = "A space in a URI is written %20, and a slash in a key %2F."
_CONNECT_S = 5.0
_ANSWER_S = 10.0
# How often pyarrow itself tries a request: with more, loaderd would not know how often storage is asked.
_S3_ATTEMPTS = 1
_GOOGLE = ("gs://", "gcs://")
_GOOGLE_RETRY_S = 5


class Filesystems:
    """See the module's docstring. Any thread may use it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._given: Any = None
        self._known: dict[str, tuple[Any, str]] = {}
        self._lock = threading.Lock()

    def of(self, uri: str) -> tuple[Any, str]:
        """(file system, path there) of a URI. Raises ShardReadError for one that cannot be parsed, and OSError."""
        scheme, _, rest = uri.partition("://")
        address, mark, query = rest.partition("?")
        if self._storage.filesystem is not None:
            return self._given_one(), self._path_of_given(uri, address)
        if " " in uri:
            raise ShardReadError(f"{uri}: the URI contains a space", hint=_HINT_URI)
        authority, slash, path = address.partition("/")
        root = f"{scheme}://{authority}{mark}{query}"
        with self._lock:
            if root not in self._known:
                self._known[root] = _opened(root, self._storage.requests)
            filesystem, base = self._known[root]
        return filesystem, f"{base.rstrip('/')}{slash}{unquote(path)}"

    def _given_one(self) -> Any:
        from pyarrow import fs

        if self._given is None:
            given = self._storage.filesystem
            known = isinstance(given, fs.FileSystem)
            self._given = given if known else fs.PyFileSystem(fs.FSSpecHandler(given))
        return self._given

    def _path_of_given(self, uri: str, address: str) -> str:
        strip = getattr(self._storage.filesystem, "_strip_protocol", None)  # fsspec has this
        if strip is None:
            return unquote(address)
        path, mark, query = str(strip(uri)).partition("?")
        # The path may still be a URL (fsspec has such paths), and a URL stays quoted.
        return f"{path if '://' in path else unquote(path)}{mark}{query}"


def _opened(root: str, requests: int) -> tuple[Any, str]:
    """Raises ShardReadError and OSError."""
    import pyarrow
    from pyarrow import fs

    if requests > pyarrow.io_thread_count():
        pyarrow.set_io_thread_count(requests)  # S3 gets as many connections
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
