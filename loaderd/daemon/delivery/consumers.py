"""The consumers of a stream, and where each of them stands: one, or the members of ``sharing="mirrored"``.

All get every batch, which is made once: the stream runs at the place of the hindmost that has asked for batches, and
the others take theirs when it has come to where they are. The page says how far each has come, and who holds which
slot (see ``shm.page``). An only consumer is the hindmost.

::

    waiting  ──all members have asked, or those who are here, after GRACE_S──►  running  ◄──┐ begins anew:
       ▲                                                                           │        │ a member is behind,
       └───── nobody needs what comes next in this pass; ──────────────────────────┘────────┘ or all are ahead
              it goes on when the hindmost has asked

- Where a member comes, or starts anew, the stream begins again at the hindmost's place.
- A member that has ended a pass stands behind its last batch. So the next pass begins when all have ended this one
  and have asked for it.
- Members say where they are, so a new server, which knows nothing, goes on there. If a member has had batches before,
  the server waits a while for the others: otherwise it would make twice what can go to all at once.

A slot is a member's until it gives it back or its connection has ended: also if it starts elsewhere meanwhile, and if
it is sent away. It may hold its **share** of the slots, so that the others can always go on: one that says that it
holds more is sent away, and holds nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loaderd.daemon.delivery.notes import Note
from loaderd.daemon.delivery.stream import Stream
from loaderd.errors import BusyError, LoaderdError
from loaderd.options import MAX_EPOCHS
from loaderd.plan.passes import Pass, PassPlan
from loaderd.shm.page import MAX_GENERATION, NEVER, POSITION, TAKEN_BATCHES, TAKEN_RECORDS, key_of, ring, split_key

GRACE_S = 15.0
"""After a restart of the server, a group begins without the missing members if none comes for so many seconds."""

PassKey = tuple[int, tuple[tuple[int, ...], ...]]
"""Sorts the passes of a stream as they follow each other."""

_BEFORE_ALL: PassKey = (-1, ())
_START: tuple[PassKey, int] = (0, ()), 0


@dataclass(eq=False)
class _Consumer:
    """``pass_``: the one that it has asked for, and gets; None: it has asked for none. ``key``: of that or the last.

    ``step``: how far it was when the daemon looked last. ``since``: from which generation of the stream on its
    POSITION counts; 0: from none.
    """

    column: int
    generation: int = 0
    pass_: Pass | None = None
    key: PassKey = _BEFORE_ALL
    num_steps: int | None = None
    step: int = 0
    since: int = 0
    seen: tuple[int, int] = 0, 0

    @property
    def place(self) -> tuple[PassKey, int]:
        """In the order in which places come."""
        return self.key, self.step


class Consumers:
    """See the module's docstring. ``bells``: of each column. A consumer is known by a number.

    ``renew_column`` gives a column new memory, and tells the workers of it.
    """

    def __init__(self, stream: Stream, bells: Sequence[int], renew_column: Callable[[int], None]) -> None:
        self.error: LoaderdError | None = None
        """Why the stream cannot begin any more."""
        self._stream = stream
        self._page = stream.page
        self._bells = bells
        self._renew_column = renew_column
        self._most = max(1, stream.page.num_members)
        """How many consumers there may be."""
        self._consumers: dict[int, _Consumer] = {}
        self._gone: dict[int, int] = {}
        """The columns of consumers that have left, and may still read what they hold."""
        self._key: PassKey | None = None
        """Of the pass that the stream runs."""
        self._furthest = 0
        """The furthest batch of that pass that a consumer can have come to."""
        self._begun = False
        self._quiet_s = 0.0
        for column in range(len(self._page.columns)):
            self._page.start_at(column, NEVER, 0)

    # ------------------------------------------------------------------------------------------- events

    def join(self, number: int) -> int:
        """Add a consumer; returns its column. The caller adds no more of them than there may be."""
        used = {*self._gone.values(), *(one.column for one in self._consumers.values())}
        column = min(set(range(len(self._page.columns))) - used)
        self._consumers[number] = _Consumer(column)
        self._quiet_s = 0.0
        return column

    def start(self, number: int, generation: int, pass_: Pass, step: int) -> None:
        """A consumer wants a pass from ``step`` on.

        Raises ValueError, or what planning the pass raises, where there is no such batch.
        """
        one = self._consumers[number]
        if generation <= one.generation:
            raise ValueError(f"generation {generation} does not come after generation {one.generation}")
        plan = self._plan_at(pass_, step)
        one.generation, one.pass_, one.key, one.since = generation, pass_, _key_of(pass_), 0
        one.step, one.num_steps = step, plan.num_steps
        self._quiet_s = 0.0
        self._send_off(one)
        self._settle()

    def stop(self) -> None:
        """Nobody gets anything before it asks again: the data become others."""
        for one in self._consumers.values():
            one.pass_ = None
        self._halt()

    def _plan_at(self, pass_: Pass, step: int) -> PassPlan:
        """The plan of a pass. Raises ValueError where it has no batch ``step``, or what planning the pass raises.

        An error that the stream meets only later would be told to all members.
        """
        plan = self._stream.plan_pass(pass_)
        if step < 0 or (plan.num_steps is not None and step > plan.num_steps):
            raise ValueError(f"a pass of {plan.num_steps} batches cannot start at batch {step}")
        if (epoch := plan.place_of(step)[0]) > MAX_EPOCHS:
            raise ValueError(f"no pass comes to epoch {epoch}")
        return plan

    def leave(self, number: int) -> None:
        """A consumer gets nothing more. What it holds stays its own: it may still read that."""
        one = self._consumers.pop(number)
        self._gone[number] = one.column
        if self._page.num_members:  # an only consumer still takes what lies in the slots
            self._send_off(one)
        if self._consumers:
            self._settle()
        else:
            self._halt()

    def give_back_all(self, number: int) -> None:
        """A consumer that has left reads nothing any more: its column is free for another one."""
        column = self._gone.pop(number, None)
        if column is not None:
            self._take_back(column)

    def _take_back(self, column: int) -> None:
        """Whatever the consumer that had the column still writes there, it holds nothing any more."""
        self._page.clear_column(column)
        self._renew_column(column)
        self._wake_workers()

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        self._quiet_s += seconds

    def take(self) -> list[tuple[int, Note]]:
        """What is to be said now, in order, and to which consumer.

        It must be sent before the workers hear of the stream's grants.
        """
        self._settle()
        notes, self._stream.notes = self._stream.notes, deque()
        return [
            (number, note._replace(generation=one.generation))
            for note in notes
            for number, one in self._consumers.items()
            if self._is_in(one) and self._step_of(one) <= note.step
        ]

    # --------------------------------------------------------------------------------- where the stream is

    def _is_in(self, one: _Consumer) -> bool:
        """Whether a consumer gets what the stream makes."""
        return self._page.starts_at(one.column) != NEVER

    def _step_of(self, one: _Consumer) -> int:
        """The batch that a consumer takes next. An impossible number in its column counts as the nearest one."""
        generation, step = split_key(self._page.columns[one.column][POSITION])
        if not one.since or not one.since <= generation <= self._stream.generation:
            return one.step
        return max(one.step, min(step, max(self._furthest, self._stream.next)))

    def _send_off(self, one: _Consumer) -> None:
        self._page.start_at(one.column, NEVER, one.generation)
        self._wake_workers()

    def _wake_workers(self) -> None:
        """Slots may be free that nobody gives back."""
        if self._stream.plan is not None:
            self._stream.wake_workers()

    def _settle(self) -> None:
        """Have the stream run at the place of the hindmost consumer that has asked."""
        stream = self._stream
        for column in self._gone.values():
            if len(self._page.held_by(column)) > self._share:  # no Loader holds so many
                self._take_back(column)
        stream.look()
        self._furthest = max(self._furthest, stream.next)
        for one in self._consumers.values():
            one.step = self._step_of(one)
            if one.pass_ is not None and one.num_steps is not None and one.step >= one.num_steps:
                one.pass_ = None
                self._send_off(one)
        asked = [one for one in self._consumers.values() if one.pass_ is not None]
        first = min(asked, key=lambda one: one.place, default=None)
        if first is None:
            if any(one.num_steps is None or one.step < one.num_steps for one in self._consumers.values()):
                self._halt()
            return
        if self._key is not None and first.key > self._key:
            self._halt()
        if self._key is None:
            is_time = self._may_begin(first.place)
        else:
            lacks_one = any(one.key == self._key and not self._is_in(one) for one in asked)
            is_time = first.key < self._key or first.step > stream.next or lacks_one
        if not is_time or first.pass_ is None:
            return
        if stream.generation == MAX_GENERATION:
            self.error = BusyError("the stream has begun too often")  # its consumers come back, to another stream
        else:
            self._begin(stream.generation + 1, first.pass_, first.step)

    def _may_begin(self, place: tuple[PassKey, int]) -> bool:
        """Whether to begin at ``place``: no member need be waited for that may have to get that batch, too."""
        places = [one.place for one in self._consumers.values() if one.pass_ is not None]
        if any(one.pass_ is None and one.place < place for one in self._consumers.values()):
            return False
        came_back = max(places) > _START and self._quiet_s >= GRACE_S
        return self._begun or came_back or len(self._consumers) == self._most

    def _begin(self, generation: int, pass_: Pass, step: int) -> None:
        """Have the stream begin, for those that have asked for this pass."""
        stream, key = self._stream, _key_of(pass_)
        if self._key != key:
            self._furthest = 0
        self._begun, self._key = True, key
        stream.generation = generation
        for one in self._consumers.values():
            if one.pass_ is None or one.key != key:
                self._page.start_at(one.column, NEVER, one.generation)
                continue
            one.since = one.since or generation
            self._page.start_at(one.column, key_of(generation, one.step), one.generation)
            ring(self._bells[one.column])
        stream.start(generation, pass_, step)

    def _halt(self) -> None:
        if self._key is not None:
            self._key = None
            for one in self._consumers.values():
                self._page.start_at(one.column, NEVER, one.generation)
            self._stream.stop()

    # ------------------------------------------------------------------------------------------- report

    def waiting(self) -> list[tuple[int, int]]:
        """(number, generation) of each consumer that sleeps until the batch that is granted next is there."""
        key = key_of(self._stream.generation, self._stream.next)
        consumers = self._consumers.items()
        return [(number, one.generation) for number, one in consumers if self._page.sleeps_for(one.column) == key]

    def column_of(self, number: int) -> int:
        """The column of a consumer that has not left."""
        return self._consumers[number].column

    def held_by(self, number: int) -> int:
        """How many slots a consumer holds."""
        return len(self._page.held_by(self.column_of(number)))

    def lent_to(self, number: int) -> int:
        """How many slots hold a batch that a consumer has, or could take."""
        column = self.column_of(number)
        place, held = self._page.place(column), self._page.held_by(column)
        return len(set(held).union(slot for slot, key in enumerate(self._page.ready()) if key >= place))

    def holds_too_many(self, number: int) -> bool:
        """Whether a member holds more than its share of the slots."""
        return self.held_by(number) > self._share

    @property
    def _share(self) -> int:
        return max(1, self._page.num_slots // self._most)

    def has_waiting(self, number: int) -> bool:
        """Whether there are batches that a consumer could take, or that it must give back; others may wait for it."""
        place = self._page.place(self.column_of(number))
        is_full = self._most > 1 and self.held_by(number) >= self._share
        return is_full or any(key >= place for key in self._page.ready())

    def has_moved(self, number: int) -> bool:
        """Whether a consumer has taken something since this was asked last."""
        one = self._consumers[number]
        words = self._page.columns[one.column]
        before, one.seen = one.seen, (words[POSITION], words[TAKEN_BATCHES])
        return one.seen != before

    def taken_by(self, number: int) -> tuple[int, int, int]:
        """How many batches and records a consumer has taken, and the batch that it takes next."""
        one = self._consumers[number]
        words = self._page.columns[one.column]
        return words[TAKEN_BATCHES], words[TAKEN_RECORDS], self._step_of(one)

    def describe(self, number: int) -> str:
        """What a consumer waits for, in words."""
        one, page, others = self._consumers[number], self._page, self._consumers.items()
        if one.pass_ is None:
            return "has asked for no batches"
        if not self._is_in(one):
            behind = [other for other, member in others if member.pass_ is None or member.place < one.place]
            lacking = f"the rest of its group: {len(others)} of {self._most} consumers are here"
            return f"waits for {_named(behind) or lacking}"
        if len(page.filled()) < page.num_slots:
            return "waits for the workers"
        if self._most == 1:
            all_of_them = f"all of the {page.num_slots}"
            return f"waits for batches to be given back: the consumer has {all_of_them}, or can take them"
        least = page.least_place()
        slow = [
            other
            for other, member in others
            if page.place(member.column) == least or self.held_by(other) >= self._share
        ]
        return f"waits for {_named(slow)} to take batches, or to give batches back"


def _key_of(pass_: Pass) -> PassKey:
    return pass_.first_epoch, pass_.past


def _named(numbers: Sequence[int]) -> str:
    return ", ".join(f"consumer {number}" for number in numbers)
