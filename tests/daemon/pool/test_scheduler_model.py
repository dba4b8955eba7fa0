"""The worker manager with several sources, in any order of events, held to what must be true whatever happens.

Two streams and index passes share workers that end what they are at well, badly, or not at all, and the model sees
what the workers see, which batches they claim and what tasks they are given, and what is said to each consumer (see
``consumer_model``). At the end of each example everything is let run to its end, and then each batch must have come,
and each slot and arena be free.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.daemon.indexing.index_pass import IndexPass
from loaderd.daemon.pool.tasks import TASKS_PER_WORKER, Task
from loaderd.errors import ShardReadError
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import ShardIndex, encode_indexes
from loaderd.ipc.worker_messages import NO_STREAM, IndexResult, IndexTask
from loaderd.shm.page import step_of
from loaderd.storage.shard_file import ShardFile
from tests.daemon.consumer_model import MOST_WORKERS, Consumer
from tests.daemon.page_workers import free_arenas
from tests.daemon.worker_manager_run import Crew, Hand, Job


def no_records(file: ShardFile) -> ShardIndex:
    return ShardIndex(file, "none", 0, (), *[np.zeros(0, np.uint8)] * 5)


_STEPS_OF_AN_ENDLESS_PASS = 20
_MOST_TURNS = 5000
_STALL_TIMEOUT_S = 8.0
_STALL_TICKS, _START_TICKS = 8, 60

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


class SchedulerMachine(RuleBasedStateMachine):
    """Workers, two consumers, and now and then an index pass.

    ``eager``: the daemon and the workers do at once what they can do; and only if something wakes them. Else several
    events come together.
    """

    @initialize(first=sizes, second=sizes, num_workers=st.integers(1, 3), eager=st.booleans())
    def set_up(self, first, second, num_workers: int, eager: bool) -> None:
        self.crew = Crew(_STALL_TIMEOUT_S)
        self.scheduler = self.crew.worker_manager.scheduler
        self.consumers = [Consumer(self.crew, **first), Consumer(self.crew, **second)]
        self.index_pass: IndexPass | None = None
        self.eager = eager
        self.ticks: Counter[int] = Counter()
        self.seen: dict[int, Job | None] = {}
        self.waits: dict[int, dict[Any, int]] = {}
        self.add_workers(num_workers, True)
        for consumer in self.consumers:
            consumer.start(0, 0)
        self.settle(True)

    # ------------------------------------------------------------------------------------------ workers

    @precondition(lambda self: len(self.crew.hands) < MOST_WORKERS)
    @rule(number=st.integers(1, 3), ready=st.booleans())
    def add_workers(self, number: int, ready: bool) -> None:
        self.crew.start(min(number, MOST_WORKERS - len(self.crew.hands)))
        if ready:
            self.all_get_ready()

    @rule()
    def all_get_ready(self) -> None:
        for hand in self.crew.hands.values():
            if not hand.started:
                hand.start()
        self.settle()

    @rule(which=st.integers(1, 15), ready=st.booleans() | st.just(True))
    def lose_workers(self, which: int, ready: bool) -> None:
        """One, several or all die at once; ``which``: a bit for each."""
        for position, hand in enumerate(list(self.crew.hands.values())):
            if which >> position & 1:
                self.lose(hand)
        if ready:
            self.all_get_ready()
        self.settle(True)

    @rule(victim=st.integers(0, 5), times=st.integers(1, 25))
    def lose_workers_at_a_job(self, victim: int, times: int) -> None:
        """Until it is given up, and at what is tried of it then."""
        target: Any = None
        for _ in range(times):
            self.listen()
            self.begin(15, True)
            holders = {name_of(hand): hand for hand in self.working}
            if not holders:
                break
            if target not in holders:
                target = list(holders)[victim % len(holders)]
            self.lose(holders[target])
            self.all_get_ready()
        self.settle(True)

    def lose(self, hand: Hand) -> None:
        # What a worker keeps a slot for, it tells nobody; the page shows it as a claim like others.
        keeps_slots = any(filler._parked for filler in hand.fillers.values())
        deaths = {task: task.deaths for task in self.scheduler.tasks_of(hand.number)}
        at = None if hand.job is None else hand.job.task
        self.crew.kill(hand.number)
        self.error_context(hand, False)
        for task, before in deaths.items():
            # Of one that is no stream's, nobody sees whether it is begun.
            may_be = isinstance(task.work, IndexTask) and (hand.job is None or not self.is_wanted(hand.job))
            # And of one who keeps a slot for a batch, it may look as if he were at that.
            must_be = task is at and not keeps_slots
            assert before + must_be <= task.deaths <= before + (task is at or may_be), "who is at it is blamed"

    def error_context(self, hand: Hand, stalled: bool) -> None:
        if hand.job is not None and hand.job.stream != NO_STREAM:
            self.consumers[hand.job.stream].error_context(hand.job, stalled)
        for stream, filler in hand.fillers.items():
            self.consumers[stream].losses.update(map(step_of, filler._parked))

    def is_wanted(self, job: Job) -> bool:
        """Whether it is a task, or a batch that a consumer still waits for."""
        return job.claim is None or job.claim.place[0] == self.consumers[job.stream].generation

    @rule(times=st.sampled_from([1, 4, _STALL_TICKS, _STALL_TICKS + 1, _START_TICKS]))
    def tick(self, times: int) -> None:
        """Moments pass; who got nothing done for some of them is replaced."""
        for _ in range(times):
            self.listen()
            self.tick_once()
        self.settle(True)

    def tick_once(self) -> None:
        """Who is at something for so long must be found.

        And nobody else but those who have been given something and have not begun, or are at what nobody waits for.
        """
        hands = self.crew.hands
        must, may = set(), set()
        for number, hand in hands.items():
            is_ready, before = self.scheduler.is_ready(number), self.seen.get(number)
            self.seen[number] = hand.job
            has_waited = self.has_waited(number)
            goes_on = is_ready and (hand.job is None or hand.job is not before)
            self.ticks[number] = 0 if goes_on else self.ticks[number] + 1
            is_late = self.ticks[number] >= (_STALL_TICKS if is_ready else _START_TICKS)
            if is_late and (hand.job is None or self.is_wanted(hand.job)):
                must.add(number)
            elif is_late or has_waited:
                may.add(number)
        stalled = set(self.crew.tick())
        assert must <= stalled <= must | may
        for number in stalled:
            self.error_context(hands[number], True)

    def has_waited(self, number: int) -> bool:
        """Whether there has been the same for a worker to do for so many ticks: a task, or a batch that is due."""
        due = [(stream, one.is_due_at(self.crew.hands[number].seat)) for stream, one in enumerate(self.consumers)]
        things = [*self.scheduler.tasks_of(number)[:1], *[(stream, key) for stream, key in due if key]]
        before = self.waits.get(number, {})
        self.waits[number] = {thing: before.get(thing, -1) + 1 for thing in things}
        return any(ticks >= _STALL_TICKS for ticks in self.waits[number].values())

    @property
    def working(self) -> list[Hand]:
        """Workers that are at something."""
        return [hand for hand in self.crew.hands.values() if hand.job is not None]

    @rule(which=st.integers(1, 15), reads=st.booleans())
    def begin(self, which: int, reads: bool) -> None:
        """Workers who are at nothing begin with something, if they know of something."""
        for position, hand in enumerate(self.crew.hands.values()):
            if hand.job is None and which >> position & 1:
                others = [other.job for other in self.working]
                hand.begin(reads)
                if hand.job is not None and hand.job.claim is not None:
                    stream = hand.job.stream
                    claims = [job.claim for job in others if job and job.claim and job.stream == stream]
                    self.consumers[stream].begin_batch(hand.job.claim, claims)

    @precondition(lambda self: self.working)
    @rule(which=st.integers(0, 5), failed=st.sampled_from([False, False, True]), faults=some_faults)
    def end(self, which: int, failed: bool, faults: list[int]) -> None:
        """A worker is done."""
        self.end_job(self.working[which % len(self.working)], failed, faults)

    @precondition(lambda self: any(hand.job.claim for hand in self.working))
    @rule(which=st.integers(0, 5))
    def fail_batch(self, which: int) -> None:
        making = [hand for hand in self.working if hand.job is not None and hand.job.claim is not None]
        self.end_job(making[which % len(making)], True, [])

    def end_job(self, hand: Hand, failed: bool, faults: list[int]) -> None:
        job = hand.job
        assert job is not None
        if job.stream != NO_STREAM:
            answer = self.consumers[job.stream].end(job, failed, faults)
        else:
            assert job.task is not None and isinstance(job.task.work, IndexTask)
            encoded = encode_indexes([no_records(file) for file in job.task.work.group])
            answer = IndexResult(encoded, None, [0] * 5)
        hand.end(answer, ShardReadError("unreadable") if failed else None)
        self.settle()

    @rule(num_jobs=st.integers(1, 12))
    def work(self, num_jobs: int) -> None:
        """Some way on."""
        for number in range(num_jobs):
            self.listen()
            self.begin(15, True)
            if self.working:
                self.end(number, False, [])

    # -------------------------------------------------------------------------------------------- sources

    @rule(which=st.integers(0, 1), first_epoch=st.integers(0, 2), where=st.integers(0, 40) | st.just(0))
    def start(self, which: int, first_epoch: int, where: int) -> None:
        self.consumers[which].start(first_epoch, where)
        self.settle(True)

    @rule(which=st.integers(0, 1))
    def stop(self, which: int) -> None:
        self.consumers[which].stop()
        self.settle(True)

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
        self.settle(True)

    @precondition(lambda self: self.index_pass is None)
    @rule(num_files=st.integers(1, 9))
    def index(self, num_files: int) -> None:
        files = [ShardFile(f"shard {number}", 1_000_000, 0) for number in range(num_files)]
        self.index_pass = IndexPass(files, IndexCache("none", 1024))
        self.crew.add_source(self.index_pass)
        self.settle(True)

    @precondition(lambda self: self.index_pass is not None)
    @rule()
    def drop_index_pass(self) -> None:
        """Before or behind its end: tasks of it may be with workers still."""
        assert self.index_pass is not None
        self.crew.worker_manager.scheduler.remove_source(self.index_pass)
        self.index_pass = None

    # ----------------------------------------------------------------------------------- after each event

    @rule()
    def listen(self) -> None:
        """What the daemon does when it is woken, or when a moment has passed."""
        self.crew.hear()
        self.go_on()

    def go_on(self) -> None:
        for consumer in self.consumers:
            consumer.listen()
        others = self.outstanding
        for task in self.crew.assign():
            assert task not in others
            for consumer in self.consumers:
                if task.source is consumer.stream:
                    consumer.begin_load(task, [one for one in others if one.source is consumer.stream])
            assert not isinstance(task.work, IndexTask) or task.source is self.index_pass, "of a source that is there"
            others.append(task)

    def settle(self, daemon_is_awake: bool = False) -> None:
        """Have everybody do what there is to do."""
        if not self.eager:
            return
        self.begin(15, True)
        while self.crew.hear() or daemon_is_awake:
            daemon_is_awake = False
            self.go_on()
            self.begin(15, True)
        self.nobody_waits_without_need()

    @property
    def outstanding(self) -> list[Task]:
        return [task for number in self.crew.hands for task in self.scheduler.tasks_of(number)]

    def nobody_waits_without_need(self) -> None:
        """Whoever waits, waits for a worker, or for the consumer to give a slot back."""
        idle = [hand for hand in self.crew.hands.values() if hand.started and hand.job is None]
        for hand in idle:
            assert not self.scheduler.tasks_of(hand.number)
            assert not hand.overlooked(), "nobody sleeps who could work"
        if not idle or not all(hand.started for hand in self.crew.hands.values()):
            return
        for stream, consumer in enumerate(self.consumers):
            begun = any(hand.job and hand.job.stream == stream for hand in self.working)
            begun = begun or any(task.source is consumer.stream for task in self.outstanding)
            page = consumer.page
            kept = any(page.is_free(slot) for hand in self.working for slot in page.slots_of(hand.seat))
            assert consumer.ended or consumer.lent or begun or kept, "no event will ever come"
        if self.index_pass is not None and not self.index_pass.finished:
            assert any(task.source is self.index_pass for task in self.outstanding)

    @invariant()
    def the_scheduler_knows_what_each_worker_has(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for number, hand in self.crew.hands.items():
            tasks = self.scheduler.tasks_of(number)
            assert [task.number for task in tasks] == hand.task_numbers() and len(tasks) <= TASKS_PER_WORKER
        numbers = [task.number for task in self.outstanding]
        assert len(set(numbers)) == len(numbers)

    # ---------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if hasattr(self, "crew"):
            try:
                self.eager = True
                self.run_to_the_end()
                self.everything_is_free_again()
            finally:
                self.crew.close()

    def run_to_the_end(self) -> None:
        """From any state everything comes to its end if workers work and consumers give back what they get."""
        if len(self.crew.hands) < MOST_WORKERS:
            self.add_workers(1, False)
        self.settle(True)
        self.all_get_ready()
        last_steps = [one.generation >= 0 and one.next_step + _STEPS_OF_AN_ENDLESS_PASS for one in self.consumers]
        turn = 0
        while not all(
            consumer.ended or (consumer.epochs is None and consumer.next_step >= last_step)
            for consumer, last_step in zip(self.consumers, last_steps, strict=True)
        ):
            if any(consumer.lent for consumer in self.consumers):
                self.release(None)
            if self.working:
                self.end(turn, False, [])
            turn += 1
            assert turn < _MOST_TURNS, "it comes to its end"

    def everything_is_free_again(self) -> None:
        for consumer in self.consumers:
            consumer.stop()
            consumer.release(sorted(consumer.lent))
        self.settle(True)
        while self.working:
            self.end(0, False, [])
        if self.index_pass is not None:
            assert self.index_pass.finished and self.index_pass.done_bytes == self.index_pass.total_bytes
        assert not self.outstanding
        for consumer in self.consumers:
            assert all(consumer.page.is_free(slot) for slot in range(consumer.page.num_slots))
            assert free_arenas(consumer.stream) == list(range(consumer.num_arenas))


def name_of(hand: Hand) -> Any:
    """What a worker is at, whichever worker it is."""
    assert hand.job is not None
    return hand.job.task or (hand.job.stream, hand.job.claim and hand.job.claim.key)


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
