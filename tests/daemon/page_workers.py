"""A worker's end of a page, as the tests of the daemon move it: step by step, and without a process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.pool.tasks import Task
from loaderd.ipc.worker_messages import Granted, LoadDone, LoadFault, LoadTask, TrialDone, Withdrawn
from loaderd.shm.page import Page, words_of
from loaderd.worker.page_producer import Claim, PageProducer


def new_page(num_slots: int, num_seats: int) -> Page:
    """On memory of its own."""
    return Page(np.zeros(8 * words_of(num_slots, num_seats), np.uint8), num_slots, num_seats)


def answer_to(task: Task, faults: Sequence[LoadFault] = ()) -> LoadDone | TrialDone:
    """What a worker says when it has done a load, or a trial."""
    is_load = isinstance(task.work, LoadTask)
    return LoadDone(task.number, list(faults)) if is_load else TrialDone(task.number)


def free_arenas(stream: Stream) -> list[int]:
    """The arenas that no window has, in order.

    Only the stream knows: one that is lost shows in nothing but windows that are loaded later than they could be.
    """
    return sorted(stream._windows._free_arenas)


class PageWorker:
    """The worker of a seat: it reads what it is told no sooner than it must, as a process that is slow."""

    def __init__(self, page: Page, seat: int, news: int, consumer_bell: int) -> None:
        self.filler = PageProducer(page, seat, news, consumer_bell)
        self._unread: deque[Granted | Withdrawn] = deque()

    def tell(self, message: Granted | Withdrawn) -> None:
        """It is on its way; that it is, the page says already."""
        self._unread.append(message)

    def claim(self) -> Claim | None:
        """What it makes next."""
        while self.filler.has_news:
            assert self._unread, "nobody waits for what was never sent"
            self._read(self._unread.popleft())
        return self.filler.claim()

    def _read(self, message: Granted | Withdrawn) -> None:
        if isinstance(message, Withdrawn):
            self.filler.withdrawn(message.generation, message.step)
            return
        self.filler.granted(message.generation, message.runs)
