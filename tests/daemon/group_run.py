"""Members of a group, and the stream that they share: without processes.

It is worked at when it is told to, in any order. It knows what is in each slot and who reads it, and raises
AssertionError where somebody writes there or gets what is not there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection

import numpy as np

from loaderd.client.page_consumer import PageConsumer
from loaderd.daemon.delivery.consumers import Consumers
from loaderd.daemon.pool.tasks import Task
from loaderd.errors import ShardReadError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import FillFailed, UseColumn
from loaderd.plan.passes import Pass, PassPlan
from loaderd.shm.page import Page, column_words_of, new_bell, words_of
from loaderd.worker.page_producer import Claim
from tests.daemon.page_workers import PageWorker, answer_to, free_arenas, plan_of, stream_of

STEPS = 6
BATCH_SIZE = 2
_NUM_ARENAS = 3
NUM_WORKERS = 2
_MOST_LOADS = 2


class Member:
    """A member's end of the page. ``step``: the batch that it takes next; None: it has asked for none."""

    def __init__(self, group: Group, number: int) -> None:
        self.number = number
        self.generation = 0
        self.epoch = 0
        self.step: int | None = None
        self.got: list[int] = []
        self.kept: dict[int, tuple[int, int]] = {}
        """What is in the slots that it has: (epoch, step)."""
        self.unread: deque[BatchFailed] = deque()
        self._group = group
        self.column = group.consumers.join(number)
        self.memory = group.columns[self.column]
        own = self.memory.data.cast("q")
        fds = [group.bells[self.column], group.daemon_bell, *group.seat_bells]
        self.page_consumer = PageConsumer(group.member_page, fds, self.column, own)

    def start(self, step: int = 0, epoch: int = 0) -> None:
        self.generation += 1
        self.epoch, self.step = epoch, step
        self.page_consumer.begin(self.generation, step)
        self._group.consumers.start(self.number, self.generation, Pass(epoch, 1), step)

    def take(self) -> bool:
        """Take the next batch; False: it is not there, or the pass is over."""
        while self.page_consumer.has_news:
            self.page_consumer.noted()
            self.page_consumer.failed(self.unread.popleft())
        if self.step is None or not self.page_consumer.can_take:
            return False
        assert self.page_consumer.step == self.step < self._group.num_steps, "no batch is missed, none comes twice"
        item = self.page_consumer.take()
        assert isinstance(item, BatchFailed) == (self.step in self._group.broken)
        if not isinstance(item, BatchFailed):
            assert item[0] not in self.kept and item[1] == BATCH_SIZE
            self.kept[item[0]] = self.epoch, self.step
            self.check()
        self.got.append(self.step)
        self.step += 1
        if self.step == self._group.num_steps:
            self.epoch, self.step = self.epoch + 1, None
        return True

    def check(self) -> None:
        """What is in its slots stays there."""
        assert {slot: self._group.contents.get(slot) for slot in self.kept} == self.kept

    def release(self, most: int = 1000) -> None:
        for slot in list(self.kept)[:most]:
            self.check()
            del self.kept[slot]
            self.page_consumer.release(slot)


