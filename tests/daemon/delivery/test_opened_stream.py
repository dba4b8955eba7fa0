"""What the consumers and the workers are told of a stream, and in which order."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from loaderd.client.page_consumer import PageConsumer
from loaderd.daemon.delivery import stream as delivery_stream
from loaderd.daemon.delivery.notes import Note
from loaderd.errors import CorruptRecordError
from loaderd.ipc.worker_messages import BlockSelection, FilePlace, Granted, LoadFault, LoadTask
from loaderd.plan.passes import Pass
from loaderd.plan.sampling import BlockDraw, Circle
from loaderd.shm.page import key_of, new_bell
from loaderd.storage.shard_file import Block
from tests.daemon.page_workers import answer_to, new_page, plan_of, stream_of
from tests.daemon.stream_run import Run
from tests.daemon.worker_manager_run import Crew
from tests.helpers.bells import was_rung


@pytest.mark.parametrize("loses", [True, False])
def test_consumers_hear_what_a_batch_lacks_before_a_worker_may_make_it(loses: bool):
    """Also where what was granted is told early, as a worker is lost: another one could make it at once."""
    crew = Crew()
    stream = stream_of(plan_of(40, 10, 40), new_page(8, 2), skip_damaged=True)
    heard: list[Note] = []

    def granted() -> set[int]:
        """The batches that somebody may make."""
        told = [
            message for inbox in crew.event_loop.inboxes.values() for message in inbox if isinstance(message, Granted)
        ]
        return {step for message in told for one in message.ranges for step in range(one.first, one.stop)}

    def tell_consumers() -> None:
        while stream.notes:
            heard.append(stream.notes.popleft())
            assert heard[-1].step not in granted()

    opened = crew.attach(stream, tell_consumers)
    crew.start(2)
    for hand in crew.hands.values():
        hand.start()
    crew.hear()
    stream.start(1, Pass(0, 1), 0)
    opened.say()
    while crew.assign():
        for hand in crew.hands.values():
            hand.begin()
            while hand.job is not None and hand.job.task is not None:
                fault = LoadFault((13,), CorruptRecordError("it is damaged"))
                hand.end(answer_to(hand.job.task, [fault]))
                hand.begin()
        crew.hear()
    stream.look()
    assert not heard and not granted()
    crew.kill(next(iter(crew.hands))) if loses else opened.say()
    assert [note.step for note in heard] == [1] and granted() == {0, 1, 2, 3}
    crew.close()


class Damaged:
    """A stream of one window, all loaded, and its consumer; ``every``: which of the records of a task are damaged."""

    def __init__(self, num_records: int, batch_size: int, num_slots: int, every: int, skip_damaged: bool) -> None:
        plan = plan_of(num_records, batch_size, num_records, block_records=64)
        self.stream = stream_of(plan, page := new_page(num_slots, 2), skip_damaged=skip_damaged)
        self._bell = new_bell()
        self._consumer = PageConsumer(page, [self._bell, self._bell])
        self._consumer.begin(1, 0)
        page.start_at(0, key_of(1, 0), 1)
        assert not self._consumer.has_batch()
        self.stream.start(1, Pass(0, 1), 0)
        while (task := self.stream.next_task()) is not None:
            assert isinstance(task.work, LoadTask)
            rows = [row for part in task.work.slices for row in range(part.row, part.row + part.stop - part.first)]
            faults = [LoadFault((row,), CorruptRecordError("no")) for row in rows[::every]]
            self.stream.done(task, answer_to(task, faults))

    def pass_over(self, num_batches: int, most_ahead: int) -> None:
        """Take so many batches, and see that no more is said ahead of them."""
        for step in range(num_batches):
            if was_rung(self._bell):
                self.stream.look()
            assert step < len(self.stream.notes) <= step + most_ahead
            self._consumer.skip()
        os.close(self._bell)


def test_no_load_has_more_weights_than_a_message_holds(monkeypatch: pytest.MonkeyPatch):
    run = Run(80, 10, 80)
    draw = BlockDraw(Circle(0, 1, 1, 0, 1), 0, 0, 1, 0, np.zeros(50, np.uint16))
    place = FilePlace(Block(0, 0, 0, 50, 0, b""), BlockSelection(0, 50, [], draw), 0)
    data: Any = run.stream.data
    data.places = lambda slices, seed: iter([place] * len(slices))
    for most, expected in ((200, {2}), (99, {1})):
        monkeypatch.setattr(delivery_stream, "_MOST_WEIGHT_BYTES", most)
        run.tasks.clear()
        run.start(most, 0)
        assert len(run.to_the_end()) == 8
        loads = [task.work for task in run.tasks if isinstance(task.work, LoadTask) and task.generation == most]
        assert {len(load.slices) for load in loads} == expected == {len(load.places) for load in loads}
        assert sorted(part.block for load in loads for part in load.slices) == [*range(8)]


def test_what_damaged_batches_lack_is_said_no_further_ahead_than_they_can_be_made():
    """At one go, what is wrong with a window took the daemon seconds, and more of a socket than a server allows."""
    num_slots = 8
    damaged = Damaged(1 << 18, 64, num_slots, every=3, skip_damaged=True)
    began_s = time.thread_time()
    damaged.stream.look()
    assert time.thread_time() - began_s < 1
    damaged.pass_over(1000, num_slots + 1)


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_damages_that_are_named_ahead_are_no_more_than_may_lie_unread(skip_damaged: bool):
    """A server sends away who lets 4 MiB lie unread, and a damage is up to 680 bytes of a message."""
    num_records, batch_size = 1 << 16, 2048
    damaged = Damaged(num_records, batch_size, 20, every=1, skip_damaged=skip_damaged)
    damaged.stream.look()
    damaged.pass_over(num_records // batch_size, 2)
