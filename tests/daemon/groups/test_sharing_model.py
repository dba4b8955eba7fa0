"""Groups of consumers in any order of events, held to what was promised to their users.

The model knows what users know: what they were given, what they have taken of it, what they still have. The members
come, start anew, leave and are slow as they like; a stream is behind them, whose workers are as slow as they like,
and that watches over its slots (``sharing_run.Workshop``). At the end of each example everybody gives back and takes
what comes, and then everybody must come to the end of some passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sharing_run import Workshop

from loaderd.daemon.delivery.outgoing import BrokenBatch, Delivery, PassEnd
from loaderd.daemon.groups.members import GRACE_S, Handed, Progressed
from loaderd.daemon.groups.mirrored_group import Mirrored
from loaderd.daemon.groups.shared_group import Shared
from loaderd.plan.passes import Pass

_LAST_EPOCH = 2
_MOST_TURNS = 2000

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


# ---------------------------------------------------------------------------------------------- mirrored


@dataclass
class Mirror:
    """A member that counts what it gets. ``epoch``: what it asks for next; ``step``: None if it has not asked."""

    generation: int = 0
    epoch: int = 0
    step: int | None = None
    slots: list[int] = field(default_factory=list)
    passes: dict[int, Pass] = field(default_factory=dict)
    """By generation."""


class MirroredMachine(RuleBasedStateMachine):
    """No member misses a batch, or gets one twice."""

    @initialize(size=sizes, num_members=st.integers(1, 3))
    def set_up(self, size, num_members: int) -> None:
        self.work = Workshop(**size)
        self.num_members = num_members
        self.group = Mirrored(self.work.feed, num_members)
        self.members: dict[int, Mirror] = {}
        self.numbers = count(1)

    def one(self, which: int) -> tuple[int, Mirror]:
        return list(self.members.items())[which % len(self.members)]

    @precondition(lambda self: len(self.members) < self.num_members)
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
        self.group.start(number, one.generation, Pass(epoch, 1), one.step, [])

    def all_come(self) -> None:
        while len(self.members) < self.num_members:
            self.join(0, 0, True)

    @precondition(lambda self: any(one.step is None for one in self.members.values()))
    @rule()
    def all_go_on(self) -> None:
        for number, one in self.members.items():
            if one.step is None:
                self.start_at(number, one.epoch, 0)

    @precondition(lambda self: self.members)
    @rule(which=some)
    def leave(self, which: int) -> None:
        number, one = self.one(which)
        self.give_back(number, one.slots)
        del self.members[number]
        self.group.leave(number)

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
        for _ in range(_MOST_TURNS):
            if one.step is None or any((one.epoch, one.step) >= place for place in others):
                return
            self.release(list(self.members).index(number), self.work.num_slots)
            self.do_work(1, 0)
        raise AssertionError("it does not get on")

    @rule(num_tasks=st.integers(1, 12), turn=some)
    def do_work(self, num_tasks: int, turn: int) -> None:
        for _ in range(num_tasks):
            self.work.work(1, turn)
            self.listen()

    @rule(num_tasks=st.integers(1, 12), turn=some)
    def do_work_unheard(self, num_tasks: int, turn: int) -> None:
        self.work.work(num_tasks, turn)

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
            assert isinstance(item, (Delivery, BrokenBatch))
            assert item.step == one.step, "no batch is missed, and none comes twice"
            assert isinstance(item, BrokenBatch) == (item.step in self.work.broken)
            one.step += 1

    def teardown(self) -> None:
        if not hasattr(self, "work"):
            return
        self.all_come()
        for _ in range(_MOST_TURNS):
            for number, one in list(self.members.items()):
                if one.epoch > _LAST_EPOCH:
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


# ------------------------------------------------------------------------------------------------ shared


@dataclass
class Sharer:
    """A member that takes one batch after the other, and remembers what it must.

    It has ``asked`` for a pass, and stands in the one of ``epoch``, whose batches before ``low`` are used up; of
    those behind, it has ``had`` some. Of the batches of this generation, by step: those that lie in its ``queue``,
    and those that its user has ``in_use``; of the latter, it has ``said`` some. ``stale`` slots are of older
    generations.
    """

    generation: int = 0
    asked: bool = False
    joined: bool = False
    waiting: bool = False
    epoch: int = 0
    low: int = 0
    had: set[int] = field(default_factory=set)
    queue: dict[int, int] = field(default_factory=dict)
    in_use: dict[int, int] = field(default_factory=dict)
    said: set[int] = field(default_factory=set)
    stale: list[int] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        return [*self.stale, *self.in_use.values(), *self.queue.values()]


@dataclass
class Epoch:
    """What is known of the batches of an epoch. Steps that have a holder must not come again."""

    holders: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    """Somebody has had them, and has not died with them."""
    returned: dict[int, int] = field(default_factory=dict)
    """Slots of what must come again, before all else."""
    over: bool = False


class SharedMachine(RuleBasedStateMachine):
    """Each batch is had by one; by another only if that one is gone; and all of a pass are had before it ends."""

    @initialize(size=sizes, num_members=st.integers(1, 3))
    def set_up(self, size, num_members: int) -> None:
        self.size = size
        self.num_members = num_members
        self.members: dict[int, Sharer] = {}
        self.numbers = count(1)
        self.epochs: dict[int, Epoch] = {}
        self.serve()

    def serve(self) -> None:
        if hasattr(self, "work"):
            self.work.close()
        self.work = Workshop(**self.size)
        self.group = Shared(self.work.feed, self.num_members)

    def one(self, which: int) -> tuple[int, Sharer]:
        return list(self.members.items())[which % len(self.members)]

    def epoch_of(self, one: Sharer) -> Epoch:
        return self.epochs.setdefault(one.epoch, Epoch())

    # ------------------------------------------------------------------------------------------ members

    @precondition(lambda self: len(self.members) < self.num_members)
    @rule(starts=st.booleans() | st.just(True))
    def join(self, starts: bool) -> None:
        number = next(self.numbers)
        self.members[number] = Sharer()
        self.group.join(number)
        if starts:
            self.start_as_it_is(number)

    def start_as_it_is(self, number: int) -> None:
        one = self.members[number]
        one.generation += 1
        one.asked, one.joined, one.waiting = True, False, False
        taken = sorted(step for step in one.had if step >= one.low)
        self.group.start(number, one.generation, Pass(one.epoch, 1), one.low, taken)

    @precondition(lambda self: self.members)
    @rule(which=some)
    def start(self, which: int) -> None:
        """Anew, or in the middle: what it has not taken is another's."""
        number, one = self.one(which)
        epoch = self.epoch_of(one)
        for step, slot in one.queue.items():
            self.can_come_again(one, step, slot)
        one.said |= set(one.in_use)
        for step in one.had:
            epoch.returned.pop(step, None)
        one.queue = {}
        self.start_as_it_is(number)

    @precondition(lambda self: any(one.joined for one in self.members.values()))
    @rule(which=some)
    def start_without_memory(self, which: int) -> None:
        """As a client that says nothing of what it has: what its user has may come again."""
        joined = [item for item in self.members.items() if item[1].joined]
        number, one = joined[which % len(joined)]
        for step, slot in one.queue.items():
            self.can_come_again(one, step, slot)
        for step, slot in one.in_use.items():
            if step not in one.said:
                self.can_come_again(one, step, slot)
        one.stale += one.in_use.values()
        one.queue, one.in_use, one.had, one.said, one.epoch, one.low = {}, {}, set(), set(), 0, 0
        self.start_as_it_is(number)

    def can_come_again(self, one: Sharer, step: int, slot: int) -> None:
        """``one`` does not have it any more."""
        epoch = self.epoch_of(one)
        if not epoch.over:
            del epoch.holders[step]
            epoch.settled.discard(step)
            epoch.returned[step] = slot
        if step in one.queue:
            one.stale.append(slot)

    @precondition(lambda self: self.members)
    @rule(which=some)
    def leave(self, which: int) -> None:
        """Or die."""
        number, one = self.one(which)
        for step, slot in {**one.in_use, **one.queue}.items():
            if step not in one.said:
                self.can_come_again(one, step, slot)
        one.stale = []
        for slot in one.slots:
            self.work.readers[slot].remove(number)
        for slot, readers in self.work.readers.items():
            self.work.readers[slot] = [reader for reader in readers if reader != number]
        has_begun = any(other.joined for other in self.members.values())
        del self.members[number]
        self.group.leave(number)
        if not self.members:
            self.epochs = {}
        if not has_begun:  # the server was killed, and has not asked yet: nobody knows what this one has had
            self.forget()

    @precondition(lambda self: any(one.asked and not one.waiting for one in self.members.values()))
    @rule(which=some)
    def want(self, which: int) -> None:
        """Takes what has come, or waits for more."""
        able = [item for item in self.members.items() if item[1].asked and not item[1].waiting]
        number, one = able[which % len(able)]
        if one.queue:
            (step,) = one.queue
            one.in_use[step] = one.queue.pop(step)
            one.had.add(step)
            self.epoch_of(one).settled.add(step)
        else:
            one.waiting = True
            self.group.want(number, 1)

    @precondition(lambda self: any(one.in_use or one.stale for one in self.members.values()))
    @rule(which=some, most=st.integers(1, 3))
    def release(self, which: int, most: int) -> None:
        having = [item for item in self.members.items() if item[1].in_use or item[1].stale]
        number, one = having[which % len(having)]
        slots = [*one.stale, *one.in_use.values()][:most]
        for slot in slots:
            self.work.readers[slot].remove(number)
        one.stale = [slot for slot in one.stale if slot not in slots]
        one.in_use = {step: slot for step, slot in one.in_use.items() if slot not in slots}
        self.group.release(number, slots)

    @precondition(lambda self: self.members)
    @rule(way=way, turn=some)
    def take_turns(self, way: list[int], turn: int) -> None:
        """Members ask, get, and keep a batch or two."""
        for number in way:
            if any(one.asked and not one.waiting for one in self.members.values()):
                self.want(number)
            self.do_work(3, turn)
            if len(self.one(number)[1].in_use) > 1:
                self.release(number, 1)

    @rule(way=way, surviving=st.integers(0, 7) | st.just(7), order=st.permutations(range(3)))
    def kill_the_server(self, way: list[int], surviving: int, order: list[int]) -> None:
        """And maybe members with it. The others come back, and say what they know."""
        if self.members:
            self.take_turns(way, 0)
        for position in reversed(range(len(self.members))):
            if not surviving >> position & 1:
                self.leave(position)
        survivors = list(self.members.items())
        self.members = {number: one for _, (number, one) in sorted(zip(order, survivors, strict=False))}
        self.forget()
        self.serve()
        for number, one in self.members.items():
            one.stale, one.queue, one.in_use, one.said = [], {}, {}, set()
            self.group.join(number)
            if one.generation:
                self.start_as_it_is(number)

    def forget(self) -> None:
        """What nobody knows who lives."""
        for number, epoch in self.epochs.items():
            known = {step for one in self.members.values() if one.epoch == number for step in one.had}
            queued = {step for one in self.members.values() if one.epoch == number for step in one.queue}
            epoch.holders = {step: holder for step, holder in epoch.holders.items() if step in known - queued}
            epoch.returned = {}
            epoch.over = False

    # --------------------------------------------------------------------------------------- the server

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
        one, item = self.members[handed.member], handed.item
        if handed.generation != one.generation:
            assert isinstance(item, Progressed)
        elif isinstance(item, Progressed):
            self.go_on(one, item)
        elif isinstance(item, PassEnd):
            self.end_pass(one)
        else:
            self.receive(handed, one, item)

    def go_on(self, one: Sharer, item: Progressed) -> None:
        assert one.asked
        if item.pass_.first_epoch != one.epoch:
            assert not one.joined, "a pass ends before another begins"
            one.stale += one.in_use.values()
            one.epoch, one.had, one.in_use, one.said = item.pass_.first_epoch, set(), {}, set()
        else:
            assert item.step >= one.low
            one.had = {step for step in one.had if step >= item.step}
        one.low, one.joined = item.step, True

    def receive(self, handed: Handed, one: Sharer, item: Delivery | BrokenBatch) -> None:
        epoch, step = self.epoch_of(one), item.step
        assert one.joined and one.waiting, "nobody gets what it has not asked for"
        assert step >= one.low and step not in epoch.holders, "nobody has had it who lives"
        assert isinstance(item, BrokenBatch) == (step in self.work.broken)
        one.waiting = False
        epoch.holders[step] = handed.member
        if isinstance(item, BrokenBatch):
            one.had.add(step)
            epoch.settled.add(step)
            return
        first = {other: slot for other, slot in epoch.returned.items() if other < step}
        assert set(first.values()) <= set(one.slots), "what has come back goes first"
        assert epoch.returned.pop(step, item.slot) == item.slot, "it is not made again"
        one.queue[step] = item.slot
        self.work.lend(handed, Pass(one.epoch, 1))

    def end_pass(self, one: Sharer) -> None:
        assert one.joined and one.waiting
        epoch = self.epoch_of(one)
        if not epoch.over:
            assert epoch.settled == set(range(self.work.num_steps)), "all of the pass has been had"
            epoch.over = True
        one.stale += one.in_use.values()
        one.asked = one.joined = one.waiting = False
        one.in_use, one.had, one.said = {}, set(), set()
        one.epoch, one.low = one.epoch + 1, 0

    # ------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "work"):
            return
        self.tick(GRACE_S)
        for _ in range(_MOST_TURNS):
            for number, one in list(self.members.items()):
                if one.epoch > _LAST_EPOCH:
                    self.leave(list(self.members).index(number))
                elif not one.asked:
                    self.start_as_it_is(number)
                elif not one.waiting:
                    self.want(list(self.members).index(number))
            if not self.members:
                break
            while any(one.in_use or one.stale for one in self.members.values()):
                self.release(0, 3)
            self.tick(GRACE_S)
            self.do_work(1, 0)
        assert not self.members, "who takes what comes, comes to the end"
        self.work.everything_is_free()


MirroredMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
SharedMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestMirrored = MirroredMachine.TestCase
TestShared = SharedMachine.TestCase
