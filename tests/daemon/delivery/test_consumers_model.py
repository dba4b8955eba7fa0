"""Members that all get every batch, in any order of events, held to what was promised to their users.

They come, start anew, leave and are slow as they like; workers are as slow as they like. At the end of each example
everybody takes what comes and gives it back, and then everybody must come to the end of some passes.
"""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from loaderd.daemon.delivery.consumers import GRACE_S
from tests.daemon.group_run import Group, Member

LAST_EPOCH = 2
MOST_TURNS = 2000

some = st.integers(0, 5)
"""One of those that there are, by its place among them."""
way = st.lists(some, min_size=1, max_size=9)
"""Some way on: who gets on, one after the other."""


class MembersModel(RuleBasedStateMachine):
    """No member misses a batch, or gets one twice, and nobody writes where one reads: see ``group_run``."""

    group: Group

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.sent_away: list[Member] = []
        """Members that have left, and read what they have until they hang up."""

    @initialize(
        num_members=st.integers(1, 3),
        num_steps=st.integers(1, 8),
        more_slots=st.integers(0, 6),
        broken=st.sets(st.integers(0, 7), max_size=3),
    )
    def set_up(self, num_members: int, num_steps: int, more_slots: int, broken: set[int]) -> None:
        num_slots = 2 * num_members + more_slots
        self.group = Group(num_members, num_slots=num_slots, num_steps=num_steps, broken=broken)
        self.most_held = num_slots // num_members

    @property
    def members(self) -> list[Member]:
        return list(self.group.members.values())

    def one(self, which: int) -> Member:
        return self.members[which % len(self.members)]

    def start_at(self, one: Member, epoch: int, step: int) -> None:
        one.start(step % self.group.num_steps, epoch)

    # ------------------------------------------------------------------------------------- who is there

    @precondition(lambda self: len(self.members) + len(self.sent_away) < self.group.num_members)
    @rule(epoch=st.integers(0, 1), step=st.just(0) | some, starts=st.booleans() | st.just(True))
    def join(self, epoch: int, step: int, starts: bool) -> None:
        one = self.group.join(next(self.numbers))
        if starts:
            self.start_at(one, epoch, step)

    @precondition(lambda self: self.members)
    @rule(which=some, epoch=st.integers(-1, 1), step=some)
    def start(self, which: int, epoch: int, step: int) -> None:
        """Anywhere: also where it was, in the middle of what is being said to it."""
        one = self.one(which)
        self.start_at(one, max(0, one.epoch + epoch), step)

    @precondition(lambda self: self.members)
    @rule(which=some, back=st.sampled_from([0, 0, 1, 2]), leaves=st.booleans())
    def go_back(self, which: int, back: int, leaves: bool) -> None:
        """To where it was, or to a little before that; as who seeks, or who has lost its connection."""
        one = self.one(which)
        step = max(0, (one.step or 0) - back)
        if leaves:
            self.leave(which)
            self.join(one.epoch, step, True)
        else:
            self.start_at(one, one.epoch, step)

    @precondition(lambda self: self.members)
    @rule(which=some, hangs_up=st.booleans())
    def leave(self, which: int, hangs_up: bool = True) -> None:
        one = self.group.leave(self.one(which).number, hangs_up)
        if not hangs_up:
            self.sent_away.append(one)

    @precondition(lambda self: self.sent_away)
    @rule(which=some)
    def hang_up(self, which: int) -> None:
        self.group.hang_up(self.sent_away.pop(which % len(self.sent_away)))

    def all_come(self) -> None:
        while self.sent_away:
            self.hang_up(0)
        while len(self.members) < self.group.num_members:
            self.join(0, 0, True)

    # ------------------------------------------------------------------------------------ what they do

    @precondition(lambda self: self.members)
    @rule(which=some, most=st.integers(1, 5))
    def take(self, which: int, most: int) -> None:
        one = self.one(which)
        while most and len(one.kept) < self.most_held and one.take():
            most -= 1

    @precondition(lambda self: any(one.kept for one in self.members))
    @rule(which=some, most=st.integers(1, 5))
    def release(self, which: int, most: int) -> None:
        self.one(which).release(most)

    @precondition(lambda self: self.members)
    @rule(which=some, sleeps=st.booleans())
    def sleep(self, which: int, sleeps: bool) -> None:
        consumer = self.one(which).page_consumer
        if not sleeps or not consumer.fall_asleep():
            consumer.wake_up()

    @precondition(lambda self: self.members)
    @rule(way=way, turn=some)
    def go_on(self, way: list[int], turn: int) -> None:
        """Some give back what they have, and get more."""
        for which in way:
            self.group.work(2, turn)
            self.release(which, 2)
            self.take(which, 2)

    @rule(num_jobs=st.integers(1, 12), turn=some)
    def work(self, num_jobs: int, turn: int) -> None:
        self.group.work(num_jobs, turn)

    @rule(seconds=st.sampled_from([1.0, GRACE_S]))
    def tick(self, seconds: float) -> None:
        self.group.consumers.tick(seconds)

    @rule()
    def listen(self) -> None:
        self.group.listen()
        for one in [*self.members, *self.sent_away]:
            one.check()
        for one in self.members:
            assert self.group.consumers.describe(one.number)
            assert not self.group.consumers.holds_too_many(one.number)

    # ------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        self.all_come()
        for _ in range(MOST_TURNS):
            for which, one in enumerate(self.members):
                if one.epoch > LAST_EPOCH:
                    self.leave(which)
                    break
                if one.step is None:
                    self.start_at(one, one.epoch, 0)
            if not self.members:
                break
            self.group.work(1)
            for one in self.members:
                one.release()
                one.take()
        assert not self.members, "who takes what comes, comes to the end"
        self.group.everything_is_free()
        self.group.close()


MembersModel.TestCase.settings = settings(stateful_step_count=40)
TestMembers = MembersModel.TestCase
