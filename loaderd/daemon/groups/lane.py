"""The page by which a member gets its batches: its own, or the stream's.

A member of a group has a page of its own (:class:`Lane`), which the daemon fills as a worker fills a stream's. The
batches lie in the slots of the group's stream. The page tells this member alone which slots it has, and for which
steps of its own generation. The page has one seat, the daemon's, which always says that it sleeps: so the member
rings the daemon's bell whenever it gives a slot back. It also rings when it is past the last damaged batch that it
was told of. The daemon trusts nothing that the member may write: wrong values harm only the member.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

from loaderd.daemon.delivery.events import Delivery
from loaderd.daemon.delivery.stream import Stream
from loaderd.errors import DaemonError
from loaderd.machine import remedy
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.page import (
    CONSUMER_SLEEPS_FOR,
    POSITION,
    TAKEN_BATCHES,
    TAKEN_RECORDS,
    WAKE_DAEMON_AT,
    Page,
    barrier,
    key_of,
    new_bell,
    ring,
    split_key,
    words_of,
)

_SEAT = 0


class Had(NamedTuple):
    """What a member was handed or has taken, and where it stands: the step behind its last batch."""

    batches: int = 0
    records: int = 0
    next_step: int = 0


class Lane:
    """The page of one member of a group, whose stream has ``num_slots`` slots. Raises DaemonError."""

    def __init__(self, num_slots: int, daemon_bell: int) -> None:
        self._words = SharedMemory.create("lane", 8 * words_of(num_slots, 1))
        self._page = Page(self._words.bytes, num_slots, 1)
        self._page.say_sleeps(_SEAT, True)
        try:
            self._bell = new_bell()
        except OSError as error:
            raise DaemonError(f"cannot take a consumer: {error.strerror}", hint=remedy(error)) from None
        self.fds = [self._words.fd, self._bell, daemon_bell, daemon_bell]
        """The descriptors that the member needs: see ``Opened``."""
        self.had = Had()
        self._fills: Counter[int] = Counter()
        self._lent: set[int] = set()
        self._seen_taken = 0

    def announce(self) -> None:
        """A message about batches is on its way, and is to be read before what is filled from here on."""
        self._page.add_consumer_news()

    def fill(self, generation: int, batch: Delivery) -> None:
        """A batch is lent to the member."""
        self.had = Had(self.had.batches + 1, self.had.records + batch.num_records, batch.step + 1)
        slot = batch.slot
        self._fills[slot] += 1
        self._lent.add(slot)
        self._page.claim(slot, key_of(generation, batch.step))
        self._page.fill(slot, batch.num_records, self._fills[slot])
        barrier()
        if self._page.words[CONSUMER_SLEEPS_FOR]:
            ring(self._bell)

    def take_back(self) -> list[int]:
        """The slots that the member has given back, each of them once."""
        slots = [slot for slot in self._lent if self._page.released(slot) == self._fills[slot]]
        self._lent.difference_update(slots)
        return slots

    @property
    def sleeps(self) -> bool:
        """Whether the member sleeps until a batch is there."""
        return bool(self._page.words[CONSUMER_SLEEPS_FOR])

    @property
    def place(self) -> tuple[int, int]:
        """(generation, step) of the batch that the member takes next."""
        return split_key(self._page.words[POSITION])

    def wake_behind(self, generation: int, step: int) -> None:
        """Have the member ring the daemon's bell when it has come past this batch."""
        self._page.words[WAKE_DAEMON_AT] = key_of(generation, step + 1)

    def has_moved(self) -> bool:
        """Whether the member has taken something since this was asked last."""
        before, self._seen_taken = self._seen_taken, self._page.words[TAKEN_BATCHES]
        return self._seen_taken != before

    def close(self) -> None:
        """Give page and bell back: the member is gone."""
        self._words.close_fd()
        os.close(self._bell)
        self._page.close()
        del self._words


class WholeStream:
    """In place of a :class:`Lane` where a member has the stream to itself: the member reads the stream's page."""

    def __init__(self, stream: Stream, fds: list[int]) -> None:
        self._stream = stream
        self.fds = fds
        self._seen_position = 0

    def announce(self) -> None:
        self._stream.page.add_consumer_news()

    def take_back(self) -> list[int]:
        """Always empty: the workers see in the page what was given back."""
        return []

    @property
    def sleeps(self) -> bool:
        return bool(self._stream.page.words[CONSUMER_SLEEPS_FOR])

    @property
    def had(self) -> Had:
        words = self._stream.page.words
        generation, step = split_key(words[POSITION])
        is_there = generation == self._stream.generation
        return Had(words[TAKEN_BATCHES], words[TAKEN_RECORDS], step if is_there else 0)

    def has_moved(self) -> bool:
        before, self._seen_position = self._seen_position, self._stream.page.words[POSITION]
        return self._seen_position != before

    def close(self) -> None:
        """Nothing to do: the page is the stream's."""
