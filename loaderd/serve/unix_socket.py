"""The Unix socket that a server listens on: a file that only its owner may use.

A server that was killed leaves its file behind; connecting shows whether anybody still listens there. A lock on the
folder keeps two servers from looking, removing and binding at the same time. Whoever may read the folder can lock it,
and may be anybody: so a server waits for the lock only for a while.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from loaderd.errors import ServerError
from loaderd.ipc.channel import peer_of
from loaderd.processes import has_ended

_BACKLOG = 128
_DYING_S = 10.0
_LOCKED_S = 15.0  # another server may wait for _DYING_S meanwhile
_MAX_PATH_BYTES = 107  # sun_path of sockaddr_un, without the zero at its end


class UnixSocket:
    """Listens at ``path``, with mode 0600 from the first moment on. Raises ServerError if that is impossible."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ServerError(
                f"the path of a Unix socket must have at most {_MAX_PATH_BYTES} bytes, got {self.path}",
                hint="Choose a shorter one with --unix.",
            )
        with _locked_folder(self.path):
            _remove_stale(self.path)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                self.socket.bind(self.path)
                self.socket.listen(_BACKLOG)
            except OSError as error:
                self.socket.close()
                raise ServerError(f"cannot listen at {self.path}: {error.strerror}") from None
            finally:
                os.umask(before)
            self._identity = _identity(self.path)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket and remove its file, unless another server has replaced it. May be called again."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _identity(self.path) == self._identity:
                os.unlink(self.path)


def make_private_folder(folder: Path) -> None:
    """Make ``folder``, for this user alone. Raises ServerError if that fails, or if others own it or have access.

    It is meant for a folder in /tmp, where any user may have made it before.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise ServerError(
            f"cannot listen in {folder}: {error.strerror}", hint="Choose another path with --unix."
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServerError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700, "
            f"found {stat.filemode(found.st_mode)} of user {found.st_uid}",
            hint="Another user could listen there. Remove it, or choose another path with --unix.",
        )


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked_folder(path: str) -> Iterator[None]:
    """Raises ServerError where the folder cannot be opened, or stays locked."""
    folder = os.path.dirname(path)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ServerError(f"cannot listen at {path}: {folder}: {error.strerror}") from None
    until_s = time.monotonic() + _LOCKED_S
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until_s:
                raise ServerError(
                    f"cannot listen at {path}: another process has locked {folder} for {_LOCKED_S:g} s",
                    hint="`lslocks` says which one. Choose another path with --unix, in a folder of yours.",
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: str) -> None:
    """Remove the socket of a dead server. Raises ServerError if the server lives, or if ``path`` is no socket.

    The processes of a server that was killed keep its socket for some moments, until they end, too. This waits for
    them, for up to 10 s.
    """
    until_s = time.monotonic() + _DYING_S
    while True:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ServerError(
                f"cannot listen at {path}: it exists and is no socket", hint="Choose another path with --unix."
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # do not wait if the queue is full: the server lives
            number = probe.connect_ex(path)
            if number == errno.ECONNREFUSED:
                os.unlink(path)
                return
            if number not in (0, errno.EAGAIN):
                raise ServerError(
                    f"cannot listen at {path}: it exists, and connecting to it fails: {os.strerror(number)}"
                )
            pid, user = peer_of(probe) if number == 0 else (0, 0)
        if not (pid and has_ended(pid)) or time.monotonic() > until_s:
            who = f"process {pid} of user {user}" if number == 0 else "another process"
            raise ServerError(
                f"cannot listen at {path}: {who} listens there already",
                hint="Stop that server, or choose another path with --unix.",
            )
        time.sleep(0.02)
