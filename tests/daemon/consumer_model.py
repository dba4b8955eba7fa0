"""A consumer of one stream in the model of the worker manager: what must hold for its batches, slots and arenas."""

from __future__ import annotations

from collections import Counter
from itertools import count

import numpy as np

from loaderd.daemon.pool.tasks import MAX_DEATHS, Task
from loaderd.errors import ShardReadError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import LoadFault, LoadTask
from loaderd.options import Remainder
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare
from loaderd.shm.page import POSITION, split_key
from loaderd.worker.page_producer import Claim
from tests.daemon.page_workers import Delivery, Taker, new_page, stream_of
from tests.daemon.worker_manager_run import Crew, Job

MOST_WORKERS = 4

Place = tuple[int, int]
"""(window, place in it, or row of it)."""


def rows_of(work: LoadTask) -> set[int]:
    """Rows of the window that a load brings."""
    return {row for part in work.slices for row in range(part.row, part.row + part.stop - part.first)}


class Consumer:
    """A stream, and what is seen of it from outside: where its slots and arenas are, which rows are loaded."""

    def __init__(
        self,
        crew: Crew,
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
            HostShare(EpochRemainder(num_records), 0, 1, window_records),
            min(batch_size, num_records),
            remainder,
            epochs,
        )
        rows = DatasetRows(np.array(blocks), 5, True)
        self.num_arenas = 2 + batch_size
        self.epochs = epochs
        self.skip_damaged = skip_damaged
        self.make_plan = lambda pass_: PassPlan(rows, batches, 5, True, pass_.first_epoch)
        self.page = new_page(num_slots, MOST_WORKERS)
        self.stream = stream_of(
            self.make_plan,
            self.page,
            num_arenas=self.num_arenas,
            num_workers=num_workers,
            skip_damaged=skip_damaged,
            number=len(crew.pages),
        )
        self.opened = crew.attach(self.stream)
        self.feed = Taker(self.stream, crew.worker_manager.bell, crew.pool.bells)
        self.taker = self.feed.consumer
        self.generations = count(1)
        self.lent: set[int] = set()
        self.arenas: dict[int, tuple[int, int]] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        self.stop()

    def stop(self) -> None:
        self.feed.stop()
        self.ended = True
        self.generation = -1

    def start(self, first_epoch: int, where: int) -> None:
        """A pass; what is known of an older one is void."""
        self.generation = next(self.generations)
        self.ended = False
        self.loaded: Counter[Place] = Counter()
        self.bad: set[Place] = set()
        self.failed: set[int] = set()
        self.losses: Counter[int] = Counter()
        """By step, how many workers the daemon may believe to have been lost there."""
        self.kills: Counter[int] = Counter()
        """And how many were, with the whole batch."""
        self.kills_alone: Counter[Place] = Counter()
        """And with a place of it alone."""
        self.stalls: set[int] = set()
        pass_ = Pass(first_epoch, self.epochs)
        self.plan = self.make_plan(pass_)
        self.next_step = where if self.plan.num_steps is None else where % (self.plan.num_steps + 1)
        self.feed.start(self.generation, pass_, self.next_step)

    # ---------------------------------------------------------------------------- what workers begin with

    def begin_load(self, task: Task, others: list[Task]) -> None:
        """A worker is given ``task``; ``others`` are those that workers have of this stream."""
        assert task.generation == self.generation and task.deaths < task.most_deaths
        work = task.work
        assert isinstance(work, LoadTask)
        window = (self.generation, work.window)
        users = [other for other in others if isinstance(other.work, LoadTask) and other.work.arena == work.arena]
        if self.arenas.get(work.arena) != window:
            assert not users, "nobody else writes to the arena of a new window"
            assert window not in self.arenas.values(), "a window has one arena"
            before = self.arenas.get(work.arena, (-1, 0))
            if before[0] == self.generation:
                assert not self.is_needed(before[1]), "no batch needs the window that was there"
            self.arenas[work.arena] = window
        for other in users:
            assert isinstance(other.work, LoadTask)
            assert not rows_of(other.work) & rows_of(work), "one place, one load"
        assert not any(self.loaded[work.window, row] for row in rows_of(work)), "a row is loaded once"

    def is_needed(self, window: int) -> bool:
        """Whether a batch reads from ``window`` that has not been taken, and will be."""
        _, taken = split_key(self.page.words[POSITION])
        for step in range(taken, self.plan.last_step_in(window) + 1):
            if window in {one.window for one in self.plan.segments_of(step)} and not self.is_broken(step):
                return True
        return False

    def is_due_at(self, seat: int) -> int:
        """The key of the batch that the consumer waits for, if nobody makes it and this worker could; or 0."""
        key: int = self.page.words[POSITION]
        keys = self.page.keys()
        could = key not in keys and any(self.page.is_free(slot) for slot in self.page.slots_of(seat))
        return key if could and self.stream.is_under_way(key) else 0

    def places_of(self, step: int) -> list[Place]:
        """What batch ``step`` is made of."""
        return [(one.window, place) for one in self.plan.segments_of(step) for place in range(one.start, one.stop)]

    def is_broken(self, step: int) -> bool:
        """Whether a batch must not come, for what is known of its rows."""
        bad = [place in self.bad for place in self.places_of(step)]
        return all(bad) if self.skip_damaged else any(bad)

    def begin_batch(self, claim: Claim, others: list[Claim]) -> None:
        """A worker has claimed a batch; ``others`` are those that workers are at, of this stream."""
        generation, step = claim.place
        assert generation == self.generation, "nobody begins what nobody wants"
        assert step >= self.next_step and not self.is_broken(step) and step not in self.failed
        assert self.kills[step] < 2 * MAX_DEATHS, "what kills for ever is given up"
        assert claim.slot not in self.lent and claim.slot not in [other.slot for other in others]
        assert self.slots.get(claim.slot, (-1, 0)) < (generation, self.next_step), "nobody needs what is in the slot"
        assert claim.key not in [other.key for other in others], "a batch is made by one worker"
        assert (generation, step) not in self.slots.values(), "a batch is made once"
        assert self.holds(claim)
        rows = [
            (one.window, row) for one in self.plan.segments_of(step) for row in range(self.plan.rows_of(one.window))
        ]
        assert all(self.loaded[row] for row in rows), "its windows are ready"
        bad = {row for row, place in enumerate(self.places_of(step)) if place in self.bad}
        assert set(claim.batch.omit) == bad, "what cannot be delivered is left out, and nothing else"
        self.slots.pop(claim.slot, None)

    def holds(self, claim: Claim) -> bool:
        """Whether the rows of a batch are where its worker looks for them."""
        planned = [((claim.place[0], one.window), one.start, one.stop) for one in self.plan.segments_of(claim.step)]
        return planned == [(self.arenas.get(arena), start, stop) for _, start, stop, arena in claim.batch.segments]

    # --------------------------------------------------------------------------------- what becomes of it

    def end(self, job: Job, failed: bool, faults: list[int]) -> list[LoadFault] | None:
        """A worker is to end a job; returns its answer to a task."""
        if job.task is not None:
            load = job.task.work
            assert isinstance(load, LoadTask)
            is_wanted = job.task.generation == self.generation
            return self.end_load(load, failed, faults) if is_wanted else []
        assert job.claim is not None
        generation, step = job.claim.place
        if generation == self.generation and failed:
            self.failed.add(step)
        elif generation == self.generation and self.holds(job.claim):
            self.slots[job.claim.slot] = generation, step
        return None

    def end_load(self, work: LoadTask, failed: bool, faults: list[int]) -> list[LoadFault]:
        rows = sorted(rows_of(work))
        self.loaded.update((work.window, row) for row in rows)
        wrong = rows if failed else sorted({rows[number % len(rows)] for number in faults})
        places = self.plan.order_of(work.window).places()
        self.bad |= {(work.window, int(places[row])) for row in wrong}
        return [LoadFault((int(places[row]),), ShardReadError("unreadable")) for row in wrong]

    def error_context(self, job: Job, stalled: bool) -> None:
        """A worker was lost at a job, and the daemon knows of it."""
        if job.claim is not None:
            generation, step = job.claim.place
            if generation == self.generation:
                self.losses[step] += 1
                self.stalls |= {step} if stalled else set()
                if job.suspect < 0:
                    self.kills[step] += 1
                if len(job.claim.batch.suspects_at(job.suspect)) != 1:
                    return
                place = self.places_of(step)[job.suspect]
                self.kills_alone[place] += 1
                if self.kills_alone[place] == MAX_DEATHS:
                    self.bad.add(place)
            return
        task = job.task
        assert task is not None
        if task.generation != self.generation:
            return
        if task.deaths < MAX_DEATHS:
            return
        if isinstance(task.work, LoadTask) and len(task.work.slices) == 1:
            self.end_load(task.work, True, [])

    # -------------------------------------------------------------------------------------- the consumer

    def listen(self) -> None:
        """What a session does when the daemon has heard something."""
        self.stream.look()
        while (item := self.feed.take()) is not None:
            assert not self.ended and item.step == self.next_step, "in order, none twice, none left out"
            self.next_step += 1
            self.take(item)
        if self.feed.ended and not self.ended:
            assert self.next_step == self.plan.num_steps
            self.ended = True
        self.opened.say()

    def take(self, item: Delivery | BatchFailed) -> None:
        places = self.places_of(item.step)
        bad = len(self.bad.intersection(places))
        if isinstance(item, BatchFailed):
            most = MAX_DEATHS if item.step in self.stalls and not self.skip_damaged else 2 * MAX_DEATHS
            is_deadly = self.losses[item.step] >= most
            assert self.is_broken(item.step) or is_deadly or item.step in self.failed, "it is broken for a reason"
            return
        assert self.slots.pop(item.slot) == (self.generation, item.step), "what is in the slot is the batch"
        assert item.slot not in self.lent
        skipped, errors = (item.omission.num_records, item.omission.errors) if item.omission else (0, ())
        assert item.num_records + skipped == len(places) and item.num_records
        assert skipped == bad and bool(errors) == bool(skipped) and (self.skip_damaged or not skipped)
        self.lent.add(item.slot)

    def release(self, slots: list[int]) -> None:
        self.lent.difference_update(slots)
        self.taker.release(*slots)
