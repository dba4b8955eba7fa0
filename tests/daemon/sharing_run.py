"""A stream that is worked at when it is told to, and that watches over its slots."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from loaderd.daemon.members import Handed, PassKey, key_of
from loaderd.daemon.outgoing import Delivery
from loaderd.daemon.stream import Stream
from loaderd.daemon.tasks import FillWork, Task
from loaderd.errors import ShardReadError
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import SetRows
from loaderd.plan.shares import HostShare, Rest

BATCH_SIZE = 2


class Workshop:
    """A stream, and workers that do its tasks in any order, and fail at the batches in ``broken``.

    It knows what is in each slot and who may read it, and raises AssertionError where somebody writes there or gets
    what is not there.
    """

    def __init__(self, num_steps: int, num_slots: int, broken: Collection[int] = ()) -> None:
        self.num_steps = num_steps
        self.num_slots = num_slots
        self.broken = broken
        self.fills = 0
        self.stream = Stream(
            self._plan_pass,
            num_slots=num_slots,
            num_arenas=3,
            num_workers=2,
            skip_damaged=False,
            blame=lambda records, error: error,
        )
        self.readers: dict[int, list[int]] = {}
        """By slot, the members that it is lent to."""
        self._passes: dict[PassPlan, Pass] = {}
        self._tasks: list[tuple[Task, PassKey]] = []
        self._contents: dict[int, tuple[PassKey, int]] = {}

    def _plan_pass(self, pass_: Pass) -> PassPlan:
        num_records = BATCH_SIZE * self.num_steps
        batches = BatchPlan(HostShare(Rest(num_records), 0, 1, 4), BATCH_SIZE, "short", 1)
        plan = PassPlan(SetRows(np.full(self.num_steps, BATCH_SIZE), 0, True), batches, 0, True, pass_.first_epoch)
        self._passes[plan] = pass_
        return plan

    # ------------------------------------------------------------------------------------------ workers

    def work(self, num_tasks: int = 1000, turn: int = 0) -> None:
        """Do so many tasks, or what there is; ``turn``: which of those that are begun."""
        for _ in range(num_tasks):
            self._begin()
            if not self._tasks:
                return
            self._end(*self._tasks.pop(turn % len(self._tasks)))

    def _begin(self) -> None:
        while len(self._tasks) < 3 and (task := self.stream.next_task()) is not None:
            assert self.stream.plan is not None
            self._tasks.append((task, key_of(self._passes[self.stream.plan])))
            for batch in task.work.batches if isinstance(task.work, FillWork) else ():
                assert not self.readers.get(batch.slot), "nobody reads what is overwritten"
                self._contents.pop(batch.slot, None)

    def _end(self, task: Task, key: PassKey) -> None:
        if not isinstance(task.work, FillWork):
            self.stream.done(task, [])
        elif any(batch.step in self.broken for batch in task.work.batches):
            self.stream.failed(task, ShardReadError("unreadable"))
        else:
            for batch in task.work.batches:
                self._contents[batch.slot] = key, batch.step
                self.fills += 1
            self.stream.done(task, None)

    # ---------------------------------------------------------------------------------------- consumers

    def lend(self, handed: Handed, pass_: Pass) -> None:
        """A member gets a batch of a pass."""
        assert isinstance(handed.item, Delivery)
        slot = handed.item.slot
        assert handed.member not in self.readers.setdefault(slot, []), "a member has a slot once"
        assert self._contents[slot] == (key_of(pass_), handed.item.step), "the batch is in the slot"
        self.readers[slot].append(handed.member)

    def everything_is_free(self) -> None:
        """Nobody has anything, and so the stream has all."""
        assert not any(self.readers.values())
        self.stream.stop()
        while self._tasks:
            self._end(*self._tasks.pop())
        assert sorted(self.stream._free_slots) == list(range(self.num_slots))
        assert not self.stream._lent
