"""The consumer's end of a page: takes batches in order, and gives slots back."""

from __future__ import annotations

from collections.abc import Sequence

from loaderd.shm.page import (
    CONSUMER_SLEEPS_FOR,
    POSITION,
    TAKEN_BATCHES,
    TAKEN_RECORDS,
    WAKE_DAEMON_AT,
    Page,
    barrier,
    key_of,
    ring,
    split_key,
)


class PageConsumer:
    """For one thread at a time. The caller keeps ``daemon_bell`` and ``bells``, one of each seat, and closes them.

    Takes 2 µs a batch.
    """

    def __init__(self, page: Page, daemon_bell: int, bells: Sequence[int]) -> None:
        self._page = page
        self._words = page.words
        self._daemon_bell = daemon_bell
        self._bells = bells
        self._key = 0
        self._rung = 0
        self._found = -1
        self.held: set[int] = set()
        """Slots that were taken and not given back yet."""

    @property
    def step(self) -> int:
        """The step of the batch that is taken next."""
        return split_key(self._key)[1]

    def begin(self, generation: int, step: int) -> None:
        """Take batches from ``step`` on; what was made before is passed over."""
        self._go_to(key_of(generation, step))
        self.pass_over()

    def _go_to(self, key: int) -> None:
        self._key = self._words[POSITION] = key
        self._found = -1
        barrier()
        wake_at = self._words[WAKE_DAEMON_AT]
        if key >= wake_at != self._rung:
            self._rung = wake_at
            ring(self._daemon_bell)

    def has_batch(self) -> bool:
        """Whether the next batch is there."""
        if self._found < 0:
            self._found = self._slot_of(self._key)
        return self._found >= 0

    def _slot_of(self, key: int) -> int:
        """The slot of the batch with this key; -1: it is not there."""
        keys = self._page.keys()
        slot = -1
        for _ in range(keys.count(key)):
            slot = keys.index(key, slot + 1)
            if not self._page.is_free(slot):
                barrier()
                if self._page.key_in(slot) == key:  # a worker may change its claim until the slot is filled
                    return slot
        return -1

    def take(self) -> tuple[int, int]:
        """(slot, records) of the next batch, which is there; the slot is the consumer's until :meth:`release`."""
        slot, words = self._found, self._words
        num_records = self._page.records_in(slot)
        self.held.add(slot)
        self.skip()
        words[TAKEN_BATCHES] += 1
        words[TAKEN_RECORDS] += num_records
        return slot, num_records

    def skip(self) -> None:
        """Go on without the next batch."""
        self._go_to(self._key + 1)

    def release(self, slot: int) -> None:
        """The slot is not used any more."""
        if self._page.release(slot):
            ring(self._bells[self._page.seat_of(slot)])
        self.held.discard(slot)

    def pass_over(self) -> None:
        """Release the slots of batches that will not be taken: of older generations, or made twice."""
        for slot in self._page.filled():
            if slot not in self.held:
                barrier()
                if self._page.key_in(slot) < self._key:
                    self.release(slot)

    def fall_asleep(self) -> bool:
        """Have the consumer's bell rung when the next batch is there; False: it is there already."""
        self.pass_over()
        self._words[CONSUMER_SLEEPS_FOR] = self._key
        barrier()
        return not self.has_batch()

    def wake_up(self) -> None:
        """Undo :meth:`fall_asleep`."""
        self._words[CONSUMER_SLEEPS_FOR] = 0
