"""A worker's end of a page: which batch it makes next, and in which of its slots. See ``shm.page`` for how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.ipc.worker_messages import Granted, News, UseColumn
from loaderd.plan.batch_range import BatchRange, without
from loaderd.shm.page import Page, barrier, key_of, ring, split_key, step_of


class Claim(NamedTuple):
    """Make ``batch``, a range of one, in ``slot``."""

    slot: int
    key: int
    batch: BatchRange

    @property
    def place(self) -> tuple[int, int]:
        """(generation, step)."""
        return split_key(self.key)

    @property
    def step(self) -> int:
        return self.batch.first


class PageProducer:
    """Says what the worker of ``seat`` makes of a stream.

    The caller keeps ``bells``, one of each consumer, and closes them. ``news``: how many messages of News were sent
    to the seat before; it does not wait for these.
    """

    def __init__(self, page: Page, seat: int, news: int, bells: Sequence[int]) -> None:
        self.page = page
        self.seat = seat
        self.has_slot = True
        """Whether a slot was free when it last looked."""
        self._news = news
        self._bells = bells
        self._generation = 0
        self._ranges: list[BatchRange] = []
        self._slots = list(page.slots_of(seat))
        """The one that was used last comes first: it is the most likely one to be in the cache still."""
        self._parked = {key: slot for slot, key in page.unfinished(seat)}
        """By key, slots that are kept for batches that nobody may make now, but perhaps later."""

    # ------------------------------------------------------------------------------------ what it is told

    @property
    def has_news(self) -> bool:
        return self.page.news(self.seat) != self._news

    def received(self, message: News, memory: npt.NDArray[np.uint8] | None = None) -> None:
        """Take in what the daemon says. ``memory`` comes with UseColumn."""
        self._news += 1
        if isinstance(message, Granted):
            self._granted(message.generation, message.ranges)
        elif isinstance(message, UseColumn):
            assert memory is not None
            self.page.use_column(message.column, memory)
        elif message.generation == self._generation:
            self._ranges = without(self._ranges, message.step)
            self._unpark(key_of(message.generation, message.step))

    def _granted(self, generation: int, ranges: list[BatchRange]) -> None:
        if generation != self._generation:
            self._generation, self._ranges = generation, []
        for one in ranges:
            if one.stop == one.first + 1:  # it may be granted anew, with other rows left out
                self._ranges = without(self._ranges, one.first)
        self._ranges = sorted([*self._ranges, *ranges], key=lambda one: one.first)
        for key in list(self._parked):
            if split_key(key)[0] != generation or any(one.has(step_of(key)) for one in ranges):
                self._unpark(key)

    def _unpark(self, key: int) -> None:
        if key in self._parked:
            self.page.claim(self._parked.pop(key), 0)

    # --------------------------------------------------------------------------------------- what it does

    def claim(self) -> Claim | None:
        """The next batch to make; None if there is nothing to make, or no slot. About 4 µs."""
        page = self.page
        slot = self._free_slot()
        self.has_slot = slot >= 0
        if slot < 0:
            return None
        keys = page.keys()
        while True:
            found = self._next_key(set(keys))
            if found is None:
                return None
            key, batches = found
            page.claim(slot, key)
            barrier()
            keys = page.keys()
            if self.has_news:  # the batch may have been withdrawn
                page.claim(slot, 0)
                return None
            if page.is_held(slot):  # a consumer has taken what was there at the same moment
                page.claim(slot, 0)
                return None
            if keys.index(key) == slot:
                self._slots.remove(slot)
                self._slots.insert(0, slot)
                page.say_makes(self.seat, key)
                return Claim(slot, key, batches.batch(step_of(key)))
            page.claim(slot, 0)  # another worker has claimed it at the same moment

    def _free_slot(self) -> int:
        least_place = self.page.least_place()
        if self._parked:  # another worker may have made such a batch meanwhile
            for key in [key for key in self._parked if key < least_place]:
                self._unpark(key)
        for slot in self._slots:
            if self.page.is_free(slot, least_place) and slot not in self._parked.values():
                return slot
        return -1

    def _next_key(self, taken: set[int]) -> tuple[int, BatchRange] | None:
        generation, position = split_key(self.page.least_place())
        if generation != self._generation:
            return None
        while self._ranges and self._ranges[0].stop <= position:
            del self._ranges[0]
        base = key_of(generation, 0)
        for one in self._ranges:
            for key in range(base + max(one.first, position), base + one.stop):
                if key not in taken:
                    return key, one
        return None

    def made(self, claim: Claim) -> None:
        """The batch is ready in its slot: say so on the page."""
        page = self.page
        page.say_makes(self.seat, 0)
        if page.least_place() > claim.key:  # the consumers have begun elsewhere meanwhile
            page.claim(claim.slot, 0)
            return
        page.fill(claim.slot, claim.batch.num_records)
        barrier()
        for column, bell in enumerate(self._bells):
            if page.sleeps_for(column) == claim.key:
                ring(bell)

    def not_made(self, claim: Claim) -> None:
        """The batch cannot be made. The claim stays, so that nobody else tries, until the daemon knows of it."""
        self.page.say_makes(self.seat, 0)
        if self.page.least_place() > claim.key or claim.place[0] != self._generation:
            self.page.claim(claim.slot, 0)
        else:
            self._parked[claim.key] = claim.slot
