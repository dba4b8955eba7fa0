"""Groups of consumers in any order of events, held to what was promised to their users.

A model knows what users know: what they were given, what they have taken of it, what they still have. The members
come, start anew, leave and are slow as they like; a stream is behind them, whose workers are as slow as they like,
and that watches over its slots (``sharing_run.Workshop``). At the end of each example everybody gives back and takes
what comes, and then everybody must come to the end of some passes.
"""

from __future__ import annotations

from itertools import count
from typing import Generic, Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from loaderd.daemon.groups.members import GRACE_S, Handed, Members
from tests.daemon.sharing_run import Workshop

LAST_EPOCH = 2
MOST_TURNS = 2000

sizes = st.fixed_dictionaries(
    {
        "num_steps": st.integers(1, 8),
        "num_slots": st.integers(1, 9),
        "broken": st.sets(st.integers(0, 7), max_size=3),
    }
)
some = st.integers(0, 5)
"""One of those that there are, by its place among them."""
way = st.lists(some, min_size=1, max_size=9)
"""Some way on: who gets on, one after the other."""


class Member(Protocol):
    """What a model knows of a member."""

    @property
    def slots(self) -> list[int]:
        """Those that are lent to it."""


AnyMember = TypeVar("AnyMember", bound=Member)


class GroupModel(RuleBasedStateMachine, Generic[AnyMember]):
    """What is the same however the members share the batches."""

    work: Workshop
    group: Members

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[int, AnyMember] = {}
        self.sent_away: list[int] = []
        """Members that have left, and read what they have until they hang up."""
        self.numbers = count(1)

    def one(self, which: int) -> tuple[int, AnyMember]:
        return list(self.members.items())[which % len(self.members)]

    def go_away(self, number: int, hangs_up: bool) -> None:
        """A member is gone, or sent away, which it hears of when it asks for more."""
        del self.members[number]
        self.group.leave(number)
        self.sent_away.append(number)
        if hangs_up:
            self.hang_up(-1)

    @precondition(lambda self: self.sent_away)
    @rule(which=some)
    def hang_up(self, which: int) -> None:
        number = self.sent_away.pop(which % len(self.sent_away))
        for slot, readers in self.work.readers.items():
            self.work.readers[slot] = [reader for reader in readers if reader != number]
        self.group.give_back_all(number)
        assert self.group.held_by(number) == 0

    def all_hang_up(self) -> None:
        while self.sent_away:
            self.hang_up(0)

    @rule(num_tasks=st.integers(1, 12), turn=some)
    def do_work(self, num_tasks: int, turn: int) -> None:
        for _ in range(num_tasks):
            self.work.work(1, turn)
            self.listen()

    @rule(seconds=st.sampled_from([1.0, GRACE_S]))
    def tick(self, seconds: float) -> None:
        self.group.tick(seconds)

    @rule()
    def listen(self) -> None:
        for handed in self.work.hand_over(self.group):
            self.hear(handed)
        for number, one in self.members.items():
            assert self.group.held_by(number) == len(one.slots)
            assert self.group.describe(number)

    def hear(self, handed: Handed) -> None:
        """What a member is told."""
        raise NotImplementedError
