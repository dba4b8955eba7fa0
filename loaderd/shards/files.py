"""The files that shards are: what a path, a glob or a URI names, and reading bytes from one.

Local files are read by ``pread`` (never mapped: a file that is cut short while it is mapped is a SIGBUS, with
``pread`` it is a short read). Anything with a scheme (``s3://…``, ``gs://…``) goes through ``pyarrow.fs``, which is
imported only then. A glob means the same in both.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol
from urllib.parse import quote, unquote

from loaderd.errors import Damage, NoShardsError, OptionError, ShardReadError
from loaderd.machine import remedy
from loaderd.shards.local import absolute, find_files, is_a_folder

_GLOB_CHARACTERS = frozenset("*?[")
_GOOGLE = ("gs://", "gcs://")
_GOOGLE_RETRY_S = 30
_S3_ATTEMPTS = 5
_SAFE_IN_PATHS = "/:=@,+!$&'()~;"
_HINT_READ = "Check that the file exists and that this user may read it."
HINT_STORAGE = "Check that this machine reaches it: the network, a proxy, the endpoint or region, the credentials."
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


def list_shards(shards: Any, on_name: Callable[[int], None] = lambda number: None) -> list[ShardFile]:
    """The files that ``shards`` names: a path, a glob, a URI, or an iterable of them.

    They come **in the order of their paths**, compared folder by folder, however they are given: what is in a list,
    a set, or several globs comes in the same order as from one glob. So hosts agree without knowing of each other,
    also where the files lie in other folders or in a bucket on some of them, as long as these lie alike below one
    folder: what is in front of that is the same for all files, and decides nothing. (Where files are scattered over
    mounts that differ from host to host, links to them in one folder will do: it is the link's path that counts.)
    The files' names alone would not depend on any folder; but where a folder is a day or a generation, the order is
    to be that of the folders. Names are compared as text: 10 comes before 9.

    ``*`` in a glob stops at a slash, ``**`` does not (and passes through links), and neither finds hidden files. All
    that a glob with an ending (``*.tfrecord``) matches must be files. One that ends in a wildcard (``**``, or
    ``train*``) passes folders over, but not those that are named as the files beside them are.

    Raises NoShardsError where one names no file, and where a glob matches a folder named like a shard, or a link that
    leads nowhere; ShardReadError where a folder cannot be looked into. Raises OptionError where the same file is
    named twice, be it through links, hard ones included: its records would be delivered twice.
    ``on_name`` is told of each name, when it has been listed, which it is (counted from 0).
    """
    names = checked_names(shards)
    files: dict[ShardFile, None] = {}
    seen: dict[Any, str] = {}
    for number, name in enumerate([names] if isinstance(names, str) else names):
        for file, places in _list_remote_places(name) if _is_remote(name) else _list_local(name):
            for place in places:
                if place in seen:
                    raise _named_twice(seen[place], file.uri)
                seen[place] = file.uri
            files[file] = None
        on_name(number)
    return sorted(files, key=_path_order)


def checked_names(shards: Any) -> str | tuple[str, ...]:
    """What ``shards`` is given as, in a form that can be kept and sent: text, or a tuple of it.

    Raises OptionError for what is no path, glob, URI or iterable of them; NoShardsError for an empty one.
    """
    if isinstance(shards, (str, os.PathLike)):
        return _checked_name(shards)
    if isinstance(shards, (bytes, Mapping)) or not isinstance(shards, Iterable):
        raise _no_shards(shards)
    names = tuple(map(_checked_name, shards))
    if not names:
        raise NoShardsError(
            "shards must name at least one file, got an empty list",
            hint="Was a generator used up before, or is a glob empty? Give the glob itself.",
        )
    return tuple(sorted(names)) if isinstance(shards, Set) else names


def absolute_names(shards: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The same names, relative ones made absolute: whoever uses them may be in another folder by then."""
    if isinstance(shards, tuple):
        return tuple(name if _is_remote(name) else absolute(name) for name in shards)
    return shards if _is_remote(shards) else absolute(shards)


def _checked_name(name: Any) -> str:
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str) or not text or "\0" in text:
        raise _no_shards(name)
    return str(text)  # numpy has a str of its own


def _no_shards(got: Any) -> OptionError:
    return OptionError(f"shards must be a path, a glob, a URI or a list of them, got {got!r:.200}")


def _path_order(file: ShardFile) -> tuple[list[str], str]:
    path = file.uri
    if _is_remote(path):
        path = unquote(path.partition("://")[2].partition("?")[0])
    return path.strip("/").split("/"), file.uri


