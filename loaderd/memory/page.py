"""The page: what changes with each batch of a stream, in words of shared memory that nobody has to be asked for.

A word is a signed integer of 64 bits, at a multiple of 8 bytes; it is read and written as a whole. **Each word has
one writer**, so there is nothing to lock; whoever wants to know, reads. ("Worker" below is the one that has the seat;
when it is dead, the daemon writes what it leaves, until another one has the seat.)

::

    word                     writer    what it says
    CONSUMER_NEWS            daemon    how many messages about batches it has sent to the consumer
    WAKE_DAEMON_AT           daemon    ring its bell when POSITION has come to this key
    GRANTED                  daemon    the key behind the last batch that workers may make, or that is broken
    LAYOUT … FACTS_BYTES     daemon    how to read the page, for processes that have nothing else: see ``samples``
    SAMPLES                  daemon    how many samples it has written so far
    POSITION                 consumer  the key of the batch that it takes next: all before it are taken
    CONSUMER_SLEEPS_FOR      consumer  the key of the batch that it sleeps for; 0: it does not sleep
    TAKEN_BATCHES, _RECORDS  consumer  how many it has taken so far
    CONSUMER_WAITED_NS       consumer  how long it has waited for batches
    COPY_NS                  consumer  how long it has copied batches, because too many are held
    CONSUMER_PID, _THREAD    consumer  its process, and the thread that began the pass
    TAKES_AHEAD              consumer  1: who takes the batches is not who uses them (tf.data)
    DEVICE_WAIT_NS           consumer  how long it has waited for copies of batches to a device
    COPIES_AHEAD             consumer  how many batches are copied there before they are taken
    WAITS …                  consumer  how many waits there were of less than 4 µs, 8 µs, 16 µs …; the last: longer
    of each seat:
      NEWS                   daemon    how many Granted and Withdrawn it has sent there
      SLEEPS                 worker    1: it sleeps; ring its bell when a slot of its own has been given back
      TASK                   worker    1 + the number of the task that it is at; 0: none
      MAKES                  worker    the key of the batch that it is making; 0: none
      FILLS …                worker    counters: see ``Counter``; behind them, ns by stage and by field
    of each slot, all of which belong to a seat (slot % seats):
      KEY                    worker    the key of the batch that is in the slot, or that is being written there
      RECORDS                worker    how many records that batch has
      FILLED                 worker    how many batches were written there so far
      RELEASED               consumer  how many of these it has given back, or passed over
    of each of the last samples:
      …                      daemon    what all words above said at some moment, added up: see ``samples``

A **key** is the generation (which counts how often the consumer began somewhere) and the step in it, as one number,
so that the two are never read half old, half new; keys rise. A slot is free while FILLED == RELEASED.

**A worker** takes a slot of its own that is free, looks for the first step that is granted, not taken, and in no
KEY, and writes its key there: that is its claim. It writes the batch, then RECORDS, then FILLED. It reads the KEYs
first and POSITION behind them: what it finds in neither was not there when it looked. Two workers may claim one step
at the same moment: each looks again behind its claim, and whose slot has the higher number gives way. Should both go
on, one batch is there twice; the consumer takes one, and passes the other over.

**The consumer** looks for the slot whose KEY is POSITION and which is not free, writes POSITION, reads the batch, and
writes RELEASED when nothing refers to it any more. What is older than POSITION it passes over.

**The daemon** grants steps whose rows are in their windows; it reads POSITION to know which windows are done with.

**Order.** A writer writes data before the word that announces them; a reader reads the word before the data. x86
keeps that order by itself; aarch64 needs a barrier between the two. And both need one where somebody writes a word
and then reads another one's, who does the same the other way round: a worker that says SLEEPS and looks for a free
slot once more, a consumer that writes RELEASED and looks whether the worker SLEEPS. :func:`barrier` is both.

**Groups.** Each member of a group has a page of its own, in which the daemon is the only worker (``groups.lane``).
One that gets batches by turns takes any batch of its generation, and not the one at POSITION.

**Deaths.** A worker that dies between KEY and FILLED leaves a claim: the daemon takes it back, and another worker
makes the batch. One that dies behind FILLED has delivered. What a daemon or a consumer leaves goes with the page.
"""

from __future__ import annotations

import contextlib
import os
import threading
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from loaderd.stages import Stage

_STEP_BITS = 38
MAX_STEP = (1 << _STEP_BITS) - 1
MAX_GENERATION = (1 << 63 - _STEP_BITS) - 1
NEVER = (1 << 63) - 1
"""A key that is never reached."""

