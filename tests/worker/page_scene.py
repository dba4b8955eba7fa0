"""Two workers and a consumer at one page, where something happens between any two accesses to its words.

Each of them has a view of the page of its own. Words are read and written one at a time, in the order of the code:
what a processor may change in that order, no test here sees.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from loaderd.client.page_consumer import PageConsumer
from loaderd.ipc.worker_messages import Granted, Withdrawn
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.batches import Segment
from loaderd.shm.page import Page, key_of, new_bell, split_key, words_of
from loaderd.worker.page_producer import Claim, PageProducer

SIZE = 3
"""Records of a batch."""


def batches(first: int, stop: int, *omit: int) -> BatchRange:
    """Batches of ``SIZE`` rows that lie one behind the other in arena 0."""
    return BatchRange(first, stop, (Segment(0, SIZE * first, SIZE * (first + 1), 0),), omit)


class Died(BaseException):
    """A worker is killed."""


class Words:
    """Words that tell of each access before it happens."""

    def __init__(self, words: Any, scene: Scene, actor: str) -> None:
        self._words = words
        self._scene = scene
        self._actor = actor

    def __getitem__(self, where: int | slice) -> Any:
        if isinstance(where, slice):
            return _Slice(self, range(where.start, where.stop))
        self._scene.on_access(self._actor, False)
        return self._words[where]

    def __setitem__(self, where: int, value: int) -> None:
        self._scene.on_access(self._actor, True)
        self._words[where] = value


class _Slice:
    def __init__(self, words: Words, numbers: range) -> None:
        self._words = words
        self._numbers = numbers

    def tolist(self) -> list[int]:
        return [self._words[number] for number in self._numbers]


class Scene:
    """Workers "A" and "B" at seats 0 and 1, and the consumer, of a pass of ``num_steps`` batches.

    ``on_access`` is called in front of each access, with who it is and whether it writes. What is in a slot is the
    key of the batch, or None while it is written.
    """

    def __init__(self, num_slots: int, num_steps: int = 6) -> None:
        self.num_steps = num_steps
        self._memory = np.zeros(8 * words_of(num_slots, 2), np.uint8)
        self._num_slots = num_slots
        self.on_access: Callable[[str, bool], None]
        self.ignore()
        self.page = Page(self._memory, num_slots, 2)
        """As the daemon and the tests see it."""
        self.bells = [new_bell() for _ in range(4)]
        self.consumer_bell, self.daemon_bell, *self.seat_bells = self.bells
        self.taker = PageConsumer(self._view("consumer"), self.bells)
        self.fillers: dict[str, PageProducer] = {}
        self.generation = 1
        self.delivered: list[int] = []
        self.lent: dict[int, int] = {}
        self.contents: list[int | None] = [None] * num_slots
        self.taker.begin(1, 0)
        self.page.start_at(0, key_of(1, 0), 1)
        for name in "AB":
            self.hire(name)

    def ignore(self) -> None:
        """Nothing happens at accesses."""
        self.on_access = lambda actor, writes: None

    def close(self) -> None:
        for bell in self.bells:
            os.close(bell)

    def _view(self, actor: str) -> Page:
        page = Page(self._memory, self._num_slots, 2)
        page.words = Words(page.words, self, actor)  # type: ignore[assignment]
        page.columns = [page.words]
        return page

    # ------------------------------------------------------------------------------------------- workers

    def hire(self, name: str) -> None:
        """A new worker takes a seat, and is told what it may make."""
        seat = "AB".index(name)
        self.fillers[name] = PageProducer(self._view(name), seat, self.page.news(seat), [self.consumer_bell])
        self.grant(name)

    def grant(self, name: str, *ranges: BatchRange) -> None:
        """A worker reads that it may make all, or these."""
        self.page.add_news(self.fillers[name].seat)
        self.fillers[name].received(Granted(0, self.generation, [*ranges] or [batches(0, self.num_steps)]))

    def withdraw(self, name: str, step: int, generation: int | None = None) -> None:
        """A worker reads that it may not make a batch."""
        self.page.add_news(self.fillers[name].seat)
        self.fillers[name].received(Withdrawn(0, self.generation if generation is None else generation, step))

    def lose(self, name: str) -> None:
        """A worker is dead: the daemon takes its claim back."""
        seat = "AB".index(name)
        unfinished = self.page.unfinished(seat)
        assert len(unfinished) <= 1
        for slot, _ in unfinished:
            self.page.claim(slot, 0)
        self.page.say_sleeps(seat, False)
        self.hire(name)

    def begin_writing(self, claim: Claim) -> None:
        """Its first byte is written."""
        assert self.page.is_free(claim.slot) and claim.slot not in self.lent, "others may read there"
        self.contents[claim.slot] = None

    def end_writing(self, claim: Claim) -> None:
        """Its last byte is written."""
        assert self.page.is_free(claim.slot) and claim.slot not in self.lent, "others may read there"
        self.contents[claim.slot] = claim.key

    def make(self, name: str) -> bool:
        """All that a worker does for a batch; False: there is none."""
        claim = self.fillers[name].claim()
        if claim is not None:
            self.begin_writing(claim)
            self.end_writing(claim)
            self.fillers[name].made(claim)
        return claim is not None

    # ------------------------------------------------------------------------------------------ consumer

    def take(self) -> bool:
        """The consumer takes the next batch; False: it is not there."""
        if self.taker.step == self.num_steps:
            return False
        if not self.taker.has_batch():
            is_there = not self.taker.fall_asleep()
            self.taker.wake_up()
            if not is_there:
                return False
        step = self.taker.step
        slot, num_records = self.taker.take()  # type: ignore[misc]
        key = self.contents[slot]
        assert key is not None and split_key(key) == (self.generation, step), "what is delivered is that batch"
        assert num_records == SIZE
        assert slot not in self.lent
        self.lent[slot] = key
        self.delivered.append(step)
        return True

    def give_back(self) -> None:
        """The consumer gives all back that it has."""
        for slot in list(self.lent):
            assert self.contents[slot] == self.lent[slot], "nobody has written there"
            del self.lent[slot]
            self.taker.release(slot)

    def consume(self) -> bool:
        """Both."""
        taken = self.take()
        self.give_back()
        return taken

    def begin(self, step: int) -> None:
        """The consumer goes elsewhere. Workers hear of it by :meth:`grant`."""
        self.generation += 1
        self.delivered.clear()
        self.taker.begin(self.generation, step)
        self.page.start_at(0, key_of(self.generation, step), self.generation)

    # ----------------------------------------------------------------------------------------------- end

    def finish(self, first_step: int = 0) -> None:
        """Each batch has come, or comes, exactly once and in order; and no slot is lost."""
        self.ignore()
        for _ in range(4 * self.num_steps):
            self.make("A")
            self.make("B")
            self.consume()
        assert self.delivered == list(range(first_step, self.num_steps))
        assert all(self.page.is_free(slot) for slot in range(self._num_slots)), "no slot is lost"
        assert not self.page.unfinished(0) and not self.page.unfinished(1)


NewScene = Callable[..., Scene]


def do_at(scene: Scene, actor: str, number: int, what: Callable[[], object], only_writes: bool = False) -> list[int]:
    """Have ``what`` happen in front of an actor's access of that number; returns a list of those there were."""
    seen: list[int] = []

    def on_access(who: str, writes: bool) -> None:
        if who == actor and (writes or not only_writes):
            seen.append(len(seen))
            if len(seen) == number + 1:
                what()

    scene.on_access = on_access
    return seen


def claimed(scene: Scene, name: str) -> Claim:
    claim = scene.fillers[name].claim()
    assert claim is not None
    return claim
