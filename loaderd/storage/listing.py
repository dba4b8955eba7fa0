"""What a URI or a glob with a scheme names: the objects of a bucket."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from loaderd.errors import NoShardsError, ShardReadError
from loaderd.storage.access import Access
from loaderd.storage.local import is_a_folder
from loaderd.storage.names import bracket_hint
from loaderd.storage.shard_file import ShardFile, unanswered
from loaderd.storage.storage_threads import RequestThreads

if TYPE_CHECKING:
    from concurrent.futures import Future

_GLOB_CHARACTERS = frozenset("*?[")
_SAFE_IN_PATHS = "/:=@,+!$&'()~;"
_ASK_EVERY_S = 1.5

_Answer = TypeVar("_Answer")


def list_remote(uri: str, access: Access) -> list[ShardFile]:
    """The shards that a URI names.

    Its query (``?region=…``) belongs to the file system, not to the path; ``?`` is no wildcard here. Raises
    NoShardsError, ShardReadError for a URI that cannot be parsed, and StorageError.
    """
    from pyarrow import fs

    address, question_mark, query = uri.partition("?")
    if not _GLOB_CHARACTERS.isdisjoint(address):
        return _list_glob(address, question_mark + query, access)
    (info,) = _look(uri, uri, access)[1]
    if info.type == fs.FileType.Directory:
        raise is_a_folder(address)
    if info.type != fs.FileType.File:
        raise NoShardsError(f"{uri} does not exist")
    return [_shard_file(uri, info)]


def _list_glob(address: str, query: str, access: Access) -> list[ShardFile]:
    from pyarrow import fs

    folder = address
    while not _GLOB_CHARACTERS.isdisjoint(folder):
        folder = posixpath.dirname(folder)
    if "://" not in folder:
        raise ShardReadError(f"{address}{query}: a glob may not have wildcards in the bucket's name")
    pattern = unquote(address[len(folder) + 1 :]).split("/")
    path, infos = _look(address + query, folder + query, access, recursive=pattern == ["**"] or len(pattern) > 1)
    files = []
    for info in sorted(infos, key=lambda info: str(info.path)):
        name = str(info.path).removeprefix(path).lstrip("/")
        name = unquote(name) if "://" in path else name  # a URL, as of a web server
        if info.type == fs.FileType.File and _matches(name.split("/"), pattern):
            files.append(_shard_file(f"{folder}/{quote(name, safe=_SAFE_IN_PATHS)}{query}", info))
    if not files:
        raise NoShardsError(f"{address}{query} matches no file", hint=bracket_hint(address))
    return files


def _look(named: str, uri: str, access: Access, recursive: bool | None = None) -> tuple[str, list[Any]]:
    """The path of ``uri`` in its file system, and what is there; ``recursive`` or not: what is in that folder.

    ``named``: in errors.
    """
    from pyarrow import fs

    def look() -> tuple[str, list[Any]]:
        filesystem, path = access.locate(uri)
        if recursive is None:
            return path, [filesystem.get_file_info(path)]
        infos = filesystem.get_file_info(fs.FileSelector(path, recursive=recursive, allow_not_found=True))
        # A web server lists links only: the sizes of the files must be asked for.
        unknown = [info.path for info in infos if info.type == fs.FileType.File and info.size is None]
        known = [info for info in infos if info.type != fs.FileType.File or info.size is not None]
        return path, known + filesystem.get_file_info(unknown)

    return _patiently(named, uri, look, access)


def _patiently(named: str, uri: str, look: Callable[[], _Answer], access: Access) -> _Answer:
    """The answer to ``look``. It may take long, page by page, and pyarrow does not tell how far it is.

    So ``uri`` is looked at beside it: while that is answered, the listing goes on. A worker that is not answered is
    silent, so that the daemon can say which listing that is.
    """
    from concurrent.futures import wait  # needed only for shards that are far away

    answer = access.ask(lambda: access.call_with_retries(named, look))
    beside, heard_s = RequestThreads(1), time.monotonic()
    sign: Future[Any] | None = None
    while not wait([answer], _ASK_EVERY_S).done:
        if sign is not None and sign.done() and sign.exception() is None:
            heard_s = time.monotonic()
            access.outages.answered()
            access.on_wait()
        if sign is None or sign.done():
            sign = beside.ask(lambda: _info_of(uri, access))
        if time.monotonic() - heard_s > access.limit_s:
            access.abandon()
            beside.abandon()
            raise unanswered(named, "the storage does not answer", access.limit_s, True)
    beside.abandon()
    return access.wait(named, answer)


def _info_of(uri: str, access: Access) -> Any:
    filesystem, path = access.locate(uri)
    return filesystem.get_file_info(path)


def _matches(name: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a path match those of a glob, as ``glob.glob`` has it."""
    if not name or not pattern:
        return not name and not pattern
    if pattern == ["**"]:
        return not any(part.startswith(".") for part in name)
    if pattern[0] == "**":
        return _matches(name, pattern[1:]) or (not name[0].startswith(".") and _matches(name[1:], pattern))
    visible = pattern[0].startswith(".") or not name[0].startswith(".")
    return visible and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _shard_file(uri: str, info: Any) -> ShardFile:
    if info.size is None:
        raise ShardReadError(f"{uri} cannot be read: the storage does not say how large it is")
    return ShardFile(uri, int(info.size), 0 if info.mtime_ns is None else int(info.mtime_ns))
