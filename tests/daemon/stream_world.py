"""What the model of a stream knows: which rows a batch must have, where they lie, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.pool.tasks import Task
from loaderd.errors import CorruptRecordError, LoaderdError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import FillFailed, LoadFault, LoadTask
from loaderd.plan.batches import BatchPlan, Segment
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import PassSequence
from loaderd.plan.shares import EpochRemainder, HostShare
from loaderd.worker.page_producer import Claim
from tests.daemon.page_run import Consumer, Floor, Hand
from tests.daemon.page_workers import Delivery

Row = tuple[int, int, int]
"""(epoch, block, record of the block)."""

STALE: Row = (-1, -1, -1)


def rows_of_load(work: LoadTask) -> dict[int, tuple[int, int]]:
    """(block, record) of each row of the window that a load writes."""
    return {
        part.row + number - part.first: (part.block, number)
        for part in work.slices
        for number in range(part.first, part.stop)
    }


class StreamWorld(RuleBasedStateMachine):
    """``arenas`` and ``slots`` stand for the shared memory.

    A load may write from when it is handed out until it ends, and a worker to its slot from its claim on, so what
    they will write is None from the start; a batch is read when it ends. ``bad`` and ``broken`` are what went wrong:
    the errors of places (window, place), and of batches.
    """

    floor: Floor
    consumer: Consumer
    stream: Stream
    pass_sequence: PassSequence
    batches: BatchPlan
    plan: PassPlan
    num_records: int
    num_hosts: int
    window_records: int
    first_epoch: int
    generation: int
    next_step: int
    skip: bool
    unheard_start: tuple[Pass, int] | None
    outstanding: list[Task]
    hands: list[Hand]
    arenas: list[list[Row | None]]
    opened: list[tuple[Any, int, Any]]
    """Of each arena: its window, the number of that, and the places of its rows."""
    slots: list[list[Row | None]]
    lent: dict[int, list[Row | None]]
    delivered: list[Row]
    bad: dict[tuple[int, int], LoaderdError]
    broken: dict[int, LoaderdError]
    error_numbers: count[int]

    def possible(self, past: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        """What other hosts took of the first epoch, cut down to what they could take."""
        rest = EpochRemainder(self.num_records)
        found = []
        for taken in past:
            shares = [HostShare(rest, host, len(taken), self.window_records) for host in range(len(taken))]
            # Hosts go in step, so they differ by a row at most, and something is left.
            rows = min(taken[0], max(0, rest.size // len(taken) - 1))
            found.append(tuple(min(rows, share.size) for share in shares))
            rest = rest.after(found[-1], self.window_records)
        return tuple(found)

    def check(self, item: Delivery | BatchFailed) -> None:
        rows, bad = self.planned(item.step)
        errors = [self.broken[item.step]] if item.step in self.broken else [] if self.skip else list(bad.values())
        if isinstance(item, BatchFailed):
            if not errors:  # they were all to be skipped
                assert bad and len(bad) == len(rows) and f"of batch {item.step} is left" in item.error.message
            else:
                more = f" (and {len(errors) - 1} more in this batch)" if len(errors) > 1 else ""
                assert item.error.message == errors[0].message + more
            return
        omission = item.omission
        said = (omission.num_records, {error.message for error in omission.errors}) if omission else (0, set())
        assert said == (len(bad), {error.message for error in bad.values()})
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
        found: list[Row] = [STALE] * self.plan.order_of(window).num_places
        places = self.plan.order_of(window).places()
        for part in self.plan.slices_of(window):
            assert part.epoch == epoch
            for number in range(part.first, part.stop):
                place = places[part.row + number - part.first]
                if place >= 0:
                    found[place] = (epoch, part.block, number)
        return found

    def open(self, number: int, arena: int) -> None:
        """The first load of a window begins: nothing else may be written there, nor read but what will be void."""
        window = self.stream._windows._open[number]  # the object tells it from one of a pass before
        if self.opened[arena][0] is window:
            return
        assert window.arena == arena
        assert not [task for task in self.outstanding if isinstance(task.work, LoadTask) and task.work.arena == arena]
        self.opened[arena] = window, number, self.plan.order_of(number).places()
        self.arenas[arena] = [None] * len(self.arenas[arena])

    def begin_load(self, work: LoadTask) -> None:
        self.open(work.window, work.arena)
        _, window, places = self.opened[work.arena]
        assert window == work.window
        for task in self.outstanding:
            if isinstance(task.work, LoadTask) and task.work.arena == work.arena:
                assert (task.generation, task.work.window) == (self.stream.generation, window)
                assert not set(rows_of_load(task.work)) & set(rows_of_load(work))
        for row in rows_of_load(work):
            assert places[row] < 0 or self.arenas[work.arena][places[row]] is None, "each row is loaded once"
        for hand in self.hands:
            if hand.at is not None and hand.at.key >= self.floor.page.least_place():
                arenas = [segment.arena for segment in hand.at.batch.segments]
                assert work.arena not in arenas, "what is read there will be delivered"

    def check_claim(self, claim: Claim) -> None:
        generation, step = claim.place
        assert generation == self.stream.generation
        assert self.next_step <= step and claim.slot not in self.lent
        keys = [hand.at.key for hand in self.hands if hand.at is not None]
        assert keys.count(claim.key) == 1, "here, none claims while another does"
        rows, bad = self.planned(step)
        assert list(claim.batch.omit) == list(bad) and (self.skip or not bad)
        read = self.read(claim.batch.segments)
        assert all(read[i] == row for i, row in enumerate(rows) if i not in bad), "its windows are loaded"
        assert self.stream.is_under_way(claim.key) and step not in self.broken
        self.slots[claim.slot] = [None]

    def read(self, segments: tuple[Segment, ...]) -> list[Row | None]:
        return [row for _, start, stop, arena in segments for row in self.arenas[arena][start:stop]]

    def finish_load(self, task: Task, work: LoadTask, faults: list[int]) -> list[LoadFault]:
        _, window, places = self.opened[work.arena]
        rows = rows_of_load(work)
        bad = sorted({int(places[list(rows)[number % len(rows)]]) for number in faults} - {-1})
        found = [LoadFault((place,), self.new_error()) for place in bad]
        is_stale = task.generation != self.stream.generation
        if not is_stale:
            self.note_faults(window, found)
        epoch = -1 if is_stale else self.first_epoch + self.batches.locate(window)[0]
        for row, (block, record) in rows.items():
            if int(places[row]) not in [*bad, -1]:
                self.arenas[work.arena][places[row]] = STALE if is_stale else (epoch, block, record)
        return found

    def new_error(self) -> LoaderdError:
        return CorruptRecordError(f"error {next(self.error_numbers)}")

    def note_faults(self, window: int, faults: list[LoadFault]) -> None:
        for fault in faults:
            for place in fault.places:
                self.bad[window, place] = fault.error

    def note_row_faults(self, failed: FillFailed) -> None:
        segments = self.plan.segments_of(failed.step)
        places = [(part.window, place) for part in segments for place in range(part.start, part.stop)]
        for row, error in failed.faults.items():
            self.bad[places[row]] = error

    def check_completeness(self) -> None:
        """A pass without faults holds every record of the host once an epoch."""
        shares = [self.batches.share_of(epoch) for epoch in range(self.batches.epochs or 0)]
        assert len(set(self.delivered)) == len(self.delivered)
        if self.batches.remainder != "drop":
            assert len(self.delivered) == sum(share.size for share in shares)
            counts = Counter((block, record) for _, block, record in self.delivered)
            assert self.num_hosts > 1 or shares[0].rest.size < self.num_records or len(counts) == self.num_records
