"""The windows that are held at a time: their arenas, the loads that bring their rows in, the rows that are missing.

::

    window   waiting ──open──► loading ──all rows in──► ready ──last batch taken──► (its arena is free)

Windows are opened in order, as arenas come free. A worker may still read from an arena that is free, for a batch that
was taken meanwhile or that nobody wants any more: the batch that it makes is passed over. A window is ready when all
of its rows are there; until then, any number of loads may write to it at once, no two to the same place. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from loaderd.errors import LoaderdError
from loaderd.ipc.worker_messages import LoadFault, LoadTask
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.batches import Segment
from loaderd.plan.epoch import Slice, record_at
from loaderd.plan.passes import PassPlan
from loaderd.shm.page import key_of

# With half as many, the daemon spends 38 ns on a record instead of 29, as it is woken for each load. A worker makes
# no batches while it loads: large batches leave it more time for that.
_ROWS_PER_LOAD, _MOST_ROWS_PER_LOAD = 16_384, 65_536
_BATCHES_PER_LOAD = 8


@dataclass
class _Window:
    """``due``: (first, stop) of the steps during which it should be loaded."""

    arena: int
    rows: int
    pending: deque[tuple[Slice, ...]]
    last_step: int
    due: tuple[int, int]
    loaded_rows: int = 0
    assigned_rows: int = 0
    bad_places: dict[int, LoadFault] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.loaded_rows == self.rows


class Windows:
    """The windows of one pass of ``stream`` at a time. Loads of older ones keep their arenas until they are done."""

    def __init__(self, num_arenas: int, num_workers: int, stream: int, batch_size: int = 1) -> None:
        self._num_workers = num_workers
        self._stream = stream
        self._rows_per_load = min(max(_ROWS_PER_LOAD, _BATCHES_PER_LOAD * batch_size), _MOST_ROWS_PER_LOAD)
        self._generation = 0
        self._free_arenas = list(range(num_arenas))
        self._stale_arenas: Counter[int] = Counter()
        """By arena, how many loads of older passes write there."""
        self._open: dict[int, _Window] = {}
        self._plan: PassPlan | None = None
        self._next = 0
        self._last_due = self._due = 0

    @property
    def plan(self) -> PassPlan:
        """The plan of the pass that was begun."""
        assert self._plan is not None
        return self._plan

    def begin(self, plan: PassPlan, generation: int, first: int, step: int) -> None:
        """Open windows of ``plan`` from number ``first`` on; ``step`` is the first batch that is wanted."""
        self._plan = plan
        self._generation = generation
        self._next = first
        self._last_due = self._due = step
        self._open_more()

    def stop(self, in_flight: Iterable[LoadTask]) -> None:
        """Close all windows; arenas to which loads ``in_flight`` write come free only by :meth:`forget`."""
        self._stale_arenas.update(work.arena for work in in_flight)
        self._free_arenas.extend(w.arena for w in self._open.values() if not self._stale_arenas[w.arena])
        self._open.clear()
        self._plan = None

    def forget(self, work: LoadTask) -> None:
        """A load of an older pass has ended."""
        self._stale_arenas[work.arena] -= 1
        if not self._stale_arenas[work.arena]:
            self._free_arenas.append(work.arena)
        self._open_more()

    def _open_more(self) -> None:
        if self._plan is None:
            return
        last = self._plan.last_window
        while self._free_arenas and (last is None or self._next <= last):
            number = self._next
            rows = self._plan.rows_of(number)
            rows_per_load = max(1, min(self._rows_per_load, rows // (2 * self._num_workers)))
            last_step = self._plan.last_step_in(number)
            pending = _group(self._plan.slices_of(number), rows_per_load)
            due = self._last_due, self._due
            self._open[number] = _Window(self._free_arenas.pop(), rows, pending, last_step, due)
            self._last_due, self._due = self._due, last_step
            self._next += 1

    @property
    def next_close(self) -> int | None:
        """The batch behind which an arena comes free for a window that waits for one; None: none waits."""
        last = self.plan.last_window
        if self._free_arenas or not self._open or (last is not None and self._next > last):
            return None
        return next(iter(self._open.values())).last_step

    def close(self, next_taken: int) -> None:
        """Free the arenas of windows that no batch needs any more, ``next_taken`` being the next to be taken."""
        for number, window in list(self._open.items()):
            if not window.ready or window.last_step >= next_taken:
                break
            del self._open[number]
            self._free_arenas.append(window.arena)
        if self._free_arenas:
            self._open_more()

    # -------------------------------------------------------------------------------------------- loads

    def next_load(self) -> LoadTask | None:
        """The next load, if there is one: the loads of a window are spread over the batches of the one before it.

        The caller adds the places where it is read.
        """
        for number, window in self._open.items():
            if window.pending:
                begin, end = window.due
                step = begin + (end - begin) * window.assigned_rows // window.rows
                due, slices = key_of(self._generation, step), window.pending.popleft()
                work = LoadTask(self._stream, number, window.arena, due, self.plan.order_of(number), slices, ())
                window.assigned_rows += work.num_rows
                return work
        return None

    def loaded(self, work: LoadTask, faults: Sequence[LoadFault]) -> None:
        """A load is done, except for the places that ``faults`` name."""
        window = self._open[work.window]
        window.loaded_rows += work.num_rows
        for fault in faults:
            window.bad_places.update(dict.fromkeys(fault.places, fault))

    def lost(self, work: LoadTask, error_of: Callable[[Slice], LoaderdError]) -> None:
        """A load cannot be done at all; ``error_of`` says why, of each record."""
        faults = []
        for part in work.slices:
            places = enumerate(work.order.places(part.row, part.row + part.stop - part.first).tolist())
            faults += [LoadFault((place,), error_of(part.record(n))) for n, place in places if place >= 0]
        self.loaded(work, faults)

    # ------------------------------------------------------------------------------------------ batches

    def ready(self, segments: Sequence[Segment]) -> bool:
        """Whether all rows of a batch are there."""
        return all(s.window in self._open and self._open[s.window].ready for s in segments)

    def in_arenas(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """The segments of a batch whose rows are there, with their arenas."""
        return tuple(segment._replace(arena=self._open[segment.window].arena) for segment in segments)

    def bad_rows(self, segments: Sequence[Segment]) -> dict[int, LoadFault]:
        """The rows of a batch, counted from its start, that cannot be delivered; and why."""
        bad: dict[int, LoadFault] = {}
        row = 0
        for segment in segments:
            places = self._open[segment.window].bad_places
            if places:
                wanted = range(segment.start, segment.stop)
                bad.update({row + p - segment.start: places[p] for p in wanted if p in places})
            row += segment.stop - segment.start
        return bad

    def bad_in(self, window: int) -> Collection[LoadFault]:
        """The fault of each row of a window that cannot be delivered."""
        return self._open[window].bad_places.values()

    def mark_bad(self, window: int, place: int, error: LoaderdError) -> None:
        """The row at ``place`` cannot be delivered, for the reason ``error``."""
        self._open[window].bad_places[place] = LoadFault((place,), error)

    def records_of(self, batch: BatchRange, rows: Iterable[int]) -> list[Slice]:
        """The record of each of these rows of a batch, as a slice.

        Costs about 10 ns for each row of a window, and 3 µs for each slice: ask for many rows together.
        """
        places = [batch.place_of(row) for row in rows]
        found: dict[tuple[int, int], Slice] = {}
        for window in {window for window, _ in places}:
            order, slices = self.plan.order_of(window).places(), self.plan.slices_of(window)
            for row in np.flatnonzero(np.isin(order, [place for of, place in places if of == window])).tolist():
                found[window, int(order[row])] = record_at(slices, row)
        return [found[place] for place in places]

    @property
    def num_ready(self) -> int:
        """How many windows are held whose rows are all there."""
        return sum(window.ready for window in self._open.values())

    def describe(self) -> list[str]:
        """How far each window is loaded, a line for each."""
        return [f"window {number:<3} {w.loaded_rows} of {w.rows} rows are loaded" for number, w in self._open.items()]


def _group(slices: list[Slice], rows_per_load: int) -> deque[tuple[Slice, ...]]:
    """Slices in groups of about ``rows_per_load`` rows, so that a task is worth its messages."""
    groups: deque[tuple[Slice, ...]] = deque()
    group: list[Slice] = []
    rows = 0
    for part in slices:
        group.append(part)
        rows += part.stop - part.first
        if rows >= rows_per_load:
            groups.append(tuple(group))
            group, rows = [], 0
    if group:
        groups.append(tuple(group))
    return groups
