"""What a URI or a glob with a scheme names: the objects of a bucket.

A listing may take long, page by page, and pyarrow does not tell how far it is; or storage may never answer. To tell
the two apart, a small question is asked beside it every few seconds: while that is answered, the listing goes on.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from loaderd.errors import LoaderdError, NoShardsError, ShardReadError
from loaderd.storage.access import Access
from loaderd.storage.local import is_a_folder
from loaderd.storage.names import bracket_hint
from loaderd.storage.shard_file import ShardFile, UriParts, unanswered

if TYPE_CHECKING:
    from concurrent.futures import Future

_GLOB_CHARACTERS = frozenset("*?[")
_SAFE_IN_PATHS = "/:=@,+!$&'()~;"
_ASK_EVERY_S = 3.0
_TICK_S = 0.05

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

    info = _patiently(uri, uri, lambda: _info_of(uri, access), access)
    if info.type == fs.FileType.Directory:
        raise is_a_folder(address)
    if info.type != fs.FileType.File:
        raise NoShardsError(f"{uri} does not exist", hint=_missing_bucket(uri, access))
    return [_shard_file(uri, info)]


def _list_glob(address: str, query: str, access: Access) -> list[ShardFile]:
    from pyarrow import fs

    folder = address
    while not _GLOB_CHARACTERS.isdisjoint(folder):
        folder = posixpath.dirname(folder)
    if "://" not in folder:
        raise ShardReadError(f"{address}{query}: a glob may not have wildcards in the bucket's name")
    pattern = unquote(address[len(folder) + 1 :]).split("/")

    def look() -> tuple[str, Any]:
        filesystem, path = access.filesystems.of(folder + query)
        selector = fs.FileSelector(path, recursive=pattern == ["**"] or len(pattern) > 1, allow_not_found=True)
        infos = filesystem.get_file_info(selector)
        # A web server lists links only: the sizes of the files must be asked for.
        unknown = [info.path for info in infos if info.type == fs.FileType.File and info.size is None]
        return path, [info for info in infos if info.path not in unknown] + filesystem.get_file_info(unknown)

    files = []
    path, infos = _patiently(address + query, folder + query, look, access)
    for info in sorted(infos, key=lambda info: str(info.path)):
        name = info.path[len(path) :].lstrip("/") if info.path.startswith(path) else info.path.lstrip("/")
        name = unquote(name) if "://" in path else name  # a URL, as of a web server
        if info.type == fs.FileType.File and _matches(name.split("/"), pattern):
            files.append(_shard_file(f"{folder}/{quote(name, safe=_SAFE_IN_PATHS)}{query}", info))
    if not files:
        hints = [bracket_hint(address), _missing_bucket(folder + query, access)]
        raise NoShardsError(f"{address}{query} matches no file", hint=" ".join(filter(None, hints)))
    return files


def _patiently(uri: str, small: str, look: Callable[[], _Answer], access: Access) -> _Answer:
    """The answer to ``look``, which is waited for as long as the storage answers questions about ``small``, a URI.

    Raises StorageError where it answers none for ``Storage.retry_s``.
    """
    answer = access.ask(lambda: access.call_with_retries(uri, look))
    began_s = heard_s = asked_s = time.monotonic()
    sign: Future[Any] | None = None
    while not answer.done():
        time.sleep(_TICK_S)
        now_s = time.monotonic()
        if sign is not None and sign.done():
            if sign.exception() is None:
                heard_s = now_s
                access.on_wait()
            sign = None
        elif sign is None and now_s - asked_s > _ASK_EVERY_S:
            asked_s, sign = now_s, access.ask(lambda: _info_of(small, access))
        if now_s - heard_s > access.storage.retry_s + _ASK_EVERY_S:
            access.abandon()
            raise unanswered(uri, "it cannot be listed, for the storage does not answer", now_s - began_s, True)
    return access.wait(uri, answer)


def _info_of(uri: str, access: Access) -> Any:
    filesystem, path = access.filesystems.of(uri)
    return filesystem.get_file_info(path)


def _missing_bucket(uri: str, access: Access) -> str:
    """A hint, where not even the bucket of a URI is there; else "", also where the bucket may not be looked at."""
    from pyarrow import fs

    bucket = UriParts.of(uri)
    root = bucket.root
    try:
        info = _patiently(root, root, lambda: _info_of(root, access), access)
    except LoaderdError:
        return ""
    return f"There is no {bucket.place} at all." if info.type == fs.FileType.NotFound else ""


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
