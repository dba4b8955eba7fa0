"""The page: words of shared memory that say what changes with each batch of a stream. Anybody may read it any time.

A word is a signed integer of 64 bits, at a multiple of 8 bytes; it is read and written as a whole. **Each word has
one writer**, so there is nothing to lock. ("Worker" below means the worker that has the seat. When it has died, the
daemon writes its words until another worker takes the seat.)

::

    word                     writer    what it says
    WAKE_DAEMON_AT           daemon    ring its bell when POSITION has come to this key
    GRANTED                  daemon    the key behind the last batch that workers may make, or that is broken
    LAYOUT … NUM_MEMBERS     daemon    how to read the page, for processes that have nothing else: see ``samples``
    SAMPLES                  daemon    how many samples it has written so far
    of each consumer, in its column:
      POSITION               consumer  the key of the batch that it takes next: all before it are taken
      CONSUMER_SLEEPS_FOR    consumer  the key of the batch for which it sleeps; 0: it is awake
      TAKEN_BATCHES, …       consumer  how many batches and records it has taken so far
      CONSUMER_WAITED_NS     consumer  how long it has waited for batches
      COPY_NS                consumer  how long it has copied batches, because too many are held
      CONSUMER_PID, _THREAD  consumer  its process, and the thread that began the pass
      TAKES_AHEAD            consumer  1: batches are taken ahead of their use (tf.data)
      DEVICE_WAIT_NS         consumer  how long it has waited for copies of batches to a device
      COPIES_AHEAD           consumer  how many batches are copied there before they are taken
      WAITS …                consumer  how many waits there were of less than 4 µs, 8 µs, 16 µs …; the last: longer
      HELD, of each slot     consumer  1: it reads the slot
    of each consumer, beside its column:
      CONSUMER_NEWS          daemon    how many messages to be read at once it has sent to the consumer
      STARTS_AT              daemon    the key from which on the consumer gets batches; NEVER: it gets none
      ANSWERED               daemon    the number of the StartPass that STARTS_AT answers
    of each seat:
      NEWS                   daemon    how many messages it has sent there that come before a claim
      SLEEPS                 worker    1: it sleeps; ring its bell when a slot of its own has been given back
      TASK                   worker    1 + the number of the task that it is at; 0: none
      MAKES                  worker    the key of the batch that it is making; 0: none
      ROW                    worker    1 + where the part of that batch begins that it tries; 0: none
      FILLS …                worker    counters: see ``Counter``; behind them, ns by stage and by field
    of each slot, all of which belong to a seat (slot % seats):
      KEY                    worker    the key of the batch that is in the slot, or that is being written there
      RECORDS                worker    how many records that batch has
      READY                  worker    the key of the last batch that was written there to its end
    of each of the last samples:
      …                      daemon    what all words above said at some moment, added up: see ``samples``
    ERROR                    daemon    how often the text behind it has changed, and its length; 0: it changes now
    …                        daemon    the text: how the last request to storage failed

A **key** is the generation (how often the stream has begun somewhere) and the step in it, in one word, so that
both are always read together. Keys only rise.

**Who holds a slot.** A slot is free when no consumer has HELD it, and its READY is less than the place of each. The
**place** of a consumer is the greater of its POSITION and STARTS_AT.

**Columns.** What a consumer writes is its column. A stream's only consumer has its column in the page, which it maps
for writing. With ``sharing="mirrored"``, each consumer (a **member**) maps a memory of its own for writing, which
holds its column, and the page and the slots for reading. So wrong values harm only the member that writes them.

**A worker** takes a free slot of its own and looks for the first step that is granted, not taken, and in no KEY. It
claims that step by writing its key to the slot's KEY, then writes the batch, then RECORDS, then READY. It reads all
KEYs before the places, so that a step which was taken meanwhile is found in one of the two. Two workers may claim
the same step at the same moment; so each looks at the KEYs again after its claim, and the one whose slot has the
higher number gives way. If both go on all the same, the batch is there twice: one of the two is never taken.

**A consumer** looks for the slot whose READY is POSITION, says HELD, writes POSITION, reads the batch, and takes HELD
back when nothing refers to it any more. Where the daemon has written STARTS_AT meanwhile, a worker may believe that
the slot is free. So the worker looks at HELD again after its claim, and the consumer at KEY after it has said HELD:
one of them sees the other and gives way.

**The daemon** grants steps whose rows are in their windows. From the places it learns which windows are used up. It
numbers the generations: each consumer follows STARTS_AT, and goes on at its own step.

**Order.** A writer writes data before the word that announces them; a reader reads the word before the data. x86
keeps that order by itself, aarch64 needs a barrier between the two. Both need one where two processes each write a
word and then read the other's: a worker says SLEEPS and then looks for a free slot once more, while a consumer
takes HELD back and then looks whether the worker SLEEPS. :func:`barrier` serves for both.

**Deaths.** A worker that dies between writing KEY and READY leaves a claim: the daemon withdraws it, and another
worker makes the batch. One that dies after READY has delivered it. When a daemon or the only consumer dies, the
page goes too. When a member dies, the daemon clears its column, and the others go on.
The next member gets a column in new memory: a thread of the one before it may still write to the old one. NEWS counts
the message by which workers get it. A worker that has not read it believes the old column, which says that nothing is
held: it sees NEWS after its claim, and gives way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from loaderd.options import MAX_STEP
from loaderd.stages import Stage

_STEP_BITS = MAX_STEP.bit_length()
MAX_GENERATION = (1 << 63 - _STEP_BITS) - 1
NEVER = (1 << 63) - 1
"""A key that is never reached."""

_LINE = 8
"""Words of a cache line. Words of different writers lie in different lines."""
WAKE_DAEMON_AT, GRANTED, LAYOUT, NUM_SLOTS, NUM_SEATS, FACTS_BYTES, SAMPLES, NUM_MEMBERS = range(_LINE)
POSITION, CONSUMER_SLEEPS_FOR, TAKEN_BATCHES, TAKEN_RECORDS, CONSUMER_WAITED_NS = range(_LINE, _LINE + 5)
COPY_NS, CONSUMER_PID, CONSUMER_THREAD = range(_LINE + 5, _LINE + 8)
TAKES_AHEAD, DEVICE_WAIT_NS, COPIES_AHEAD, WAITS = range(2 * _LINE, 2 * _LINE + 4)
NUM_WAITS = 23
"""Bins of the histogram of the consumer's waits; the last but one ends at 9 s."""
CONSUMER = slice(POSITION, WAITS + NUM_WAITS)
"""All words of a column but HELD."""
HELD = 6 * _LINE
"""Of slot 0. The words of a column have the same places in the page and in a memory of a member's own."""
_CONSUMER_NEWS, _STARTS_AT, _ANSWERED = range(3)


