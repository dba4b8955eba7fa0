"""The two ways in which batches come: by the page of a stream, or by messages that hand each of them over.

Who reads the page hears of nothing but what is rare: what batches lack, and which of them cannot be made. How many
such messages there are says the page, and so they are read before the batch that they are about is taken.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from loaderd.memory.page import (
    CONSUMER_NEWS,
    CONSUMER_PID,
    CONSUMER_THREAD,
    CONSUMER_WAITED_NS,
    STORAGE_COUNTERS,
    WAITS,
    Page,
    silence,
)
from loaderd.memory.samples import wait_class
from loaderd.memory.taking import Taker
from loaderd.protocol.messages import Broken, Ended, Message, Ready, Release

Found = tuple[int, int] | Broken | None
"""(slot, records), the slot being ours; or why the batch cannot be had; or None: the pass is over."""

_SLOTS_PER_RELEASE = 2


class Intake(Protocol):
    """Batches of one generation at a time, in order."""

    step: int
    """That of the batch which was taken last."""

    def begin(self, generation: int, step: int) -> None:
        """Give back what was not taken; what is taken from here on belongs to this generation."""

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`take` can answer."""

    @property
    def has_news(self) -> bool:
        """Whether the socket must be read first."""

    def take(self) -> Found:
        """The next batch."""

    def give_back(self, slots: Sequence[int]) -> None:
        """The consumer uses these no more."""

    def handle(self, message: Ready | Broken | Ended) -> None:
        """A message about batches has come; it may be of an older generation."""

    def noted(self) -> None:
        """A Skipped or Broken has come."""

    def fall_asleep(self, wanted: int) -> bool:
        """Give back what can be given back, in front of a wait for so many batches; False: they are there."""

    def wake_up(self, waited_ns: int) -> None:
        """Behind it."""

    def waited(self, waited_ns: int) -> None:
        """A wait is over, in which it may have slept several times."""

    def storage_counts(self) -> list[int]:
        """The fields of ``StorageCounts``, as far as they are known."""

    def close(self) -> None:
        """It is not used any more."""


class PageIntake:
    """Takes batches of the page; ``fds`` are the bells, which it owns: of the consumer, of the daemon, of each seat.

    Nothing is sent. 3 µs a batch.
    """

    def __init__(self, page: Page, fds: Sequence[int]) -> None:
        self._bell, daemon_bell, *bells = fds
        self.step = 0
        self._fds = fds
        self._page = page
        self._taker = Taker(page, daemon_bell, bells)
        self._generation = self._news = 0
        self._broken: dict[int, Broken] = {}

    def begin(self, generation: int, step: int) -> None:
        """See :class:`Intake`; so are the others."""
        words = self._page.words
        words[CONSUMER_PID], words[CONSUMER_THREAD] = os.getpid(), threading.get_native_id()
        self._generation = generation
        self._broken.clear()
        self._taker.begin(generation, step)

    @property
    def has_batch(self) -> bool:
        return self._taker.has_batch() or (bool(self._broken) and self._taker.step in self._broken)

    @property
    def has_news(self) -> bool:
        return self._page.words[CONSUMER_NEWS] != self._news

    def take(self) -> Found:
        self.step = self._taker.step
        broken = self._broken.pop(self.step, None) if self._broken else None
        if broken is not None:
            self._taker.skip()
            return broken
        return self._taker.take()

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._taker.release(slot)

    def handle(self, message: Ready | Broken | Ended) -> None:
        if isinstance(message, Broken) and message.generation == self._generation:
            self._broken[message.step] = message

    def noted(self) -> None:
        self._news += 1

    def fall_asleep(self, wanted: int) -> bool:
        step = self._taker.step
        return self._taker.fall_asleep(min([wanted, *[broken - step for broken in self._broken if broken > step]]))

    def wake_up(self, waited_ns: int) -> None:
        self._taker.wake_up()
        self._page.words[CONSUMER_WAITED_NS] += waited_ns
        silence(self._bell)

    def waited(self, waited_ns: int) -> None:
        self._page.words[WAITS + wait_class(waited_ns)] += 1

    def storage_counts(self) -> list[int]:
        return [self._page.total(counter) for counter in STORAGE_COUNTERS]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class HandedIntake:
    """Takes batches of Ready; ``send`` says Release, for two slots at a time, to halve what that costs."""

    has_news = False

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.step = 0
        self._send = weakref.WeakMethod(send)  # a connection must not be garbage that refers to itself
        self._generation = 0
        self._batches: deque[list[int] | Broken | None] = deque()
        self._freed: list[int] = []

    def begin(self, generation: int, step: int) -> None:
        """See :class:`Intake`; so are the others."""
        self._generation = generation
        self._freed += [batch[1] for batch in self._batches if isinstance(batch, list)]
        self._batches.clear()

    @property
    def has_batch(self) -> bool:
        return bool(self._batches)

    def take(self) -> Found:
        batch = self._batches[0]
        if batch is None:
            return None
        self._batches.popleft()
        self.step = batch.step if isinstance(batch, Broken) else batch[0]
        return batch if isinstance(batch, Broken) else (batch[1], batch[2])

    def give_back(self, slots: Sequence[int]) -> None:
        self._freed += slots
        if len(self._freed) >= _SLOTS_PER_RELEASE:
            self._release()

    def _release(self) -> None:
        send = self._send()
        if self._freed and send is not None:
            send(Release(self._freed))
            self._freed = []

    def handle(self, message: Ready | Broken | Ended) -> None:
        is_ours = message.generation == self._generation
        if isinstance(message, Ready):
            if is_ours:
                self._batches.extend(message.batches)
            else:
                self._freed += [slot for _, slot, _ in message.batches]
        elif is_ours:
            self._batches.append(message if isinstance(message, Broken) else None)

    def noted(self) -> None:
        """It is handed over in front of the batch."""

    def fall_asleep(self, wanted: int) -> bool:
        self._release()  # the workers may wait for it
        return True

    def wake_up(self, waited_ns: int) -> None:
        """It did not say that it slept."""

    def waited(self, waited_ns: int) -> None:
        """Nobody reads it."""

    def storage_counts(self) -> list[int]:
        return []

    def close(self) -> None:
        """There is nothing to be closed."""
