"""The scheduler with several sources, in any order of events, held to what must be true whatever happens.

``test_stream.py`` follows what one stream writes to memory, row by row. Here it is who waits for whom: two streams
and index passes share workers that end their tasks well, badly, or not at all, and the model sees what the daemon
sees: tasks that go out, and what is said to each consumer. At the end of each example everything is let run to its
end, and then each batch must have come, and each slot and arena be free.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.outgoing import BrokenBatch, Delivery, Fault, PassEnd
from loaderd.daemon.scheduler import TASKS_PER_WORKER, Scheduler
from loaderd.daemon.stream import Stream
from loaderd.daemon.tasks import MAX_DEATHS, FillBatch, FillWork, IndexWork, LoadWork, Task, TrialWork
from loaderd.errors import LoaderdError, ShardReadError
from loaderd.options import Remainder
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import SetRows
from loaderd.plan.shares import HostShare, Rest
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ShardIndex
from loaderd.shards.index_cache import IndexCache

NO_RECORDS = ShardIndex(ShardFile("empty", 0, 0), "none", 0, (), *[np.zeros(0, np.uint8)] * 5).encode()
_STEPS_OF_AN_ENDLESS_PASS = 20
_MOST_TURNS = 5000
_STALL_TICKS, _START_TICKS = 3, 5

Place = tuple[int, int]
"""(window, place in it, or row of it)."""

sizes = st.fixed_dictionaries(
    {
        "blocks": st.lists(st.integers(1, 9), min_size=1, max_size=6),
        "window_records": st.sampled_from([1, 3, 8, 20]),
        "batch_size": st.sampled_from([1, 2, 5]),
        "remainder": st.sampled_from(["drop", "short", "carry"]),
        "epochs": st.sampled_from([1, 2, None]),
        "num_slots": st.integers(1, 9),
        "num_workers": st.integers(1, 3),
        "skip_damaged": st.booleans(),
    }
)
some_faults = st.just([]) | st.just([]) | st.lists(st.integers(0, 20), max_size=2)


def rows_of(work: LoadWork) -> set[int]:
    """Rows of the window that a load brings."""
    return {row for part in work.slices for row in range(part.row, part.row + part.stop - part.first)}


def batches_of(task: Task) -> tuple[FillBatch, ...]:
    return task.work.batches if isinstance(task.work, FillWork) else ()


def arenas_of(task: Task) -> set[int]:
    if isinstance(task.work, LoadWork):
        return {task.work.arena}
    return {arena for batch in batches_of(task) for arena in batch.arenas}


class Consumer:
    """A stream, and what is seen of it from outside: where its slots and arenas are, which rows are loaded."""

    def __init__(
        self,
        blocks: list[int],
        window_records: int,
        batch_size: int,
        remainder: Remainder,
        epochs: int | None,
        num_slots: int,
        num_workers: int,
        skip_damaged: bool,
    ) -> None:
        num_records = sum(blocks)
        batches = BatchPlan(
            HostShare(Rest(num_records), 0, 1, window_records), min(batch_size, num_records), remainder, epochs
        )
        rows = SetRows(np.array(blocks), 5, True)
        self.num_slots = num_slots
        self.num_arenas = 2 + batch_size
        self.epochs = epochs
        self.skip_damaged = skip_damaged
        self.make_plan = lambda pass_: PassPlan(rows, batches, 5, True, pass_.first_epoch)
        self.stream = Stream(
            self.make_plan,
            num_slots=num_slots,
            num_arenas=self.num_arenas,
            num_workers=num_workers,
            skip_damaged=skip_damaged,
            blame=lambda records, error: error,
        )
        self.generations = count()
        self.lent: set[int] = set()
        self.contents: dict[int, tuple[int, int]] = {}
        self.stop()

    def stop(self) -> None:
        self.stream.stop()
        self.ended = True
        self.generation = -1

    def start(self, first_epoch: int, where: int) -> None:
        """A pass; what is known of an older one is void."""
        self.generation = next(self.generations)
        self.ended = False
        self.done: dict[int, int] = {}
        self.loaded: Counter[Place] = Counter()
        self.bad: set[Place] = set()
        self.bad_steps: set[int] = set()
        self.losses: Counter[Task | int] = Counter()
        pass_ = Pass(first_epoch, self.epochs)
        self.plan = self.make_plan(pass_)
        self.next_step = where if self.plan.num_steps is None else where % (self.plan.num_steps + 1)
        self.begun = self.next_step
        self.stream.start(self.generation, pass_, self.next_step)

    # ----------------------------------------------------------------------------------- tasks go out

    def begin(self, task: Task, others: list[Task]) -> None:
        """A worker gets ``task``; ``others`` are those that workers have of this stream."""
        assert task.generation == self.generation
        if isinstance(task.work, LoadWork):
            self.begin_load(task.work, others)
        for batch in batches_of(task):
            self.begin_fill(batch, others)

    def begin_load(self, work: LoadWork, others: list[Task]) -> None:
        window = (self.generation, work.window)
        users = [task for task in others if work.arena in arenas_of(task)]
        if self.contents.get(work.arena) != window:
            assert not users, "nobody else is at the arena of a new window"
            assert window not in self.contents.values(), "a window has one arena"
            before = self.contents.get(work.arena, (-1, 0))
            if before[0] == self.generation:
                assert not self.is_needed(before[1]), "no batch needs the window that was there"
            self.contents[work.arena] = window
        for task in users:
            assert isinstance(task.work, LoadWork) and not rows_of(task.work) & rows_of(work), "one place, one load"
        assert not any(self.loaded[work.window, row] for row in rows_of(work)), "a row is loaded once"

    def is_needed(self, window: int) -> bool:
        """Whether a batch reads from ``window`` that has not begun, and will."""
        for step in range(self.begun, self.plan.last_step_in(window) + 1):
            bad = [place in self.bad for place in self.places_of(step)]
            never_begins = all(bad) if self.skip_damaged else any(bad)
            if window in {one.window for one in self.plan.segments_of(step)} and not never_begins:
                return True
        return False

    def places_of(self, step: int) -> list[Place]:
        """What batch ``step`` is made of."""
        return [(one.window, place) for one in self.plan.segments_of(step) for place in range(one.start, one.stop)]

    def begin_fill(self, batch: FillBatch, others: list[Task]) -> None:
        assert list(batch.segments) == self.plan.segments_of(batch.step)
        assert batch.slot not in {*self.lent, *self.done.values()}, "nobody needs what is in the slot"
        assert batch.slot not in [other.slot for task in others for other in batches_of(task)]
        of_now = [other.step for task in others if task.generation == self.generation for other in batches_of(task)]
        assert batch.step not in of_now, "a batch is made by one worker"
        assert batch.step >= self.next_step and batch.step not in self.done, "a batch is made once"
        for segment, arena in zip(batch.segments, batch.arenas, strict=True):
            assert self.contents[arena] == (self.generation, segment.window)
            rows = range(self.plan.rows_of(segment.window))
            assert all(self.loaded[segment.window, row] for row in rows), "its windows are ready"
        self.begun = max(self.begun, batch.step + 1)

    # --------------------------------------------------------------------------------- tasks come back

    def end(self, task: Task, failed: bool, faults: list[int]) -> list[Fault]:
        """What becomes of a task that a worker ends; returns the result of a load."""
        if task.generation != self.generation:
            return []
        if isinstance(task.work, LoadWork):
            return self.end_load(task.work, failed, faults)
        for batch in () if isinstance(task.work, TrialWork) else batches_of(task):
            if not failed:
                self.done[batch.step] = batch.slot
            elif len(batches_of(task)) == 1:
                self.bad_steps.add(batch.step)
        return []

    def end_load(self, work: LoadWork, failed: bool, faults: list[int]) -> list[Fault]:
        rows = sorted(rows_of(work))
        self.loaded.update((work.window, row) for row in rows)
        wrong = rows if failed else sorted({rows[number % len(rows)] for number in faults})
        places = self.plan.order_of(work.window).places()
        self.bad |= {(work.window, int(places[row])) for row in wrong}
        return [Fault((int(places[row]),), ShardReadError("unreadable")) for row in wrong]

    def blame(self, task: Task) -> None:
        """A worker was lost at ``task``."""
        if task.generation != self.generation:
            return
        self.losses[task] += 1
        self.losses.update(batch.step for batch in batches_of(task))
        if isinstance(task.work, LoadWork) and len(task.work.slices) == 1 and self.losses[task] == MAX_DEATHS:
            self.end_load(task.work, True, [])

    # -------------------------------------------------------------------------------------- the consumer

    def listen(self) -> None:
        """Take what the stream has to say."""
        while self.stream.outbox:
            item = self.stream.outbox.popleft()
            if isinstance(item, (Delivery, BrokenBatch)):
                assert not self.ended and item.step == self.next_step, "in order, none twice, none left out"
                self.next_step += 1
                self.take(item)
            elif isinstance(item, PassEnd):
                assert not self.ended and self.next_step == self.plan.num_steps
                self.ended = True

    def take(self, item: Delivery | BrokenBatch) -> None:
        places = self.places_of(item.step)
        bad = len(self.bad.intersection(places))
        on_trial = self.losses[item.step] >= MAX_DEATHS
        if isinstance(item, BrokenBatch):
            never_begun = bad == len(places) if self.skip_damaged else bad > 0
            assert never_begun or on_trial or item.step in self.bad_steps, "a batch is broken for a reason"
            return
        assert item.slot == self.done.pop(item.step) and item.slot not in self.lent
        assert item.num_records + item.num_skipped == len(places) and item.num_records
        assert item.num_skipped == bad or (on_trial and item.num_skipped > bad)
        assert bool(item.errors) == bool(item.num_skipped) and (self.skip_damaged or not item.errors)
        self.lent.add(item.slot)

    def release(self, slots: list[int]) -> None:
        self.lent.difference_update(slots)
        self.stream.release(slots)


class SchedulerMachine(RuleBasedStateMachine):
    """Workers, two consumers, and now and then an index pass."""

    @initialize(first=sizes, second=sizes, num_workers=st.integers(1, 3), eager=st.booleans())
    def set_up(self, first, second, num_workers: int, eager: bool) -> None:
        self.scheduler = Scheduler()
        self.consumers = [Consumer(**first), Consumer(**second)]
        self.index_pass: IndexPass | None = None
        self.eager = eager
        self.workers: dict[int, list[Task]] = {}
        self.started: set[int] = set()
        self.ticks: Counter[int] = Counter()
        self.worker_numbers = count()
        self.add_workers(num_workers, True)
        for consumer in self.consumers:
            self.scheduler.add_source(consumer.stream)
            consumer.start(0, 0)
        self.settle()

    # ------------------------------------------------------------------------------------------ workers

    @precondition(lambda self: len(self.workers) < 6)
    @rule(number=st.integers(1, 3), ready=st.booleans())
    def add_workers(self, number: int, ready: bool) -> None:
        for _ in range(number):
            worker = next(self.worker_numbers)
            self.scheduler.add_worker(worker)
            self.workers[worker] = []
            if ready:
                self.get_ready(worker)

    def get_ready(self, worker: int) -> None:
        self.scheduler.ready(worker)
        self.started.add(worker)
        self.ticks[worker] = 0

    @precondition(lambda self: self.workers.keys() - self.started)
    @rule()
    def all_get_ready(self) -> None:
        for worker in self.workers.keys() - self.started:
            self.get_ready(worker)

    @precondition(lambda self: self.workers)
    @rule(which=st.integers(1, 63), replaced=st.booleans() | st.just(True))
    def lose_workers(self, which: int, replaced: bool) -> None:
        """One, several or all die at once; ``which``: a bit for each."""
        dead = [worker for position, worker in enumerate(sorted(self.workers)) if which >> position & 1]
        for worker in dead:
            self.lose_worker(worker, False)
        if replaced:
            self.add_workers(len(dead), True)
        self.settle()

    @rule(victim=st.integers(0, 5), times=st.integers(1, 25))
    def lose_workers_at_a_task(self, victim: int, times: int) -> None:
        """Until it is given up, and at what is tried of it then."""
        target: Task | None = None
        for _ in range(times):
            self.assign()
            self.listen()
            holders = {self.workers[worker][0]: worker for worker in self.working}
            if not holders:
                break
            if target not in holders:
                trials = [task for task in holders if isinstance(task.work, TrialWork)]
                target = (trials or list(holders))[victim % len(trials or holders)]
            self.lose_worker(holders[target], False)
            self.add_workers(1, True)
        self.settle()

    @rule()
    def tick(self) -> None:
        """A moment passes; who got nothing done for some of them is replaced."""
        self.scheduler.tick()
        for worker, tasks in self.workers.items():
            self.ticks[worker] = self.ticks[worker] + 1 if tasks or worker not in self.started else 0
        limits = {worker: _STALL_TICKS if worker in self.started else _START_TICKS for worker in self.workers}
        stalled = self.scheduler.stalled(_STALL_TICKS, _START_TICKS)
        assert stalled == [worker for worker in self.workers if self.ticks[worker] >= limits[worker]]
        for worker in stalled:
            self.lose_worker(worker, True)
            self.add_workers(1, True)
        self.settle()

    def lose_worker(self, worker: int, stalled: bool) -> None:
        tasks = self.workers.pop(worker)
        for task in tasks[: worker in self.started]:
            for consumer in self.consumers:
                if task.source is consumer.stream:
                    consumer.blame(task)
        self.scheduler.lose_worker(worker, "was lost", stalled)

    @property
    def working(self) -> list[int]:
        """Workers that are at a task."""
        return sorted(worker for worker, tasks in self.workers.items() if tasks and worker in self.started)

    @precondition(lambda self: self.working)
    @rule(which=st.integers(0, 5), failed=st.sampled_from([False, False, True]), faults=some_faults)
    def end_task(self, which: int, failed: bool, faults: list[int]) -> None:
        """The first task of a worker ends."""
        self.end_task_of(self.working[which % len(self.working)], failed, faults)

    @property
    def filling(self) -> list[int]:
        """Workers that decode batches, those with the most in front."""
        sizes = {worker: len(batches_of(self.workers[worker][0])) for worker in self.working}
        return sorted((worker for worker in sizes if sizes[worker]), key=lambda worker: -sizes[worker])

    @precondition(lambda self: self.filling)
    @rule()
    def fail_batches(self) -> None:
        self.end_task_of(self.filling[0], True, [])

    def end_task_of(self, worker: int, failed: bool, faults: list[int]) -> None:
        task = self.workers[worker].pop(0)
        self.ticks[worker] = 0
        error = ShardReadError("unreadable") if failed else None
        self.scheduler.end_task(worker, task.number, self.result_of(task, error, faults), error)
        self.settle()

    def result_of(self, task: Task, error: LoaderdError | None, faults: list[int]) -> object:
        if isinstance(task.work, IndexWork):
            return NO_RECORDS, None
        (consumer,) = [one for one in self.consumers if one.stream is task.source]
        return consumer.end(task, error is not None, faults)

    @rule(num_tasks=st.integers(1, 12))
    def work(self, num_tasks: int) -> None:
        """Some way on."""
        for number in range(num_tasks):
            self.assign()
            self.listen()
            if self.working:
                self.end_task(number, False, [])

    # -------------------------------------------------------------------------------------------- sources

    @rule(which=st.integers(0, 1), first_epoch=st.integers(0, 2), where=st.integers(0, 40) | st.just(0))
    def start(self, which: int, first_epoch: int, where: int) -> None:
        self.consumers[which].start(first_epoch, where)
        self.settle()

    @rule(which=st.integers(0, 1))
    def stop(self, which: int) -> None:
        self.consumers[which].stop()
        self.settle()

    @precondition(lambda self: any(consumer.lent for consumer in self.consumers))
    @rule(which=st.integers(0, 17) | st.none())
    def release(self, which: int | None) -> None:
        """A slot of either consumer, or all of both."""
        if which is None:
            for consumer in self.consumers:
                consumer.release(sorted(consumer.lent))
        else:
            lent = [(consumer, slot) for consumer in self.consumers for slot in sorted(consumer.lent)]
            consumer, slot = lent[which % len(lent)]
            consumer.release([slot])
        self.settle()

    @precondition(lambda self: self.index_pass is None)
    @rule(num_files=st.integers(1, 9))
    def index(self, num_files: int) -> None:
        files = [ShardFile(f"shard {number}", 100, 0) for number in range(num_files)]
        self.index_pass = IndexPass(files, IndexCache("none", 1024))
        self.scheduler.add_source(self.index_pass)
        self.settle()

    @precondition(lambda self: self.index_pass is not None)
    @rule()
    def drop_index_pass(self) -> None:
        """Before or behind its end: tasks of it may be with workers still."""
        assert self.index_pass is not None
        self.scheduler.remove_source(self.index_pass)
        self.index_pass = None

    # ----------------------------------------------------------------------------------- after each event

    @rule()
    def assign(self) -> None:
        for worker, task in self.scheduler.assign():
            assert task not in self.outstanding
            for consumer in self.consumers:
                if task.source is consumer.stream:
                    consumer.begin(task, [one for one in self.outstanding if one.source is consumer.stream])
            assert not isinstance(task.work, IndexWork) or task.source is self.index_pass, "of a source that is there"
            self.workers[worker].append(task)
        self.nothing_waits_without_need()

    @rule()
    def listen(self) -> None:
        for consumer in self.consumers:
            consumer.listen()

    def settle(self) -> None:
        """What the daemon does after each event; here it may be late, so that several events come together."""
        if self.eager:
            self.assign()
            self.listen()

    @property
    def outstanding(self) -> list[Task]:
        return [task for tasks in self.workers.values() for task in tasks]

    def nothing_waits_without_need(self) -> None:
        """Whoever waits, waits for a worker, or for the consumer to give a slot back."""
        ready = [tasks for worker, tasks in self.workers.items() if self.scheduler.is_ready(worker)]
        if not any(len(tasks) < TASKS_PER_WORKER for tasks in ready):
            return
        for consumer in self.consumers:
            consumer.listen()
            begun = any(task.source is consumer.stream for task in self.outstanding)
            assert consumer.ended or begun or consumer.lent, "no event will ever come"
        if self.index_pass is not None and not self.index_pass.finished:
            assert any(task.source is self.index_pass for task in self.outstanding)

    @invariant()
    def the_scheduler_knows_what_each_worker_has(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for worker, tasks in self.workers.items():
            assert self.scheduler.tasks_of(worker) == tasks and len(tasks) <= TASKS_PER_WORKER
        numbers = [task.number for task in self.outstanding]
        assert len(set(numbers)) == len(numbers)
        assert [self.scheduler.work_of(number) for number in numbers] == [task.work for task in self.outstanding]

    # ---------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.eager = True
            self.run_to_the_end()
            self.everything_is_free_again()

    def run_to_the_end(self) -> None:
        """From any state everything comes to its end if workers work and consumers give back what they get."""
        self.add_workers(1, False)
        self.all_get_ready()
        last_steps = [one.generation >= 0 and one.next_step + _STEPS_OF_AN_ENDLESS_PASS for one in self.consumers]
        self.settle()
        turn = 0
        while not all(
            consumer.ended or (consumer.epochs is None and consumer.next_step >= last_step)
            for consumer, last_step in zip(self.consumers, last_steps, strict=True)
        ):
            self.release(None)
            if self.outstanding:
                self.end_task(turn, False, [])
            turn += 1
            assert turn < _MOST_TURNS, "it comes to its end"

    def everything_is_free_again(self) -> None:
        for consumer in self.consumers:
            consumer.stop()
        self.release(None)
        while self.outstanding:
            self.end_task(0, False, [])
        if self.index_pass is not None:
            assert self.index_pass.finished and self.index_pass.done_bytes == self.index_pass.total_bytes
        for consumer in self.consumers:
            assert sorted(consumer.stream._free_slots) == list(range(consumer.num_slots))
            assert sorted(consumer.stream._windows._free_arenas) == list(range(consumer.num_arenas))


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
