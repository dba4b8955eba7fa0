"""Small files of loaderd's own, in folders into which others may write: read, written whole, and counted."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

_FOLDER = re.compile("[0-9a-f]{2}")


def read_own(path: str | Path, most_bytes: int) -> tuple[bytes, float]:
    """A file that ``write_whole`` wrote, and its time of change.

    Raises OSError, also where it is larger, or no regular file.
    Who may write to its folder may have put anything there: a pipe that nobody writes to, or /dev/zero.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
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


def delete_least_used(files: list[tuple[float, int, str]], in_use_s: float, keep_bytes: int, most_bytes: int) -> int:
    """Delete those of ``files`` (:func:`kept_files`) that were not used for the longest time; returns the bytes left.

    Those not used since ``in_use_s`` (seconds since 1970) go until ``keep_bytes`` are left, the others only until
    ``most_bytes`` are. Several processes may do this at once.
    """
    left_bytes = sum(num_bytes for _, num_bytes, _ in files)
    for used_s, num_bytes, path in sorted(files):
        if left_bytes <= (most_bytes if used_s >= in_use_s else keep_bytes):
            break
        left_bytes -= num_bytes
        with contextlib.suppress(OSError):  # another process was faster; or it is somebody else's
            os.unlink(path)
    return left_bytes


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
