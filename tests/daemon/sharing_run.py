"""A stream that is worked at when it is told to, and that watches over its slots."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection

import numpy as np

from loaderd.daemon.delivery.events import Delivery
from loaderd.daemon.delivery.grants import Withdrawal
from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.groups.feed import Feed
from loaderd.daemon.groups.members import Handed, Members, PassKey, key_of
from loaderd.daemon.pool.tasks import Task
from loaderd.errors import ShardReadError
from loaderd.ipc.worker_messages import FillFailed, Granted, Withdrawn
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare
from loaderd.shm.page import MAX_GENERATION, new_bell
from loaderd.shm.page_consumer import PageConsumer
from loaderd.worker.page_producer import Claim
from tests.daemon.page_workers import PageWorker, answer_to, free_arenas, new_page

BATCH_SIZE = 2
_NUM_ARENAS = 3
NUM_WORKERS = 2
_MOST_LOADS = 2


class Workshop:
    """A stream, and workers that load and make its batches in any order, and fail at the batches in ``broken``.

    It knows what is in each slot and who may read it, and raises AssertionError where somebody writes there or gets
    what is not there.
    """

    def __init__(self, num_steps: int, num_slots: int, broken: Collection[int] = ()) -> None:
        self.num_steps = num_steps
        self.num_slots = num_slots
        self.broken = broken
        self.fills = 0
        self.page = new_page(num_slots, NUM_WORKERS)
        self.stream = Stream(
            self._plan_pass,
            self.page,
            num_arenas=_NUM_ARENAS,
            num_workers=NUM_WORKERS,
            skip_damaged=False,
            error_context=lambda records, error, **_: error,
        )
        self.bell, *self.bells = [new_bell() for _ in range(1 + NUM_WORKERS)]
        self.close = weakref.finalize(self, _close, [self.bell, *self.bells])
        self._taker = PageConsumer(self.page, self.bell, self.bells)
        self.feed = Feed(self.stream, self._taker)
        self.readers: dict[int, list[int]] = {}
        """By slot, the members that it is lent to."""
        self._workers = [PageWorker(self.page, seat, 0, self.bell) for seat in range(NUM_WORKERS)]
        self._passes: dict[PassPlan, Pass] = {}
        self._keys: dict[int, PassKey] = {}
        """By generation, the pass that is granted in it."""
        self._jobs: list[Task | tuple[PageWorker, Claim]] = []
        self._contents: dict[int, tuple[PassKey, int]] = {}

    def _plan_pass(self, pass_: Pass) -> PassPlan:
        num_records = BATCH_SIZE * self.num_steps
        batches = BatchPlan(HostShare(EpochRemainder(num_records), 0, 1, 4), BATCH_SIZE, "short", 1)
        plan = PassPlan(
            DatasetRows(np.full(self.num_steps, BATCH_SIZE), 0, True), batches, 0, True, pass_.first_epoch
        )
        self._passes[plan] = pass_
        return plan

    # ---------------------------------------------------------------------------------------- the daemon

    def hand_over(self, members: Members) -> list[Handed]:
        """What the members get, and then the workers are told, in the order in which a session does it."""
        self.stream.look()
        self.feed.collect()
        handed = members.take()
        self._say_grants()
        return handed

    def _say_grants(self) -> None:
        stream = self.stream
        if stream.plan is not None:
            self._keys[stream.generation] = key_of(self._passes[stream.plan])
        while stream.grants:
            item = stream.grants.popleft()
            for seat, worker in enumerate(self._workers):
                self.page.add_news(seat)
                if isinstance(item, Withdrawal):
                    worker.tell(Withdrawn(0, stream.generation, item.step))
                else:
                    worker.tell(Granted(0, stream.generation, [grant.run for grant in item]))

    # ------------------------------------------------------------------------------------------ workers

    def work(self, num_jobs: int = 1000, turn: int = 0, collects: bool = True) -> None:
        """Do so many jobs, or what there is; ``turn``: which of those that are begun."""
        for _ in range(num_jobs):
            if self.is_idle(collects):
                return
            self._end(self._jobs.pop(turn % len(self._jobs)))

    def is_idle(self, collects: bool = True) -> bool:
        """Have the workers begin what they can begin; whether there is nothing. ``collects``: for the feed."""
        self.stream.look()
        if collects:
            self.feed.collect()
        self._say_grants()
        while self._num_loads < _MOST_LOADS and (task := self.stream.next_task()) is not None:
            self._jobs.append(task)
        busy = [job[0] for job in self._jobs if isinstance(job, tuple)]
        for worker in self._workers:
            if worker not in busy and (claim := worker.claim()) is not None:
                assert not self.readers.get(claim.slot), "nobody reads what is overwritten"
                self._contents.pop(claim.slot, None)
                self._jobs.append((worker, claim))
        return not self._jobs

    @property
    def _num_loads(self) -> int:
        return sum(isinstance(job, Task) for job in self._jobs)

    def _end(self, job: Task | tuple[PageWorker, Claim]) -> None:
        if isinstance(job, Task):
            self.stream.done(job, answer_to(job))
            return
        worker, claim = job
        generation, step = claim.place
        if step in self.broken:
            worker.filler.not_made(claim)
            self.stream.not_made(FillFailed(0, generation, step, [], [], True, ShardReadError("unreadable")))
            return
        assert not self.readers.get(claim.slot), "nobody reads what is overwritten"
        self.fills += 1
        self._contents[claim.slot] = self._keys[generation], step
        worker.filler.made(claim)

    # ---------------------------------------------------------------------------------------- consumers

    def lend(self, handed: Handed, pass_: Pass) -> None:
        """A member gets a batch of a pass."""
        assert isinstance(handed.item, Delivery)
        slot = handed.item.slot
        assert handed.member not in self.readers.setdefault(slot, []), "a member has a slot once"
        assert self._contents[slot] == (key_of(pass_), handed.item.step), "the batch is in the slot"
        self.readers[slot].append(handed.member)

    def everything_is_free(self) -> None:
        """Nobody has anything, and so the stream has all. It is the end of it."""
        assert not any(self.readers.values()) and not self._taker.held
        self.feed.stop()
        while self._jobs:
            self._end(self._jobs.pop())
        assert self.is_idle(), "nothing happens behind the end"
        self._taker.begin(MAX_GENERATION, 0)
        assert all(self.page.is_free(slot) for slot in range(self.num_slots))
        assert free_arenas(self.stream) == list(range(_NUM_ARENAS))
        self.close()


def _close(fds: Collection[int]) -> None:
    for fd in fds:
        os.close(fd)
