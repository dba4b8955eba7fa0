"""Reads a shard that has a path on this machine, even if that is in a network file system.

A shard is read by ``pread`` and never mapped: if a mapped file is cut short, reading it raises SIGBUS, while
``pread`` reads less. What fails with an error that may pass, as in a network file system or with too many open files,
is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from loaderd.errors import LoaderdError
from loaderd.machine import remedy
from loaderd.storage.access import Access, no_callback
from loaderd.storage.retries import call_with_retries, may_pass
from loaderd.storage.shard_file import ShardFile, changed, unanswered, unreadable

_Answer = TypeVar("_Answer")

# A file may have become a pipe since it was listed: to open one waits for somebody who writes, for ever.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
# A network file system may have forgotten a descriptor for good. EBADF: the last try to open the file failed.
_NEW_DESCRIPTOR = (errno.ESTALE, errno.EBADF, errno.ENOTCONN)


def read_whole(file: ShardFile, view: memoryview) -> bool:
    """Read a file into ``view``, of its size or more, in 8 µs. False where anything is wrong: a LocalFile tells."""
    try:
        fd = os.open(file.uri, _READ_FLAGS)
        try:
            got, status = os.preadv(fd, [view], 0), os.fstat(fd)
        finally:
            os.close(fd)
    except OSError:
        return False
    return got == file.size_bytes and (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def retried(
    name: str,
    ask: Callable[[], _Answer],
    access: Access,
    doing: str = "{}",
    make_room: Callable[[], None] = no_callback,
) -> _Answer:
    """The answer to ``ask``, about what ``name`` names; it is asked again while a failure may pass.

    Raises StorageError where that is in vain, and ShardReadError for any other OSError; ``doing``: in errors, what
    cannot be done, and where. ``make_room`` closes other files before each further try: too many may be open.
    """

    def on_retry() -> None:
        make_room()
        access.on_wait()

    began_s = time.monotonic()
    try:
        return call_with_retries(partial(access.outages.watch, name, ask), access.storage.retry_s, on_retry)
    except LoaderdError:
        raise
    except OSError as error:
        why = doing.format(error.strerror)
        if may_pass(error):
            raise unanswered(error.filename or name, why, time.monotonic() - began_s, True, remedy(error)) from None
        raise unreadable(name, why, remedy(error)) from None


class LocalFile:
    """Opens the file; ``make_room`` as of :func:`retried`."""

    def __init__(self, file: ShardFile, access: Access, make_room: Callable[[], None] = no_callback) -> None:
        self._file, self._access = file, access
        self._fd = -1
        retried(file.uri, self._open, access, make_room=make_room)

    def _open(self) -> None:
        self.close()
        self._fd = os.open(self._file.uri, _READ_FLAGS)

    def _ask(self, call: Callable[[], _Answer], doing: str = "{}") -> _Answer:
        """What ``call`` returns; it is called again with a new descriptor if the old one is no longer valid."""

        def ask() -> _Answer:
            try:
                return call()
            except OSError as error:
                if error.errno not in _NEW_DESCRIPTOR:
                    raise
            self._open()  # check_unchanged says whether it is still the same file
            return call()

        return retried(self._file.uri, ask, self._access, doing)

    def check_unchanged(self) -> None:
        """Raise ShardReadError if the file is not what it was when it was listed."""
        file = self._file
        try:
            status = os.fstat(self._fd)
        except OSError:  # asked again, with patience
            status = self._ask(lambda: os.fstat(self._fd))
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            raise changed(file, status.st_size, status.st_mtime_ns)

    def read_at(self, offset: int, view: memoryview) -> int:
        try:
            done = os.preadv(self._fd, [view], offset)
        except OSError:  # asked again, with patience, whose preparations take some microseconds
            done = 0
        else:
            self._access.outages.answered()
        while done < len(view):
            read = partial(self._read_some, offset + done, view[done:])
            got = self._ask(read, f"{{}} at byte {offset + done}")
            if got == 0:
                break
            done += got
        return done

    def _read_some(self, offset: int, view: memoryview) -> int:
        return os.preadv(self._fd, [view], offset)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # of a mount that is gone; nothing was written
                os.close(fd)
