"""The words of a page, and the consumer's end of it. What may happen between two accesses is in tests/worker."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from operator import setitem

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.client.page_consumer import PageConsumer
from loaderd.options import MAX_STEP
from loaderd.shm.page import (
    CONSUMER,
    HELD,
    MAX_FIELDS,
    MAX_GENERATION,
    NEVER,
    NUM_MEMBERS,
    NUM_SAMPLES,
    POSITION,
    WAKE_DAEMON_AT,
    Counter,
    Page,
    barrier,
    key_of,
    new_bell,
    ring,
    silence,
    split_key,
    step_of,
    words_of,
)
from loaderd.stages import Stage
from tests.helpers.bells import was_rung
from tests.helpers.interrupts import InterruptAt, points_of

generations = st.integers(1, MAX_GENERATION)
steps = st.integers(0, MAX_STEP)
_LINE_BYTES = 64


class Memory:
    """A page, and what one step of a process changes in it."""

    def __init__(self, num_slots: int, num_seats: int) -> None:
        self.bytes = np.zeros(8 * words_of(num_slots, num_seats) + 40, np.uint8)
        self.page = Page(self.bytes, num_slots, num_seats)
        self._before = self.bytes.copy()

    def changed(self) -> set[int]:
        """Words that have changed since this was asked last."""
        words = np.flatnonzero(self._before != self.bytes) // 8
        self._before = self.bytes.copy()
        return set(words.tolist())


@pytest.fixture
def bells() -> Iterator[list[int]]:
    """Of the daemon, and of two seats."""
    found = [new_bell() for _ in range(3)]
    yield found
    for bell in found:
        os.close(bell)


def hold(page: Page, slot: int, held: int = 1) -> None:
    page.words[HELD + slot] = held


def fill(page: Page, slot: int, key: int, num_records: int = 5) -> None:
    page.claim(slot, key)
    page.fill(slot, num_records)


# ---------------------------------------------------------------------------------------------------- keys


@given(generations, steps)
def test_a_key_is_a_generation_and_a_step(generation: int, step: int):
    key = key_of(generation, step)
    assert split_key(key) == (generation, step) and step_of(key) == step
    assert 0 < key <= NEVER
    words = np.zeros(1, np.int64)
    words[0] = key
    assert words[0] == key, "it is a signed integer of 64 bits"


@given(st.tuples(generations, steps), st.tuples(generations, steps))
def test_keys_rise(one: tuple[int, int], other: tuple[int, int]):
    assert (key_of(*one) < key_of(*other)) == (one < other)


# --------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(("num_slots", "num_seats"), [(1, 1), (3, 5), (8, 2), (9, 3), (40, 8)])
def test_no_two_words_are_one(num_slots: int, num_seats: int):
    """Each of them is changed alone, and nothing is behind the end."""
    memory = Memory(num_slots, num_seats)
    page = memory.page
    seen: set[int] = set()
    seats, slots = range(num_seats), range(num_slots)
    headers = [*range(NUM_MEMBERS + 1), *range(CONSUMER.start, CONSUMER.stop)]
    changes = [
        *(partial(setitem, page.words, word, 1) for word in headers),
        page.add_consumer_news,
        *(partial(page.add_news, seat) for seat in seats),
        *(partial(page.say_sleeps, seat, True) for seat in seats),
        *(partial(page.say_task, seat, 0) for seat in seats),
        *(partial(page.count, seat, which, 3) for seat in seats for which in Counter),
        *(partial(setitem, page.spent(seat), n, 1) for seat in seats for n in range(len(Stage) + MAX_FIELDS)),
        *(partial(setitem, page.sample(n), word, 1) for n in range(NUM_SAMPLES) for word in (0, 1, -1)),
        *(partial(page.claim, slot, 9) for slot in slots),
        *(partial(page.fill, slot, 0) for slot in slots),
        *(partial(page.fill, slot, 1) for slot in slots),
        *(partial(hold, page, slot) for slot in slots),
    ]
    for change in changes:
        change()
        (word,) = memory.changed()
        assert word not in seen and word < words_of(num_slots, num_seats)
        seen.add(word)
    page.say_error("x" * 10_000)
    of_error = memory.changed()
    assert of_error and not of_error & seen and max(of_error) < words_of(num_slots, num_seats)
    page.fill(num_slots - 1, 7)
    assert max(memory.changed()) < words_of(num_slots, num_seats)


def test_what_different_processes_write_lies_in_different_lines():
    memory = Memory(8, 3)
    page = memory.page
    lines: dict[str, set[int]] = {}

    def wrote(who: str) -> None:
        lines.setdefault(who, set()).update(word * 8 // _LINE_BYTES for word in memory.changed())

    page.words[NUM_MEMBERS] = page.sample(0)[0] = page.sample(7)[-1] = 1
    page.start_at(0, 1, 1)
    wrote("daemon")
    for word in range(CONSUMER.start, CONSUMER.stop):
        page.words[word] = 1
    wrote("consumer")
    for seat in range(3):
        page.add_news(seat)
        wrote("daemon")
        page.say_sleeps(seat, True)
        page.say_task(seat, 1)
        page.count(seat, Counter.FILLS, 1)
        page.spent(seat)[len(Stage) + MAX_FIELDS - 1] = 1
        wrote(f"worker {seat}")
    fill(page, 0, 1)
    wrote("workers' slots")
    hold(page, 0)
    wrote("consumer")
    found = [line for whose in lines.values() for line in whose]
    assert len(set(found)) == len(found)


def test_a_slot_is_free_until_it_is_filled_and_when_it_is_given_back():
    page = Memory(3, 2).page
    assert page.filled() == page.unfinished(0) == [], "nobody has begun yet"
    page.claim(1, key_of(1, 4))
    assert page.is_free(1) and page.unfinished(1) == [(1, key_of(1, 4))]
    page.fill(1, 6)
    assert not page.is_free(1) and page.records_in(1) == 6 and page.unfinished(1) == []
    page.words[POSITION] = key_of(1, 5)
    hold(page, 1)
    assert not page.is_free(1) and page.held_by(0) == [1]
    hold(page, 1, 0)
    assert page.is_free(1) and page.unfinished(1) == []
    assert page.keys() == [0, key_of(1, 4), 0]


def test_what_is_older_than_the_position_is_nothing_unfinished():
    page = Memory(6, 2).page
    page.words[POSITION] = key_of(2, 3)
    for slot, key in enumerate([key_of(1, 9), 0, key_of(2, 2), 0, key_of(2, 3), 0]):
        page.claim(slot, key)
    assert page.unfinished(0) == [(4, key_of(2, 3))]
    assert page.unfinished(1) == []


def test_tasks_and_counters():
    page = Memory(2, 2).page
    assert [slot for seat in range(2) for slot in page.slots_of(seat)] == [0, 1] and page.seat_of(1) == 1
    page.say_task(1, 0)
    assert (page.task(0), page.task(1)) == (None, 0)
    page.say_task(1, None)
    assert page.task(1) is None
    page.count(0, Counter.LOAD_NS, 30)
    page.count(1, Counter.LOAD_NS, 12)
    assert page.total(Counter.LOAD_NS) == 42 and page.total(Counter.FILL_NS) == 0


def test_threads_may_all_be_at_a_barrier():
    """Several loaders are used by a thread each. They change over as often as possible, also inside of it."""
    errors: list[BaseException] = []

    def pass_barriers() -> None:
        try:
            for _ in range(200_000):
                barrier()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=pass_barriers) for _ in range(3)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval_s)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_a_barrier_may_be_interrupted():
    """KeyboardInterrupt at each point of it at which Python looks for signals; the next ones are as ever."""
    came = 0
    for point in points_of(barrier):
        with InterruptAt(*point) as interrupt:
            barrier()
        came += interrupt.came
        barrier()
        barrier()
    assert came >= 2


def test_a_bell_may_be_rung_too_often():
    bell = new_bell()
    os.eventfd_write(bell, 2**64 - 2)
    ring(bell)
    silence(bell)
    silence(bell)
    assert not was_rung(bell)
    os.close(bell)


# -------------------------------------------------------------------------------------------------- taking


def begin(page: Page, taker: PageConsumer, generation: int) -> None:
    taker.begin(generation, 0)
    page.start_at(0, key_of(generation, 0), generation)
    assert not taker.has_batch()


def test_whoever_sleeps_is_rung_for_when_a_slot_of_its_own_is_given_back(bells: list[int]):
    page = Memory(4, 2).page
    taker = PageConsumer(page, [bells[0], *bells])
    begin(page, taker, 1)
    for step in range(3):
        fill(page, step, key_of(1, step))
    slots = [taker.take()[0] for _ in range(3) if taker.has_batch()]
    assert slots == [0, 1, 2]
    page.say_sleeps(0, True)
    taker.release(1)
    assert not was_rung(bells[1]) and not was_rung(bells[2])
    taker.release(2)
    assert was_rung(bells[1]) and not was_rung(bells[2])
    page.say_sleeps(0, False)
    taker.release(0)
    assert not was_rung(bells[1])


def test_the_daemon_is_rung_for_once_for_each_place(bells: list[int]):
    page = Memory(2, 2).page
    page.words[WAKE_DAEMON_AT] = NEVER
    taker = PageConsumer(page, [bells[0], *bells])
    begin(page, taker, 1)
    assert not was_rung(bells[0])
    page.words[WAKE_DAEMON_AT] = key_of(1, 2)
    rung = []
    for _ in range(4):
        taker.skip()
        rung.append(was_rung(bells[0]))
    assert rung == [False, True, False, False]
    page.words[WAKE_DAEMON_AT] = key_of(1, 5)
    taker.skip()
    assert was_rung(bells[0])
    begin(page, taker, 2)
    assert not was_rung(bells[0]), "it was rung for this place"
