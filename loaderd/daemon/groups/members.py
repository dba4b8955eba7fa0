"""Which consumer of a stream gets which batch: what all ways of sharing have in common, and a stream for one.

A consumer is a **member**, known by a number. Between the stream and its members stands one of

- :class:`PageReader`: there is one member, and it takes the batches of the page itself;
- ``mirrored_group.Mirrored``: every batch goes to every member.

All are pure state machines: events go in (a member joins, starts, gives slots back, leaves; time passes), and
``take`` returns what each member is to be told. Each member counts its own generations, and the state machine those
of the stream: what one member does must not make another one's batches void.

**Slots.** A slot that was handed to a member is lent to it until it gives the slot back or its connection has ended:
also if it starts elsewhere meanwhile, and if it is sent away. A slot that several members have is free when the last
of them has given it back (see ``feed.Feed``).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from loaderd.daemon.delivery.events import Omission, Outgoing
from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.groups.feed import Feed
from loaderd.options import MAX_EPOCHS, MAX_STEP
from loaderd.plan.passes import Pass
from loaderd.shm.page import MAX_GENERATION, POSITION

GRACE_S = 15.0
"""After a restart of the server, a group begins without the missing members if none comes for so many seconds."""

PassKey = tuple[int, tuple[tuple[int, ...], ...]]


class Handed(NamedTuple):
    """``item`` is for ``member``, and belongs to its own ``generation``."""

    member: int
    generation: int
    item: Outgoing | Omission


class Members(Protocol):
    """The consumers of a stream: see the module's docstring."""

    def join(self, member: int) -> None:
        """Add a member. The caller adds no more of them than the group may have."""

    def start(self, member: int, generation: int, pass_: Pass, step: int) -> None:
        """A member wants a pass from ``step`` on.

        Raises ValueError, or what planning the pass raises, where there is no such batch.
        """

    def reached(self, member: int, generation: int, step: int) -> None:
        """A member takes batch ``step`` of its ``generation`` next."""

    def release(self, member: int, slots: list[int]) -> None:
        """A member gives slots back. Raises ValueError for one that it does not have."""

    def leave(self, member: int) -> None:
        """A member gets nothing more. What it has stays lent to it: it may still read that."""

    def give_back_all(self, member: int) -> None:
        """A member that has left reads nothing any more: what it has goes back."""

    def tick(self, seconds: float) -> None:
        """So much time has passed."""

    def take(self) -> list[Handed]:
        """What the members are to be told now, in order; it is taken out of what the stream has for them."""

    def waiting(self) -> list[tuple[int, int]]:
        """(member, generation) of each member that was handed all batches so far, and gets the stream's next one."""

    def describe(self, member: int) -> str:
        """Whom a member waits for, in words."""

    def has_waiting(self, member: int) -> bool:
        """Whether there are batches that a member could take; others may be waiting for it to do so."""

    def held_by(self, member: int) -> int:
        """How many slots are lent to a member."""


def key_of(pass_: Pass) -> PassKey:
    """A key that sorts the passes of a stream as they follow each other."""
    return pass_.first_epoch, pass_.past


def require_place(stream: Stream | Feed, pass_: Pass, step: int) -> None:
    """Raise ValueError where a pass has no batch ``step``, or what planning the pass raises.

    It is called when a member asks: an error that the stream meets only later would be told to all members.
    """
    plan = stream.plan_pass(pass_)
    if step < 0 or (plan.num_steps is not None and step > plan.num_steps):
        raise ValueError(f"a pass of {plan.num_steps} batches cannot start at batch {step}")
    if (epoch := plan.place_of(step)[0]) > MAX_EPOCHS:
        raise ValueError(f"no pass comes to epoch {epoch}")


class PageReader:
    """A stream for one member that takes the batches of the page itself."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._member = 0

    def join(self, member: int) -> None:
        """See :class:`Members` for this and the other methods."""
        self._member = member

    def start(self, member: int, generation: int, pass_: Pass, step: int) -> None:
        if not self._stream.generation < generation <= MAX_GENERATION or step > MAX_STEP:
            raise ValueError(f"generation {generation} does not come after generation {self._stream.generation}")
        require_place(self._stream, pass_, step)
        self._stream.start(generation, pass_, step)

    def reached(self, member: int, generation: int, step: int) -> None:
        """The stream sees it in the page."""

    def release(self, member: int, slots: list[int]) -> None:
        raise ValueError("slots of this stream are given back in its page")

    def leave(self, member: int) -> None:
        self._stream.stop()

    def give_back_all(self, member: int) -> None:
        """Nothing to do: nobody else gets the slots."""

    def tick(self, seconds: float) -> None:
        """Nothing to do: nothing depends on time."""

    def take(self) -> list[Handed]:
        notes, self._stream.notes = self._stream.notes, deque()
        return [Handed(self._member, self._stream.generation, note) for note in notes]

    def waiting(self) -> list[tuple[int, int]]:
        return [(self._member, self._stream.generation)]

    def describe(self, member: int) -> str:
        page = self._stream.page
        if self._stream.plan is None:
            return "has asked for no batches"
        if any(page.is_free(slot) for slot in range(page.num_slots)):
            return "waits for the workers"
        return f"waits for batches to be given back: the consumer has all of the {page.num_slots}, or can take them"

    def has_waiting(self, member: int) -> bool:
        page = self._stream.page
        position = page.words[POSITION]
        return any(not page.is_free(slot) and page.key_in(slot) >= position for slot in range(page.num_slots))

    def held_by(self, member: int) -> int:
        page = self._stream.page
        return sum(not page.is_free(slot) for slot in range(page.num_slots))