_LINE = 8
"""Words of a cache line: what different processes write lies in different ones."""
CONSUMER_NEWS, WAKE_DAEMON_AT, GRANTED, LAYOUT, NUM_SLOTS, NUM_SEATS, FACTS_BYTES, SAMPLES = range(_LINE)
POSITION, CONSUMER_SLEEPS_FOR, TAKEN_BATCHES, TAKEN_RECORDS, CONSUMER_WAITED_NS = range(_LINE, _LINE + 5)
COPY_NS, CONSUMER_PID, CONSUMER_THREAD = range(_LINE + 5, _LINE + 8)
TAKES_AHEAD, DEVICE_WAIT_NS, COPIES_AHEAD, WAITS = range(_LINE + 8, _LINE + 12)
NUM_WAITS = 23
"""Of the histogram of the consumer's waits. The last but one counts those of less than 9 s."""
_SEATS = 6 * _LINE
CONSUMER = slice(POSITION, WAITS + NUM_WAITS)
"""All words of the consumer."""


class Counter(IntEnum):
    """What a worker counts for whoever wants to know; times in ns."""

    FILLS = 0
    FILL_NS = 1
    LOADS = 2
    LOAD_NS = 3
    SLOT_WAIT_NS = 4
    """It had no slot: the consumer is slower."""
    WINDOW_WAIT_NS = 5
    """It had a slot, and no rows."""
    STORAGE_REQUESTS = 6
    STORAGE_BYTES = 7
    STORAGE_RETRIES = 8
    CACHE_HITS = 9
    CACHE_MISSES = 10


STORAGE_COUNTERS = tuple(Counter)[Counter.STORAGE_REQUESTS :]
"""Of each field of ``StorageCounts``, in order."""


MAX_FIELDS = 32
"""That have a word of their own; the last one is of all fields from there on."""
NUM_COUNTERS = len(Counter) + len(Stage) + MAX_FIELDS
_NEWS, _SLEEPS, _TASK, _MAKES, _COUNTERS = 0, _LINE, _LINE + 1, _LINE + 2, _LINE + 3
_SPENT = _COUNTERS + len(Counter)
_SEAT_WORDS = 8 * _LINE
NUM_SAMPLES = 16
"""That are kept: one is written while the others can be read."""
SAMPLE_WORDS = 13 * _LINE


def key_of(generation: int, step: int) -> int:
    """The key of a step. Generations count from 1: 0 is the key of nothing."""
    return generation << _STEP_BITS | step


def split_key(key: int) -> tuple[int, int]:
    """(generation, step)."""
    return key >> _STEP_BITS, key & MAX_STEP


def step_of(key: int) -> int:
    """The step of a key."""
    return key & MAX_STEP


_lock = threading.Lock()
_lock.acquire()


def barrier() -> None:
    """Nothing that is written or read behind this comes before what was written or read in front of it. 60 ns.

    To release a lock and to acquire one is that, on every processor: Python has nothing else for it.
    """
    _lock.release()
    _lock.acquire()


def ring(bell: int) -> None:
    """Wake who polls this eventfd."""
    # It may have been rung 2**64 - 2 times, by somebody who means no good: it wakes all the same.
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(bell, 1)


