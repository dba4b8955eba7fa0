"""Which tickets processes of this server have died of, and at which row: memory ran out, or a function crashed.

::

    process ──writes the tickets that it works at──► a file in memory ──read when it has died──► supervisor
            ◄─────────────────────── all deaths of the last five minutes (SharedValue) ──────────────┘

A ticket of which a process has died is made row by row, and the file says at which row; a row of which three have
died is left out. No other ticket is made beside it: that one would be suspected, too, and be lost in the end. Deaths
are forgotten after five minutes: memory, say, may have been short for a while.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256

from loaderd.serve.shared_value import SharedValue

NO_ROW = -1
MAX_DEATHS = 3
"""Of a row; or before the first one, of the whole ticket."""
STUCK_STATUS = 70
"""Of a process that ended because its rows made no progress: storage may hang, which is no ticket's fault."""
_REMEMBERED_S = 300.0
_CHECK_S = 0.1
_UNDER_WAY = struct.Struct("<16sq")  # a digest of the ticket, and the row; zeros: none
_BYTES = 64 * _UNDER_WAY.size  # of a process: it has fewer threads


class Deaths:
    """For use in several threads of a process. ``fd``: the file; ``place``: where this process writes in it.

    ``shared``: has what :class:`DeathRecords` knows.
    """

    def __init__(self, fd: int, place: int, shared: SharedValue) -> None:
        self._fd = fd
        self._shared = shared
        first = place * _BYTES
        self._free = list(range(first, first + _BYTES, _UNDER_WAY.size))
        self._changed = threading.Condition()
        self._num_under_way, self._is_alone = 0, False

    @contextlib.contextmanager
    def watching(
        self, ticket: bytes, check: Callable[[], None]
    ) -> Iterator[tuple[Counter[int], Callable[[int], None]]]:
        """Around the work at a ticket: yields how many processes died at which row, and what to tell of each row.

        ``check`` is called while other work must end first.
        """
        digest = sha256(ticket).digest()[:16]
        died = Counter(row for other, row in self._shared.read()["deaths"] if other == digest)
        with self._turn(bool(died), check):
            offset = self._free.pop()

            def begin_row(row: int) -> None:
                os.pwrite(self._fd, _UNDER_WAY.pack(digest, row), offset)

            begin_row(NO_ROW)
            try:
                yield died, begin_row
            finally:
                os.pwrite(self._fd, bytes(_UNDER_WAY.size), offset)
                self._free.append(offset)

    @contextlib.contextmanager
    def _turn(self, alone: bool, check: Callable[[], None]) -> Iterator[None]:
        """Around work beside which there is no other if it must be ``alone``."""

        def wait_until(is_so: Callable[[], bool]) -> None:
            while not is_so():
                self._changed.wait(_CHECK_S)
                check()

        with self._changed:
            wait_until(lambda: not self._is_alone)
            self._is_alone = alone  # from here on no other work begins
            self._num_under_way += 1
        try:
            if alone:
                with self._changed:
                    wait_until(lambda: self._num_under_way == 1)
            yield
        finally:
            with self._changed:
                self._num_under_way -= 1
                self._is_alone &= not alone
                self._changed.notify_all()


class DeathRecords:
    """The supervisor's."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("loaderd-tickets")
        self._deaths: list[tuple[float, tuple[bytes, int]]] = []

    def record_end(self, place: int, is_death: bool) -> None:
        """A process has ended, and another one will have its place. ``is_death``: it has died of its tickets."""
        entries = _UNDER_WAY.iter_unpack(os.pread(self.fd, _BYTES, place * _BYTES).ljust(_BYTES, b"\0"))
        if is_death:
            self._deaths += [(time.monotonic(), (digest, row)) for digest, row in entries if any(digest)]
        os.pwrite(self.fd, bytes(_BYTES), place * _BYTES)

    def to_wire(self) -> list[tuple[bytes, int]]:
        """The digest of the ticket, and the row, of each death that is not forgotten."""
        since_s = time.monotonic() - _REMEMBERED_S
        self._deaths = [death for death in self._deaths if death[0] > since_s]
        return [what for _, what in self._deaths]
