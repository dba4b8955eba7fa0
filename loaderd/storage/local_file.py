"""Reads a shard that has a path on this machine, even if that is in a network file system; and writes whole files.

A shard is read by ``pread`` and never mapped: if a mapped file is cut short, reading it raises SIGBUS, while
``pread`` reads less. What fails with an error that may pass, as in a network file system or with too many open files,
is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from loaderd.errors import LoaderdError
from loaderd.machine import remedy
from loaderd.storage.outage_tracker import OutageTracker
from loaderd.storage.retries import call_with_retries, may_pass
from loaderd.storage.shard_file import ShardFile, changed, state_in_words, unanswered, unreadable

_Answer = TypeVar("_Answer")

# A file may have become a pipe since it was listed: to open one waits for somebody who writes, for ever.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

_FOLDER = re.compile("[0-9a-f]{2}")

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


def read_own(path: str | Path, most_bytes: int) -> tuple[bytes, float]:
    """A file that ``write_whole`` wrote, and its time of change.

    Raises OSError, also where it is larger, or no regular file.
    Who may write to its folder may have put anything there: a pipe that nobody writes to, or /dev/zero.
    """
    with open(os.open(path, _READ_FLAGS | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise OSError(errno.EINVAL, f"not a regular file of at most {most_bytes} bytes", str(path))
        return file.read(status.st_size), status.st_mtime  # memory is taken for as much as is asked for


def kept_files(folder: Path, pattern: str) -> list[tuple[float, int, str]]:
    """(time of last use, bytes, path) of what ``write_whole`` has put into the subfolders 00 to ff of ``folder``.

    That is the files whose names match ``pattern``, and those that a process left unfinished when it was killed; the
    user may have other things there, too.
    """
    name = re.compile(rf"{pattern}|\.[0-9a-f]{{16}}\.tmp")
    files = []
    for inner in os.scandir(folder):
        if _FOLDER.fullmatch(inner.name) and inner.is_dir(follow_symlinks=False):
            for entry in os.scandir(inner):
                if name.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime, status.st_size, entry.path))
    return files


def write_whole(path: str | Path, data: bytes, mode: int = 0, dir_fd: int | None = None) -> None:
    """Write a file under a hidden name, and rename it: a reader sees all of it or none, even if the writer is killed.

    ``mode``: whatever the umask says; 0: the usual one. ``dir_fd``: as of ``os.open``; then the file is on the disk
    when this returns. Raises OSError, and leaves nothing then.
    """
    folder, _ = os.path.split(path)
    temporary = os.path.join(folder, f".{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode or 0o666, dir_fd=dir_fd)
    try:
        with open(fd, "wb") as out:
            if mode:
                os.fchmod(fd, mode)
            out.write(data)
            if dir_fd is not None:
                out.flush()
                os.fsync(fd)
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise


def retried(
    name: str,
    ask: Callable[[], _Answer],
    retry_s: float,
    on_retry: Callable[[], None],
    outages: OutageTracker,
    doing: str = "",
) -> _Answer:
    """The answer to ``ask``, about what ``name`` names; it is asked again for ``retry_s`` while a failure may pass.

    Raises StorageError where that is in vain, and ShardReadError for any other OSError; ``doing``: in errors, what
    cannot be done, and where.
    """
    began_s = time.monotonic()
    try:
        return call_with_retries(partial(outages.watch, name, ask), retry_s, on_retry)
    except LoaderdError:
        raise
    except OSError as error:
        why = doing.format(error.strerror) if doing else str(error.strerror)
        if may_pass(error):
            raise unanswered(error.filename or name, why, time.monotonic() - began_s, True, remedy(error)) from None
        raise unreadable(name, why, remedy(error)) from None


class LocalFile:
    """Opens the file. ``on_retry`` is called before anything is tried again, and ``outages`` learns of failures.

    While the file is opened for the first time, ``make_room`` is called then, too. It closes other files, because too
    many may be open.
    """

    def __init__(
        self,
        file: ShardFile,
        retry_s: float,
        on_retry: Callable[[], None],
        make_room: Callable[[], None],
        outages: OutageTracker | None = None,
    ) -> None:
        def waits() -> None:
            make_room()
            on_retry()

        self._file, self._retry_s, self._on_retry = file, retry_s, waits
        self._outages = outages or OutageTracker()
        self._fd = -1
        self._ask(self._open)
        self._on_retry = on_retry

    def _open(self) -> None:
        self.close()
        self._fd = os.open(self._file.uri, _READ_FLAGS)

    def _ask(self, ask: Callable[[], _Answer], doing: str = "") -> _Answer:
        return retried(self._file.uri, ask, self._retry_s, self._on_retry, self._outages, doing)

    def check_unchanged(self) -> None:
        file = self._file
        status = self._ask(lambda: self._reopening(lambda: os.fstat(self._fd)))
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            raise changed(
                file.uri,
                state_in_words(file.size_bytes, file.mtime_ns),
                state_in_words(status.st_size, status.st_mtime_ns),
            )

    def read_at(self, offset: int, view: memoryview) -> int:
        done = 0
        while done < len(view):
            read = partial(self._read_some, offset + done, view[done:])
            got = self._ask(partial(self._reopening, read), f"{{}} at byte {offset + done}")
            if got == 0:
                break
            done += got
        return done

    def _read_some(self, offset: int, view: memoryview) -> int:
        return os.preadv(self._fd, [view], offset)

    def _reopening(self, call: Callable[[], _Answer]) -> _Answer:
        """What ``call`` returns; it is called again with a new descriptor if the old one is no longer valid."""
        try:
            return call()
        except OSError as error:
            if error.errno not in _NEW_DESCRIPTOR:
                raise
        self._open()  # check_unchanged says whether it is still the same file
        return call()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # of a mount that is gone; nothing was written
                os.close(fd)
