"""A group's stream: the daemon takes the batches of its page, to hand them to the members (see ``lane``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from loaderd.daemon.delivery.outgoing import BrokenBatch, Delivery, Omission, Outgoing, PassEnd
from loaderd.daemon.delivery.stream import Stream
from loaderd.memory.taking import Taker
from loaderd.plan.passes import Pass, PassPlan


class Feed:
    """What there is for the members lies in ``outbox``, in the order of the batches. Each slot there is lent."""

    def __init__(self, stream: Stream, taker: Taker) -> None:
        self.outbox: deque[Outgoing] = deque()
        self._stream = stream
        self._taker = taker
        self._omissions: dict[int, Omission] = {}
        self._broken: dict[int, BrokenBatch] = {}
        self._ended = True

    @property
    def plan(self) -> PassPlan | None:
        """That of the pass under way."""
        return self._stream.plan

    @property
    def plan_pass(self) -> Callable[[Pass], PassPlan]:
        """Makes the plan of a pass."""
        return self._stream.plan_pass

    @property
    def num_slots(self) -> int:
        """Of the stream."""
        return self._stream.page.num_slots

    def start(self, generation: int, pass_: Pass, step: int) -> None:
        """Have a pass delivered from ``step`` on; all else is void."""
        self.stop()
        self._taker.begin(generation, step)
        self._stream.start(generation, pass_, step)
        self._ended = False
        self.collect()

    def stop(self) -> None:
        """Nothing happens until the next :meth:`start`. What was handed out stays lent."""
        self._stream.stop()
        for item in self.outbox:
            if isinstance(item, Delivery):  # which nobody will hear of
                self._taker.release(item.slot)
        self.outbox.clear()
        self._omissions.clear()
        self._broken.clear()
        self._ended = True
        self._taker.stop(self._stream.generation + 1)  # or the workers would go on until no slot is left

    def release(self, slots: list[int]) -> None:
        """Slots are given back; raises ValueError for one that is not lent."""
        for slot in slots:
            if slot not in self._taker.held:
                raise ValueError(f"slot {slot} is not lent")
            self._taker.release(slot)

    def collect(self) -> None:
        """Take what is there, and have the daemon woken when the next batch is."""
        for note in self._stream.notes:
            if isinstance(note, BrokenBatch):
                self._broken[note.step] = note
            else:
                self._omissions[note.step] = note
        self._stream.notes.clear()
        while not self._ended and self._collect_one():
            pass

    def _collect_one(self) -> bool:
        taker, plan = self._taker, self._stream.plan
        assert plan is not None
        step = taker.step
        if plan.num_steps is not None and step >= plan.num_steps:
            self._ended = True
            self.outbox.append(PassEnd())
        elif step in self._broken:
            self.outbox.append(self._broken.pop(step))
            taker.skip()
        elif taker.has_batch():
            slot, num_records = taker.take()
            self.outbox.append(Delivery(step, slot, num_records, self._omissions.pop(step, None)))
        elif taker.fall_asleep():
            return False
        return True
