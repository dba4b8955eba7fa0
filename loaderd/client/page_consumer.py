"""The consumer's end of a page: takes batches in order, and gives slots back.

The socket carries only what is rare: which records a batch lacks, which batches cannot be made, and what the user
should hear. The page counts these messages, so that each is read before its batch is taken, or with the next one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from loaderd.ipc.messages import BatchFailed
from loaderd.shm.page import (
    CONSUMER_PID,
    CONSUMER_SLEEPS_FOR,
    CONSUMER_THREAD,
    CONSUMER_WAITED_NS,
    HELD,
    NEVER,
    POSITION,
    TAKEN_BATCHES,
    TAKEN_RECORDS,
    WAITS,
    WAKE_DAEMON_AT,
    Page,
    barrier,
    key_of,
    ring,
    silence,
    split_key,
    step_of,
)
from loaderd.shm.samples import wait_class


class PageConsumer:
    """Takes batches of one generation at a time. For one thread at a time. Takes 3 µs a batch.

    ``fds``: the bells of the consumer, of the daemon, and of each seat. ``number``: of its column.
    ``own``: that column, where it is in memory of its own.
    """

    def __init__(self, page: Page, fds: Sequence[int], number: int = 0, own: memoryview[int] | None = None) -> None:
        self._bell, self._daemon_bell, *self._bells = fds
        self._page = page
        self._number = number
        self._words = page.words if own is None else own
        self._news = 0  # messages that CONSUMER_NEWS counts, and that have come
        self._generation = 0
        self._key = 0
        """Of the batch that is taken next. Its generation is 0 until the daemon has said where to start."""
        self._rung = 0
        self._found = -1
        """The slot of the next batch, which is held already; -1: it is not known."""
        self._failed: dict[int, BatchFailed] = {}

    @property
    def step(self) -> int:
        """The step of the batch that is taken next."""
        return step_of(self._key)

    # ------------------------------------------------------------------------------------------- places

    def begin(self, generation: int, step: int) -> None:
        """Give back what was not taken. From here on, take the batches of a StartPass, from ``step`` on."""
        words = self._words
        words[CONSUMER_PID], words[CONSUMER_THREAD] = os.getpid(), threading.get_native_id()
        self._generation = generation
        self._failed.clear()
        self._drop_found()
        self._key = step

    def _go_to(self, key: int) -> None:
        self._drop_found()
        self._key = self._words[POSITION] = key
        barrier()
        wake_at = self._page.words[WAKE_DAEMON_AT]
        if key >= wake_at != self._rung:
            self._rung = wake_at
            ring(self._daemon_bell)

    def _drop_found(self) -> None:
        if self._found >= 0:
            slot, self._found = self._found, -1
            self.release(slot)

    def _wake_workers(self) -> None:
        """Slots of older batches have become free, which nobody gives back."""
        for slot, key in enumerate(self._page.ready()):
            if 0 < key < self._key and self._page.worker_sleeps(slot):
                ring(self._bells[self._page.seat_of(slot)])

    def _follow(self) -> bool:
        """Go on in the generation that the daemon delivers; False: it delivers none."""
        if self._page.answered(self._number) != self._generation:
            return False
        barrier()
        starts_at = self._page.starts_at(self._number)
        generation, _ = split_key(starts_at)
        if starts_at != NEVER and generation != split_key(self._key)[0]:
            self._go_to(key_of(generation, self.step))
            self._wake_workers()
        return starts_at != NEVER

    # ------------------------------------------------------------------------------------------ batches

    def has_batch(self) -> bool:
        """Whether the next batch is there."""
        if self._found < 0 and self._follow():
            self._found = self._hold(self._key)
        return self._found >= 0

    def _hold(self, key: int) -> int:
        """Hold the slot of the batch with this key; -1: it is not there."""
        page = self._page
        ready = page.ready()
        if key not in ready:
            return -1
        slot = ready.index(key)
        self._words[HELD + slot] = 1
        barrier()
        if page.key_in(slot) == key:
            return slot
        self.release(slot)  # the daemon has let a worker have it
        return -1

    @property
    def can_take(self) -> bool:
        """Whether :meth:`take` can answer."""
        return self.has_batch() or (bool(self._failed) and self.step in self._failed)

    @property
    def has_news(self) -> bool:
        """Whether the socket must be read first."""
        return self._page.consumer_news(self._number) != self._news

    def take(self) -> tuple[int, int] | BatchFailed:
        """(slot, records) of the next batch, and the slot is the consumer's then; or why it cannot be had."""
        failed = self._failed.pop(self.step, None) if self._failed else None
        if failed is not None:
            self.skip()
            return failed
        slot, key, words = self._found, self._key, self._words
        num_records = self._page.records_in(slot)
        self._found = -1
        self.skip()
        if self._page.ready().count(key) > 1:  # it was made twice
            self._wake_workers()
        words[TAKEN_BATCHES] += 1
        words[TAKEN_RECORDS] += num_records
        return slot, num_records

    def skip(self) -> None:
        """Go on without the next batch."""
        self._go_to(self._key + 1)

    def release(self, *slots: int) -> None:
        """These slots are not used any more."""
        for slot in slots:
            self._words[HELD + slot] = 0
            barrier()
            if self._page.worker_sleeps(slot):
                ring(self._bells[self._page.seat_of(slot)])

    # ----------------------------------------------------------------------------------------- messages

    def failed(self, message: BatchFailed) -> None:
        """Take in that a batch, maybe one of an older generation, cannot be had."""
        if message.generation == self._generation and message.step >= self.step:
            self._failed[message.step] = message

    def noted(self) -> None:
        """One of the messages that CONSUMER_NEWS counts has come."""
        self._news += 1

    # -------------------------------------------------------------------------------------------- waits

    def fall_asleep(self) -> bool:
        """Have the consumer's bell rung when the next batch is there; False: it is there already."""
        while True:
            key = self._words[CONSUMER_SLEEPS_FOR] = max(1, self._key)
            barrier()
            if self.has_batch():
                return False
            if key == max(1, self._key):
                return True

    def wake_up(self, waited_ns: int = 0) -> None:
        """Undo :meth:`fall_asleep`, after ``waited_ns``."""
        self._words[CONSUMER_SLEEPS_FOR] = 0
        self._words[CONSUMER_WAITED_NS] += waited_ns
        silence(self._bell)

    def waited(self, waited_ns: int) -> None:
        """Count a wait that is over, in which the consumer may have slept several times."""
        self._words[WAITS + wait_class(waited_ns)] += 1