class Counter(IntEnum):
    """What a worker counts; times in ns."""

    FILLS = 0
    FILL_NS = 1
    LOADS = 2
    LOAD_NS = 3
    SLOT_WAIT_NS = 4
    """It had no free slot: the consumer is slower."""
    WINDOW_WAIT_NS = 5
    """It had a slot, but no rows."""
    STORAGE_REQUESTS = 6
    STORAGE_BYTES = 7
    STORAGE_RETRIES = 8
    CACHE_HITS = 9
    CACHE_MISSES = 10


STORAGE_COUNTERS = tuple(Counter)[Counter.STORAGE_REQUESTS :]
"""One for each field of ``StorageCounts``, in order."""


MAX_FIELDS = 32
"""Fields that have a word of their own; the last word is for all further ones together."""
NUM_COUNTERS = len(Counter) + len(Stage) + MAX_FIELDS
_NEWS, _SLEEPS, _TASK, _MAKES, _ROW, _COUNTERS = 0, *range(_LINE, _LINE + 5)
_SPENT = _COUNTERS + len(Counter)
_SEAT_WORDS = 8 * _LINE
NUM_SAMPLES = 16
"""Samples that are kept: one is being written while the others can be read."""
SAMPLE_WORDS = 14 * _LINE
_ERROR_BYTES = 64 * _LINE - 8


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
    """Reads and writes after this happen after those before it, as other processes see it. Takes 90 ns.

    Releasing and acquiring a lock has this effect on every processor; Python offers no other way.
    """
    try:
        _lock.release()
    except RuntimeError:  # another thread is between these lines, or was when KeyboardInterrupt came
        _lock.acquire(False)
        barrier()
        return
    _lock.acquire(False)  # if another thread was quicker, Python has switched to it and back: a barrier, too


