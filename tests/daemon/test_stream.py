"""The stream and the scheduler against a model of what the workers and the consumer see, in any order of events."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.daemon.outgoing import BrokenBatch, Delivery, Fault, PassEnd
from loaderd.daemon.scheduler import TASKS_PER_WORKER, Scheduler
from loaderd.daemon.stream import Stream
from loaderd.daemon.tasks import FillWork, LoadWork, Task
from loaderd.errors import CorruptRecordError, LoaderdError
from loaderd.options import StreamOptions
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import Course
from loaderd.plan.rows import SetRows
from loaderd.plan.shares import HostShare, Rest

Row = tuple[int, int, int]
"""(epoch, block, record of the block)."""

STALE: Row = (-1, -1, -1)
_STEPS_OF_AN_ENDLESS_PASS = 25

pasts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), max_size=2) | st.just([])


def rows_of_load(work: LoadWork) -> dict[int, tuple[int, int]]:
    """(block, record) of each row of the window that a load writes."""
    return {
        part.row + number - part.first: (part.block, number)
        for part in work.slices
        for number in range(part.first, part.stop)
    }


def arenas_of(task: Task) -> set[int]:
    if isinstance(task.work, LoadWork):
        return {task.work.arena}
    assert isinstance(task.work, FillWork)
    return {arena for batch in task.work.batches for arena in batch.arenas}


def slots_of(task: Task) -> list[int]:
    return [batch.slot for batch in task.work.batches] if isinstance(task.work, FillWork) else []


class StreamMachine(RuleBasedStateMachine):
    """Workers that work, fail and die, and a consumer that takes, keeps, gives back and seeks.

    ``arenas`` and ``slots`` stand for the shared memory. A task may write from when it is handed out until it ends,
    so what it will write is None from the start; it reads when it ends.
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
        self.course = Course(options, sum(counts), window_records, {})
        self.num_records, self.num_hosts, self.window_records = sum(counts), host[1], window_records
        rows = SetRows(np.array(counts), 7, shuffle)
        self.make_plan = lambda pass_: PassPlan(rows, self.course.batches(pass_), 7, shuffle, pass_.first_epoch)
        # What others began and left in parts of a row or two takes as many arenas as a batch has rows.
        num_arenas = 2 * batch_size + 2 + sizes.pop("more_arenas")
        self.epochs = epochs
        self.stream = Stream(
            self.make_plan, **sizes, num_arenas=num_arenas, skip_damaged=skip, blame=lambda records, error: error
        )
        self.scheduler = Scheduler()
        self.scheduler.add_source(self.stream)
        self.skip = skip
        self.eager = eager
        self.workers: dict[int, list[Task]] = {}
        self.worker_numbers = count()
        for _ in range(sizes["num_workers"]):
            self.new_worker()
        self.deaths: Counter[Task] = Counter()
        self.arenas: list[list[Row | None]] = [[None] * (window_records + 1) for _ in range(num_arenas)]
        self.opened: list[tuple[Any, int, Any]] = [(None, -1, ())] * num_arenas
        self.slots: list[list[Row | None]] = [[None] for _ in range(sizes["num_slots"])]
        self.lent: dict[int, list[Row | None]] = {}
        self.error_numbers = count()
        self.generation = -1
        self.start(0, [], 0)

    @property
    def outstanding(self) -> list[Task]:
        return [task for tasks in self.workers.values() for task in tasks]

    # ------------------------------------------------------------------------------------------ consumer

    @rule(first_epoch=st.integers(0, 2), past=pasts, where=st.integers(0, 60))
    def start(self, first_epoch: int, past: list[list[int]], where: int) -> None:
        pass_ = Pass(first_epoch, self.epochs, self.possible(past))
        self.batches = self.course.batches(pass_)
        num_steps = self.batches.num_steps
        step = where if num_steps is None else where % (num_steps + 1)
        self.generation += 1
        self.plan = self.make_plan(pass_)
        self.first_epoch = first_epoch
        self.next_step = self.first_step = step
        self.ended = False
        self.delivered: list[Row] = []
        self.bad: dict[tuple[int, int], LoaderdError] = {}
        self.broken: dict[int, LoaderdError] = {}
        self.stream.start(self.generation, pass_, step)
        self.settle()

    def possible(self, past: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        """What other hosts took of the first epoch, cut down to what they could take."""
        rest = Rest(self.num_records)
        found = []
        for taken in past:
            shares = [HostShare(rest, host, len(taken), self.window_records) for host in range(len(taken))]
            # Hosts go in step, so they differ by a row at most, and something is left.
            rows = min(taken[0], max(0, rest.size // len(taken) - 1))
            found.append(tuple(min(rows, share.size) for share in shares))
            rest = rest.after(found[-1], self.window_records)
        return tuple(found)

    def settle(self) -> None:
        """What the daemon does after each event; here it may be late, so that several events come together."""
        if self.eager:
            self.assign()
            self.tell_client()
            assert self.ended or self.outstanding or self.lent or not self.workers, "no event will ever come"

    @rule()
    def tell_client(self) -> None:
        while self.stream.outbox:
            item = self.stream.outbox.popleft()
            assert not self.ended
            if isinstance(item, PassEnd):
                assert self.next_step == self.batches.num_steps
                self.ended = True
            else:
                assert item.step == self.next_step
                self.next_step += 1
                self.take(item)

    def take(self, item: Delivery | BrokenBatch) -> None:
        rows, bad = self.planned(item.step)
        errors = [self.broken[item.step]] if item.step in self.broken else [] if self.skip else list(bad.values())
        if isinstance(item, BrokenBatch):
            if not errors:  # they were all to be skipped
                assert len(bad) == len(rows) and f"of batch {item.step} is left" in item.error.message
            else:
                more = f" (and {len(errors) - 1} more in this batch)" if len(errors) > 1 else ""
                assert item.error.message == errors[0].message + more
            return
        messages = {error.message for error in bad.values()}
        assert (item.num_skipped, {error.message for error in item.errors}) == (len(bad), messages)
        expected = [row for position, row in enumerate(rows) if position not in bad]
        assert not errors and item.slot not in self.lent
        assert (self.slots[item.slot], item.num_records) == (expected, len(expected))
        self.lent[item.slot] = expected
        self.delivered += expected

    def planned(self, step: int) -> tuple[list[Row], dict[int, LoaderdError]]:
        """The rows of a batch, and the errors of those (counted from its start) that could not be loaded."""
        rows: list[Row] = []
        bad: dict[int, LoaderdError] = {}
        for segment in self.plan.segments_of(step):
            window = self.rows_of(segment.window)
            for place in range(segment.start, segment.stop):
                if (segment.window, place) in self.bad:
                    bad[len(rows)] = self.bad[segment.window, place]
                rows.append(window[place])
        return rows, bad

    def rows_of(self, window: int) -> list[Row]:
        """The rows of a window, by place."""
        epoch = self.first_epoch + self.batches.locate(window)[0]
        found: list[Row] = [STALE] * self.plan.places_of(window)
        places = self.plan.order_of(window).places()
        for part in self.plan.slices_of(window):
            assert part.epoch == epoch
            for number in range(part.first, part.stop):
                place = places[part.row + number - part.first]
                if place >= 0:
                    found[place] = (epoch, part.block, number)
        return found

    @precondition(lambda self: self.lent)
    @rule(which=st.integers(0, 11) | st.none())
    def release(self, which: int | None) -> None:
        slots = sorted(self.lent) if which is None else [sorted(self.lent)[which % len(self.lent)]]
        for slot in slots:
            assert self.slots[slot] == self.lent.pop(slot), "nobody writes to a slot that the consumer has"
        self.stream.release(slots)
        self.settle()

    # ------------------------------------------------------------------------------------------- workers

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def new_worker(self) -> None:
        worker = next(self.worker_numbers)
        self.scheduler.add_worker(worker)
        self.scheduler.ready(worker)
        self.workers[worker] = []

    @rule(num_tasks=st.integers(1, 40))
    def work(self, num_tasks: int) -> None:
        """Some way into the pass."""
        for number in range(num_tasks):
            self.assign()
            self.tell_client()
            if self.outstanding:
                self.finish(number, [])
        self.assign()

    @rule()
    def assign(self) -> None:
        assigned = self.scheduler.assign()
        for worker, task in assigned:
            assert task.generation == self.generation and task not in self.outstanding
            self.begin_load(task.work) if isinstance(task.work, LoadWork) else self.begin_fill(task.work)
            self.workers[worker].append(task)
        for worker, tasks in self.workers.items():
            assert tasks == self.scheduler.tasks_of(worker) and len(tasks) <= TASKS_PER_WORKER

    def open(self, number: int, arena: int) -> None:
        """The first load of a window begins: nothing else may be at its arena."""
        window = self.stream._windows._open[number]
        if self.opened[arena][0] is window:
            return
        assert window.arena == arena
        assert not [task for task in self.outstanding if arena in arenas_of(task)]
        self.opened[arena] = window, number, self.plan.order_of(number).places()
        self.arenas[arena] = [None] * len(self.arenas[arena])

    def begin_load(self, work: LoadWork) -> None:
        self.open(work.window, work.arena)
        _, window, places = self.opened[work.arena]
        assert window == work.window
        for task in self.outstanding:
            if work.arena in arenas_of(task):
                assert isinstance(task.work, LoadWork)
                assert (task.generation, task.work.window) == (self.generation, window)
                assert not set(rows_of_load(task.work)) & set(rows_of_load(work))
        for row in rows_of_load(work):
            assert places[row] < 0 or self.arenas[work.arena][places[row]] is None, "each row is loaded once"

    def begin_fill(self, work: FillWork) -> None:
        for batch in work.batches:
            rows, bad = self.planned(batch.step)
            assert list(batch.segments) == self.plan.segments_of(batch.step)
            assert list(batch.omit) == list(bad) and (self.skip or not bad)
            for task in self.outstanding:
                assert not (isinstance(task.work, LoadWork) and task.work.arena in batch.arenas)
                assert batch.slot not in slots_of(task)
            read = self.read(batch.arenas, batch.segments)
            assert [None if i in bad else row for i, row in enumerate(rows)] == read, "its windows are loaded"
            assert batch.slot not in self.lent
            self.slots[batch.slot] = [None]

    def read(self, arenas: tuple[int, ...], segments: tuple[Any, ...]) -> list[Row | None]:
        return [
            row
            for arena, segment in zip(arenas, segments, strict=True)
            for row in self.arenas[arena][segment.start : segment.stop]
        ]

    @precondition(lambda self: self.outstanding)
    @rule(which=st.integers(0, 5), faults=st.lists(st.integers(0, 20), max_size=2) | st.just([]) | st.just([]))
    def finish(self, which: int, faults: list[int]) -> None:
        worker, task = list(self.working.items())[which % len(self.working)]
        result = None
        if isinstance(task.work, LoadWork):
            result = self.finish_load(task, task.work, faults)
        for batch in task.work.batches if isinstance(task.work, FillWork) else ():
            rows = self.read(batch.arenas, batch.segments)
            self.slots[batch.slot] = [row for i, row in enumerate(rows) if i not in batch.omit]
        self.workers[worker].remove(task)
        self.scheduler.end_task(worker, task.number, result)
        self.settle()

    def finish_load(self, task: Task, work: LoadWork, faults: list[int]) -> list[Fault]:
        _, window, places = self.opened[work.arena]
        rows = rows_of_load(work)
        bad = sorted({int(places[list(rows)[number % len(rows)]]) for number in faults} - {-1})
        found = [Fault((place,), self.new_error()) for place in bad]
        is_stale = task.generation != self.generation
        if not is_stale:
            self.note_faults(window, found)
        epoch = -1 if is_stale else self.first_epoch + self.batches.locate(window)[0]
        for row, (block, record) in rows.items():
            if int(places[row]) not in [*bad, -1]:
                self.arenas[work.arena][places[row]] = STALE if is_stale else (epoch, block, record)
        return found

    def new_error(self) -> LoaderdError:
        return CorruptRecordError(f"error {next(self.error_numbers)}")

    def note_faults(self, window: int, faults: list[Fault]) -> None:
        for fault in faults:
            for place in fault.places:
                self.bad[window, place] = fault.error

    @precondition(lambda self: self.outstanding)
    @rule(which=st.integers(0, 5))
    def fail(self, which: int) -> None:
        self.fail_at(*list(self.working.items())[which % len(self.working)])

    @precondition(lambda self: any(tasks and len(slots_of(tasks[0])) > 1 for tasks in self.workers.values()))
    @rule()
    def fail_several_batches(self) -> None:
        self.fail_at(*max(self.working.items(), key=lambda item: len(slots_of(item[1]))))

    def fail_at(self, worker: int, task: Task) -> None:
        self.workers[worker].remove(task)
        error = self.new_error()
        self.expect_failure(task, error)
        self.scheduler.end_task(worker, task.number, None, error)
        self.settle()

    def expect_failure(self, task: Task, error: LoaderdError) -> None:
        if task.generation != self.generation:
            return
        if isinstance(task.work, LoadWork):
            places = self.opened[task.work.arena][2]
            for part in task.work.slices:
                wanted = places[part.row : part.row + part.stop - part.first]
                if (wanted >= 0).any():
                    self.note_faults(task.work.window, [Fault(tuple(wanted[wanted >= 0].tolist()), error)])
        elif isinstance(task.work, FillWork) and len(task.work.batches) == 1:
            self.broken[task.work.batches[0].step] = error

    @precondition(lambda self: self.workers)
    @rule(which=st.integers(0, 5), replaced=st.booleans() | st.just(True))
    def die(self, which: int, replaced: bool) -> None:
        """What is given up for it, and what is tried then, is in the other model."""
        worker = sorted(self.workers)[which % len(self.workers)]
        tasks = self.workers[worker]
        if tasks and self.deaths[tasks[0]] == tasks[0].most_deaths - 1:
            return
        del self.workers[worker]
        self.deaths.update(tasks[:1])
        self.scheduler.lose_worker(worker, "was killed by SIGBUS")
        if replaced:
            self.new_worker()
        self.settle()

    @property
    def working(self) -> dict[int, Task]:
        """What each worker works on."""
        return {worker: tasks[0] for worker, tasks in sorted(self.workers.items()) if tasks}

    # ---------------------------------------------------------------------------------- what always holds

    @invariant()
    def a_slot_has_one_owner(self) -> None:
        finished = [*self.stream._finished.values(), *self.stream.outbox]
        unsent = [item.slot for item in finished if isinstance(item, Delivery)]
        begun = [slot for task in (*self.outstanding, *self.scheduler._again) for slot in slots_of(task)]
        begun += [batch.slot for batch, _ in self.stream._fills_alone]
        assert sorted([*self.stream._free_slots, *self.lent, *unsent, *begun]) == list(range(len(self.slots)))

    @invariant()
    def an_arena_has_one_owner(self) -> None:
        begun = [*self.outstanding, *self.scheduler._again]
        stale = {arena for task in begun if task.generation != self.generation for arena in arenas_of(task)}
        windows = self.stream._windows
        owned = [*windows._free_arenas, *[window.arena for window in windows._open.values()], *stale]
        assert sorted(owned) == list(range(len(self.arenas)))

    # ------------------------------------------------------------------------------------------- the end

    @rule(first_epoch=st.integers(0, 2), past=pasts, where=st.integers(0, 60))
    def run_to_the_end_and_start(self, first_epoch: int, past: list[list[int]], where: int) -> None:
        self.run_to_the_end()
        self.start(first_epoch, past, where)

    def run_to_the_end(self) -> None:
        """From any state a pass comes to its end if workers work and the consumer gives back what it gets."""
        if not self.workers:
            self.new_worker()
        last_step = self.next_step + _STEPS_OF_AN_ENDLESS_PASS
        while not self.ended and (self.batches.num_steps is not None or self.next_step < last_step):
            if self.lent:
                self.release(None)
            self.assign()
            self.tell_client()
            assert self.ended or self.outstanding or self.lent, "no event will ever come"
            if self.outstanding:
                self.finish(0, [])
        if self.first_step == 0 and self.batches.epochs and not self.bad and not self.broken:
            self.check_completeness()

    def check_completeness(self) -> None:
        """A pass without faults holds every record of the host once an epoch."""
        shares = [self.batches.share_of(epoch) for epoch in range(self.batches.epochs or 0)]
        assert len(set(self.delivered)) == len(self.delivered)
        if self.batches.remainder != "drop":
            assert len(self.delivered) == sum(share.size for share in shares)
            counts = Counter((block, record) for _, block, record in self.delivered)
            assert self.num_hosts > 1 or shares[0].rest.size < self.num_records or len(counts) == self.num_records

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        self.run_to_the_end()
        self.eager = False
        while self.outstanding:
            self.finish(0, [])
        self.a_slot_has_one_owner()
        self.an_arena_has_one_owner()


StreamMachine.TestCase.settings = settings(stateful_step_count=50, deadline=None)
TestStream = StreamMachine.TestCase
