"""One consumer's stream of batches: a pure state machine over windows and slots.

::

    window   loading ──all rows in──► ready                                             (see ``windows``)
    slot     free ──fill begins──► filling ──done──► filled ──in its turn──► lent ──released──► free

- Batches are begun in order and handed over in order; between, they may be done in any order. So the batch that is
  due next always has a slot already, and waits for nothing but workers.
- Loads of the next window keep pace with the fills of this one (:meth:`Stream.next_task`), so that the consumer does
  not meet a pause where a window ends.
- :meth:`Stream.start` begins anew anywhere. What older generations still have in flight keeps its arena and its slot
  until it is done, and then is forgotten.
- What cannot be done in company is done alone, and what workers are lost at is put on trial (see ``trials``).

The owner takes what there is to say to the consumer from ``outbox``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from loaderd.daemon.outgoing import BrokenBatch, Delivery, Outgoing, PassEnd
from loaderd.daemon.tasks import MAX_DEATHS, FillBatch, FillWork, LoadWork, Task, TrialWork
from loaderd.daemon.trials import Trial
from loaderd.daemon.windows import Windows
from loaderd.errors import LoaderdError, ShardError, WorkerError
from loaderd.options import RECORDS_PER_FILL
from loaderd.plan.batches import Segment
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Pass, PassPlan

_NO_GENERATION = -1


class Stream:
    """See the module's docstring.

    ``plan_pass`` makes the plan of a pass; ``blame`` makes an error name the records that it is about.
    """

    def __init__(
        self,
        plan_pass: Callable[[Pass], PassPlan],
        *,
        num_slots: int,
        num_arenas: int,
        num_workers: int,
        skip_damaged: bool,
        blame: Callable[[list[Slice], LoaderdError], LoaderdError],
    ) -> None:
        self.outbox: deque[Outgoing] = deque()
        self.generation = _NO_GENERATION
        self.plan: PassPlan | None = None
        self.plan_pass = plan_pass
        self.num_slots = num_slots
        self._skip_damaged = skip_damaged
        self._blame = blame
        self._windows = Windows(num_arenas, num_workers)
        # The slot that was freed last is filled next: it is the most likely one to be in the cache still.
        self._free_slots = list(range(num_slots))
        self._lent: set[int] = set()
        self._in_flight: set[Task] = set()
        self._finished: dict[int, Delivery | BrokenBatch] = {}
        self._loads_alone: deque[LoadWork] = deque()
        self._fills_alone: deque[tuple[FillBatch, int]] = deque()
        """Batches that have a slot, and how many workers may be lost at each."""
        self._trials: dict[int, Trial] = {}
        self._tried: set[int] = set()
        self._next_fill = self._next_send = 0
        self._ended = True

    # ------------------------------------------------------------------------------------------- events

    def stop(self) -> None:
        """All that is under way is void; nothing happens until the next :meth:`start`."""
        # These count as lent, but the consumer will never hear of them.
        self.release([item.slot for item in self.outbox if isinstance(item, Delivery)])
        self.outbox.clear()
        self._windows.stop(self._in_flight)
        self._free_slots.extend(item.slot for item in self._finished.values() if isinstance(item, Delivery))
        self._free_slots.extend(batch.slot for batch, _ in self._fills_alone)
        self._free_slots.extend(trial.batch.slot for trial in self._trials.values() if not trial.under_way)
        self._in_flight.clear()
        self._finished.clear()
        self._loads_alone.clear()
        self._fills_alone.clear()
        self._trials.clear()
        self._tried.clear()
        self.plan = None
        self.generation = _NO_GENERATION
        self._ended = True

    def start(self, generation: int, pass_: Pass, step: int) -> None:
        """Deliver a pass from ``step`` on; all else is void."""
        self.stop()
        self.generation = generation
        self.plan = self.plan_pass(pass_)
        self._next_fill = self._next_send = step
        self._ended = False
        if not self._past_end(step):
            self._windows.begin(self.plan, self.plan.first_window_from(step))
        self._send_in_order()

    def release(self, slots: list[int]) -> None:
        """The consumer gives slots back; raises ValueError for one that it does not have."""
        for slot in slots:
            if slot not in self._lent:
                raise ValueError(f"slot {slot} is not lent")
            self._lent.remove(slot)
            self._free_slots.append(slot)

    def advanced(self, task: Task, done_bytes: int) -> None:
        """A load goes on; nobody asks how far it is."""

    def done(self, task: Task, result: Any) -> None:
        """A task is done; the result of a load is the list of its faults."""
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        if isinstance(task.work, LoadWork):
            self._windows.loaded(task.work, result)
            self._windows.close(self._next_fill)
        elif isinstance(task.work, TrialWork):
            self._tried_rows(task.work, None)
        elif isinstance(task.work, FillWork):
            for batch in task.work.batches:
                done = Delivery(batch.step, batch.slot, batch.num_records, len(batch.omit), batch.errors)
                self._end_fill(batch, done)

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A task cannot be done: the batches that need it are broken.

        Of several batches in one task most are not at fault. They are done again, each alone: which batches are
        broken must not depend on which were in a task together.
        """
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        work = task.work
        if isinstance(work, LoadWork):
            self._lose_load(work, lambda _: error)
        elif isinstance(work, TrialWork):
            self._tried_rows(work, None)  # its worker lives; what it says comes again when all rows are decoded
        elif isinstance(work, FillWork):
            self._part_or_break(work, error, MAX_DEATHS)

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        """Workers are lost at a task: find out at which of its records, and go on without them or break their batch.

        To see a stall takes long: its record is looked for only if the batch can go on without it.
        """
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        work = task.work
        if isinstance(work, LoadWork):
            if len(work.slices) > 1:
                self._loads_alone.extend(LoadWork(work.window, work.arena, (part,)) for part in work.slices)
            else:
                self._lose_load(work, lambda record: self._blame([record], error))
        elif isinstance(work, TrialWork):
            self._tried_rows(work, error)
        elif isinstance(work, FillWork):
            batch = work.batches[0]
            if len(work.batches) > 1:
                self._part_or_break(work, error, 1)
            elif batch.step in self._tried or (stalled and not self._skip_damaged):
                records = [one for s in batch.segments for one in self._windows.records_at(s.window, s.start, s.stop)]
                self._part_or_break(work, self._blame(records, error), 1)
            else:
                self._tried.add(batch.step)
                self._trials[batch.step] = Trial(batch, first_only=not self._skip_damaged)

    def retry(self, task: Task) -> bool:
        """A worker died: its task is wanted still unless it is of an older generation."""
        return not self._forget_stale(task)

    def next_task(self) -> Task | None:
        """The most useful work that can begin now."""
        if self.plan is None or self._ended:
            return None
        work, most_deaths = self._next_redone()
        work = work or self._next_work(self.plan)
        if work is None:
            return None
        task = Task(self, work, self.generation, most_deaths)
        self._in_flight.add(task)
        return task

    def _next_redone(self) -> tuple[LoadWork | FillWork | None, int]:
        """What has failed before comes first, for everything waits for it; and how many workers may be lost at it."""
        for trial in self._trials.values():
            if (work := trial.next_work()) is not None:
                return work, trial.most_deaths(work)
        if self._loads_alone:
            return self._loads_alone.popleft(), MAX_DEATHS
        if self._fills_alone:
            batch, most_deaths = self._fills_alone.popleft()
            return FillWork((batch,)), most_deaths
        return None, MAX_DEATHS

    def _next_work(self, plan: PassPlan) -> LoadWork | FillWork | None:
        """The window that the next batch waits for comes first.

        Otherwise the load of the window behind it comes first while it lags behind the fills of this one, else a
        fill; and if no slot is free, loads go on.
        """
        if self._past_end(self._next_fill):
            return None
        windows, segments = self._windows, plan.segments_of(self._next_fill)
        if not windows.ready(segments):
            return windows.next_load()
        if not segments:
            return self._next_fills(plan)
        return windows.next_load(windows.progress_at(segments[0])) or self._next_fills(plan) or windows.next_load()

    def _past_end(self, step: int) -> bool:
        assert self.plan is not None
        return self.plan.num_steps is not None and step >= self.plan.num_steps

    # ------------------------------------------------------------------------------------------ batches

    def _next_fills(self, plan: PassPlan) -> FillWork | None:
        """The next batches, as many as make a task worth its messages and leave slots to the other workers."""
        batches: list[FillBatch] = []
        most = max(1, len(self._free_slots) // 2)
        records = 0
        while self._free_slots and len(batches) < most and records < RECORDS_PER_FILL:
            step = self._next_fill
            if self._past_end(step):
                break
            segments = plan.segments_of(step)
            if not self._windows.ready(segments):
                break
            self._next_fill += 1
            batch = self._begin_batch(step, segments)
            if isinstance(batch, BrokenBatch):
                self._finished[step] = batch
                continue
            self._windows.begin_fill(segments)
            batches.append(batch)
            records += batch.num_records
        if not batches:
            self._windows.close(self._next_fill)
            self._send_in_order()
        return FillWork(tuple(batches)) if batches else None

    def _begin_batch(self, step: int, segments: Sequence[Segment]) -> FillBatch | BrokenBatch:
        """Batch ``step``, whose rows are there, with a slot of its own; or why it cannot be delivered."""
        bad = self._windows.bad_rows(segments)
        errors = tuple({id(fault): fault.error for fault in bad.values()}.values())
        num_rows = sum(segment.stop - segment.start for segment in segments)
        if bad and not self._skip_damaged:
            return BrokenBatch(step, _together(errors))
        if bad and len(bad) == num_rows:
            return BrokenBatch(step, _nothing_left(step, num_rows, _together(errors)))
        arenas = self._windows.arenas_of(segments)
        return FillBatch(step, self._free_slots.pop(), tuple(segments), arenas, tuple(bad), errors)

    def _end_fill(self, batch: FillBatch, finished: Delivery | BrokenBatch) -> None:
        self._finished[batch.step] = finished
        self._windows.end_fill(batch.segments)
        self._windows.close(self._next_fill)
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

    # ------------------------------------------------------------------------------------------- report

    def describe(self) -> list[str]:
        """What waits for what, in a few lines."""
        lines = [f"consumer   has {len(self._lent)} batches, taken or ready; {len(self._free_slots)} slots are free"]
        if self.plan is None:
            return [*lines, "batches    none are asked for"]
        steps = f"of {self.plan.num_steps}" if self.plan.num_steps is not None else "without end"
        ahead = f"{len(self._finished)} behind it are made; {self._next_fill} is the next to be begun"
        lines.append(f"batches    {self._next_send} {steps} is due; {ahead}")
        if self._trials or self._fills_alone or self._loads_alone:
            again = [*self._trials, *[batch.step for batch, _ in self._fills_alone]]
            lines.append(f"again      batches {again}, {len(self._loads_alone)} loads: workers were lost there")
        return [*lines, *self._windows.describe()]

    def why_idle(self) -> str:
        """Why a worker has nothing to do."""
        if self.plan is None or self._ended:
            return "waits for the consumer to ask for batches"
        if not self._free_slots:
            return "waits for the consumer to give slots back"
        return "waits for what the others are at"

    # ---------------------------------------------------------------------------------- what goes wrong

    def _lose_load(self, work: LoadWork, blame: Callable[[Slice], LoaderdError]) -> None:
        self._windows.lost(work, blame)
        self._windows.close(self._next_fill)

    def _part_or_break(self, work: FillWork, error: LoaderdError, most_deaths: int) -> None:
        """Of several batches, try each alone; a single one is broken."""
        if len(work.batches) > 1:
            self._fills_alone.extend((batch, most_deaths) for batch in work.batches)
            return
        (batch,) = work.batches
        self._free_slots.append(batch.slot)
        self._end_fill(batch, BrokenBatch(batch.step, error))

    def _tried_rows(self, work: TrialWork, error: WorkerError | None) -> None:
        """Rows of a batch have been tried; at the end of the trial, the batch is made without the guilty ones."""
        batch = work.batches[0]
        trial = self._trials[batch.step]
        if error is None:
            trial.done()
        else:
            trial.given_up(work, error)
        if not trial.finished:
            return
        del self._trials[batch.step]
        for row, why in trial.guilty.items():
            window, place = _place_of(batch, row)
            record = self._windows.records_at(window, place, place + 1)
            self._windows.mark_bad(window, place, self._blame(record, why))
        self._free_slots.append(batch.slot)
        again = self._begin_batch(batch.step, batch.segments)
        if isinstance(again, BrokenBatch):
            self._end_fill(batch, again)
        else:
            self._fills_alone.append((again, MAX_DEATHS))

    # ------------------------------------------------------------------------------------- older generations

    def _forget_stale(self, task: Task) -> bool:
        """Whether ``task`` is of an older generation; if so, give back what it held."""
        if task.generation == self.generation:
            return False
        self._windows.forget(task)
        if isinstance(task.work, FillWork):
            self._free_slots.extend(batch.slot for batch in task.work.batches)
        return True


def _place_of(batch: FillBatch, row: int) -> tuple[int, int]:
    """(window, place in it) of a row of a batch."""
    for segment in batch.segments:
        size = segment.stop - segment.start
        if row < size:
            return segment.window, segment.start + row
        row -= size
    raise IndexError(row)


def _together(errors: Sequence[LoaderdError]) -> LoaderdError:
    """The first of the errors of one batch, which names the damages of all."""
    first = errors[0]
    if len(errors) == 1:
        return first
    return type(first)(
        f"{first.message} (and {len(errors) - 1} more in this batch)",
        hint=first.hint,
        damages=tuple(damage for error in errors for damage in error.damages),
        traceback=first.traceback,
    )


def _nothing_left(step: int, num_rows: int, error: LoaderdError) -> LoaderdError:
    """An empty batch would make a loss that is no number, so there is none."""
    return ShardError(
        f"none of the {num_rows} records of batch {step} is left; the first: {error.message}",
        hint="Ask for the next batch to go on without it.",
        damages=error.damages,
    )
