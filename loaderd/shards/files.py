"""The files that shards are: what a path, a glob or a URI names, and reading bytes from one.

Local files are read by ``pread`` (never mapped: a file that is cut short while it is mapped is a SIGBUS, with
``pread`` it is a short read). Anything with a scheme (``s3://…``, ``gs://…``) goes through ``pyarrow.fs``, which is
imported only then. A glob means the same in both: ``*`` stops at a slash, ``**`` does not, and neither finds hidden
files.
"""

from __future__ import annotations

import contextlib
import glob
import os
import posixpath
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol
from urllib.parse import quote, unquote

from loaderd.errors import Damage, NoShardsError, OptionError, ShardReadError
from loaderd.machine import remedy

_GLOB_CHARACTERS = frozenset("*?[")
_SAFE_IN_PATHS = "/:=@,+!$&'()~;"
_HINT_READ = "Check that the file exists and that this user may read it."
_HINT_URI = "loaderd reads the URIs that pyarrow.fs knows; a blank in one is written %20."
_HINT_CHANGED = "Make a new loader: it will index the file as it is now."


@dataclass(frozen=True, slots=True, order=True)
class ShardFile:
    """A shard as it was when it was listed: a change of size or time means that it is another file.

    A remote file is compared by its size alone when it is opened: to ask for its time would be a request more.
    """

    uri: str
    size_bytes: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """The file's name, without its folders and without a URI's query: what stays when shards are moved."""
        if not _is_remote(self.uri):
            return posixpath.basename(self.uri)
        return unquote(posixpath.basename(self.uri.partition("?")[0]))


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
    is_one = isinstance(shards, (str, bytes, os.PathLike)) or not isinstance(shards, Iterable)
    names = [shards] if is_one else list(shards)
    if not names:
        raise NoShardsError("shards must name at least one file, got an empty list")
    files: list[ShardFile] = []
    for name in names:
        text = os.fspath(name) if isinstance(name, os.PathLike) else name
        if not isinstance(text, str):
            raise OptionError(f"shards must be a path, a glob, a URI or a list of them, got {name!r}")
        files.extend(_list_remote(text) if _is_remote(text) else _list_local(text))
    seen: set[str] = set()
    for file in files:
        if file.uri in seen:
            raise OptionError(f"shards names {file.uri} twice", hint="Each record would be delivered twice.")
        seen.add(file.uri)
    return files


def open_shard(file: ShardFile) -> OpenFile:
    """Open a listed shard; raises ShardReadError where it cannot be read or is not the file that was listed."""
    opened: OpenFile = _RemoteFile(file) if _is_remote(file.uri) else _LocalFile(file)
    try:
        opened.check_unchanged()
    except BaseException:
        opened.close()
        raise
    return opened


def _is_remote(name: str) -> bool:
    return "://" in name and not name.startswith("file://")


def _has_glob(name: str) -> bool:
    return not _GLOB_CHARACTERS.isdisjoint(name)


def _list_local(name: str) -> list[ShardFile]:
    if name.startswith("file://"):
        name = unquote(name.removeprefix("file://").removeprefix("localhost"))
    path = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(path):
        raise _is_a_folder(path)
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise NoShardsError(f"{path} is not a regular file", hint="A shard is read from many places at a time.")
        paths = [path]
    else:
        paths = sorted(glob.glob(path, recursive=True)) if _has_glob(path) else []
    listed = []
    for found in paths:
        with contextlib.suppress(OSError):  # deleted since it was found
            status = os.stat(found)
            if stat.S_ISREG(status.st_mode):
                listed.append(ShardFile(found, status.st_size, status.st_mtime_ns))
    if not listed:
        what = "matches no file" if _has_glob(path) else "does not exist"
        raise NoShardsError(f"{path} {what}", hint=f"Paths are relative to {os.getcwd()}.")
    return listed


def _is_a_folder(name: str) -> NoShardsError:
    hint = f"Name the files in it with a glob: {name.rstrip('/')}/*.tfrecord"
    return NoShardsError(f"{name} is a folder, a shard is a file", hint=hint)


def _unreadable(uri: str, why: str, hint: str = "") -> ShardReadError:
    damage = Damage(uri, 0, 0, "a file that can be read", why, lost_bytes=-1)
    return ShardReadError(f"{uri}: {why}", hint=hint or _HINT_READ, damage=damage)


