"""A stream whose members get each batch once: whoever has asked gets the next one.

::

    batch    ready ──handed to one who has asked──► in flight ──its slot given back──► used up
               ▲                                        │
               └───── its member left, or started anew ─┘

- Batches that come back are handed out again before all others, in the slots where they lie. So a batch that was in
  flight at a member that died comes at least once, and all others come exactly once. A broken batch is used up when a
  member is told of it.
- **The low mark**: all batches before it are used up. Members are told when it moves, and remember which batches they
  have had behind it. A server that is started again knows nothing, but its members together know it all: the stream
  goes on at the highest low mark, without the batches that any of them has had. So the group waits a while for
  members that are not back yet. If a member that knows nothing comes first, the group begins anew, and goes to where
  the others were as soon as one of them is back.
- **The end of a pass**: nothing is ready, and every batch in flight is held by a member that has asked for more. So
  members must not ask for more before they have used what they have: it could be lost with them. (The group cannot
  wait until slots are given back: a member that waits for a batch may hold on to its last one for ever.)
- The pass is the group's: a member that comes joins it where it is. When it is over, the first member that asks for a
  later pass begins that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from loaderd.daemon.delivery.outgoing import BrokenBatch, Delivery, PassEnd
from loaderd.daemon.groups.feed import Feed
from loaderd.daemon.groups.members import (
    GRACE_S,
    Handed,
    PassKey,
    Progressed,
    key_of,
    require_place,
)
from loaderd.plan.passes import Pass

_QUEUE = None
"""The holder of the slots of batches that are ready (see ``Feed``)."""


@dataclass(frozen=True)
class _Arrival:
    """What a member says when it starts: as in ``Members.start``."""

    pass_: Pass
    step: int
    taken: frozenset[int]

    @property
    def place(self) -> tuple[PassKey, int]:
        return key_of(self.pass_), self.step

    @property
    def has_past(self) -> bool:
        return self.place > ((0, ()), 0) or bool(self.taken)


@dataclass(eq=False)
class _Member:
    """``in_pass``: which of the group's passes it is in, counted from 1; 0: none."""

    generation: int = 0
    arrival: _Arrival | None = None
    """Until the group has begun."""
    in_pass: int = 0
    wants: int = 0
    told: int = 0
    """The low mark that it was told last."""


@dataclass
class _Pass:
    """The pass that a group is at: number ``number`` of its passes."""

    pass_: Pass
    number: int
    low: int
    """All batches before this one are used up."""
    used: set[int]
    """So are these batches behind it."""
    next: int = 0
    """The batch that comes next from the stream."""
    ready: deque[Delivery | BrokenBatch] = field(default_factory=deque)
    in_flight: dict[int, tuple[int, Delivery]] = field(default_factory=dict)
    """By slot: the member that has the batch, and the batch."""
    drained: bool = False
    """Whether all batches of the pass have come from the stream."""
    over: bool = False

    def __post_init__(self) -> None:
        self.use_all(self.low, self.used)

    def use(self, step: int) -> None:
        if step >= self.low:
            self.used.add(step)
            self._move_low()

    def use_all(self, low: int, steps: Iterable[int]) -> None:
        """All batches before ``low`` are used up, and those in ``steps``."""
        self.low = max(self.low, low)
        self.used = {step for step in self.used.union(steps) if step >= self.low}
        self._move_low()

    def _move_low(self) -> None:
        while self.low in self.used:
            self.used.remove(self.low)
            self.low += 1

    def is_used(self, step: int) -> bool:
        return step < self.low or step in self.used


