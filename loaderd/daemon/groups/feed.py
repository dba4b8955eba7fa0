"""A group's stream: the daemon takes the batches of its page, to hand them to the members (see ``lane``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from loaderd.daemon.delivery.events import Delivery, FailedBatch, Omission, Outgoing, PassEnd
from loaderd.daemon.delivery.stream import Stream
from loaderd.plan.passes import Pass, PassPlan
from loaderd.shm.page_consumer import PageConsumer


class Feed:
    """``outbox`` holds what there is for the members, in the order of the batches.

    A slot whose batch has left the outbox has **holders**: members, by their numbers, and None for the group itself,
    which keeps batches that it has not handed out yet. When nobody holds a slot, it is the stream's again.
    """

    def __init__(self, stream: Stream, taker: PageConsumer) -> None:
        self.outbox: deque[Outgoing] = deque()
        self._stream = stream
        self._taker = taker
        self._omissions: dict[int, Omission] = {}
        self._broken: dict[int, FailedBatch] = {}
        self._ended = True
        self._holders: dict[int, set[int | None]] = {}

    @property
    def plan_pass(self) -> Callable[[Pass], PassPlan]:
        """Makes the plan of a pass."""
        return self._stream.plan_pass

    @property
    def num_slots(self) -> int:
        """Slots of the stream."""
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
            if isinstance(item, Delivery):  # nobody will hear of it
                self._taker.release(item.slot)
        self.outbox.clear()
        self._omissions.clear()
        self._broken.clear()
        self._ended = True
        self._taker.begin(self._stream.generation + 1, 0)  # else what workers make yet would fill all slots

    # ------------------------------------------------------------------------------------------- slots

    def lend(self, slot: int, holder: int | None) -> None:
        """``holder`` has a slot, beside those who have it already."""
        self._holders.setdefault(slot, set()).add(holder)

    def give_back(self, slot: int, holder: int | None) -> bool:
        """``holder`` gives back a slot that it has (else: ValueError); returns whether the slot is free now."""
        holders = self._holders.get(slot, set())
        if holder not in holders:
            raise ValueError(f"slot {slot} is not lent to consumer {holder}")
        holders.remove(holder)
        if holders:
            return False
        del self._holders[slot]
        self._taker.release(slot)
        return True

    def slots_of(self, holder: int | None) -> set[int]:
        """The slots that ``holder`` has."""
        return {slot for slot, holders in self._holders.items() if holder in holders}

    def describe(self) -> str:
        """What to wait for: members to give slots back, or workers."""
        if len(self._holders) < self.num_slots:
            return "waits for the workers"
        members = sorted({one for holders in self._holders.values() for one in holders if one is not None})
        having = ", ".join(f"consumer {member} has {len(self.slots_of(member))}" for member in members)
        return f"waits for batches to be given back: of {self.num_slots}, {having}"

    # ----------------------------------------------------------------------------------------- batches

    def collect(self) -> bool:
        """Put what is there in the outbox, and return whether anything was. The next batch will wake the daemon."""
        before = len(self.outbox)
        for note in self._stream.notes:
            if isinstance(note, FailedBatch):
                self._broken[note.step] = note
            else:
                self._omissions[note.step] = note
        self._stream.notes.clear()
        while not self._ended and self._collect_one():
            pass
        return len(self.outbox) > before

    def _collect_one(self) -> bool:
        taker, plan = self._taker, self._stream.plan
        assert plan is not None
        step = taker.step
        if plan.num_steps is not None and step >= plan.num_steps:
            self._ended = True
            self.outbox.append(PassEnd())
        elif step in self._broken:
            if len(self.outbox) >= self.num_slots:  # else a whole pass of broken batches could lie there
                return False
            self.outbox.append(self._broken.pop(step))
            taker.skip()
        elif taker.has_batch():
            slot, num_records = taker.take()
            self.outbox.append(Delivery(step, slot, num_records, self._omissions.pop(step, None)))
        elif taker.fall_asleep():
            return False
        return True