def _changed(uri: str, expected: str, found: str) -> ShardReadError:
    damage = Damage(uri, 0, 0, f"the file of {expected} that was indexed", found, lost_bytes=-1)
    text = f"{uri} changed while it was in use: expected {expected}, found {found}"
    return ShardReadError(text, hint=_HINT_CHANGED, damage=damage)


class _LocalFile:
    def __init__(self, file: ShardFile) -> None:
        try:
            self._fd = os.open(file.uri, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(file.uri, str(error.strerror), remedy(error)) from None
        self._file = file

    def check_unchanged(self) -> None:
        file, status = self._file, os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            raise _changed(
                file.uri,
                f"{file.size_bytes} bytes of time {file.mtime_ns}",
                f"{status.st_size} bytes of time {status.st_mtime_ns}",
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
            raise _unreadable(self._file.uri, f"{error.strerror} at byte {offset + done}") from None
        return done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _filesystem(uri: str) -> tuple[Any, str]:
    from pyarrow import fs

    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as error:
        raise ShardReadError(f"{uri}: {error}", hint=_HINT_URI) from None
    return filesystem, path


def _list_remote(uri: str) -> list[ShardFile]:
    """A URI's query (``?region=…``) belongs to the file system, not to the path; ``?`` is no wildcard here."""
    from pyarrow import fs

    address, question_mark, query = uri.partition("?")
    if not _GLOB_CHARACTERS.isdisjoint(address):
        return _list_remote_glob(address, question_mark + query)
    filesystem, path = _filesystem(uri)
    try:
        info = filesystem.get_file_info(path)
    except OSError as error:
        raise ShardReadError(f"{uri}: {error}", hint=_HINT_READ) from None
    if info.type == fs.FileType.Directory:
        raise _is_a_folder(address)
    if info.type != fs.FileType.File:
        raise NoShardsError(f"{uri} does not exist")
    return [_shard_file(uri, info)]


def _list_remote_glob(address: str, query: str) -> list[ShardFile]:
    from pyarrow import fs

    folder = address
    while not _GLOB_CHARACTERS.isdisjoint(folder):
        folder = posixpath.dirname(folder)
    pattern = unquote(address[len(folder) + 1 :]).split("/")
    filesystem, path = _filesystem(folder + query)
    selector = fs.FileSelector(path, recursive=len(pattern) > 1, allow_not_found=True)
    try:
        found = filesystem.get_file_info(selector)
    except OSError as error:
        raise ShardReadError(f"{address}{query}: {error}", hint=_HINT_READ) from None
    files = []
    for info in sorted(found, key=lambda info: str(info.path)):
        name = info.path[len(path) :].lstrip("/")
        if info.type == fs.FileType.File and _matches(name.split("/"), pattern):
            files.append(_shard_file(f"{folder}/{quote(name, safe=_SAFE_IN_PATHS)}{query}", info))
    if not files:
        raise NoShardsError(f"{address}{query} matches no file")
    return files


def _matches(name: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a path match those of a glob, as ``glob.glob`` has it."""
    if not name or not pattern:
        return not name and not pattern
    if pattern[0] == "**":
        return _matches(name, pattern[1:]) or (not name[0].startswith(".") and _matches(name[1:], pattern))
    visible = pattern[0].startswith(".") or not name[0].startswith(".")
    return visible and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _shard_file(uri: str, info: Any) -> ShardFile:
    return ShardFile(uri, int(info.size), 0 if info.mtime_ns is None else int(info.mtime_ns))


class _RemoteFile:
    def __init__(self, file: ShardFile) -> None:
        filesystem, path = _filesystem(file.uri)
        try:
            self._file = filesystem.open_input_file(path)
        except OSError as error:
            raise _unreadable(file.uri, str(error)) from None
        self._uri = file.uri
        self._size_bytes = file.size_bytes

    def check_unchanged(self) -> None:
        size_bytes = self._file.size()
        if size_bytes != self._size_bytes:
            raise _changed(self._uri, f"{self._size_bytes} bytes", f"{size_bytes} bytes")

    def read_at(self, offset: int, view: memoryview) -> int:
        if offset >= self._size_bytes:
            return 0  # pyarrow raises
        try:
            data = self._file.read_at(len(view), offset)
        except OSError as error:
            raise _unreadable(self._uri, f"{error} at byte {offset}") from None
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