class Shared:
    """See the module's docstring, and :class:`~loaderd.daemon.groups.members.Members`."""

    def __init__(self, stream: Feed, num_members: int) -> None:
        self._stream = stream
        self._num_members = num_members
        self._members: dict[int, _Member] = {}
        self._turns: deque[int] = deque()
        """The members that want batches, in the order in which they get one."""
        self._at: _Pass | None = None
        self._knows_past = False
        """Whether any member that came knew of a batch that is used up; if not, the group may have been further."""
        self._quiet_s = 0.0
        self._handed: list[Handed] = []
        self._generations = count(1)

    # ------------------------------------------------------------------------------------------- events

    def join(self, member: int) -> None:
        self._members[member] = _Member()
        self._quiet_s = 0.0

    def start(self, member: int, generation: int, pass_: Pass, step: int, taken: Sequence[int]) -> None:
        require_place(self._stream, pass_, step)
        arrival = _Arrival(pass_, step, frozenset(taken))
        one = self._members[member]
        is_back = one.generation == 0 and not self._knows_past
        one.generation, one.arrival, one.in_pass, one.wants = generation, arrival, 0, 0
        if member in self._turns:
            self._turns.remove(member)
        self._quiet_s = 0.0
        at = self._at
        if at is None:
            self._begin_group()
            return
        if arrival.place[0] > key_of(at.pass_) and (at.over or is_back):
            self._free_queue()
            self._begin(arrival, arrival.taken)
        elif arrival.place[0] == key_of(at.pass_):
            self._learn(at, arrival)
        self._return(member)
        self._admit(member, one)

    def want(self, member: int, count: int) -> None:
        one = self._members[member]
        one.wants += count
        if one.wants > 0 and member not in self._turns:
            self._turns.append(member)

    def reached(self, member: int, generation: int, step: int) -> None:
        """Nothing to do: a member gets only what it has asked for."""

    def release(self, member: int, slots: list[int]) -> None:
        for slot in slots:
            self._stream.give_back(slot, member)
            if self._at is not None and slot in self._at.in_flight and self._at.in_flight[slot][0] == member:
                self._at.use(self._at.in_flight.pop(slot)[1].step)

    def leave(self, member: int) -> None:
        self._return(member)
        del self._members[member]
        if member in self._turns:
            self._turns.remove(member)
        self._handed = [handed for handed in self._handed if handed.member != member]
        if not self._members:
            self._end_group()

    def give_back_all(self, member: int) -> None:
        for slot in self._stream.slots_of(member):
            self._stream.give_back(slot, member)

    def tick(self, seconds: float) -> None:
        self._quiet_s += seconds
        self._begin_group()

    def take(self) -> list[Handed]:
        if self._at is not None:
            self._drain(self._at)
            self._hand_out(self._at)
            self._end_if_over(self._at)
        handed, self._handed = self._handed, []
        return handed

    def waiting(self) -> list[tuple[int, int]]:
        at = self._at
        if at is None or at.ready:
            return []
        waiting = [(member, self._members[member]) for member in self._turns]
        return [(member, one.generation) for member, one in waiting if one.in_pass == at.number]

    # ------------------------------------------------------------------------------------------- passes

    def _begin_group(self) -> None:
        """Begin where the members are that have come, unless others that may know more must be waited for."""
        came = {member: one.arrival for member, one in self._members.items() if one.arrival is not None}
        if self._at is not None or not came:
            return
        waits = any(arrival.has_past for arrival in came.values()) and self._quiet_s < GRACE_S
        if waits and len(came) < self._num_members:
            return
        last = max(came.values(), key=lambda arrival: arrival.place)
        same = [arrival.taken for arrival in came.values() if arrival.place[0] == last.place[0]]
        self._begin(last, frozenset().union(*same))
        for member in came:
            self._admit(member, self._members[member])

    def _begin(self, arrival: _Arrival, used: frozenset[int]) -> None:
        number = 1 if self._at is None else self._at.number + 1
        self._at = _Pass(arrival.pass_, number, arrival.step, set(used))
        self._knows_past |= arrival.has_past
        self._start_stream(self._at)

    def _start_stream(self, at: _Pass) -> None:
        at.next = at.low
        self._stream.start(next(self._generations), at.pass_, at.low)

    def _learn(self, at: _Pass, arrival: _Arrival) -> None:
        """Hear from a member that starts which batches are used up."""
        self._knows_past |= arrival.has_past
        at.use_all(arrival.step, arrival.taken)
        for item in [item for item in at.ready if at.is_used(item.step)]:
            at.ready.remove(item)
            self._keep(item, False)
        if at.next < at.low and not at.drained:
            self._start_stream(at)

    def _admit(self, member: int, one: _Member) -> None:
        """Let a member into the pass that the group is at."""
        assert self._at is not None
        one.arrival, one.in_pass, one.told = None, self._at.number, self._at.low
        self._handed.append(Handed(member, one.generation, Progressed(self._at.pass_, self._at.low)))

    def _end_if_over(self, at: _Pass) -> None:
        if at.drained and not at.ready and all(self._members[one].wants > 0 for one, _ in at.in_flight.values()):
            at.over = True
            for _, batch in at.in_flight.values():
                at.use(batch.step)
        for member in list(self._turns):
            one = self._members[member]
            if one.in_pass and (at.over or one.in_pass < at.number):
                self._handed.append(Handed(member, one.generation, PassEnd()))
                one.in_pass = one.wants = 0
                self._turns.remove(member)

    def _end_group(self) -> None:
        self._stream.stop()
        self._free_queue()
        self._at, self._knows_past = None, False

    def _free_queue(self) -> None:
        """The pass ends for all: free the slots of its batches that are ready, which nobody gets any more."""
        for slot in self._stream.slots_of(_QUEUE):
            self._stream.give_back(slot, _QUEUE)

    # ------------------------------------------------------------------------------------------ batches

    def _keep(self, item: Delivery | BrokenBatch, kept: bool) -> None:
        """Have the queue hold the slot of a batch, or, unless ``kept``, hold it no longer."""
        if isinstance(item, Delivery) and kept:
            self._stream.lend(item.slot, _QUEUE)
        elif isinstance(item, Delivery):
            self._stream.give_back(item.slot, _QUEUE)

    def _drain(self, at: _Pass) -> None:
        """Take what has come from the stream, but for what is used up, until as many are ready as there are slots."""
        while self._stream.outbox and len(at.ready) < self._stream.num_slots:
            item = self._stream.outbox.popleft()
            if isinstance(item, PassEnd):
                at.drained = True
                continue
            at.next = item.step + 1
            self._keep(item, True)
            if at.is_used(item.step):
                self._keep(item, False)
            else:
                at.ready.append(item)

    def _hand_out(self, at: _Pass) -> None:
        while (found := self._next_pair(at)) is not None:
            member, item = found
            one = self._members[member]
            at.ready.remove(item)
            self._turns.remove(member)
            one.wants -= 1
            if one.wants > 0:
                self._turns.append(member)
            if one.told < at.low:
                self._handed.append(Handed(member, one.generation, Progressed(at.pass_, at.low)))
                one.told = at.low
            self._handed.append(Handed(member, one.generation, item))
            if isinstance(item, Delivery):
                self._stream.lend(item.slot, member)
                at.in_flight[item.slot] = member, item
            else:
                at.use(item.step)
            self._keep(item, False)

    def _next_pair(self, at: _Pass) -> tuple[int, Delivery | BrokenBatch] | None:
        """The member that gets a batch next, and its batch: the first that is ready.

        No member gets a batch in a slot that it has already, from an older generation: it would not know which of
        the two it gives back.
        """
        for member in self._turns:
            if self._members[member].in_pass == at.number:
                own = self._stream.slots_of(member)
                for item in at.ready:
                    if isinstance(item, BrokenBatch) or item.slot not in own:
                        return member, item
        return None

    def _return(self, member: int) -> None:
        """Make batches in flight at ``member`` ready again, in order, unless they are used up."""
        at = self._at
        if at is None:
            return
        for slot in [slot for slot, (one, _) in at.in_flight.items() if one == member]:
            _, batch = at.in_flight.pop(slot)
            if not at.is_used(batch.step):
                self._keep(batch, True)
                at.ready.append(batch)
        at.ready = deque(sorted(at.ready, key=lambda item: item.step))

    # ------------------------------------------------------------------------------------------- report

    def describe(self, member: int) -> str:
        one, at = self._members[member], self._at
        if one.arrival is not None:
            return f"waits for the rest of its group: {len(self._members)} of {self._num_members} consumers are here"
        if at is None or not one.in_pass:
            return "has asked for no pass"
        if one.wants <= 0:
            return "has what it has asked for"
        if at.drained and not at.ready:
            users = sorted(
                {f"consumer {user}" for user, _ in at.in_flight.values() if self._members[user].wants <= 0}
            )
            return f"waits for {', '.join(users)} to use the last batches of the pass"
        return self._stream.describe()

    def has_waiting(self, member: int) -> bool:
        one, at = self._members[member], self._at
        if at is None or one.in_pass != at.number:  # the pass is over for it: nobody waits for what it holds
            return False
        return one.wants <= 0 and bool(self.held_by(member))

    def held_by(self, member: int) -> int:
        return len(self._stream.slots_of(member))
