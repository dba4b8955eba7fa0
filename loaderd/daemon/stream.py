"""One consumer's stream of batches: a pure state machine over windows and slots.

::

    window   waiting ──open──► loading ──all rows in──► ready ──last batch filled──► (its arena is free)
    slot     free ──fill begins──► filling ──done──► filled ──in its turn──► lent ──released──► free

- Windows are opened in order, as arenas come free. A window is ready when every row is in it; until then its rows may
  be written by any number of loads at once, never two to one place.
- Batches are begun in order and handed over in order; between, they may be done in any order. So the batch that is
  due next always has a slot already, and waits for nothing but workers.
- Loads of the next window keep pace with the fills of this one (:meth:`Stream.next_task`), so that the consumer does
  not meet a pause where a window ends.
- :meth:`Stream.start` begins anew anywhere. What older generations still have in flight keeps its arena and its slot
  until it is done, and then is forgotten.

The owner takes what there is to say to the consumer from ``outbox``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loaderd.daemon.tasks import FillBatch, FillWork, LoadWork, Task
from loaderd.errors import LoaderdError
from loaderd.options import RECORDS_PER_FILL
from loaderd.plan.batches import Segment
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Pass, PassPlan

_ROWS_PER_LOAD = 4096
_NO_GENERATION = -1


@dataclass(frozen=True)
class Fault:
    """Places of a window whose records cannot be delivered, and why."""

    places: tuple[int, ...]
    error: LoaderdError


@dataclass(frozen=True)
class Delivery:
    """Batch ``step`` is in ``slot``, ``num_records`` of it."""

    step: int
    slot: int
    num_records: int


@dataclass(frozen=True)
class BrokenBatch:
    """Batch ``step`` cannot be delivered."""

    step: int
    error: LoaderdError


@dataclass(frozen=True)
class Skip:
    """Records that were left out of batches."""

    fault: Fault


@dataclass(frozen=True)
class PassEnd:
    """The pass is over."""


Outgoing = Delivery | BrokenBatch | Skip | PassEnd


@dataclass
class _Window:
    arena: int
    rows: int
    places: int
    pending: deque[tuple[Slice, ...]]
    last_step: int
    loaded_rows: int = 0
    assigned_rows: int = 0
    bad_places: dict[int, Fault] = field(default_factory=dict)
    fills: int = 0

    @property
    def ready(self) -> bool:
        return self.loaded_rows == self.rows


class Stream:
    """See the module's docstring. ``plan_pass`` makes the plan of a pass."""

    def __init__(
        self,
        plan_pass: Callable[[Pass], PassPlan],
        *,
        num_slots: int,
        num_arenas: int,
        num_workers: int,
        skip_damaged: bool,
    ) -> None:
        self.outbox: deque[Outgoing] = deque()
        self.generation = _NO_GENERATION
        self.plan: PassPlan | None = None
        self._plan_pass = plan_pass
        self._num_slots = num_slots
        self._num_workers = num_workers
        self._skip_damaged = skip_damaged
        # The slot that was freed last is filled next: it is the most likely one to be in the cache still.
        self._free_slots = list(range(num_slots))
        self._lent: set[int] = set()
        self._free_arenas = list(range(num_arenas))
        self._stale_arenas: Counter[int] = Counter()
        self._windows: dict[int, _Window] = {}
        self._in_flight: set[Task] = set()
        self._finished: dict[int, Delivery | BrokenBatch] = {}
        self._alone: deque[FillBatch] = deque()
        self._next_window = self._next_fill = self._next_send = 0
        self._ended = True

    # ------------------------------------------------------------------------------------------- events

    def stop(self) -> None:
        """All that is under way is void; nothing happens until the next :meth:`start`."""
        # These count as lent, but the consumer will never hear of them.
        self.release([item.slot for item in self.outbox if isinstance(item, Delivery)])
        self.outbox.clear()
        for task in self._in_flight:
            self._stale_arenas.update(_arenas_of(task))
        self._free_arenas.extend(w.arena for w in self._windows.values() if not self._stale_arenas[w.arena])
        self._free_slots.extend(item.slot for item in self._finished.values() if isinstance(item, Delivery))
        self._free_slots.extend(batch.slot for batch in self._alone)
        self._windows.clear()
        self._in_flight.clear()
        self._finished.clear()
        self._alone.clear()
        self.plan = None
        self.generation = _NO_GENERATION
        self._ended = True

    def start(self, generation: int, pass_: Pass, step: int) -> None:
        """Deliver a pass from ``step`` on; all else is void."""
        self.stop()
        self.generation = generation
        self.plan = self._plan_pass(pass_)
        self._next_fill = self._next_send = step
        self._ended = False
        if not self._past_end(step):
            self._next_window = self.plan.first_window_from(step)
            self._open_windows()
        self._send_in_order()

    def release(self, slots: list[int]) -> None:
        """The consumer gives slots back; raises ValueError for one that it does not have."""
        for slot in slots:
            if slot not in self._lent:
                raise ValueError(f"slot {slot} is not lent")
            self._lent.remove(slot)
            self._free_slots.append(slot)

    def done(self, task: Task, result: Any) -> None:
        """A task is done; the result of a load is the list of its faults."""
        if not self._forget_stale(task):
            self._in_flight.remove(task)
            if isinstance(task.work, LoadWork):
                self._loaded(task.work, result)
            elif isinstance(task.work, FillWork):
                self._filled(task.work, None)

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A task cannot be done: the batches that need it are broken.

        Of several batches in one task most are not at fault. They are done again, each alone: which batches are
        broken must not depend on which were in a task together.
        """
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        if isinstance(task.work, FillWork):
            if len(task.work.batches) > 1:
                self._alone.extend(task.work.batches)
            else:
                self._filled(task.work, error)
        elif isinstance(task.work, LoadWork):
            assert self.plan is not None
            order = self.plan.order_of(task.work.window)
            places = [order.places(part.row, part.row + part.stop - part.first) for part in task.work.slices]
            wanted = [tuple(of_one[of_one >= 0].tolist()) for of_one in places]
            self._loaded(task.work, [Fault(of_one, error) for of_one in wanted if of_one])

    def retry(self, task: Task) -> bool:
        """A worker died: its task is wanted still unless it is of an older generation."""
        return not self._forget_stale(task)

    def next_task(self) -> Task | None:
        """The most useful work that can begin now."""
        if self.plan is None or self._ended:
            return None
        work = FillWork((self._alone.popleft(),)) if self._alone else self._next_work(self.plan)
        if work is None:
            return None
        task = Task(self, work, self.generation)
        self._in_flight.add(task)
        return task

    def _next_work(self, plan: PassPlan) -> LoadWork | FillWork | None:
        """The window that the next batch waits for comes first.

        Otherwise the load of the window behind it comes first while it lags behind the fills of this one, else a
        fill; and if no slot is free, loads go on.
        """
        if self._past_end(self._next_fill):
            return None
        segments = plan.segments_of(self._next_fill)
        if not all(s.window in self._windows and self._windows[s.window].ready for s in segments):
            return self._next_load(None)
        if not segments:
            return self._next_fills()
        here = self._windows[segments[0].window]
        return self._next_load(segments[0].start / here.places) or self._next_fills() or self._next_load(None)

    # ------------------------------------------------------------------------------------------ windows

    def _past_end(self, step: int) -> bool:
        assert self.plan is not None
        return self.plan.num_steps is not None and step >= self.plan.num_steps

    def _open_windows(self) -> None:
        assert self.plan is not None
        last = self.plan.last_window
        while self._free_arenas and (last is None or self._next_window <= last):
            number = self._next_window
            arena = self._free_arenas.pop()
            rows = self.plan.rows_of(number)
            rows_per_load = max(1, min(_ROWS_PER_LOAD, rows // (2 * self._num_workers)))
            pending = _group(self.plan.slices_of(number), rows_per_load)
            last_step = self.plan.last_step_in(number)
            self._windows[number] = _Window(arena, rows, self.plan.places_of(number), pending, last_step)
            self._next_window += 1

    def _next_load(self, progress: float | None) -> LoadWork | None:
        """The next load there is; with ``progress``, only of a window that is loaded to a smaller part than that."""
        for number, window in self._windows.items():
            if window.pending and (progress is None or window.assigned_rows < progress * window.rows):
                slices = window.pending.popleft()
                work = LoadWork(number, window.arena, slices)
                window.assigned_rows += work.num_rows
                return work
        return None

    def _loaded(self, work: LoadWork, faults: list[Fault]) -> None:
        window = self._windows[work.window]
        window.loaded_rows += work.num_rows
        for fault in faults:
            window.bad_places.update(dict.fromkeys(fault.places, fault))
            if self._skip_damaged:
                self.outbox.append(Skip(fault))
        self._close_windows()

    def _close_windows(self) -> None:
        """Free the arenas of windows that no batch needs any more."""
        for number in list(self._windows):
            window = self._windows[number]
            idle = window.ready and not window.fills
            if not idle or window.last_step >= self._next_fill:
                break
            del self._windows[number]
            self._free_arenas.append(window.arena)
        if self._free_arenas:
            self._open_windows()

    # -------------------------------------------------------------------------------------------- slots

    def _next_fills(self) -> FillWork | None:
        """The next batches, as many as make a task worth its messages and leave slots to the other workers."""
        assert self.plan is not None
        batches: list[FillBatch] = []
        most = max(1, len(self._free_slots) // 2)
        records = 0
        while self._free_slots and len(batches) < most and records < RECORDS_PER_FILL:
            step = self._next_fill
            if self._past_end(step):
                break
            segments = self.plan.segments_of(step)
            windows = [self._windows.get(s.window) for s in segments]
            if not all(window is not None and window.ready for window in windows):
                break
            bad = self._bad_rows(segments)
            self._next_fill += 1
            if bad and not self._skip_damaged:
                self._finished[step] = BrokenBatch(step, next(iter(bad.values())).error)
                continue
            arenas = tuple(window.arena for window in windows if window is not None)
            batches.append(FillBatch(step, self._free_slots.pop(), tuple(segments), arenas, tuple(bad)))
            records += batches[-1].num_records
            for segment in segments:
                self._windows[segment.window].fills += 1
        if not batches:
            self._close_windows()
            self._send_in_order()
        return FillWork(tuple(batches)) if batches else None

    def _bad_rows(self, segments: list[Segment]) -> dict[int, Fault]:
        """Rows of a batch, from its start, that cannot be delivered."""
        bad: dict[int, Fault] = {}
        row = 0
        for segment in segments:
            places = self._windows[segment.window].bad_places
            if places:
                wanted = range(segment.start, segment.stop)
                bad.update({row + p - segment.start: places[p] for p in sorted(places) if p in wanted})
            row += segment.stop - segment.start
        return bad

    def _filled(self, work: FillWork, error: LoaderdError | None) -> None:
        for batch in work.batches:
            for segment in batch.segments:
                self._windows[segment.window].fills -= 1
            if error is None:
                self._finished[batch.step] = Delivery(batch.step, batch.slot, batch.num_records)
            else:
                self._free_slots.append(batch.slot)
                self._finished[batch.step] = BrokenBatch(batch.step, error)
        self._close_windows()
        self._send_in_order()

    def _send_in_order(self) -> None:
        while self._next_send in self._finished:
            finished = self._finished.pop(self._next_send)
            if isinstance(finished, Delivery):
                self._lent.add(finished.slot)
            self.outbox.append(finished)
            self._next_send += 1
        if self._past_end(self._next_send):
            self._ended = True
            self.outbox.append(PassEnd())

    # ------------------------------------------------------------------------------------- older generations

    def _forget_stale(self, task: Task) -> bool:
        """Whether ``task`` is of an older generation; if so, give back what it held."""
        if task.generation == self.generation:
            return False
        for arena in _arenas_of(task):
            self._stale_arenas[arena] -= 1
            if not self._stale_arenas[arena]:
                self._free_arenas.append(arena)
        if isinstance(task.work, FillWork):
            self._free_slots.extend(batch.slot for batch in task.work.batches)
        if self.plan is not None and not self._ended:
            self._open_windows()
        return True


def _arenas_of(task: Task) -> set[int]:
    if isinstance(task.work, LoadWork):
        return {task.work.arena}
    if isinstance(task.work, FillWork):
        return {arena for batch in task.work.batches for arena in batch.arenas}
    return set()


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
