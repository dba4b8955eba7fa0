"""Which tickets processes of this server have died of, and at which row: memory ran out, or a function crashed.

Each process keeps a file for the ticket that it works at, in a folder that all share, and removes it when it is done.
A file whose process has ended tells of a death. A ticket of which a process has died is made row by row, and its file
says at which; a row of which three have died is left out. Deaths are forgotten after five minutes: memory, say, may
have been short for a while.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256

from loaderd.processes import has_ended

NO_ROW = -1
MAX_DEATHS = 3
"""Of a row; or before the first one, of the whole ticket."""
_REMEMBERED_S = 300.0
_PREFIX = "ticket-"
_ROW_BYTES = 8


class Deaths:
    """For use in several threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def watching(self, ticket: bytes) -> Iterator[tuple[Counter[int], Callable[[int], None]]]:
        """Around the work at a ticket: yields how many processes died at which row, and what to tell of each row."""
        name = f"{_PREFIX}{sha256(ticket).hexdigest()[:32]}-"
        deaths = self._of(name)
        path = os.path.join(self._folder, f"{name}{os.getpid()}-{os.urandom(4).hex()}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

        def begin_row(row: int) -> None:
            os.pwrite(fd, row.to_bytes(_ROW_BYTES, "little", signed=True), 0)

        try:
            yield deaths, begin_row
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def leave(self) -> None:
        """This process ends as it should: it has died of nothing that it still works at."""
        for each in os.listdir(self._folder):
            if each.startswith(_PREFIX) and each.split("-")[2] == str(os.getpid()):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._folder, each))

    def _of(self, name: str) -> Counter[int]:
        rows: Counter[int] = Counter()
        for each in os.listdir(self._folder):
            if not each.startswith(name) or not has_ended(int(each.split("-")[2])):
                continue
            path = os.path.join(self._folder, each)
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _REMEMBERED_S:
                    os.unlink(path)
                    continue
                with open(path, "rb") as file:
                    content = file.read(_ROW_BYTES)
                rows[int.from_bytes(content, "little", signed=True) if content else NO_ROW] += 1
        return rows
