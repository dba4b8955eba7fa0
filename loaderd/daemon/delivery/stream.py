"""One stream of batches, seen from the daemon: a pure state machine that loads windows and grants batches.

::

    window   loading ──all rows in──► ready                                             (see ``windows``)
    batch    planned ──its windows are ready──► granted ──made and taken by others──► (see ``shm.page``)
                 ▲                                 └─ workers are lost at it ──► on trial ──┘ (see ``poison_records``)

- Batches are granted in order, as soon as their rows are there. The daemon does not decide which worker makes which
  batch, and no message tells it that the consumer took one: when it is woken, it reads in the page how far that is.
- The consumer is told which batches cannot be made, and, before a batch is granted, which records it lacks.
- Loads of the next window come due while the consumer goes through this one, so that it does not meet a pause where a
  window ends.
- :meth:`Stream.start` begins anew anywhere. Loads of older generations that are still in flight keep their arenas
  until they are done, and then are forgotten.

The owner first sends the messages in ``notes`` to the consumer, then those in ``grants`` to all workers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loaderd.daemon.delivery.mismatches import Mismatches
from loaderd.daemon.delivery.notes import Note, note_of
from loaderd.daemon.delivery.poison_records import PoisonSearch
from loaderd.daemon.delivery.storage_outage import StorageOutage
from loaderd.daemon.delivery.windows import Windows
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.daemon.pool.tasks import HINT_OF_DEATHS, MAX_DEATHS, TASKS_PER_WORKER, Task, TaskSource
from loaderd.errors import LoaderdError, ServerError, StorageError, WorkerError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import (
    MOST_ROW_FAULTS,
    FillFailed,
    Granted,
    LoadFault,
    LoadTask,
    TrialTask,
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
        self._windows.stop([task.work for task in self._in_flight if isinstance(task.work, LoadTask)])
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
        self._trials: dict[int, PoisonSearch] = {}
        self._tried: set[int] = set()
        self._num_faults: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
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
        for trial in self._trials.values():
            if (tried := trial.next_work()) is not None:
                # One death is enough to try halves of several rows, but not to find a row guilty.
                return self._begin(tried, MAX_DEATHS if len(tried.rows) == 1 else 1)
        was_loading = self._is_loading
        load = self._loads_alone.popleft() if self._loads_alone else self._windows.next_load()
        if load is None:
            return None
        if not was_loading:
            self.storage.begin()
        return self._begin(load._replace(places=tuple(self.data.places(load.slices, self._seed))), MAX_DEATHS)

    def _begin(self, work: LoadTask | TrialTask, most_deaths: int) -> Task:
        task = Task(self, work, self.generation, most_deaths)
        self._in_flight.add(task)
        return task

    @property
    def _is_loading(self) -> bool:
        under_way = any(isinstance(task.work, LoadTask) for task in self._in_flight)
        return under_way or bool(self._loads_alone) or self.storage.has_resting

    def done(self, task: Task, result: Any) -> None:
        """A task is done. The caller calls :meth:`look` afterwards."""
        if not self._ended(task):
            return
        if isinstance(task.work, LoadTask):
            self.storage.is_back()
            self._windows.loaded(task.work, result)
        elif isinstance(task.work, TrialTask):
            self._tried_rows(task.work)

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A task cannot be done: batches that need it are broken. If storage is the reason, it is tried again."""
        if not self._ended(task):
            return
        work = task.work
        if isinstance(work, TrialTask):
            self._tried_rows(work)  # the worker survived; the error comes again with the whole batch
        elif isinstance(work, LoadTask) and isinstance(error, (StorageError, ServerError)):
            # Tried again after all batches that can be made, so that it delays none of them.
            self.storage.failed(work._replace(due=NEVER), error)
        elif isinstance(work, LoadTask) and isinstance(error, WorkerError):  # not foreseen
            self._windows.lost(work, lambda record: self.data.error_context([record], error))
        elif isinstance(work, LoadTask):
            self._windows.lost(work, lambda record: error)

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        """Workers are lost at a task: find out at which of its records."""
        if not self._ended(task):
            return
        work = task.work
        if isinstance(work, TrialTask):
            self._tried_rows(work, error, stalled)
        elif isinstance(work, LoadTask) and len(work.slices) > 1:
            self._loads_alone.extend(work._replace(slices=(part,)) for part in work.slices)
        elif isinstance(work, LoadTask):
            self._windows.lost(work, lambda record: self.data.error_context([record], error))

    def retry(self, task: Task) -> bool:
        """Whether the task of a worker that died is still wanted. If its generation is older, its arena is free."""
        is_wanted = self.plan is not None and task.generation == self.generation
        if not is_wanted and isinstance(task.work, LoadTask):
            self._windows.forget(task.work)
        return is_wanted

    def _ended(self, task: Task) -> bool:
        """A task has ended; whether it was wanted."""
        self._in_flight.discard(task)
        return self.retry(task)

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

    def keeps_slot(self, key: int) -> bool:
        """Whether a claim is of a batch on trial. That batch keeps its slot: later ones could take all slots."""
        generation, step = split_key(key)
        return self.plan is not None and generation == self.generation and step in self._trials

    def lost_at(self, key: int, reason: str, stalled: bool) -> None:
        """A worker is lost that was making a batch.

        After the third one, find out which records are to blame, and make the batch without them, or break it. To
        notice a stall takes long: after one, this is done only if batches may be made without some of their records.
        """
        step, batch = step_of(key), self._granted_at(key)
        if batch is None or not batch.num_records or self.page.keys().count(key) > 1:  # another one makes it, too
            return
        self._deaths[step] += 1
        if self._deaths[step] < MAX_DEATHS:
            return
        del self._deaths[step]
        self._withdraw(step)
        if step in self._tried or (stalled and not self._skip_damaged):
            lost = f"{MAX_DEATHS} workers in a row were lost at the decoding of batch {step}; the last one {reason}"
            self._break(batch, range(batch.num_rows), WorkerError(lost, hint=HINT_OF_DEATHS))
            return
        self._tried.add(step)
        self._trials[step] = PoisonSearch(self._number, batch, first_only=not self._skip_damaged)

    def _tried_rows(self, work: TrialTask, error: WorkerError | None = None, stalled: bool = False) -> None:
        """Rows of a batch have been tried; at the end of the trial, the batch is made without the guilty ones."""
        trial, step = self._trials[work.step], work.step
        trial.tried(work, error, stalled)
        if not trial.finished:
            return
        del self._trials[step]
        if step >= self.taken and trial.hopeless is None:
            self._make_without(trial.batch, trial.guilty)
            return
        self._withdraw(step)
        if step >= self.taken and trial.hopeless is not None:
            self._break(trial.batch, [min(trial.guilty)], trial.hopeless)

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
            self._let(again)

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
