"""The files that shards are: what a path, a glob or a URI names, and reading bytes from one.

Local files are read by ``pread`` (never mapped: a file that is cut short while it is mapped is a SIGBUS, with
``pread`` it is a short read). Anything with a scheme (``s3://…``, ``gs://…``) goes through ``pyarrow.fs``, which is
imported only then.
"""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Protocol

from loaderd.errors import NoShardsError, OptionError, ShardReadError

_GLOB_CHARACTERS = frozenset("*?[")
_HINT_READ = "Check that the file exists and that this user may read it."
_HINT_CHANGED = "Make a new loader: it will index the file as it is now."


@dataclass(frozen=True, slots=True, order=True)
class ShardFile:
    """A shard as it was when it was listed: a change of size or time means that it is another file."""

    uri: str
    size_bytes: int
    mtime_ns: int


class OpenFile(Protocol):
    """A file that is open for reading at any offset."""

    def read_at(self, offset: int, view: memoryview) -> int:
        """Fill ``view`` from ``offset`` on; returns the bytes read, fewer only at the end of the file."""

    def check_unchanged(self) -> None:
        """Raise ShardReadError if the file is not what it was when it was listed."""

    def close(self) -> None: ...


def list_shards(shards: Any) -> list[ShardFile]:
    """The files that ``shards`` names: a path, a glob, a URI, or an iterable of them.

    A glob's matches come sorted; a list keeps its order. Raises NoShardsError where one names no file, and
    OptionError where the same file is named twice (its records would be delivered twice).
    """
    names = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    if not names:
        raise NoShardsError("shards must name at least one file, got an empty list")
    files: list[ShardFile] = []
    for name in names:
        text = os.fspath(name) if isinstance(name, os.PathLike) else name
        if not isinstance(text, str):
            raise OptionError(f"shards must be a path, a glob, a URI or a list of them, got {name!r}")
        files.extend(_list_remote(text) if _is_remote(text) else _list_local(text.removeprefix("file://")))
    seen: set[str] = set()
    for file in files:
        if file.uri in seen:
            raise OptionError(f"shards names {file.uri} twice", hint="Each record would be delivered twice.")
        seen.add(file.uri)
    return files


def open_shard(file: ShardFile) -> OpenFile:
    """Open a listed shard; raises ShardReadError where it cannot be read or is not the file that was listed."""
    return _RemoteFile(file) if _is_remote(file.uri) else _LocalFile(file)


def _is_remote(name: str) -> bool:
    return "://" in name and not name.startswith("file://")


def _has_glob(name: str) -> bool:
    return not _GLOB_CHARACTERS.isdisjoint(name)


def _list_local(name: str) -> list[ShardFile]:
    path = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(path):
        raise NoShardsError(
            f"{path} is a folder, a shard is a file", hint=f"Name the files in it with a glob: {path}/*.tfrecord"
        )
    if os.path.exists(path):
        paths = [path]
    else:
        paths = [p for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)] if _has_glob(path) else []
    if not paths:
        what = "matches no file" if _has_glob(path) else "does not exist"
        raise NoShardsError(f"{path} {what}", hint=f"Paths are relative to {os.getcwd()}.")
    listed = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise ShardReadError(f"{path}: {error.strerror}", hint=_HINT_READ) from None
        listed.append(ShardFile(path, status.st_size, status.st_mtime_ns))
    return listed


class _LocalFile:
    def __init__(self, file: ShardFile) -> None:
        try:
            self._fd = os.open(file.uri, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ShardReadError(f"{file.uri}: {error.strerror}", hint=_HINT_READ) from None
        self._file = file
        try:
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        file, status = self._file, os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            raise ShardReadError(
                f"{file.uri} changed while it was in use: expected {file.size_bytes} bytes of time "
                f"{file.mtime_ns}, found {status.st_size} bytes of time {status.st_mtime_ns}",
                hint=_HINT_CHANGED,
            )

    def read_at(self, offset: int, view: memoryview) -> int:
        done = 0
        try:
            while done < len(view):
                got = os.preadv(self._fd, [view[done:]], offset + done)
                if got == 0:
                    break
                done += got
        except OSError as error:
            raise ShardReadError(
                f"{self._file.uri} at byte {offset + done}: {error.strerror}", hint=_HINT_READ
            ) from None
        return done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _filesystem(uri: str) -> tuple[Any, str]:
    from pyarrow import fs

    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError) as error:
        raise ShardReadError(f"{uri}: {error}", hint="loaderd reads the URIs that pyarrow.fs knows.") from None
    return filesystem, path


def _mtime_ns(info: Any) -> int:
    return 0 if info.mtime_ns is None else int(info.mtime_ns)


def _list_remote(uri: str) -> list[ShardFile]:
    """A URI's query (``?region=…``) belongs to the file system, not to the path; ``?`` is no wildcard here."""
    from pyarrow import fs

    address, question_mark, query = uri.partition("?")
    tail = question_mark + query
    has_glob = not frozenset("*[").isdisjoint(address)
    base = address
    while has_glob and not frozenset("*[").isdisjoint(base):
        base = posixpath.dirname(base)
    filesystem, path = _filesystem(base + tail)
    try:
        if has_glob:
            found: Sequence[Any] = filesystem.get_file_info(
                fs.FileSelector(path, recursive=True, allow_not_found=True)
            )
        else:
            found = [filesystem.get_file_info(path)]
    except OSError as error:
        raise ShardReadError(f"{uri}: {error}", hint=_HINT_READ) from None
    pattern = path + address[len(base) :]
    files = [
        info for info in found if info.type == fs.FileType.File and (not has_glob or fnmatch(info.path, pattern))
    ]
    if not files:
        raise NoShardsError(f"{uri} {'matches no file' if has_glob else 'does not exist'}")
    prefix = base[: len(base) - len(path)]
    return [
        ShardFile(prefix + info.path + tail, int(info.size), _mtime_ns(info))
        for info in sorted(files, key=lambda info: str(info.path))
    ]


class _RemoteFile:
    def __init__(self, file: ShardFile) -> None:
        filesystem, path = _filesystem(file.uri)
        try:
            self._file = filesystem.open_input_file(path)
        except OSError as error:
            raise ShardReadError(f"{file.uri}: {error}", hint=_HINT_READ) from None
        self._uri = file.uri
        self._size_bytes = file.size_bytes
        self.check_unchanged()

    def check_unchanged(self) -> None:
        size_bytes = self._file.size()
        if size_bytes != self._size_bytes:
            raise ShardReadError(
                f"{self._uri} changed while it was in use: expected {self._size_bytes} bytes, found {size_bytes}",
                hint=_HINT_CHANGED,
            )

    def read_at(self, offset: int, view: memoryview) -> int:
        try:
            data = self._file.read_at(len(view), offset)
        except OSError as error:
            raise ShardReadError(f"{self._uri} at byte {offset}: {error}", hint=_HINT_READ) from None
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()


def total_bytes(files: Iterable[ShardFile]) -> int:
    """Bytes of all the files together."""
    return sum(file.size_bytes for file in files)
