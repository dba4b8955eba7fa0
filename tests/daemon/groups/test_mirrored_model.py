"""Members that all get every batch, in any order of events. ``group_model.py`` says what they are held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from loaderd.daemon.delivery.events import Delivery, FailedBatch, PassEnd
from loaderd.daemon.groups.members import Handed
from loaderd.daemon.groups.mirrored_group import Mirrored
from loaderd.plan.passes import Pass
from tests.daemon.group_model import LAST_EPOCH, MOST_TURNS, GroupModel, sizes, some, way
from tests.daemon.sharing_run import Workshop


@dataclass
class Mirror:
    """A member that counts what it gets. ``epoch``: what it asks for next; ``step``: None if it has not asked."""

    generation: int = 0
    epoch: int = 0
    step: int | None = None
    slots: list[int] = field(default_factory=list)
    passes: dict[int, Pass] = field(default_factory=dict)
    """By generation."""


class MirroredModel(GroupModel[Mirror]):
    """No member misses a batch, or gets one twice."""

    @initialize(size=sizes, num_members=st.integers(1, 3))
    def set_up(self, size, num_members: int) -> None:
        self.work = Workshop(**size)
        self.num_members = num_members
        self.group = Mirrored(self.work.feed, num_members)

    @precondition(lambda self: len(self.members) + len(self.sent_away) < self.num_members)
    @rule(epoch=st.integers(0, 1), step=st.just(0) | some, starts=st.booleans() | st.just(True))
    def join(self, epoch: int, step: int, starts: bool) -> None:
        number = next(self.numbers)
        self.group.join(number)
        self.members[number] = Mirror()
        if starts:
            self.start_at(number, epoch, step)

    @precondition(lambda self: self.members)
    @rule(which=some, epoch=st.integers(-1, 1), step=some)
    def start(self, which: int, epoch: int, step: int) -> None:
        """Anywhere: also where it was, in the middle of what is being said to it."""
        number, one = self.one(which)
        self.start_at(number, max(0, one.epoch + epoch), step)

    @precondition(lambda self: self.members)
    @rule(which=some, back=st.sampled_from([0, 0, 1, 2]), leaves=st.booleans())
    def go_back(self, which: int, back: int, leaves: bool) -> None:
        """To where it was, or to a little before that; as who seeks, or who has lost its connection."""
        number, one = self.one(which)
        step = max(0, (one.step or 0) - back)
        if leaves:
            self.leave(which)
            self.join(one.epoch, step, True)
        else:
            self.start_at(number, one.epoch, step)

    def start_at(self, number: int, epoch: int, step: int) -> None:
        one = self.members[number]
        one.generation += 1
        one.epoch, one.step = epoch, step % (self.work.num_steps + 1)
        one.passes[one.generation] = Pass(epoch, 1)
        self.group.start(number, one.generation, Pass(epoch, 1), one.step)

    def all_come(self) -> None:
        self.all_hang_up()
        while len(self.members) < self.num_members:
            self.join(0, 0, True)

    @precondition(lambda self: any(one.step is None for one in self.members.values()))
    @rule()
    def all_go_on(self) -> None:
        for number, one in self.members.items():
            if one.step is None:
                self.start_at(number, one.epoch, 0)

    @precondition(lambda self: self.members)
    @rule(which=some, hangs_up=st.booleans())
    def leave(self, which: int, hangs_up: bool = True) -> None:
        number, _ = self.one(which)
        self.go_away(number, hangs_up)

    @precondition(lambda self: any(one.slots for one in self.members.values()))
    @rule(which=some, most=st.integers(1, 5))
    def release(self, which: int, most: int) -> None:
        number, one = self.one(which)
        slots, one.slots = one.slots[:most], one.slots[most:]
        self.give_back(number, slots)
        self.group.release(number, slots)

    def give_back(self, number: int, slots: list[int]) -> None:
        for slot in slots:
            self.work.readers[slot].remove(number)

    @precondition(lambda self: self.members)
    @rule(way=way, turn=some)
    def go_on(self, way: list[int], turn: int) -> None:
        """Some give back what they have, and get more."""
        for number in way:
            self.do_work(2, turn)
            self.release(number, 2)

    @precondition(lambda self: 1 < self.num_members <= self.work.num_slots)
    @rule(way=way, which=some, back=some, leaves=st.booleans())
    def go_back_and_catch_up(self, way: list[int], which: int, back: int, leaves: bool) -> None:
        """The hindmost comes to where the next one is, while the others stand still with what they have."""
        self.all_come()
        self.all_go_on()
        self.go_on(way, 0)
        self.do_work(20, 0)
        self.all_go_on()
        self.go_back(which, back, leaves)
        number, one = min(self.members.items(), key=lambda item: (item[1].epoch, item[1].step))
        others = [(other.epoch, other.step) for other in self.members.values() if other is not one]
        for _ in range(MOST_TURNS):
            if one.step is None or any((one.epoch, one.step) >= place for place in others):
                return
            self.release(list(self.members).index(number), self.work.num_slots)
            self.do_work(1, 0)
        raise AssertionError("it does not get on")

    @rule(num_tasks=st.integers(1, 12), turn=some)
    def do_work_unheard(self, num_tasks: int, turn: int) -> None:
        self.work.work(num_tasks, turn)

    def hear(self, handed: Handed) -> None:
        one, item = self.members[handed.member], handed.item
        if isinstance(item, Delivery):
            one.slots.append(item.slot)
            self.work.lend(handed, one.passes[handed.generation])
        if handed.generation != one.generation:
            return
        assert one.step is not None, "nobody gets what it has not asked for"
        if isinstance(item, PassEnd):
            assert one.step == self.work.num_steps, "all of the pass has come"
            one.epoch, one.step = one.epoch + 1, None
        else:
            assert isinstance(item, (Delivery, FailedBatch))
            assert item.step == one.step, "no batch is missed, and none comes twice"
            assert isinstance(item, FailedBatch) == (item.step in self.work.broken)
            one.step += 1

    def teardown(self) -> None:
        if not hasattr(self, "work"):
            return
        self.all_come()
        for _ in range(MOST_TURNS):
            for number, one in list(self.members.items()):
                if one.epoch > LAST_EPOCH:
                    self.leave(list(self.members).index(number))
                elif one.step is None:
                    self.start_at(number, one.epoch, 0)
            if not self.members:
                break
            self.do_work(1, 0)
            for which in range(len(self.members)):
                self.release(which, self.work.num_slots)
        assert not self.members, "who takes what comes, comes to the end"
        self.work.everything_is_free()


MirroredModel.TestCase.settings = settings(stateful_step_count=40)
TestMirrored = MirroredModel.TestCase
