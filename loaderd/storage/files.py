"""Lists what a path, a glob or a URI names, and opens it: in the same way on this machine and in storage far away.

::

    files.py (names) ──► local.py   finds     local_file.py   reads    paths
                     └─► listing.py finds     remote_file.py  reads    URIs; fetches.py: many blocks at a time

Anything with a scheme (``s3://…``, ``gs://…``) goes through ``pyarrow.fs``. A glob means the same in both.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from loaderd.errors import OptionError
from loaderd.redaction import redacted
from loaderd.snapshots import Progress
from loaderd.storage.access import Access, no_callback
from loaderd.storage.columns import list_columns
from loaderd.storage.credentials import asked_of
from loaderd.storage.listing import list_remote
from loaderd.storage.local import find_files
from loaderd.storage.local_file import LocalFile, read_whole, retried
from loaderd.storage.names import Columns, absolute_names, checked_names
from loaderd.storage.remote_file import RemoteFile
from loaderd.storage.shard_file import ShardFile, is_remote

if TYPE_CHECKING:
    from loaderd.progress import ProgressDisplay


class JoinedFile:
    """Files that belong together, as if they lay one behind the other."""

    def __init__(self, file: ShardFile, parts: Sequence[LocalFile | RemoteFile]) -> None:
        self._parts = parts
        self._begins = list(accumulate((part.size_bytes for part in file.parts), initial=0))

    def check_unchanged(self) -> None:
        for part in self._parts:
            part.check_unchanged()

    def read_at(self, offset: int, view: memoryview) -> int:
        """As of the files; fewer bytes come at the end of each."""
        number = min(bisect_right(self._begins, offset), len(self._parts)) - 1
        return self._parts[number].read_at(offset - self._begins[number], view)

    def close(self) -> None:
        for part in self._parts:
            part.close()


OpenFile = LocalFile | RemoteFile | JoinedFile


def list_shards(
    shards: Any, on_found: Callable[[int], None] = lambda number: None, access: Access | None = None
) -> list[ShardFile]:
    """The files that ``shards`` names: a path, a glob, a URI, or an iterable of them; or ``Columns`` of these.

    They come **in the order of their paths**, compared as text, folder by folder, however they are given. So hosts
    agree without knowing of each other, even if some of them have the files in another folder or in a bucket, as long
    as all is alike below that: the path in front is the same for all files of a host, and decides nothing. (If files
    are scattered over mounts that differ from host to host, put links to them in one folder: the path of the link
    counts.)

    ``*`` in a glob stops at a slash, ``**`` does not (and passes through links), and neither finds hidden files. All
    that a glob with an ending (``*.tfrecord``) matches must be files. A glob that ends in a wildcard (``**``, or
    ``train*``) passes over folders.

    Raises NoShardsError where a name names no file, and where a glob with an ending matches a folder, or any glob a
    link that leads nowhere; ShardReadError where a folder cannot be looked into; StorageError where storage does not
    answer; OptionError where a file is named twice, even if through links (hard ones included): its records would be
    delivered twice. ``on_found`` is called now and then with the number of files found so far.
    """
    names = checked_names(shards)
    access = access or Access()
    if isinstance(names, Columns):
        joined = list_columns(absolute_names(names), lambda pattern: list_shards(pattern, on_found, access))
        return sorted(joined, key=path_order)
    files: list[ShardFile] = []
    seen: dict[Any, str] = {}
    folders: dict[str, str] = {}
    for name in [names] if isinstance(names, str) else names:
        if is_remote(name):
            listed = [(file, [file.uri]) for file in list_remote(name, access)]
        else:
            listed = _list_local(name, access, folders, lambda number: on_found(len(files) + number))
        for file, places in listed:
            for place in places:
                if place in seen:
                    raise _named_twice(seen[place], file.uri)
                seen[place] = file.uri
            files.append(file)
        on_found(len(files))
    return sorted(files, key=path_order)


def _list_local(
    name: str, access: Access, folders: dict[str, str], on_found: Callable[[int], None]
) -> list[tuple[ShardFile, list[Any]]]:
    """The files that a name on this machine names; and of each, what is equal if another name is of the same file.

    That is its path without links and, for a file with several hard links, its inode. (The inodes of other files mean
    nothing on some network file systems.) ``folders``: those that were met so far, without links; more are added.
    """
    listed = []
    for path, status in retried(name, partial(find_files, name, on_found), access, "cannot be read: {}"):
        folder, _, base = path.rpartition("/")
        if folder not in folders:
            folders[folder] = os.path.realpath(f"{folder}/").rstrip("/")
        place = f"{folders[folder]}/{base}"
        places: list[Any] = [os.path.realpath(place) if os.path.islink(place) else place]
        if status.st_nlink > 1:
            places.append((status.st_dev, status.st_ino))
        listed.append((ShardFile(path, status.st_size, status.st_mtime_ns), places))
    return listed


def _named_twice(first: str, second: str) -> OptionError:
    what = f"{first} twice" if first == second else f"one file twice, as {first} and as {second}"
    hint = "Each of its records would be delivered twice. A loaderd.Mix can give some shards more weight."
    return OptionError(f"shards names {what}", hint=hint)


def path_order(file: ShardFile) -> tuple[str, str]:
    """A key that compares paths folder by folder: no name holds a zero, and nothing comes before it."""
    path = file.path.partition("://")[2] if is_remote(file.uri) else file.path
    return path.strip("/").replace("/", "\0"), file.uri


def list_with_progress(shards: Any, display: ProgressDisplay, access: Access | None = None) -> list[ShardFile]:
    """``list_shards``; ``display`` shows how many there are so far, and which storage has not answered."""
    names = checked_names(shards)
    first, *more = [names] if isinstance(names, str) else names
    others = len(more)
    doing = f"listing {redacted(first)}" + (f" and {others:,} more" if others else "")
    access = access or Access()
    num_found = 0

    def count(number: int) -> None:
        nonlocal num_found
        num_found = number

    def progress() -> Progress:
        outage = access.outages.outage
        remark = ""
        if outage is not None:
            asked = asked_of(first) and f". Asked is {asked_of(first)}"
            remark = f"{outage.in_words().capitalize()}{asked}; it is given up after {access.limit_s:g} s"
        return Progress(doing, num_found, remark=remark)

    with display.repeating(progress):
        return list_shards(names, count, access)


def open_shard(
    file: ShardFile, access: Access | None = None, make_room: Callable[[], None] = no_callback
) -> OpenFile:
    """Open a listed shard.

    Raises ShardReadError where it is not there or is not the file that was listed, and StorageError. ``make_room``
    closes files that need not be open; it is called where this one cannot be opened.
    """
    access = access or Access()
    opened: OpenFile
    if file.columns:
        with ExitStack() as stack:
            parts = [stack.enter_context(closing(_open_one(part, access, make_room))) for part in file.parts]
            stack.pop_all()
        opened = JoinedFile(file, parts)
    else:
        opened = _open_one(file, access, make_room)
    try:
        opened.check_unchanged()
    except BaseException:
        opened.close()
        raise
    return opened


def _open_one(file: ShardFile, access: Access, make_room: Callable[[], None]) -> LocalFile | RemoteFile:
    return RemoteFile(file, access) if is_remote(file.uri) else LocalFile(file, access, make_room)


def read_shard(
    file: ShardFile, view: memoryview, access: Access | None = None, make_room: Callable[[], None] = no_callback
) -> bool:
    """Read all of a listed shard into ``view``, of its size or more. False where it has another size.

    For small shards: it is opened and closed again. Raises as :func:`open_shard`, whose ``make_room`` is the same.
    """
    access = access or Access()
    if not is_remote(file.uri) and read_whole(file, view):
        access.outages.answered()
        return True
    with closing(open_shard(file, access, make_room)) as opened:
        if opened.read_at(0, view) != file.size_bytes:
            return False
        opened.check_unchanged()
    return True