def silence(bell: int) -> None:
    """Have an eventfd that was rung wait for the next time."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(bell)


def new_bell() -> int:
    """An eventfd, which nobody ever waits for but in a poll."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class Page:
    """The words of a stream of ``num_slots`` slots and ``num_seats`` workers in ``memory``, zeroed when it is new."""

    def __init__(self, memory: npt.NDArray[np.uint8], num_slots: int, num_seats: int) -> None:
        self.num_slots = num_slots
        self.num_seats = num_seats
        self.words = memory.data[: 8 * words_of(num_slots, num_seats)].cast("q")
        first = _SEATS + num_seats * _SEAT_WORDS
        stride = _lines(num_slots)
        self._key, self._records, self._filled, self._released = range(first, first + 4 * stride, stride)
        self._first_sample = first + 4 * stride
        self._keys, self._all_filled, self._all_released = (
            slice(begin, begin + num_slots) for begin in (self._key, self._filled, self._released)
        )

    def close(self) -> None:
        """Let go of the memory at once, and not when garbage is collected; the words are not there any more."""
        self.words.release()

    # -------------------------------------------------------------------------------------------- slots

    def keys(self) -> list[int]:
        """Of each slot, the key of the batch in it."""
        found: list[int] = self.words[self._keys].tolist()
        return found

    def key_in(self, slot: int) -> int:
        """The key of the batch in a slot."""
        return self.words[self._key + slot]

    def is_free(self, slot: int) -> bool:
        """Whether a worker may write there."""
        return self.words[self._filled + slot] == self.words[self._released + slot]

    def filled(self) -> list[int]:
        """The slots that are not free."""
        filled, released = self.words[self._all_filled].tolist(), self.words[self._all_released].tolist()
        return [slot for slot in range(self.num_slots) if filled[slot] != released[slot]]

    def claim(self, slot: int, key: int) -> None:
        """Worker: this batch is being made there; 0: none is."""
        self.words[self._key + slot] = key

    def fill(self, slot: int, num_records: int, count: int = 0) -> None:
        """Worker: the batch is there; it is number ``count`` in this slot, or one more than there were."""
        words = self.words
        words[self._records + slot] = num_records
        barrier()
        words[self._filled + slot] = count or words[self._filled + slot] + 1

    def records_in(self, slot: int) -> int:
        """Of the batch in a slot."""
        return self.words[self._records + slot]

    def release(self, slot: int) -> None:
        """Consumer: the slot is free."""
        self.words[self._released + slot] = self.words[self._filled + slot]

    def released(self, slot: int) -> int:
        """How many batches in a slot the consumer has given back."""
        return self.words[self._released + slot]

    def slots_of(self, seat: int) -> range:
        """That belong to a seat."""
        return range(seat, self.num_slots, self.num_seats)

    def seat_of(self, slot: int) -> int:
        """To which a slot belongs."""
        return slot % self.num_seats

    def unfinished(self, seat: int) -> list[tuple[int, int]]:
        """(slot, key) of what the worker of a seat has claimed: what it makes, and what it keeps a slot for."""
        least = max(1, self.words[POSITION])
        return [
            (slot, self.key_in(slot))
            for slot in self.slots_of(seat)
            if self.is_free(slot) and self.key_in(slot) >= least
        ]

    # -------------------------------------------------------------------------------------------- seats

    def _of_seat(self, seat: int) -> int:
        return _SEATS + seat * _SEAT_WORDS

    def news(self, seat: int) -> int:
        """How many Granted and Withdrawn were sent to a seat."""
        return self.words[self._of_seat(seat) + _NEWS]

    def add_news(self, seat: int) -> None:
        """Daemon: one more is on its way."""
        self.words[self._of_seat(seat) + _NEWS] += 1

    def sleeps(self, seat: int) -> bool:
        """Whether a worker waits for its bell."""
        return bool(self.words[self._of_seat(seat) + _SLEEPS])

    def say_sleeps(self, seat: int, sleeps: bool) -> None:
        """Worker: it waits for its bell; who gives a slot back rings it."""
        self.words[self._of_seat(seat) + _SLEEPS] = sleeps

    def task(self, seat: int) -> int | None:
        """The number of the task that a worker is at."""
        number = self.words[self._of_seat(seat) + _TASK]
        return number - 1 if number else None

    def say_task(self, seat: int, number: int | None) -> None:
        """Worker: it begins with a task, or is at none."""
        self.words[self._of_seat(seat) + _TASK] = 0 if number is None else number + 1

    def makes(self, seat: int) -> int:
        """The key of the batch that a worker is making; 0: none."""
        return self.words[self._of_seat(seat) + _MAKES]

    def say_makes(self, seat: int, key: int) -> None:
        """Worker: it makes this batch; 0: none."""
        self.words[self._of_seat(seat) + _MAKES] = key

    def count(self, seat: int, counter: Counter, amount: int) -> None:
        """Worker: so much more of this."""
        self.words[self._of_seat(seat) + _COUNTERS + counter] += amount

    def counted(self, seat: int, counter: Counter) -> int:
        """How much of this there was."""
        return self.words[self._of_seat(seat) + _COUNTERS + counter]

    def total(self, counter: Counter) -> int:
        """Of all seats."""
        return sum(self.counted(seat, counter) for seat in range(self.num_seats))

    def spent(self, seat: int) -> memoryview[int]:
        """The words in which a worker adds up its ns: of each stage, and of each field behind them."""
        begin = self._of_seat(seat) + _SPENT
        return self.words[begin : begin + len(Stage) + MAX_FIELDS]

    def totals(self) -> list[int]:
        """Of all seats: of each counter, each stage and each field."""
        begins = [self._of_seat(seat) + _COUNTERS for seat in range(self.num_seats)]
        of_seats = [self.words[begin : begin + NUM_COUNTERS].tolist() for begin in begins]
        return list(map(sum, zip(*of_seats, strict=True)))

    def sample(self, number: int) -> memoryview[int]:
        """The words of a sample; its place is that of an older one."""
        begin = self._first_sample + number % NUM_SAMPLES * SAMPLE_WORDS
        return self.words[begin : begin + SAMPLE_WORDS]


def _lines(num_words: int) -> int:
    return -(-num_words // _LINE) * _LINE


def words_of(num_slots: int, num_seats: int) -> int:
    """How many words the page of such a stream has."""
    return _SEATS + num_seats * _SEAT_WORDS + 4 * _lines(num_slots) + NUM_SAMPLES * SAMPLE_WORDS
