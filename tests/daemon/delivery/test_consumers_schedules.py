"""Members, workers and the daemon at one page, each of them interrupted in front of any access to a word.

``test_consumers_model`` lets one do a whole thing before the next one does something; here they do it at once, as on
several processors. Members sleep until their bell is rung, start elsewhere, are stopped for long, die in front of
any access, or end their connection while a thread of theirs is still at the page; others take their columns.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.plan.passes import Pass
from loaderd.shm.page import Page, ring
from tests.daemon.group_run import NUM_WORKERS, Group, Member
from tests.daemon.page_workers import PageWorker, answer_to
from tests.helpers.bells import was_rung
from tests.worker.page_scene import Words
from tests.worker.test_schedules import Schedule

_MOST_TURNS = 100_000


class Actors(Group):
    """A group whose members ask by messages, and whose accesses to the page are told to ``on_access``."""

    def __init__(self, num_members: int, num_slots: int, num_steps: int) -> None:
        super().__init__(num_members, num_slots=num_slots, num_steps=num_steps)
        self.on_access: Callable[[str, bool], None] = lambda actor, writes: None
        self.asked: deque[Callable[[], object]] = deque()
        """What members have sent, and which connections have ended: the daemon has not read it yet."""
        self.is_over = False
        self.trace(self.page, "daemon")
        for seat, worker in enumerate(self._workers):
            self.trace(worker.filler.page, f"worker {seat}")

    def trace(self, page: Page, actor: str) -> None:
        """Have all accesses by this view of the page told."""
        use_column = page.use_column

        def use(column: int, memory: Any) -> None:
            use_column(column, memory)
            page.columns[column] = self._traced(page.columns[column], actor)

        page.words = Words(page.words, self, actor)  # type: ignore[assignment]
        page.columns = [self._traced(column, actor) for column in page.columns]
        page.use_column = use  # type: ignore[method-assign]

    def _traced(self, column: memoryview[int], actor: str) -> Any:
        return Words(column, self, actor)  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------------------- actors

    def come(self, number: int) -> Actor:
        one = self.members[number] = Actor(self, number)
        page = one.page_consumer._page = copy.copy(self.member_page)
        self.trace(page, one.name)
        one.page_consumer._words = Words(one.page_consumer._words, self, one.name)  # type: ignore[assignment]
        return one

    def go_away(self, one: Actor) -> None:
        """The daemon sees that its connection has ended."""
        one.is_gone = True
        del self.members[one.number]
        self.consumers.leave(one.number)
        self.consumers.give_back_all(one.number)

    def be_the_daemon(self) -> None:
        while not self.is_over:
            self.turn_of_the_daemon()

    def turn_of_the_daemon(self) -> None:
        while self.asked:
            self.asked.popleft()()
        self.listen()
        if (task := self.stream.next_task()) is not None:
            self.stream.done(task, answer_to(task))

    def be_a_worker(self, seat: int) -> None:
        worker, bell = self._workers[seat], self.seat_bells[seat]
        filler = worker.filler
        while not self.is_over:
            if self._make(worker):
                continue
            filler.page.say_sleeps(seat, True)
            if not self._make(worker):
                while not was_rung(bell) and not filler.has_news and not self.is_over:
                    pass
            filler.page.say_sleeps(seat, False)

    def _make(self, worker: PageWorker) -> bool:
        while worker.filler.has_news:
            if not worker.read():
                return False  # it is on its way
        claim = worker.filler.claim()
        if claim is None:
            return False
        for _ in range(2):  # its first byte is written, and its last
            for member in self.members.values():
                assert claim.slot not in member.kept, "it reads there"
            self.contents[claim.slot] = None
            self.on_access(f"worker {worker.filler.seat}", True)
        generation, step = claim.place
        self.contents[claim.slot] = self._epochs[generation], step
        self.fills += 1
        worker.filler.made(claim)
        return True


class Actor(Member):
    """A member, of which the daemon hears when it listens."""

    _group: Actors
    is_gone = False

    @property
    def name(self) -> str:
        return f"member {self.number}"

    def start(self, step: int = 0, epoch: int = 0) -> None:
        self.generation += 1
        self.epoch, self.step = epoch, step
        self.got = []
        self.page_consumer.begin(self.generation, step)
        generation, group = self.generation, self._group
        group.asked.append(
            lambda: self.is_gone or group.consumers.start(self.number, generation, Pass(epoch, 1), step)
        )

    def check(self) -> None:
        if not self.is_gone:
            super().check()

    def read(self, first: int, rng: random.Random, most_held: int) -> None:
        """Take a pass to its end, and go elsewhere now and then."""
        bell = self._group.bells[self.column]
        self.start(first)
        jumps = rng.randrange(3)
        while self.step is not None and not self.is_gone:
            if jumps and rng.random() < 0.2:
                jumps -= 1
                self.start(rng.randrange(self._group.num_steps))
            if self.take():
                if len(self.kept) >= most_held or rng.random() < 0.5:
                    self.release()
            elif self.page_consumer.fall_asleep():
                while not was_rung(bell) and not self.is_gone:
                    self._group.on_access(self.name, False)
                self.page_consumer.wake_up()
                if self.is_gone:
                    ring(bell)  # this may have been for the next member, which else would sleep for a second
            else:
                self.page_consumer.wake_up()
        self.release()


def play(
    seed: int, num_members: int, more_slots: int, num_steps: int, patience: int, num_ends: int, apart: int
) -> Actors:
    """All read a pass; ``num_ends`` of them die, or end their connection, and others come. They are ``apart``."""
    rng = random.Random(seed)
    num_slots = 2 * num_members + more_slots
    group = Actors(num_members, num_slots, num_steps)
    schedule = Schedule(group, seed, patience)  # type: ignore[arg-type]
    most_held = num_slots // num_members - 1
    numbers = iter(range(1, 100))
    dying: set[Actor] = set()
    staying: set[Actor] = set()

    def come() -> None:
        one = group.come(next(numbers))
        staying.add(one)
        own = random.Random(rng.random())
        schedule.add(one.name, lambda: one.read(own.randrange(1 + min(apart, num_steps - 1)), own, most_held))

    try:
        for _ in range(num_members):
            come()
        for seat in range(NUM_WORKERS):
            schedule.add(f"worker {seat}", lambda seat=seat: group.be_a_worker(seat))  # type: ignore[misc]
        schedule.add("daemon", group.be_the_daemon)
        for _ in range(_MOST_TURNS):
            is_full = len(group.members) == num_members and not dying and not group.asked
            if is_full and not any(schedule.has(one.name) for one in group.members.values()):
                break
            if num_ends and staying and rng.random() < 0.01:
                one = rng.choice(sorted(staying, key=lambda one: one.number))
                num_ends -= 1
                staying.remove(one)
                dying.add(one)
                if rng.random() < 0.5 and schedule.has(one.name):
                    schedule.doomed.add(one.name)
                else:
                    schedule.stopped = one.name
            if rng.random() < 0.01:
                schedule.stopped = rng.choice(["", *sorted(schedule.names - {"daemon"})])
            schedule.step()
            for one in list(dying):
                if one.name not in schedule.doomed or not schedule.has(one.name):
                    schedule.doomed.discard(one.name)
                    dying.remove(one)

                    def end(one: Actor = one) -> None:
                        group.go_away(one)
                        group.asked.append(come)  # comes a little later

                    group.asked.append(end)
        else:
            raise AssertionError("it comes to no end")
        group.is_over, schedule.stopped = True, ""
        while schedule.names:
            schedule.step()
        for one in group.members.values():
            assert one.got[-1] == num_steps - 1 and one.got == list(range(one.got[0], num_steps))
        for one in list(group.members.values()):
            group.go_away(one)
        assert all(group.page.is_free(slot) for slot in range(num_slots)), "no slot is lost"
    finally:
        group.is_over = True
        schedule.close()
        group.close()
    return group


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1 << 32),
    num_members=st.integers(1, 3),
    more_slots=st.integers(0, 3),
    num_steps=st.integers(1, 6),
    patience=st.sampled_from([3, 10, 40, 200]),
    num_ends=st.integers(0, 3),
    apart=st.sampled_from([0, 2, 9]),
)
def test_each_member_gets_each_batch_whoever_is_interrupted_or_dies_where(
    seed: int, num_members: int, more_slots: int, num_steps: int, patience: int, num_ends: int, apart: int
):
    play(seed, num_members, more_slots, num_steps, patience, num_ends, apart)


@pytest.mark.parametrize("interrupted", ["worker 0", "member 1"])
def test_a_worker_and_a_member_that_has_not_looked_never_have_one_slot(interrupted: str):
    """The stream has begun anew: a worker may write to all slots, and a member looks for a batch of before."""
    number, seen, num_held, num_claimed = -1, [0], 0, 0
    while number < len(seen):
        number += 1
        group = Actors(2, 4, 6)
        one, two = group.come(1), group.come(2)
        for member in (one, two):
            member.start(2)
        for _ in range(9):
            group.turn_of_the_daemon()
        while group._make(group._workers[0]) or group._make(group._workers[1]):
            pass
        assert one.page_consumer._follow()
        two.start(0)
        for _ in range(9):
            group.turn_of_the_daemon()
        worker = group._workers[0]
        while worker.read():
            pass
        key = group.page.ready()[worker.filler._slots[0]]  # of the batch in the slot that it writes to next
        done: dict[str, Any] = {}

        def claim(group: Actors = group, done: dict[str, Any] = done) -> None:
            done["claim"] = group._workers[0].filler.claim()

        def hold(one: Actor = one, key: int = key, done: dict[str, Any] = done) -> None:
            done["slot"] = one.page_consumer._hold(key)

        do, other = (claim, hold) if interrupted == "worker 0" else (hold, claim)
        seen = []

        def on_access(
            actor: str, writes: bool, number: int = number, seen: list[int] = seen, other: Any = other
        ) -> None:
            if actor == interrupted:
                seen.append(len(seen))
                if len(seen) == number + 1:
                    other()

        group.on_access = on_access
        do()
        if number >= len(seen):
            other()
        claimed, slot = done["claim"], done["slot"]
        assert claimed is None or claimed.slot != slot, "it would write where the member reads"
        num_held += slot >= 0
        num_claimed += claimed is not None
        group.close()
    assert number > 5 and num_held and num_claimed
