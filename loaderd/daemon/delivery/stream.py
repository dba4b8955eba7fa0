"""One stream of batches, seen from the daemon: a pure state machine that loads windows and grants batches.

::

    window   loading ──all rows in──► ready                                             (see ``windows``)
    batch    planned ──its windows are ready──► granted ──made and taken by others──► (see ``shm.page``)
                 ▲                                 └─ workers are lost at it ──► granted with suspects ──┘

- Batches are granted in order, as soon as their rows are there. The daemon does not decide which worker makes which
  batch, and no message tells it that the consumer took one: when it is woken, it reads in the page how far that is.
- The consumer is told which batches cannot be made, and, before a batch is granted, which records it lacks.
- If worker after worker is lost at a batch, it is granted with all of its rows as **suspects**: a worker decodes them
  in parts before it makes the batch, and says on the page which. The rows of a part at which a worker is lost are
  then decoded alone. A row at which three more workers are lost is left out, or breaks the batch.
- Loads of the next window come due while the consumer goes through this one, so that it does not meet a pause where a
  window ends.
- :meth:`Stream.start` begins anew anywhere. Loads of older generations that are still in flight keep their arenas
  until they are done, and then are forgotten.

The owner first sends the messages in ``notes`` to the consumer, then those in ``grants`` to all workers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

from loaderd.daemon.delivery.mismatches import Mismatches
from loaderd.daemon.delivery.notes import Note, note_of
from loaderd.daemon.delivery.storage_outage import StorageOutage
from loaderd.daemon.delivery.windows import Windows
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.daemon.pool.tasks import HINT_OF_DEATHS, MAX_DEATHS, TASKS_PER_WORKER, Task, TaskSource
from loaderd.errors import LoaderdError, ServerError, StorageError, WorkerError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import (
    MOST_ROW_FAULTS,
    FilePlace,
    FillFailed,
    Granted,
    LoadFault,
    LoadTask,
    Withdrawn,
)
from loaderd.options import StreamOptions
from loaderd.plan.batch_range import BatchRange, without
from loaderd.plan.batches import Segment
from loaderd.plan.passes import Pass, PassPlan
from loaderd.shm.page import GRANTED, NEVER, WAKE_DAEMON_AT, Page, barrier, key_of, split_key, step_of
from loaderd.snapshots import Outage

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemoteData

_TASKS_FAR_AWAY = 4
"""What tasks need from far away is fetched while the worker does others."""
_MOST_UNREAD = 4096
"""How many damages may be named ahead: some 3 MB of messages. (A server lets 4 MiB lie unread.)"""
_MOST_WEIGHT_BYTES = 32 << 20
"""In a load, unless a single block has more."""
_MOST_STALLING_ROWS = 3
"""More of a batch are not left out: each one costs several times the seconds after which a worker is stalled."""
_OF_A_BATCH = 16
"""A message about a batch counts as so many damages, besides those that it names."""


class Stream(TaskSource):
    """See the module's docstring. ``number``: by which workers know it. ``plan_pass`` makes the plan of a pass."""

    def __init__(
        self,
        number: int,
        plan_pass: Callable[[Pass], PassPlan],
        page: Page,
        num_arenas: int,
        options: StreamOptions,
        data: LocalData | RemoteData,
    ) -> None:
        self._number = number
        self.plan_pass = plan_pass
        self.page = page
        self.data = data
        self._seed = options.seed
        self._skip_damaged = options.on_corrupt != "raise"
        self._limits_mismatches = options.on_corrupt in ("skip_record", "skip_shard")
        self._windows = Windows(num_arenas, options.num_workers, number, options.batch_size)
        self.storage = StorageOutage()
        self._in_flight: set[Task] = set()
        self.generation = 0  # none
        self.next = self.taken = 0
        """The batch that is granted next, and the first that not all consumers have taken."""
        self.stop()

    @property
    def tasks_per_worker(self) -> int:
        return _TASKS_FAR_AWAY if self.data.is_far_away else TASKS_PER_WORKER

    # ------------------------------------------------------------------------------------------- events

    def stop(self) -> None:
        """All that is under way is void; nothing happens until the next :meth:`start`."""
        self._windows.stop(map(_load_of, self._in_flight))
        self._in_flight.clear()
        self.storage.clear()
        self.plan: PassPlan | None = None
        self.notes: deque[Note] = deque()
        self.grants: deque[Granted | Withdrawn] = deque()
        self.granted: list[BatchRange] = []
        """The batches that may be made."""
        self._loads_alone: deque[LoadTask] = deque()
        """Loads that were tried before, and come first."""
        self._unread: dict[int, int] = {}
        """By step, how much a consumer was told of that it has not come to yet."""
        self._deadly: dict[int, list[tuple[int, WorkerError, bool]]] = {}
        """By step of a batch with suspects, the rows that workers are lost at, why, and whether they stalled."""
        self._num_faults: Counter[int] = Counter()
        self._deaths: Counter[tuple[int, int]] = Counter()
        """By step, and by row if it was decoded alone; else -1."""
        self._mismatches = Mismatches(self.data.per_passing)
        self.page.words[WAKE_DAEMON_AT] = NEVER

    def start(self, generation: int, pass_: Pass, step: int) -> None:
        """Have a pass made from ``step`` on; all else is void. Generations rise from one to the next."""
        self.stop()
        self.generation = generation
        self.plan = self.plan_pass(pass_)
        self.next = self.taken = step
        if not self._past_end(step):
            self._windows.begin(self.plan, generation, self.plan.first_window_from(step), step)
        self.wake_workers()
        self.look()

    def look(self) -> None:
        """See in the page how far the consumer is, and grant what can be granted."""
        while self.plan is not None:
            self.taken = self._reached()
            self.granted = [one for one in self.granted if one.stop > self.taken]
            self._unread = {step: size for step, size in self._unread.items() if step >= self.taken}
            self._windows.close(self.taken)
            wake_at = self._grant(self.plan)
            self.page.words[GRANTED] = key_of(self.generation, self.next)
            last = None if self._past_end(self.taken) else self._windows.next_close
            wake_at = min(wake_at, NEVER if last is None else key_of(self.generation, last + 1))
            self.page.words[WAKE_DAEMON_AT] = wake_at
            barrier()
            if (reached := self._reached()) == self.taken or key_of(self.generation, reached) < wake_at:
                break  # else the consumer came there before it could see WAKE_DAEMON_AT

    def _reached(self) -> int:
        """The first batch that not all have taken. An impossible number in the page counts as no progress."""
        generation, step = split_key(self.page.least_place())
        return max(self.taken, min(step, self.next)) if generation == self.generation else self.taken

    def _past_end(self, step: int) -> bool:
        assert self.plan is not None
        return self.plan.num_steps is not None and step >= self.plan.num_steps

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        self._loads_alone.extend(self.storage.tick(seconds))

    # -------------------------------------------------------------------------------------------- tasks

    def next_task(self) -> Task | None:
        """The most useful work that can begin now. Work that failed before comes first: everything waits for it."""
        if self.plan is None:
            return None
        was_loading = self._is_loading
        load = self._loads_alone.popleft() if self._loads_alone else self._windows.next_load()
        if load is None:
            return None
        if not was_loading:
            self.storage.begin()
        places = _in_one_message(self.data.places(load.slices, self._seed))
        if 0 < len(places) < len(load.slices):
            self._loads_alone.appendleft(load._replace(slices=load.slices[len(places) :]))
            load = load._replace(slices=load.slices[: len(places)])
        task = Task(self, load._replace(places=places), self.generation)
        self._in_flight.add(task)
        return task

    @property
    def _is_loading(self) -> bool:
        return bool(self._in_flight or self._loads_alone) or self.storage.has_resting

    def done(self, task: Task, result: Any) -> None:
        """A task is done. The caller calls :meth:`look` afterwards."""
        if (load := self._ended(task)) is not None:
            self.storage.is_back()
            self._windows.loaded(load, result)

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A task cannot be done: batches that need it are broken. If storage is the reason, it is tried again."""
        load = self._ended(task)
        if load is not None and isinstance(error, (StorageError, ServerError)):
            # Tried again after all batches that can be made, so that it delays none of them.
            self.storage.failed(load._replace(due=NEVER), error)
        elif load is not None and isinstance(error, WorkerError):  # not foreseen
            self._windows.lost(load, lambda record: self.data.error_context([record], error))
        elif load is not None:
            self._windows.lost(load, lambda record: error)

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        """Workers are lost at a task: find out at which of its records."""
        load = self._ended(task)
        if load is not None and len(load.slices) > 1:
            self._loads_alone.extend(load._replace(slices=(part,)) for part in load.slices)
        elif load is not None:
            self._windows.lost(load, lambda record: self.data.error_context([record], error))

    def retry(self, task: Task) -> bool:
        """Whether the task of a worker that died is still wanted. If its generation is older, its arena is free."""
        is_wanted = self.plan is not None and task.generation == self.generation
        if not is_wanted:
            self._windows.forget(_load_of(task))
        return is_wanted

    def _ended(self, task: Task) -> LoadTask | None:
        """A task has ended; its load, if that is still wanted."""
        self._in_flight.discard(task)
        return _load_of(task) if self.retry(task) else None

    # ------------------------------------------------------------------------------------------ batches

    def _grant(self, plan: PassPlan) -> int:
        """Grant all batches whose rows are there. Returns at which POSITION it must be called again.

        Batches with bad rows wait until they can have a slot, and until the consumer has read enough older notes.
        """
        found: list[BatchRange] = []
        again_at = NEVER
        while not self._past_end(self.next):
            step = self.next
            segments = plan.segments_of(step)
            if not self._windows.ready(segments):
                break
            bad = self._windows.bad_rows(segments)
            error = self._too_many_mismatches(plan, segments)
            too_early = step - self.taken - self.page.num_slots
            if (bad or error) and (too_early > 0 or not self._may_tell_of(len(bad))):
                again_at = key_of(self.generation, self.taken + max(too_early, 1))
                break
            batches = None
            if error is not None:
                self._tell(BatchFailed(self.generation, step, error), len(error.damages))
            else:
                batches = self._range_from(step, segments, bad)
            self.next = step + 1 if batches is None else batches.stop
            if batches is not None:
                found.append(batches)
        self._let(*found)
        return again_at

    def _too_many_mismatches(self, plan: PassPlan, segments: Sequence[Segment]) -> LoaderdError | None:
        """Why a batch, whose rows are there, and all behind it are broken; None: they are not."""
        if self._limits_mismatches:
            for segment in segments:
                self._mismatches.count(plan, segment.window, self._windows.bad_in(segment.window))
        return self._mismatches.error

    def _may_tell_of(self, num_damages: int) -> bool:
        """Whether so many more damages may lie unread. If none lies unread, they always may."""
        return not self._unread or sum(self._unread.values()) + num_damages <= _MOST_UNREAD

    def _tell(self, note: Note, num_damages: int) -> None:
        self._unread[note.step] = _OF_A_BATCH + num_damages
        self.notes.append(note)

    def _let(self, *ranges: BatchRange) -> None:
        """Have workers make these batches."""
        if ranges:
            self.granted += ranges
            self.grants.append(Granted(self._number, self.generation, [*ranges]))

    def wake_workers(self) -> None:
        """Have workers that sleep look at the page."""
        self.grants.append(Granted(self._number, self.generation, []))

    def _range_from(self, step: int, segments: Sequence[Segment], bad: dict[int, LoadFault]) -> BatchRange | None:
        """Batch ``step``, whose rows are there, and those behind it that are cut from the same window; None: broken.

        Tells consumers what is wrong with it: ``bad``.
        """
        if bad:
            num_rows = sum(segment.stop - segment.start for segment in segments)
            note = note_of(self.generation, step, num_rows, list(bad.values()), self._skip_damaged)
            self._tell(note, len(bad))
            if isinstance(note, BatchFailed):
                return None
        alone = bad or len(segments) != 1 or self._windows.bad_in(segments[0].window)
        stop = step + 1 if alone else self._windows.plan.stop_of_run(step)
        return BatchRange(step, stop, self._windows.in_arenas(segments), tuple(bad))

    def _granted_at(self, key: int) -> BatchRange | None:
        """The batch with this key, if it may be made."""
        generation, step = split_key(key)
        if self.plan is None or generation != self.generation:
            return None
        return next((one.batch(step) for one in self.granted if one.has(step)), None)

    def _withdraw(self, step: int) -> None:
        """Have nobody make a batch; a worker that keeps a slot for it may free the slot."""
        self.granted = without(self.granted, step)
        self.grants.append(Withdrawn(self._number, self.generation, step))

    # ---------------------------------------------------------------------------------- what goes wrong

    def is_under_way(self, key: int) -> bool:
        """Whether a claim of this key is of a batch that may be made."""
        return self._granted_at(key) is not None

    def not_made(self, failed: FillFailed) -> None:
        """A worker says that a batch cannot be made: it is made without the records to blame, or broken."""
        step = failed.step
        batch = self._granted_at(key_of(failed.generation, step))
        if batch is None or failed.omit != list(batch.omit):  # meanwhile, more are to be left out
            return
        faults = failed.faults
        self._num_faults[step] += len(faults)
        if self._skip_damaged and faults and failed.all_faults and self._num_faults[step] <= MOST_ROW_FAULTS:
            # Not withdrawn: the worker would use the slot that it keeps for a later batch.
            self.granted = without(self.granted, step)
            self._make_without(batch, faults, survived=True)
            return
        self._withdraw(step)
        self._break(batch, [min(faults)] if faults else [], failed.error, survived=True)

    def _break(self, batch: BatchRange, rows: Iterable[int], error: LoaderdError, *, survived: bool = False) -> None:
        """Tell consumers that a batch cannot be made. The error names ``rows``; ``survived`` as of ``data``."""
        if records := self._windows.records_of(batch, rows):
            error = self.data.error_context(records, error, survived=survived)
        self.notes.append(BatchFailed(self.generation, batch.first, error))

    def lost_at(self, key: int, row: int, reason: str, stalled: bool) -> None:
        """A worker is lost that was making a batch; ``row``: where the part begins that it was decoding, or -1.

        After the third one, its rows are suspects, or it is broken. To notice a stall takes long: if the third one
        has stalled, its rows are suspects only if batches may be made without some of them.
        """
        step, batch = step_of(key), self._granted_at(key)
        if batch is None or not batch.num_records or self.page.keys().count(key) > 1:  # another one makes it, too
            return
        part = batch.suspects_at(row)
        if len(part) > 1:
            self._grant_anew(batch._replace(suspects=(*part, *_behind(row, batch))))
            return
        if not part:
            row = -1
        self._deaths[step, row] += 1
        if self._deaths[step, row] < MAX_DEATHS:
            if part:  # those in front of it have been survived
                self._grant_anew(batch._replace(suspects=(row, *_behind(row, batch))))
            return
        del self._deaths[step, row]
        what = f"1 record of batch {step}" if part else f"batch {step}"
        lost = f"{MAX_DEATHS} workers were lost at the decoding of {what}; the last one {reason}"
        error = WorkerError(lost, hint=HINT_OF_DEATHS)
        if part:
            self._leave_out(batch, row, error, stalled)
        elif step in self._deadly or (stalled and not self._skip_damaged):
            self._withdraw(step)
            self._break(batch, range(batch.num_rows), error)
        else:
            self._deadly[step] = []
            rows = [row for row in range(batch.num_rows) if row not in batch.omit]
            self._grant_anew(batch._replace(suspects=(*rows[:: isqrt(len(rows))],)))  # fewest calls of the decoder

    def _leave_out(self, batch: BatchRange, row: int, error: WorkerError, stalled: bool) -> None:
        """Have a batch made without a row that workers are lost at, or break it: always, if there are too many."""
        deadly = self._deadly[batch.first]
        deadly.append((row, error, stalled))
        if len(deadly) <= MOST_ROW_FAULTS and sum(stalls for *_, stalls in deadly) <= _MOST_STALLING_ROWS:
            self.granted = without(self.granted, batch.first)
            self._make_without(batch._replace(suspects=_behind(row, batch)), {row: error})
            return
        first_row, first, _ = deadly[0]
        lost = f"workers are lost at {len(deadly)} records of batch {batch.first} or more"
        self._withdraw(batch.first)
        self._break(batch, [first_row], WorkerError(f"{lost}; at the first, {first.message}", hint=first.hint))

    def _grant_anew(self, batch: BatchRange) -> None:
        self.granted = without(self.granted, batch.first)
        self._let(batch)

    def _make_without(self, batch: BatchRange, guilty: Mapping[int, LoaderdError], survived: bool = False) -> None:
        """Have a batch that nobody may make now made without rows, or break it."""
        for (row, why), record in zip(guilty.items(), self._windows.records_of(batch, guilty), strict=True):
            error = self.data.error_context([record], why, survived=survived)
            self._windows.mark_bad(*batch.place_of(row), error)
        bad = self._windows.bad_rows(batch.segments)
        again = batch if set(bad) == set(batch.omit) else self._range_from(batch.first, batch.segments, bad)
        if again is None:
            self._withdraw(batch.first)
        else:
            self._let(again._replace(suspects=() if survived else batch.suspects))

    # ------------------------------------------------------------------------------------------- report

    @property
    def outage(self) -> Outage | None:
        """The outage that loads wait for; None: there is none, or no load is wanted."""
        return self.storage.now if self._is_loading else None

    @property
    def is_waited_for(self) -> bool:
        """Whether a consumer sleeps until it gets a batch: one that may be made, or the one behind those."""
        return any(map(self.page.sleeps_for, range(len(self.page.columns))))

    @property
    def windows_ready(self) -> int:
        """How many windows are held whose rows are all there."""
        return self._windows.num_ready

    def describe(self) -> list[str]:
        """What waits for what, in a few lines."""
        num_slots, num_full = self.page.num_slots, len(self.page.filled())
        lines = [f"consumer   has {num_full} batches, taken or ready; {num_slots - num_full} slots are free"]
        if self.plan is None:
            return [*lines, "batches    none are asked for"]
        steps = f"of {self.plan.num_steps}" if self.plan.num_steps is not None else "without end"
        lines.append(f"batches    {self.taken} {steps} is due; {self.next} is the next to be granted")
        if (outage := self.outage) is not None:
            lines.append(f"storage    {outage.in_words()}")
        return [*lines, *self._windows.describe()]


def _behind(row: int, batch: BatchRange) -> tuple[int, ...]:
    return tuple(start for start in batch.suspects if start > row)


def _load_of(task: Task) -> LoadTask:
    """What a task of a stream is."""
    assert isinstance(task.work, LoadTask)
    return task.work


def _in_one_message(places: Iterable[FilePlace]) -> tuple[FilePlace, ...]:
    """The first of these places: with a small share, a load is of blocks that have millions of weights."""
    taken: list[FilePlace] = []
    num_bytes = 0
    for place in places:
        weights = place.left and place.left.draw and place.left.draw.weights
        num_bytes += 0 if weights is None else weights.nbytes
        if taken and num_bytes > _MOST_WEIGHT_BYTES:
            break
        taken.append(place)
    return tuple(taken)