def ring(bell: int) -> None:
    """Wake the process that polls this eventfd."""
    # BlockingIOError: it was rung 2**64 - 2 times, which only an attacker does. The process wakes all the same.
    try:  # noqa: SIM105 - contextlib.suppress takes as long as the write
        os.eventfd_write(bell, 1)
    except BlockingIOError:
        pass


def silence(bell: int) -> None:
    """Reset an eventfd, so that a poll waits for the next ring."""
    try:  # noqa: SIM105 - as above
        os.eventfd_read(bell)
    except BlockingIOError:
        pass


def new_bell() -> int:
    """A new eventfd; it is non-blocking, as it is only ever polled."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class Page:
    """The words of a stream's page, in ``memory``: uint8, which must be zeroed when it is new.

    ``num_members``: how many consumers have a column of their own; 0: there is one consumer, whose column is in the
    page. ``columns``: the memories of these columns. A member has only its own, and leaves them out.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        num_slots: int,
        num_seats: int,
        num_members: int = 0,
        columns: Sequence[npt.NDArray[np.uint8]] = (),
    ) -> None:
        self.num_slots = num_slots
        self.num_seats = num_seats
        self.num_members = num_members
        self.words = memory.data[: 8 * words_of(num_slots, num_seats, num_members)].cast("q")
        self.columns: list[memoryview[int]] = [column.data.cast("q") for column in columns]
        if not num_members:
            self.columns = [self.words]
        stride = _lines(num_slots)
        self._seats = HELD + stride
        self._key = self._seats + num_seats * _SEAT_WORDS
        self._records, self._ready = self._key + stride, self._key + 2 * stride
        self._keys, self._all_ready = (slice(begin, begin + num_slots) for begin in (self._key, self._ready))
        self._first_sample = self._key + 3 * stride
        self._error = self._first_sample + NUM_SAMPLES * SAMPLE_WORDS
        self._error_bytes = memory.data[8 * (self._error + 1) :][:_ERROR_BYTES]
        self._error_text = ""
        self._num_errors = 0
        self._beside_columns = self._error + 1 + _ERROR_BYTES // 8

    def close(self) -> None:
        """Let go of the memory now, rather than at garbage collection. The words cannot be used any more."""
        for column in self.columns:
            column.release()
        self.words.release()
        self._error_bytes.release()

    # -------------------------------------------------------------------------------------------- slots

    def keys(self) -> list[int]:
        """Of each slot, the key of the batch in it."""
        found: list[int] = self.words[self._keys].tolist()
        return found

    def key_in(self, slot: int) -> int:
        """The key of the batch in a slot."""
        return self.words[self._key + slot]

    def ready(self) -> list[int]:
        """Of each slot, the key of the last batch that was written there to its end."""
        found: list[int] = self.words[self._all_ready].tolist()
        return found

    def place(self, column: int) -> int:
        """The key of the batch that a consumer takes next."""
        return max(self.columns[column][POSITION], self.starts_at(column))

    def least_place(self) -> int:
        """The least of all places: batches before it are taken by all, or not wanted."""
        words = self.words
        if not self.num_members:  # asked three times a batch, so without a loop
            return max(1, words[POSITION], words[self._beside_columns + _STARTS_AT])
        return max(1, min(map(self.place, range(self.num_members))))

    def is_held(self, slot: int) -> bool:
        """Whether a consumer reads the slot."""
        return any(column[HELD + slot] for column in self.columns)

    def is_free(self, slot: int, least_place: int = 0) -> bool:
        """Whether a worker may write there. ``least_place``: for many slots, the caller asks once."""
        return self.words[self._ready + slot] < (least_place or self.least_place()) and not self.is_held(slot)

    def filled(self) -> list[int]:
        """The slots that are not free."""
        least_place = self.least_place()
        return [slot for slot in range(self.num_slots) if not self.is_free(slot, least_place)]

    def held_by(self, column: int) -> list[int]:
        """The slots that a consumer reads."""
        return [slot for slot in range(self.num_slots) if self.columns[column][HELD + slot]]

    def claim(self, slot: int, key: int) -> None:
        """Worker: the batch with this key is being made in the slot; 0: none is."""
        self.words[self._key + slot] = key

    def fill(self, slot: int, num_records: int) -> None:
        """Worker: the batch that it has claimed is ready."""
        words = self.words
        words[self._records + slot] = num_records
        barrier()
        words[self._ready + slot] = words[self._key + slot]

    def records_in(self, slot: int) -> int:
        """How many records the batch in a slot has."""
        return self.words[self._records + slot]

    def slots_of(self, seat: int) -> range:
        """The slots that belong to a seat."""
        return range(seat, self.num_slots, self.num_seats)

    def seat_of(self, slot: int) -> int:
        """The seat to which a slot belongs."""
        return slot % self.num_seats

    def unfinished(self, seat: int) -> list[tuple[int, int]]:
        """(slot, key) of each batch that the worker of a seat has claimed and not finished."""
        least, ready = self.least_place(), self.ready()
        claims = [(slot, self.key_in(slot)) for slot in self.slots_of(seat)]
        return [(slot, key) for slot, key in claims if key >= least and key != ready[slot]]

    # ---------------------------------------------------------------------------------------- consumers

    def consumer_news(self, column: int) -> int:
        """How many messages were sent to a consumer that it reads before it takes another batch."""
        return self.words[self._beside(column) + _CONSUMER_NEWS]

    def add_consumer_news(self, column: int = 0) -> None:
        """Daemon: one more message is on its way to a consumer that it reads before it takes another batch."""
        self._add(self._beside(column) + _CONSUMER_NEWS, 1)

    def starts_at(self, column: int) -> int:
        """The key from which on a consumer gets batches; NEVER: it gets none."""
        return self.words[self._beside(column) + _STARTS_AT]

    def answered(self, column: int) -> int:
        """The number of the StartPass that :meth:`starts_at` answers."""
        return self.words[self._beside(column) + _ANSWERED]

    def start_at(self, column: int, key: int, generation: int) -> None:
        """Daemon: from here on, a consumer gets batches; ``generation``: of its StartPass."""
        self.words[self._beside(column) + _STARTS_AT] = key
        barrier()
        self.words[self._beside(column) + _ANSWERED] = generation

    def _beside(self, column: int) -> int:
        return self._beside_columns + column * _LINE

    def sleeps_for(self, column: int) -> int:
        """The key of the batch for which a consumer sleeps; 0: it is awake."""
        return self.columns[column][CONSUMER_SLEEPS_FOR]

    def clear_column(self, column: int) -> None:
        """Daemon: a member is gone, and its column is for another one."""
        for word in range(POSITION, HELD + self.num_slots):
            self.columns[column][word] = 0
        self.words[self._beside(column) + _CONSUMER_NEWS] = 0

    def use_column(self, column: int, memory: npt.NDArray[np.uint8]) -> None:
        """Daemon and workers: a column lies in other memory from here on."""
        self.columns[column] = memory.data.cast("q")

    # -------------------------------------------------------------------------------------------- seats

    def _of_seat(self, seat: int) -> int:
        return self._seats + seat * _SEAT_WORDS

    def news(self, seat: int) -> int:
        """How many messages that come before a claim were sent to a seat."""
        return self.words[self._of_seat(seat) + _NEWS]

    def add_news(self, seat: int) -> None:
        """Daemon: one more message that comes before a claim is on its way to a seat."""
        self._add(self._of_seat(seat) + _NEWS, 1)

    def say_sleeps(self, seat: int, sleeps: bool) -> None:
        """Worker: it waits for its bell, which the consumer rings when it gives a slot back."""
        self.words[self._of_seat(seat) + _SLEEPS] = sleeps

    def worker_sleeps(self, slot: int) -> bool:
        """Whether the worker that a slot belongs to sleeps, and must be woken when the slot is free."""
        return bool(self.words[self._seats + slot % self.num_seats * _SEAT_WORDS + _SLEEPS])

    def task(self, seat: int) -> int | None:
        """The number of the task on which the worker is; None: on none."""
        number = self.words[self._of_seat(seat) + _TASK]
        return number - 1 if number else None

    def say_task(self, seat: int, number: int | None) -> None:
        """Worker: it begins a task, or has none."""
        self.words[self._of_seat(seat) + _TASK] = 0 if number is None else number + 1

    def makes(self, seat: int) -> int:
        """The key of the batch that a worker is making; 0: none."""
        return self.words[self._of_seat(seat) + _MAKES]

    def say_makes(self, seat: int, key: int) -> None:
        """Worker: it makes this batch; 0: none."""
        self.words[self._of_seat(seat) + _MAKES] = key

    def row(self, seat: int) -> int:
        """The row at which the part begins that a worker tries, of the batch that it makes; -1: none."""
        return self.words[self._of_seat(seat) + _ROW] - 1

    def say_row(self, seat: int, row: int) -> None:
        """Worker: it tries the part that begins at this row; -1: none."""
        self.words[self._of_seat(seat) + _ROW] = row + 1

    def count(self, seat: int, counter: Counter, amount: int) -> None:
        """Worker: add to a counter."""
        self._add(self._of_seat(seat) + _COUNTERS + counter, amount)

    def _add(self, word: int, amount: int) -> None:
        """Add to a word that only rises. It overflows only where a consumer has written there, which harms itself."""
        total = self.words[word] + amount
        self.words[word] = total if total <= NEVER else 0

    def counted(self, seat: int, counter: Counter) -> int:
        """What a worker has counted."""
        return self.words[self._of_seat(seat) + _COUNTERS + counter]

    def total(self, counter: Counter) -> int:
        """A counter, summed over all seats."""
        return sum(self.counted(seat, counter) for seat in range(self.num_seats))

    def spent(self, seat: int) -> memoryview[int]:
        """The words in which a worker sums its ns: one for each stage, then one for each field."""
        begin = self._of_seat(seat) + _SPENT
        return self.words[begin : begin + len(Stage) + MAX_FIELDS]

    def spend(self, seat: int, stage: Stage, ns: int) -> None:
        """Worker: add to the ns of a stage."""
        self._add(self._of_seat(seat) + _SPENT + stage, ns)

    def totals(self) -> list[int]:
        """Each counter, then each stage, then each field, summed over all seats."""
        begins = [self._of_seat(seat) + _COUNTERS for seat in range(self.num_seats)]
        of_seats = [self.words[begin : begin + NUM_COUNTERS].tolist() for begin in begins]
        return list(map(sum, zip(*of_seats, strict=True)))

    # ------------------------------------------------------------------------------------------ samples

    def sample(self, number: int) -> memoryview[int]:
        """The words of sample ``number``, in the place of an older one."""
        begin = self._first_sample + number % NUM_SAMPLES * SAMPLE_WORDS
        return self.words[begin : begin + SAMPLE_WORDS]

    def add_sample(self, values: Sequence[int]) -> None:
        """Daemon: write a sample. Values too large for a word are cut: they come from what a consumer has written."""
        sample = self.sample(self.words[SAMPLES])
        for word, value in enumerate(values):
            sample[word] = max(~NEVER, min(value, NEVER))
        barrier()
        self._add(SAMPLES, 1)

    def say_error(self, text: str) -> None:
        """Daemon: write how the last request to storage failed."""
        if text == self._error_text:
            return
        self._error_text = text
        self._num_errors += 1
        encoded = text.encode()[:_ERROR_BYTES]
        self.words[self._error] = 0
        barrier()
        self._error_bytes[: len(encoded)] = encoded
        barrier()
        self.words[self._error] = self._num_errors << 32 | len(encoded)

    def error(self) -> str:
        """How the last request to storage failed; "" if none has, or while that is being written.

        A consumer may have written anything there: the text has no characters that a terminal would obey.
        """
        before = self.words[self._error]
        barrier()
        encoded = bytes(self._error_bytes[: before & 0xFFFF])
        barrier()
        is_whole = before and self.words[self._error] == before
        return "".join(filter(str.isprintable, encoded.decode(errors="ignore"))) if is_whole else ""


def _lines(num_words: int) -> int:
    return -(-num_words // _LINE) * _LINE


def column_words_of(num_slots: int) -> int:
    """How many words a column has."""
    return HELD + _lines(num_slots)


def words_of(num_slots: int, num_seats: int, num_members: int = 0) -> int:
    """How many words the page of such a stream has."""
    of_slots, text = 3 * _lines(num_slots), (8 + _ERROR_BYTES) // 8
    of_all = column_words_of(num_slots) + num_seats * _SEAT_WORDS + of_slots + NUM_SAMPLES * SAMPLE_WORDS + text
    return of_all + max(1, num_members) * _LINE
