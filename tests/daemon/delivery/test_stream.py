"""The stream, its page, its workers and its consumer against a model of what they see, in any order of events."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from loaderd.daemon.pool.scheduler import Scheduler
from loaderd.daemon.pool.tasks import MAX_DEATHS, TASKS_PER_WORKER, Task
from loaderd.errors import LoaderdError
from loaderd.ipc.worker_messages import LoadFault, LoadTask
from loaderd.options import StreamOptions
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import PassSequence
from loaderd.plan.rows import DatasetRows
from loaderd.shm.page import HELD, key_of, ring
from tests.daemon.page_run import Floor, Hand
from tests.daemon.page_workers import answer_to, free_arenas, stream_of
from tests.daemon.stream_world import Row, StreamWorld

_STEPS_OF_AN_ENDLESS_PASS = 25

pasts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), max_size=2) | st.just([])


class StreamMachine(StreamWorld):
    """Workers that work, fail and die, and a consumer that takes, keeps, gives back and seeks.

    Whoever is told something may read it late; whoever sleeps does so until it is rung for.
    """

    @initialize(
        counts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
        host=st.sampled_from([(0, 1), (0, 1), (1, 2), (0, 3), (2, 3)]),
        window_records=st.sampled_from([1, 2, 5, 9, 16, 30]),
        batch_size=st.sampled_from([1, 2, 3, 5, 12]),
        remainder=st.sampled_from(["drop", "short", "carry"]),
        epochs=st.sampled_from([1, 2, 3, None]),
        shuffle=st.booleans(),
        num_slots=st.integers(1, 12),
        more_arenas=st.integers(0, 1),
        num_workers=st.integers(1, 3),
        skip=st.booleans(),
        eager=st.booleans(),
    )
    def set_up(self, counts, host, window_records, batch_size, remainder, epochs, shuffle, skip, eager, **sizes):
        host = host if sum(counts) >= host[1] else (0, 1)
        batch_size = min(batch_size, sum(counts) // host[1])  # larger ones are refused
        options = StreamOptions(batch_size, epochs, shuffle, remainder=remainder, shard=host)
        self.pass_sequence = PassSequence(options, sum(counts), window_records, {})
        self.num_records, self.num_hosts, self.window_records = sum(counts), host[1], window_records
        rows = DatasetRows(np.array(counts), 7, shuffle)
        self.make_plan = lambda pass_: PassPlan(
            rows, self.pass_sequence.batches(pass_), 7, shuffle, pass_.first_epoch
        )
        # What others began and left in parts of a row or two takes as many arenas as a batch has rows.
        num_arenas = 2 * batch_size + 2 + sizes["more_arenas"]
        self.epochs = epochs
        self.floor = Floor(sizes["num_slots"], sizes["num_workers"])
        self.consumer = self.floor.consumer
        self.stream = self.floor.stream = stream_of(
            self.make_plan, self.floor.page, num_arenas=num_arenas, skip_damaged=skip
        )
        self.scheduler = Scheduler()
        self.scheduler.add_source(self.stream)
        self.skip = skip
        self.eager = eager
        self.worker_numbers = count()
        self.tasks: list[list[Task]] = [[] for _ in self.hands]
        self.workers = [self.new_worker() for _ in self.hands]
        """The number of the worker at each seat, and its tasks."""
        self.deaths: Counter[Task] = Counter()
        self.deaths_at: Counter[tuple[int, int]] = Counter()
        self.arenas: list[list[Row | None]] = [[None] * (window_records + 1) for _ in range(num_arenas)]
        self.opened: list[tuple[Any, int, Any]] = [(None, -1, ())] * num_arenas
        self.slots: list[list[Row | None]] = [[None] for _ in range(sizes["num_slots"])]
        self.lent: dict[int, list[Row | None]] = {}
        self.error_numbers = count()
        self.generation = 0
        self.unheard_start: tuple[Pass, int] | None = None
        self.start(0, [], 0, False)

    @property
    def hands(self) -> list[Hand]:
        return self.floor.hands

    @property
    def outstanding(self) -> list[Task]:
        return [task for tasks in self.tasks for task in tasks]

    # ------------------------------------------------------------------------------------------ consumer

    @rule(first_epoch=st.integers(0, 2), past=pasts, where=st.integers(0, 60), late=st.booleans())
    def start(self, first_epoch: int, past: list[list[int]], where: int, late: bool) -> None:
        """The consumer goes elsewhere; if it is ``late``, things happen before the daemon hears of it."""
        pass_ = Pass(first_epoch, self.epochs, self.possible(past))
        num_steps = self.pass_sequence.batches(pass_).num_steps
        step = where if num_steps is None else where % (num_steps + 1)
        self.generation += 1
        self.consumer.begin(self.generation, step)
        self.unheard_start = pass_, step
        if not late:
            self.hear_start()

    @precondition(lambda self: self.unheard_start is not None)
    @rule()
    def hear_start(self) -> None:
        """The daemon hears where the consumer is."""
        assert self.unheard_start is not None
        (pass_, step), self.unheard_start = self.unheard_start, None
        self.batches = self.pass_sequence.batches(pass_)
        self.plan = self.make_plan(pass_)
        self.first_epoch = pass_.first_epoch
        self.next_step = self.first_step = step
        self.delivered: list[Row] = []
        self.bad: dict[tuple[int, int], LoaderdError] = {}
        self.broken: dict[int, LoaderdError] = {}
        self.floor.page.start_at(0, key_of(self.generation, step), self.generation)
        ring(self.floor.consumer_bell)
        self.stream.start(self.generation, pass_, step)
        self.floor.say()
        self.settle()

    def settle(self) -> None:
        """What all do after each event; here they may be late, so that several events come together."""
        if self.eager:
            self.assign()
            for seat in range(len(self.hands)):
                self.claim(seat, 1000)
            self.take(12)
            self.wake_daemon()

    @property
    def ended(self) -> bool:
        return self.unheard_start is None and self.next_step == self.batches.num_steps

    @rule(most=st.integers(1, 12))
    def take_some(self, most: int) -> None:
        self.take(most)

    def take(self, most: int) -> bool:
        """The consumer takes what is there; whether there was something."""
        taken = False
        while most and not self.ended and (item := self.consumer.next()) is not None:
            assert self.unheard_start is None and item.step == self.next_step
            most -= 1
            taken = True
            self.next_step += 1
            self.check(item)
        return taken

    @precondition(lambda self: self.lent)
    @rule(which=st.integers(0, 11) | st.none())
    def release(self, which: int | None) -> None:
        slots = sorted(self.lent) if which is None else [sorted(self.lent)[which % len(self.lent)]]
        for slot in slots:
            assert self.slots[slot] == self.lent.pop(slot), "nobody writes to a slot that the consumer has"
            self.consumer.taker.release(slot)
        self.settle()

    @rule()
    def wake_daemon(self) -> None:
        self.floor.wake_daemon()

    # ------------------------------------------------------------------------------------------- workers

    def new_worker(self) -> int:
        worker = next(self.worker_numbers)
        self.scheduler.add_worker(worker)
        self.scheduler.ready(worker)
        return worker

    @rule(num_events=st.integers(1, 40))
    def work(self, num_events: int) -> None:
        """Some way into the pass."""
        for number in range(num_events):
            self.turn(number)

    def turn(self, number: int) -> bool:
        """One thing happens; False: there is nothing that could."""
        self.assign()
        self.floor.wake_daemon()
        happened = self.take(1)
        seats = list(range(len(self.hands)))
        for seat in seats[number % len(seats) :] + seats[: number % len(seats)]:
            self.claim(seat, 1000)
            if self.hands[seat].at is not None:
                self.make(seat)
                return True
        if self.outstanding:
            self.finish(number, [])
            return True
        return happened

    @rule()
    def assign(self) -> None:
        for worker, task in self.scheduler.assign():
            assert task.generation == self.stream.generation and task not in self.outstanding
            if isinstance(task.work, LoadTask):
                self.begin_load(task.work)
            self.tasks[self.workers.index(worker)].append(task)
        for worker, tasks in zip(self.workers, self.tasks, strict=True):
            assert tasks == self.scheduler.tasks_of(worker) and len(tasks) <= TASKS_PER_WORKER

    @rule(which=st.integers(0, 2), most=st.integers(0, 3) | st.just(1000))
    def claim(self, which: int, most: int) -> None:
        """A worker reads so much of what it was told, and claims a batch, if it may."""
        hand = self.hands[which % len(self.hands)]
        hand.read_some(most)
        if (claim := hand.try_claim()) is not None:
            self.check_claim(claim)

    @property
    def making(self) -> list[int]:
        """Seats whose workers make a batch."""
        return [seat for seat, hand in enumerate(self.hands) if hand.at is not None]

    @precondition(lambda self: self.making)
    @rule(which=st.integers(0, 2))
    def finish_batch(self, which: int) -> None:
        self.make(self.making[which % len(self.making)])
        self.settle()

    def make(self, seat: int) -> None:
        hand = self.hands[seat]
        assert hand.at is not None
        rows = self.read(hand.at.batch.segments)
        self.slots[hand.at.slot] = [row for i, row in enumerate(rows) if i not in hand.at.batch.omit]
        hand.made()

    @precondition(lambda self: self.making)
    @rule(which=st.integers(0, 2), guilty=st.lists(st.integers(0, 20), max_size=3), all_faults=st.booleans())
    def fail_batch(self, which: int, guilty: list[int], all_faults: bool) -> None:
        hand = self.hands[self.making[which % len(self.making)]]
        assert hand.at is not None
        run = hand.at.batch
        left = sorted(set(range(run.num_records + len(run.omit))).difference(run.omit))
        faults = {left[row % len(left)]: self.new_error() for row in sorted(guilty) if left}
        hand.not_made(self.new_error(), faults, all_faults)
        if self.eager:
            self.hear(which)

    @rule(which=st.integers(0, 2))
    def hear(self, which: int) -> None:
        """The daemon hears what a worker could not make."""
        self.expect_broken(which % len(self.hands))
        self.floor.hear(which % len(self.hands))
        self.settle()

    def expect_broken(self, seat: int) -> None:
        for failed in [each for each in self.hands[seat].unheard if each.generation == self.stream.generation]:
            if self.skip and failed.faults and failed.all_faults:
                self.note_row_faults(failed)
            else:
                self.broken[failed.step] = failed.error

    @property
    def working(self) -> dict[int, Task]:
        """By seat, what each worker works on."""
        return {seat: tasks[0] for seat, tasks in enumerate(self.tasks) if tasks}

    @precondition(lambda self: self.outstanding)
    @rule(which=st.integers(0, 5), faults=st.lists(st.integers(0, 20), max_size=2) | st.just([]) | st.just([]))
    def finish(self, which: int, faults: list[int]) -> None:
        seat, task = list(self.working.items())[which % len(self.working)]
        found = self.finish_load(task, task.work, faults) if isinstance(task.work, LoadTask) else []
        self.end_task(seat, task, answer_to(task, found))

    def end_task(self, seat: int, task: Task, result: Any) -> None:
        self.tasks[seat].remove(task)
        self.scheduler.end_task(self.workers[seat], task.number, result)
        self.floor.say()
        self.settle()

    @precondition(lambda self: self.outstanding)
    @rule(which=st.integers(0, 5))
    def fail(self, which: int) -> None:
        seat, task = list(self.working.items())[which % len(self.working)]
        error = self.new_error()
        if isinstance(task.work, LoadTask) and task.generation == self.stream.generation:
            places = self.opened[task.work.arena][2]
            for part in task.work.slices:
                wanted = places[part.row : part.row + part.stop - part.first]
                if (wanted >= 0).any():
                    self.note_faults(task.work.window, [LoadFault(tuple(wanted[wanted >= 0].tolist()), error)])
        self.end_task(seat, task, error)

    @rule(which=st.integers(0, 2))
    def die(self, which: int) -> None:
        """A worker is lost, and another one takes its seat. Who is to blame, ``test_poison_records`` says."""
        seat = which % len(self.hands)
        hand = self.hands[seat]
        task = self.tasks[seat][0] if self.tasks[seat] and hand.at is None else None
        if task is not None and self.deaths[task] == task.most_deaths - 1:
            return
        claimed = [(self.stream.generation, step) for step in self.floor.steps_claimed(seat)]
        if any(self.deaths_at[place] == 2 * MAX_DEATHS - 1 for place in claimed):
            return  # it would be broken
        unheard = {(failed.generation, failed.step) for failed in hand.unheard}
        self.deaths_at.update(place for place in claimed if place not in unheard)
        if task is not None:
            self.deaths[task] += 1
        self.tasks[seat].clear()
        self.scheduler.lose_worker(self.workers[seat], "was killed by SIGBUS", blamed=task)
        self.workers[seat] = self.new_worker()
        self.expect_broken(seat)
        self.floor.lose(seat, "was killed by SIGBUS")
        self.settle()

    # ---------------------------------------------------------------------------------- what always holds

    @invariant()
    def an_arena_has_one_owner(self) -> None:
        begun = [*self.outstanding, *self.scheduler._again]  # those that wait for another worker are nowhere else
        stale = {
            t.work.arena for t in begun if isinstance(t.work, LoadTask) and t.generation != self.stream.generation
        }
        held = [window.arena for window in self.stream._windows._open.values()]
        owned = [*free_arenas(self.stream), *held, *stale]
        assert sorted(owned) == list(range(len(self.arenas)))

    @invariant()
    def what_the_consumer_has_is_not_free(self) -> None:
        taker = self.consumer.taker
        held = {slot for slot in range(taker._page.num_slots) if taker._words[HELD + slot]}
        assert held - {taker._found} == set(self.lent)
        assert not any(self.floor.page.is_free(slot) for slot in self.lent)

    @invariant()
    def no_batch_is_there_twice(self) -> None:
        """Not where each claim is made as a whole; where they are not, tests/worker/test_schedules.py is."""
        page = self.floor.page
        found = Counter(page.keys())
        assert not [key for key, times in found.items() if times > 1 and key >= page.least_place()]

    # ------------------------------------------------------------------------------------------- the end

    @rule(first_epoch=st.integers(0, 2), past=pasts, where=st.integers(0, 60))
    def run_to_the_end_and_start(self, first_epoch: int, past: list[list[int]], where: int) -> None:
        self.run_to_the_end()
        self.start(first_epoch, past, where, False)

    def run_to_the_end(self) -> None:
        """From any state a pass comes to its end if workers work and the consumer gives back what it gets."""
        if self.unheard_start is not None:
            self.hear_start()
        for seat in range(len(self.hands)):
            self.hear(seat)
        last_step = self.next_step + _STEPS_OF_AN_ENDLESS_PASS
        number = 0
        while not self.ended and (self.batches.num_steps is not None or self.next_step < last_step):
            if self.lent:
                self.release(None)
            number += 1
            happened = self.turn(number)
            assert happened or self.lent or self.ended, "no event will ever come"
        if self.first_step == 0 and self.batches.epochs and not self.bad and not self.broken:
            self.check_completeness()

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        try:
            self.check_end()
        finally:
            self.floor.close()

    def check_end(self) -> None:
        self.run_to_the_end()
        self.eager = False
        while self.outstanding:
            self.finish(0, [])
        while self.making:
            self.make(self.making[0])
        for seat, hand in enumerate(self.hands):
            self.hear(seat)
            hand.read_some()
        self.an_arena_has_one_owner()
        if self.ended:
            self.release(None)
            page = self.floor.page
            assert all(page.is_free(slot) for slot in range(page.num_slots)), "no slot is lost"
            assert not any(page.unfinished(seat) for seat in range(page.num_seats))


StreamMachine.TestCase.settings = settings(stateful_step_count=50)
TestStream = StreamMachine.TestCase
