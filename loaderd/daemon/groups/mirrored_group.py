"""A stream whose members all get every batch, decoded once.

Each member has a **place**: the pass and the step that it gets next. The stream runs at the place of the hindmost
member that has asked for batches. Each batch goes to all members whose place it is, and its slot is free when all of
them have given it back. A member has at most its **share** of the slots: so the fastest is never more than that ahead
of the slowest, and a member that has come back and is behind finds slots, even if the others hold all that they may.

::

    waiting  ──all members have asked, or those who are here, after GRACE_S──►  running  ◄──┐ begins anew:
       ▲                                                                           │        │ a member is behind,
       └───── the pass is over, or nobody needs what comes next; ──────────────────┘────────┘ or all are ahead
              it goes on when the hindmost has asked

- A member that comes, or starts anew, behind the stream is handed the batches that others still have in their slots,
  if it lacks no more than these. Otherwise the stream begins again at the member's place, and the others get nothing
  until it has come to theirs.
- A member that has ended a pass stands behind its last batch; so the next pass begins when all have ended this one
  and have asked for it.
- Members say where they are, so a new server, which knows nothing, goes on there. If a member has had batches before,
  the server waits a while for the others: otherwise it would deliver twice what can go to all at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from loaderd.daemon.delivery.events import Delivery, FailedBatch, PassEnd, UnreadNotices, num_damages
from loaderd.daemon.groups.feed import Feed
from loaderd.daemon.groups.members import GRACE_S, Handed, PassKey, key_of, require_place
from loaderd.plan.passes import Pass

Place = tuple[PassKey, int]
"""(pass, step), in the order in which they come."""

_NOWHERE: Place = (-1, ()), 0
_START: Place = (0, ()), 0


@dataclass(eq=False)
class _Member:
    """``pass_``: the pass that it has asked for, and gets; None: it has asked for none."""

    generation: int = 0
    pass_: Pass | None = None
    place: Place = _NOWHERE
    said: UnreadNotices = field(default_factory=UnreadNotices)


class Mirrored:
    """See the module's docstring, and :class:`~loaderd.daemon.groups.members.Members`."""

    def __init__(self, stream: Feed, num_members: int) -> None:
        self._stream = stream
        self._num_members = num_members
        self._share = max(1, stream.num_slots // num_members)
        self._members: dict[int, _Member] = {}
        self._begun = False
        self._quiet_s = 0.0
        self._pass: Pass | None = None
        """The pass that the stream runs."""
        self._next = 0
        """The batch that comes next from the stream."""
        self._recent: deque[Delivery | FailedBatch] = deque()
        """The last batches before that, as far back as all of them are still in their slots."""
        self._handed: list[Handed] = []
        self._generations = count(1)

    # ------------------------------------------------------------------------------------------- events

    def join(self, member: int) -> None:
        self._members[member] = _Member()
        self._quiet_s = 0.0

    def start(self, member: int, generation: int, pass_: Pass, step: int) -> None:
        require_place(self._stream, pass_, step)
        one = self._members[member]
        one.generation, one.pass_, one.place = generation, pass_, (key_of(pass_), step)
        one.said.clear()
        self._quiet_s = 0.0
        self._hand_recent(member, one)
        self._settle()

    def reached(self, member: int, generation: int, step: int) -> None:
        if generation == self._members[member].generation:
            self._members[member].said.come_to(step)

    def release(self, member: int, slots: list[int]) -> None:
        for slot in slots:
            if self._stream.give_back(slot, member):
                self._forget_recent(slot)

    def leave(self, member: int) -> None:
        del self._members[member]
        self._handed = [handed for handed in self._handed if handed.member != member]
        self._begun = self._begun and bool(self._members)
        self._settle()

    def give_back_all(self, member: int) -> None:
        self.release(member, list(self._stream.slots_of(member)))

    def tick(self, seconds: float) -> None:
        self._quiet_s += seconds
        self._settle()

    def take(self) -> list[Handed]:
        while self._stream.outbox and (isinstance(self._stream.outbox[0], PassEnd) or not self._full_ones()):
            item = self._stream.outbox.popleft()
            if isinstance(item, PassEnd):
                self._end_pass()
            else:
                self._hand_to_all(item)
        handed, self._handed = self._handed, []
        return handed

    def waiting(self) -> list[tuple[int, int]]:
        return [] if self._stream.outbox else [(member, one.generation) for member, one in self._next_ones().items()]

    # -------------------------------------------------------------------------------- where the stream is

    def _settle(self) -> None:
        """Have the stream run at the place of the hindmost member that has asked."""
        asked = [one for one in self._members.values() if one.pass_ is not None]
        if not asked:
            self._halt()
            return
        first = min(asked, key=lambda one: one.place)
        assert first.pass_ is not None
        if self._pass is not None:
            here = key_of(self._pass), self._next
            if first.place == here:
                return
            if first.place < here or first.place[0] == here[0]:
                self._begin(first.pass_, first.place)
                return
            self._halt()
        if self._may_begin(first.place):
            self._begin(first.pass_, first.place)

    def _may_begin(self, place: Place) -> bool:
        """Whether to begin at ``place``: no member need be waited for that may have to get that batch, too."""
        places = [one.place for one in self._members.values() if one.pass_ is not None]
        if any(one.pass_ is None and one.place < place for one in self._members.values()):
            return False
        came_back = max(places) > _START and self._quiet_s >= GRACE_S
        return self._begun or came_back or len(self._members) == self._num_members

    def _begin(self, pass_: Pass, place: Place) -> None:
        self._begun = True
        self._pass = pass_
        self._next = place[1]
        self._recent.clear()
        self._stream.start(next(self._generations), pass_, self._next)

    def _halt(self) -> None:
        if self._pass is not None:
            self._pass = None
            self._recent.clear()
            self._stream.stop()

    # ------------------------------------------------------------------------------------------ batches

    def _next_ones(self) -> dict[int, _Member]:
        """The members that get what comes next from the stream."""
        here = None if self._pass is None else (key_of(self._pass), self._next)
        return {member: one for member, one in self._members.items() if one.pass_ is not None and one.place == here}

    def _full_ones(self) -> list[int]:
        """Those of them that must first give slots back, or read what they were told of damage."""
        return [member for member in self._next_ones() if self._is_full(member)]

    def _is_full(self, member: int) -> bool:
        return self.held_by(member) >= self._share or not self._members[member].said.has_room()

    def _hand_to_all(self, item: Delivery | FailedBatch) -> None:
        assert item.step == self._next
        for member, one in self._next_ones().items():
            self._hand(member, one, item)
        self._next += 1
        if self._recent or isinstance(item, Delivery):
            self._recent.append(item)

    def _hand(self, member: int, one: _Member, item: Delivery | FailedBatch) -> None:
        if (damages := num_damages(item)) is not None:
            one.said.add(item.step, damages)
        if isinstance(item, Delivery):
            self._stream.lend(item.slot, member)
        self._handed.append(Handed(member, one.generation, item))
        one.place = one.place[0], item.step + 1

    def _end_pass(self) -> None:
        """The stream has ended its pass, so every member in that pass has had the last batch."""
        assert self._pass is not None
        key = key_of(self._pass)
        for member, one in self._members.items():
            if one.pass_ is not None and one.place[0] == key:
                self._handed.append(Handed(member, one.generation, PassEnd()))
                one.pass_ = None
        self._halt()

    def _hand_recent(self, member: int, one: _Member) -> None:
        """Hand to ``one`` the batches that others still have, if it lacks no more than these.

        Not if it has one of their slots, from an older generation: it would not know which of the two it gives back.
        """
        if self._pass is None or one.place[0] != key_of(self._pass):
            return
        missed = [item for item in self._recent if item.step >= one.place[1]]
        if not missed or missed[0].step != one.place[1]:
            return
        own, slots = self._stream.slots_of(member), {slot for item in missed for slot in _slots(item)}
        if not own & slots and len(own) + len(slots) <= self._share:
            for item in missed:
                self._hand(member, one, item)

    def _forget_recent(self, slot: int) -> None:
        """A slot is free: its batch, and so all batches before that, cannot be handed to anybody any more."""
        last = max((at for at, item in enumerate(self._recent) if slot in _slots(item)), default=-1)
        for _ in range(last + 1):
            self._recent.popleft()
        while self._recent and not _slots(self._recent[0]):
            self._recent.popleft()

    # ------------------------------------------------------------------------------------------- report

    def describe(self, member: int) -> str:
        one = self._members[member]
        if one.pass_ is None:
            return "has asked for no batches"
        if self._pass is not None:
            if member in self._next_ones():
                full = self._full_ones()
                return f"waits for {_named(full)} to give batches back" if full else self._stream.describe()
            behind = [
                number
                for number, other in self._members.items()
                if other.pass_ is not None and other.place < one.place
            ]
            return f"waits for {_named(behind)} to come to where it is"
        if silent := [number for number, other in self._members.items() if other.pass_ is None]:
            return f"waits for {_named(silent)} to ask for batches"
        return f"waits for the rest of its group: {len(self._members)} of {self._num_members} consumers are here"

    def has_waiting(self, member: int) -> bool:
        return self._is_full(member)  # a member that is not full may be waiting for others

    def held_by(self, member: int) -> int:
        return len(self._stream.slots_of(member))


def _slots(item: Delivery | FailedBatch) -> list[int]:
    """The slot of a batch, if it has one."""
    return [item.slot] if isinstance(item, Delivery) else []


def _named(members: Sequence[int]) -> str:
    return ", ".join(f"consumer {member}" for member in members)