def _named_twice(first: str, second: str) -> OptionError:
    what = f"{first} twice" if first == second else f"one file twice, as {first} and as {second}"
    hint = "Each of its records would be delivered twice. A loaderd.Mix can give some shards more weight."
    return OptionError(f"shards names {what}", hint=hint)


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


def _list_local(name: str) -> list[tuple[ShardFile, list[Any]]]:
    """The files that a name on this machine names; and of each, what tells that another name is of the same file.

    Its path without links does; and of a file with several hard links, its number. (That of others means nothing on
    some network file systems.)
    """
    found = []
    folders: dict[str, str] = {}
    for path, status in find_files(name):
        folder, base = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        place = os.path.join(folders[folder], base)
        places: list[Any] = [os.path.realpath(place) if os.path.islink(place) else place]
        if status.st_nlink > 1:
            places.append((status.st_dev, status.st_ino))
        found.append((ShardFile(path, status.st_size, status.st_mtime_ns), places))
    return found


def _list_remote_places(uri: str) -> list[tuple[ShardFile, list[Any]]]:
    return [(file, [file.uri]) for file in _list_remote(uri)]


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
    """The file system of a URI, and the path there.

    Left to itself, pyarrow asks S3 ten times and Google for 15 minutes before it says that there is no answer.
    """
    from pyarrow import fs

    if uri.startswith(_GOOGLE) and "retry_limit_seconds=" not in uri:
        uri += f"{'&' if '?' in uri else '?'}retry_limit_seconds={_GOOGLE_RETRY_S}"
    began_s = time.monotonic()
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
        if isinstance(filesystem, fs.S3FileSystem):
            _, (options,) = filesystem.__reduce__()
            retries = fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS)
            filesystem = fs.S3FileSystem(**options, retry_strategy=retries)
    except (ValueError, NotImplementedError) as error:
        raise ShardReadError(f"{uri}: {error}", hint=_HINT_URI) from None
    except OSError as error:  # the region of a bucket is asked for
        raise _unanswered(uri, error, began_s) from None
    return filesystem, path


def _unanswered(uri: str, error: OSError, began_s: float) -> ShardReadError:
    """What storage says, or that it says nothing; asked since ``began_s``."""
    tried_s = time.monotonic() - began_s
    tried = f" (tried for {tried_s:.0f} s)" if tried_s >= 1 else ""
    said = str(error).partition(" error_info=")[0]  # behind that, Google's says the same again
    return _unreadable(uri, f"{said}{tried}", HINT_STORAGE)


def _list_remote(uri: str) -> list[ShardFile]:
    """A URI's query (``?region=…``) belongs to the file system, not to the path; ``?`` is no wildcard here."""
    from pyarrow import fs

    address, question_mark, query = uri.partition("?")
    if not _GLOB_CHARACTERS.isdisjoint(address):
        return _list_remote_glob(address, question_mark + query)
    began_s = time.monotonic()
    filesystem, path = _filesystem(uri)
    try:
        info = filesystem.get_file_info(path)
    except OSError as error:
        raise _unanswered(uri, error, began_s) from None
    if info.type == fs.FileType.Directory:
        raise is_a_folder(address)
    if info.type != fs.FileType.File:
        raise NoShardsError(f"{uri} does not exist")
    return [_shard_file(uri, info)]


def _list_remote_glob(address: str, query: str) -> list[ShardFile]:
    from pyarrow import fs

    folder = address
    while not _GLOB_CHARACTERS.isdisjoint(folder):
        folder = posixpath.dirname(folder)
    pattern = unquote(address[len(folder) + 1 :]).split("/")
    began_s = time.monotonic()
    filesystem, path = _filesystem(folder + query)
    selector = fs.FileSelector(path, recursive=len(pattern) > 1, allow_not_found=True)
    try:
        found = filesystem.get_file_info(selector)
    except OSError as error:
        raise _unanswered(address + query, error, began_s) from None
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
        began_s = time.monotonic()
        filesystem, path = _filesystem(file.uri)
        try:
            self._file = filesystem.open_input_file(path)
        except OSError as error:
            raise _unanswered(file.uri, error, began_s) from None
        self._uri = file.uri
        self._size_bytes = file.size_bytes

    def check_unchanged(self) -> None:
        size_bytes = self._file.size()
        if size_bytes != self._size_bytes:
            raise _changed(self._uri, f"{self._size_bytes} bytes", f"{size_bytes} bytes")

    def read_at(self, offset: int, view: memoryview) -> int:
        if offset >= self._size_bytes:
            return 0  # pyarrow raises
        began_s = time.monotonic()
        try:
            data = self._file.read_at(len(view), offset)
        except OSError as error:
            raise _unanswered(f"{self._uri} at byte {offset}", error, began_s) from None
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
