"""Members that share the batches, in any order of events. ``group_model.py`` says what they are held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from group_model import LAST_EPOCH, MOST_TURNS, GroupModel, sizes, some, way
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from sharing_run import Workshop

from loaderd.daemon.delivery.outgoing import BrokenBatch, Delivery, PassEnd
from loaderd.daemon.groups.members import GRACE_S, Handed, Progressed
from loaderd.daemon.groups.shared_group import Shared
from loaderd.plan.passes import Pass


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


class SharedModel(GroupModel[Sharer]):
    """Each batch is had by one; by another only if that one is gone; and all of a pass are had before it ends."""

    @initialize(size=sizes, num_members=st.integers(1, 3))
    def set_up(self, size, num_members: int) -> None:
        self.size = size
        self.num_members = num_members
        self.epochs: dict[int, Epoch] = {}
        self.serve()

    def serve(self) -> None:
        self.sent_away = []
        if hasattr(self, "work"):
            self.work.close()
        self.work = Workshop(**self.size)
        self.group = Shared(self.work.feed, self.num_members)

    def epoch_of(self, one: Sharer) -> Epoch:
        return self.epochs.setdefault(one.epoch, Epoch())

    # ------------------------------------------------------------------------------------------ members

    @precondition(lambda self: len(self.members) + len(self.sent_away) < self.num_members)
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
    @rule(which=some, hangs_up=st.booleans())
    def leave(self, which: int, hangs_up: bool = True) -> None:
        """Or die, or be sent away."""
        number, one = self.one(which)
        for step, slot in {**one.in_use, **one.queue}.items():
            if step not in one.said:
                self.can_come_again(one, step, slot)
        has_begun = any(other.joined for other in self.members.values())
        self.go_away(number, hangs_up)
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
            epoch.over = any(one.epoch > number for one in self.members.values())

    # --------------------------------------------------------------------------------------- the server

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
        self.all_hang_up()
        self.tick(GRACE_S)
        for _ in range(MOST_TURNS):
            for number, one in list(self.members.items()):
                if one.epoch > LAST_EPOCH:
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


SharedModel.TestCase.settings = settings(stateful_step_count=40)
TestShared = SharedModel.TestCase
