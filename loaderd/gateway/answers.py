"""Memory for answers to tickets. Each answer is made once, and kept for others who send the same ticket.

::

    cell     free ──first to ask──► being made ──► there ──nobody sends it, and room is needed──► free
                                       └─ failed ──► free

All cells have the same size. An answer gets one; if it turns out to be a record that is larger, it gets several, one
behind the other, in place of that. Makers write to them, and the gateway sends from them without a copy; only the
gateway knows which cell holds what. When it needs cells and they are not free, it takes those of the answer that was
asked for least recently and that nobody waits for or sends. When there is none, the server is full.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loaderd.errors import OptionError
from loaderd.shm.anonymous import SharedMemory

HINT_OF_DEATHS = "A derived field that crashes, or too little memory, are the usual causes."
CELL_BYTES = 1 << 20
_MIN_CELLS = 32
_MAKING_LIMIT_S = 60.0


class NotReady(Exception):
    """The answer cannot be had now: ask later, or ask another server."""


@dataclass(eq=False)
class Answer:
    """``num_rows`` rows of ``row_bytes`` in ``cells``; ``faults``: the rows that could not be had, as msgpack."""

    cells: range
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
        self._free = set(range(self._num_cells))
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
        start = answer.cells.start * CELL_BYTES
        rows: npt.NDArray[np.uint8] = self.memory.bytes[start : start + answer.num_rows * answer.row_bytes]
        # The finalizer takes no lock: it may run wherever garbage is collected, even in a thread that holds the lock.
        weakref.finalize(rows, self._ended.append, answer)
        return rows

    def widen(self, answer: Answer, num_bytes: int) -> None:
        """Have ``answer``, which is being made, have cells for ``num_bytes``: others than so far.

        Raises NotReady, and OptionError where there are not so many.
        """
        num_cells = -(-num_bytes // CELL_BYTES)
        if num_cells > self._num_cells:
            raise OptionError(
                f"a record of {num_bytes:,} bytes is larger than the server's memory for answers, "
                f"{self._num_cells * CELL_BYTES:,} bytes",
                hint=f"Start the server with --cache {num_cells}MiB or more.",
            )
        with self._lock:
            self._take_back()
            self._free.update(answer.cells)
            answer.cells = range(0)
            answer.cells = self._take(num_cells)

    def _find(self, ticket: bytes) -> tuple[Answer, bool]:
        with self._lock:
            self._take_back()
            answer = self._known.get(ticket)
            is_new = answer is None
            if answer is None:
                answer = self._known[ticket] = Answer(self._take(1))
            answer.users += 1
            self._known.move_to_end(ticket)
            return answer, is_new

    def _take_back(self) -> None:
        while self._ended:
            answer = self._ended.popleft()
            answer.users -= 1
            if not answer.users and not answer.kept:
                self._free.update(answer.cells)

    def _forget(self, ticket: bytes) -> None:
        self._known.pop(ticket).kept = False

    def _take(self, num_cells: int) -> range:
        """So many cells, one behind the other, which are no longer free. Raises NotReady."""
        for cell in self._free_cells():
            cells = self._around(cell, num_cells)
            if len(cells) == num_cells:
                self._free.difference_update(cells)
                return cells
        raise NotReady("the server is full")

    def _free_cells(self) -> Iterator[int]:
        """The free cells; behind them one of each answer that can be forgotten, which is done when its turn comes."""
        yield from self._free
        while True:
            ticket = next((ticket for ticket, answer in self._known.items() if not answer.users), None)
            if ticket is None:
                return
            cells = self._known[ticket].cells
            self._forget(ticket)
            self._free.update(cells)
            yield cells.start

    def _around(self, cell: int, num_cells: int) -> range:
        """The free cells around a free one, as many as there are up to ``num_cells``."""
        first = last = cell
        while first - 1 in self._free and last - first + 1 < num_cells:
            first -= 1
        while last + 1 in self._free and last - first + 1 < num_cells:
            last += 1
        return range(first, last + 1)


def check_size(num_rows: int, row_bytes: int) -> None:
    """Raise OptionError where an answer would be larger than a cell, and is not a single row."""
    most = max(1, CELL_BYTES // max(1, row_bytes))
    if num_rows > most:
        raise OptionError(f"a ticket must ask for at most {most} records of {row_bytes} bytes, got {num_rows}")
