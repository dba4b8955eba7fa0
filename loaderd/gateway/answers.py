"""Memory for answers to tickets. Each answer is made once, and kept for others who send the same ticket.

::

    cell     free ──first to ask──► being made ──► there ──nobody sends it, and room is needed──► free
                                       └─ failed ──► free

All cells have the same size. Makers write to them, and the gateway sends from them without a copy; only the gateway
knows which cell holds what. When it needs a cell and none is free, it takes the one that was asked
for least recently and that nobody waits for or sends. When there is none, the server is full.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loaderd.errors import OptionError
from loaderd.memory.anonymous import SharedMemory

CELL_BYTES = 1 << 20
_MIN_CELLS = 32
_MAKING_LIMIT_S = 60.0


class NotReady(Exception):
    """The answer cannot be had now: ask later, or ask another server."""


@dataclass(eq=False)
class Answer:
    """``num_rows`` rows of ``row_bytes`` in cell ``cell``; ``faults``: the rows that could not be had, as msgpack."""

    cell: int
    users: int = 0
    num_rows: int = 0
    row_bytes: int = 0
    faults: bytes = b""
    made: threading.Event = field(default_factory=threading.Event)
    failed: bool = False
    kept: bool = True
    """Whether others who send the same ticket get it, too."""


class Answers:
    """For use from any thread. ``num_bytes``: the size of the memory, which is taken when it is first written."""

    def __init__(self, num_bytes: int) -> None:
        self._num_cells = max(_MIN_CELLS, num_bytes // CELL_BYTES)
        self.memory = SharedMemory.create("answers", self._num_cells * CELL_BYTES)
        self._free = list(range(self._num_cells))
        self._known: OrderedDict[bytes, Answer] = OrderedDict()
        self._ended: deque[Answer] = deque()
        self._lock = threading.Lock()

    def get(self, ticket: bytes, make: Callable[[Answer], None]) -> tuple[Answer, bool]:
        """(the answer to ``ticket``, whether it was there). It keeps its cell until its :meth:`rows` are dropped.

        ``make`` fills a new answer. Raises NotReady, and what ``make`` raises.
        """
        answer, is_new = self._find(ticket)
        if not is_new:
            if answer.made.wait(_MAKING_LIMIT_S) and not answer.failed:
                return answer, True
            self._ended.append(answer)
            raise NotReady("the rows could not be made; ask again")
        try:
            make(answer)
        except BaseException:
            answer.failed = True
            raise
        finally:
            answer.made.set()
            if answer.failed or answer.faults:
                with self._lock:
                    self._forget(ticket)
            if answer.failed:
                self._ended.append(answer)
        return answer, False

    def rows(self, answer: Answer) -> npt.NDArray[np.uint8]:
        """The rows to send: uint8, (bytes,). When this array is dropped, the cell may be used again."""
        start = answer.cell * CELL_BYTES
        rows: npt.NDArray[np.uint8] = self.memory.bytes[start : start + answer.num_rows * answer.row_bytes]
        # The finalizer takes no lock: it may run wherever garbage is collected, even in a thread that holds the lock.
        weakref.finalize(rows, self._ended.append, answer)
        return rows

    def _find(self, ticket: bytes) -> tuple[Answer, bool]:
        with self._lock:
            self._take_back()
            answer = self._known.get(ticket)
            is_new = answer is None
            if answer is None:
                answer = self._known[ticket] = Answer(self._free_cell())
            answer.users += 1
            self._known.move_to_end(ticket)
            return answer, is_new

    def _take_back(self) -> None:
        while self._ended:
            answer = self._ended.popleft()
            answer.users -= 1
            if not answer.users and not answer.kept:
                self._free.append(answer.cell)

    def _forget(self, ticket: bytes) -> None:
        self._known.pop(ticket).kept = False

    def _free_cell(self) -> int:
        if self._free:
            return self._free.pop()
        for ticket, answer in self._known.items():
            if not answer.users:
                self._forget(ticket)
                return answer.cell
        raise NotReady("the server is full")


def check_size(num_rows: int, row_bytes: int) -> None:
    """Raise OptionError where an answer would be larger than a cell."""
    if num_rows * row_bytes > CELL_BYTES:
        most = CELL_BYTES // row_bytes
        raise OptionError(f"a ticket must ask for at most {most} records of {row_bytes} bytes, got {num_rows}")
