"""Which tickets processes of this server have died of: memory ran out, or a function crashed.

::

    a file in memory:   the last 1,024 deaths │ tickets that process 0 works at │ process 1 │ …
                        the supervisor writes   the process writes; the supervisor reads them when it has died

The rows of a ticket of which a process has died are asked for in halves, until one row is left; a row of which three
have died is lost. A ticket that was only beside it is halved, too, which costs nothing. Deaths are forgotten after
five minutes: memory, say, may have been short for a while.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from hashlib import sha256

MAX_DEATHS = 3
"""Of a ticket for one row."""
STUCK_STATUS = 70
"""Of a process that ended because its rows made no progress: storage may hang, which is no ticket's fault."""
_REMEMBERED_S = 300.0
_ENTRY = struct.Struct("<16sd")  # a digest of the ticket; of a death, when it was (monotonic, s)
_MOST_DEATHS, _MOST_UNDER_WAY = 1024, 64  # a process has fewer threads
_DEATHS_BYTES, _PROCESS_BYTES = _MOST_DEATHS * _ENTRY.size, _MOST_UNDER_WAY * _ENTRY.size


class Deaths:
    """For use in several threads of a process. ``fd``: the file; None: a new one, for the supervisor.

    ``place``: where this process writes in it.
    """

    def __init__(self, fd: int | None = None, place: int = 0) -> None:
        self.fd = os.memfd_create("loaderd-tickets") if fd is None else fd
        first = _first_byte(place)
        self._free = list(range(first, first + _PROCESS_BYTES, _ENTRY.size))
        self._num_deaths = 0

    def number_of(self, ticket: bytes) -> int:
        """How many processes have died of a ticket."""
        digest, known = _digest(ticket), os.pread(self.fd, _DEATHS_BYTES, 0)
        if digest not in known:  # which takes 3 µs, not 100
            return 0
        since_s = time.monotonic() - _REMEMBERED_S
        return sum(
            other == digest and at_s > since_s
            for other, at_s in _ENTRY.iter_unpack(known.ljust(_DEATHS_BYTES, b"\0"))
        )

    @contextlib.contextmanager
    def working_at(self, ticket: bytes) -> Iterator[None]:
        """Around the work at a ticket."""
        offset = self._free.pop()
        os.pwrite(self.fd, _ENTRY.pack(_digest(ticket), 0.0), offset)
        try:
            yield
        finally:
            os.pwrite(self.fd, bytes(_ENTRY.size), offset)
            self._free.append(offset)

    def record_end(self, place: int, is_death: bool) -> None:
        """A process has ended, and another one will have its place. ``is_death``: it has died of its tickets."""
        found = os.pread(self.fd, _PROCESS_BYTES, _first_byte(place)).ljust(_PROCESS_BYTES, b"\0")
        for digest, _ in _ENTRY.iter_unpack(found):
            if is_death and any(digest):
                death = _ENTRY.pack(digest, time.monotonic())
                os.pwrite(self.fd, death, self._num_deaths % _MOST_DEATHS * _ENTRY.size)
                self._num_deaths += 1
        os.pwrite(self.fd, bytes(_PROCESS_BYTES), _first_byte(place))


def _first_byte(place: int) -> int:
    return _DEATHS_BYTES + place * _PROCESS_BYTES


def _digest(ticket: bytes) -> bytes:
    return sha256(ticket).digest()[:16]
