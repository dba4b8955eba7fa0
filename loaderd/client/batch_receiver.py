"""Takes batches by a page: that of a stream, or the one that each member of a group has of its own.

The socket carries only what is rare: which records a batch lacks, and which batches cannot be made. The page counts
these messages, so that each is read before its batch is taken.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from loaderd.ipc.messages import BatchFailed
from loaderd.shm.page import (
    CONSUMER_NEWS,
    CONSUMER_PID,
    CONSUMER_THREAD,
    CONSUMER_WAITED_NS,
    STORAGE_COUNTERS,
    WAITS,
    Page,
    silence,
)
from loaderd.shm.page_consumer import PageConsumer
from loaderd.shm.samples import wait_class

NextBatch = tuple[int, int] | BatchFailed
"""(slot, records), and the slot is ours then; or why the batch cannot be had."""


class BatchReceiver:
    """Takes batches of one generation at a time, in order. Takes 3 µs a batch.

    ``fds``: the bells of the consumer, of the daemon, and of each seat, which it owns.
    """

    def __init__(self, page: Page, fds: Sequence[int]) -> None:
        self._bell, daemon_bell, *bells = fds
        self.step = 0
        """The step of the batch that was taken last."""
        self._fds = fds
        self._page = page
        self._taker = PageConsumer(page, daemon_bell, bells)
        self._generation = self._news = 0
        self._broken: dict[int, BatchFailed] = {}

    def begin(self, generation: int, step: int) -> None:
        """Give back what was not taken. From here on, take batches of this generation, from ``step`` on."""
        words = self._page.words
        words[CONSUMER_PID], words[CONSUMER_THREAD] = os.getpid(), threading.get_native_id()
        self._generation = generation
        self._broken.clear()
        self._taker.begin(generation, step)

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`take` can answer."""
        return self._taker.has_batch() or (bool(self._broken) and self._taker.step in self._broken)

    @property
    def has_news(self) -> bool:
        """Whether the socket must be read first."""
        return self._page.words[CONSUMER_NEWS] != self._news

    def take(self) -> NextBatch:
        """The next batch."""
        self.step = self._taker.step
        broken = self._broken.pop(self.step, None) if self._broken else None
        if broken is not None:
            self._taker.skip()
            return broken
        return self._taker.take()

    def give_back(self, slots: Sequence[int]) -> None:
        """Give back slots that the consumer uses no more."""
        for slot in slots:
            self._taker.release(slot)

    def broken(self, message: BatchFailed) -> None:
        """Take in that a batch, maybe one of an older generation, cannot be had."""
        if message.generation == self._generation:
            self._broken[message.step] = message

    def noted(self) -> None:
        """One of the messages that CONSUMER_NEWS counts has come."""
        self._news += 1

    def fall_asleep(self) -> bool:
        """Say on the page that the consumer sleeps. False: it need not, as a batch is there."""
        return self._taker.fall_asleep()

    def wake_up(self, waited_ns: int) -> None:
        """Undo :meth:`fall_asleep`, after ``waited_ns``."""
        self._taker.wake_up()
        self._page.words[CONSUMER_WAITED_NS] += waited_ns
        silence(self._bell)

    def waited(self, waited_ns: int) -> None:
        """Count a wait that is over, in which the consumer may have slept several times."""
        self._page.words[WAITS + wait_class(waited_ns)] += 1

    def storage_counts(self) -> list[int]:
        """The fields of ``StorageCounts``, as far as workers have counted them."""
        return [self._page.total(counter) for counter in STORAGE_COUNTERS]

    def close(self) -> None:
        """Close the bells."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