class Group:
    """A stream of ``num_steps`` batches a pass, and up to so many members.

    ``num_slots``: of all. Batches in ``broken`` cannot be made.
    """

    def __init__(
        self, num_members: int, *, num_slots: int = 0, num_steps: int = STEPS, broken: Collection[int] = ()
    ) -> None:
        self.num_members, self.num_steps, self.broken = num_members, num_steps, broken
        self.num_slots = num_slots or 4 * num_members
        self.fills = 0
        memory = np.zeros(8 * words_of(self.num_slots, NUM_WORKERS, num_members), np.uint8)
        self.columns = [np.zeros(8 * column_words_of(self.num_slots), np.uint8) for _ in range(num_members)]
        self.page = Page(memory, self.num_slots, NUM_WORKERS, num_members, self.columns)
        read_only = memory.view()
        read_only.flags.writeable = False
        self.member_page = Page(read_only, self.num_slots, NUM_WORKERS, num_members)
        self.stream = stream_of(self._plan_pass, self.page, num_arenas=_NUM_ARENAS)
        self.bells = [new_bell() for _ in range(num_members)]
        self.daemon_bell, *self.seat_bells = [new_bell() for _ in range(1 + NUM_WORKERS)]
        self.consumers = Consumers(self.stream, self.bells, self._renew_column)
        self.members: dict[int, Member] = {}
        self.contents: dict[int, tuple[int, int] | None] = {}
        self._epochs: dict[int, int] = {}
        """Of each generation."""
        self._plans: dict[PassPlan, int] = {}
        pages = [Page(memory, self.num_slots, NUM_WORKERS, num_members, self.columns) for _ in range(NUM_WORKERS)]
        self._workers = [PageWorker(page, seat, 0, self.bells) for seat, page in enumerate(pages)]
        self._jobs: list[Task | tuple[PageWorker, Claim]] = []

    def close(self) -> None:
        for bell in (*self.bells, self.daemon_bell, *self.seat_bells):
            os.close(bell)

    def _renew_column(self, column: int) -> None:
        self.columns[column] = np.zeros_like(self.columns[column])
        self.page.use_column(column, self.columns[column])
        for seat, worker in enumerate(self._workers):
            self.page.add_news(seat)
            worker.tell(UseColumn(0, column), self.columns[column])

    def _plan_pass(self, pass_: Pass) -> PassPlan:
        sizes = BATCH_SIZE * self.num_steps, BATCH_SIZE, 4
        plan = plan_of(*sizes, block_records=BATCH_SIZE, first_epoch=pass_.first_epoch)
        self._plans[plan] = pass_.first_epoch
        return plan

    # ------------------------------------------------------------------------------------------ members

    def join(self, number: int) -> Member:
        self.members[number] = Member(self, number)
        return self.members[number]

    def leave(self, number: int, hangs_up: bool = True) -> Member:
        member = self.members.pop(number)
        self.consumers.leave(number)
        if hangs_up:
            self.hang_up(member)
        return member

    def hang_up(self, member: Member) -> None:
        member.check()
        self.consumers.give_back_all(member.number)

    def begin(self, *numbers: int) -> None:
        """These join and start."""
        for number in numbers:
            self.join(number).start()

    def go(self, *taking: int, keep: bool = False) -> None:
        """Until nothing more happens; these members take what there is, and give it back unless they ``keep`` it."""
        while True:
            self.work()
            taken = [self.members[number].take() for number in taking]
            for number in () if keep else taking:
                self.members[number].release()
            if not any(taken):
                return

    # ------------------------------------------------------------------------------- daemon and workers

    def listen(self) -> None:
        """What a session does when the daemon is awake."""
        stream = self.stream
        stream.look()
        for number, note in self.consumers.take():
            assert isinstance(note, BatchFailed)
            self.page.add_consumer_news(self.members[number].column)
            self.members[number].unread.append(note)
        if stream.plan is not None:
            self._epochs[stream.generation] = self._plans[stream.plan]
        while stream.grants:
            item = stream.grants.popleft()
            for seat, worker in enumerate(self._workers):
                self.page.add_news(seat)
                worker.tell(item)

    def work(self, num_jobs: int = 1000, turn: int = 0) -> None:
        """Do so many jobs, or what there is; ``turn``: which of those that are begun."""
        for _ in range(num_jobs):
            if self.is_idle():
                return
            self._end(self._jobs.pop(turn % len(self._jobs)))

    def is_idle(self) -> bool:
        """Have the workers begin what they can begin; whether there is nothing."""
        self.listen()
        while sum(isinstance(job, Task) for job in self._jobs) < _MOST_LOADS and (task := self.stream.next_task()):
            self._jobs.append(task)
        busy = [job[0] for job in self._jobs if isinstance(job, tuple)]
        for worker in self._workers:
            if worker not in busy and (claim := worker.claim()) is not None:
                self._begin_writing(claim)
                self._jobs.append((worker, claim))
        return not self._jobs

    def begin_batch(self) -> tuple[PageWorker, Claim]:
        """Do all that comes before the first batch; the worker that is at it, and what it has claimed."""
        while True:
            self.is_idle()
            for job in [*self._jobs]:
                self._jobs.remove(job)
                if not isinstance(job, Task):
                    return job
                self._end(job)

    def _begin_writing(self, claim: Claim) -> None:
        self.contents[claim.slot] = None
        for member in self.members.values():
            member.check()

    def _end(self, job: Task | tuple[PageWorker, Claim]) -> None:
        if isinstance(job, Task):
            self.stream.done(job, answer_to(job))
            return
        worker, claim = job
        generation, step = claim.place
        if step in self.broken:
            worker.filler.not_made(claim)
            self.stream.not_made(FillFailed(0, generation, step, [], {}, True, ShardReadError("unreadable")))
            return
        self._begin_writing(claim)
        self.fills += 1
        self.contents[claim.slot] = self._epochs[generation], step
        worker.filler.made(claim)

    def everything_is_free(self) -> None:
        """All have left, and so the stream has all. It is the end of it."""
        assert not self.members
        while self._jobs:
            self._end(self._jobs.pop())
        assert self.is_idle(), "nothing happens behind the end"
        assert all(self.page.is_free(slot) for slot in range(self.num_slots))
        assert free_arenas(self.stream) == list(range(_NUM_ARENAS))
