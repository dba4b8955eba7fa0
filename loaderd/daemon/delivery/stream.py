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
from typing import Any

from loaderd.daemon.delivery.mismatches import Mismatches
from loaderd.daemon.delivery.notes import Note, UnreadNotices, note_of
from loaderd.daemon.delivery.poison_records import PoisonSearch
from loaderd.daemon.delivery.storage_outage import StorageOutage
from loaderd.daemon.delivery.windows import Windows
from loaderd.daemon.pool.tasks import (
    HINT_OF_DEATHS,
    MAX_DEATHS,
    TASKS_PER_WORKER,
    Task,
    TaskSource,
)
from loaderd.errors import LoaderdError, ServerError, StorageError, WorkerError
from loaderd.ipc.messages import BatchFailed
from loaderd.ipc.worker_messages import (
    MOST_ROW_FAULTS,
    FilePlace,
    FillFailed,
    Granted,
    LoadFault,
    LoadTask,
    TrialTask,
    Withdrawn,
)
from loaderd.plan.batch_range import BatchRange, without
from loaderd.plan.batches import Segment
from loaderd.plan.epoch import Slice
from loaderd.plan.passes import Pass, PassPlan
from loaderd.shm.page import (
    GRANTED,
    NEVER,
    WAKE_DAEMON_AT,
    Page,
    barrier,
    key_of,
    split_key,
    step_of,
)
from loaderd.snapshots import Outage


class Stream(TaskSource):
    """See the module's docstring. ``plan_pass`` makes the plan of a pass. ``number``: by which workers know it.

    ``limits_mismatches``: whether records that do not match the schema are an error where they are many, though
    ``skip_damaged``.
    """

    def __init__(
        self,
        plan_pass: Callable[[Pass], PassPlan],
        page: Page,
        *,
        num_arenas: int,
        num_workers: int,
        skip_damaged: bool,
        error_context: Callable[..., LoaderdError],
        limits_mismatches: bool = False,
        tasks_per_worker: int = TASKS_PER_WORKER,
        number: int = 0,
        places_of: Callable[[Sequence[Slice]], Iterable[FilePlace]] = lambda slices: (),
    ) -> None:
        """``error_context``: makes an error name records, as in ``LocalData``. ``places_of``: as in LoadTask."""
        self._tasks_per_worker = tasks_per_worker
        self._number = number
        self.notes: deque[Note] = deque()
        self.grants: deque[Granted | Withdrawn] = deque()
        self.generation = 0  # none
        self.plan: PassPlan | None = None
        self.plan_pass = plan_pass
        self.page = page
        self._skip_damaged = skip_damaged
        self._limits_mismatches = limits_mismatches
        self._mismatches = Mismatches()
        self._error_context = error_context
        self._windows = Windows(num_arenas, num_workers, number, places_of)
        self._in_flight: set[Task] = set()
        self._loads_alone: deque[LoadTask] = deque()
        self.granted: list[BatchRange] = []
        """The batches that may be made."""
        self._said = UnreadNotices()
        self._trials: dict[int, PoisonSearch] = {}
        self._tried: set[int] = set()
        self._num_faults: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
        self.storage = StorageOutage()
        self.next = self.taken = 0
        """The batch that is granted next, and the first that not all consumers have taken."""

    @property
    def tasks_per_worker(self) -> int:
        return self._tasks_per_worker

    # ------------------------------------------------------------------------------------------- events

    def stop(self) -> None:
        """All that is under way is void; nothing happens until the next :meth:`start`."""
        self.notes.clear()
        self.grants.clear()
        self._windows.stop(self._in_flight)
        self._in_flight.clear()
        self._loads_alone.clear()
        self.granted.clear()
        self._said.clear()
        self._trials.clear()
        self._tried.clear()
        self._num_faults.clear()
        self._deaths.clear()
        self._mismatches = Mismatches()
        self.storage.clear()
        self.plan = None
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
            self._said.come_to(self.taken)
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

    def done(self, task: Task, result: Any) -> None:
        """A task is done. The caller calls :meth:`look` afterwards."""
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        if isinstance(task.work, LoadTask):
            self.storage.is_back()
            self._windows.loaded(task.work, result)
        elif isinstance(task.work, TrialTask):
            self._tried_rows(task.work)

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A task cannot be done: batches that need it are broken. If storage is the reason, it is tried again."""
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        if isinstance(task.work, LoadTask) and isinstance(error, (StorageError, ServerError)):
            # Tried again after all batches that can be made, so that it delays none of them.
            self.storage.failed(task.work._replace(due=NEVER), error)
        elif isinstance(task.work, LoadTask):
            unforeseen = isinstance(error, WorkerError)
            self._windows.lost(
                task.work, lambda record: self._error_context([record], error) if unforeseen else error
            )
        elif isinstance(task.work, TrialTask):
            self._tried_rows(task.work)  # the worker survived; the error comes again with the whole batch

    @property
    def outage(self) -> Outage | None:
        """The outage that loads wait for; None: there is none, or no load is wanted."""
        return self.storage.now if self._is_loading else None

    @property
    def _is_loading(self) -> bool:
        under_way = any(isinstance(task.work, LoadTask) for task in self._in_flight)
        return under_way or bool(self._loads_alone or self.storage.num_resting)

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        self._loads_alone.extend(self.storage.tick(seconds))

    @property
    def is_waited_for(self) -> bool:
        """Whether a consumer sleeps until it gets a batch: one that may be made, or the one behind those."""
        return any(map(self.page.sleeps_for, range(len(self.page.columns))))

    @property
    def sleepers(self) -> list[int]:
        """The columns of the consumers that sleep until they get the batch that is granted next."""
        key = key_of(self.generation, self.next)
        return [column for column in range(len(self.page.columns)) if self.page.sleeps_for(column) == key]

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        """Workers are lost at a task: find out at which of its records."""
        if self._forget_stale(task):
            return
        self._in_flight.remove(task)
        work = task.work
        if isinstance(work, LoadTask) and len(work.slices) > 1:
            self._loads_alone.extend(work.one_by_one())
        elif isinstance(work, LoadTask):
            self._windows.lost(work, lambda record: self._error_context([record], error))
        elif isinstance(work, TrialTask):
            self._tried_rows(work, error, stalled)

    def retry(self, task: Task) -> bool:
        """Whether the task of a worker that died is still wanted: it is, unless its generation is older."""
        return not self._forget_stale(task)

    def next_task(self) -> Task | None:
        """The most useful work that can begin now. Work that failed before comes first: everything waits for it."""
        if self.plan is None:
            return None
        for trial in self._trials.values():
            if (tried := trial.next_work()) is not None:
                return self._begin(tried, trial.most_deaths(tried))
        is_loading = self._is_loading
        load = self._loads_alone.popleft() if self._loads_alone else self._windows.next_load()
        if load is None:
            return None
        if not is_loading:
            self.storage.begin()
        return self._begin(load, MAX_DEATHS)

    def _begin(self, work: LoadTask | TrialTask, most_deaths: int) -> Task:
        task = Task(self, work, self.generation, most_deaths)
        self._in_flight.add(task)
        return task

    def _past_end(self, step: int) -> bool:
        assert self.plan is not None
        return self.plan.num_steps is not None and step >= self.plan.num_steps

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
            if (bad or error) and (too_early > 0 or not self._said.has_room(len(bad))):
                again_at = key_of(self.generation, self.taken + max(too_early, 1))
                break
            if error is not None:
                self._said.add(step, len(error.damages))
                self._broken(step, error)
            batches = None if error is not None else self._range_from(step, segments, bad)
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

        Adds a note of what is wrong with it: ``bad``.
        """
        if bad:
            num_rows = sum(segment.stop - segment.start for segment in segments)
            self._said.add(step, len(bad))
            note = note_of(self.generation, step, num_rows, list(bad.values()), self._skip_damaged)
            self.notes.append(note)
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

    def _broken(self, step: int, error: LoaderdError) -> None:
        self.notes.append(BatchFailed(self.generation, step, error))

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
        error = failed.error
        if faults:
            error = self._error_context(self._windows.records_of(batch, [min(faults)]), error, survived=True)
        self._withdraw(step)
        self._broken(step, error)

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
        if batch is None:
            return
        if self.page.keys().count(key) > 1:  # another worker makes it, too
            return
        self._deaths[step] += 1
        if self._deaths[step] < MAX_DEATHS:
            return
        self._withdraw(step)
        if not batch.num_records:  # none is left in it that they could die of
            self._let(batch)
            return
        lost = f"{MAX_DEATHS} workers in a row were lost at the decoding of batch {step}; the last one {reason}"
        error = WorkerError(lost, hint=HINT_OF_DEATHS)
        del self._deaths[step]
        if step in self._tried or (stalled and not self._skip_damaged):
            records = self._windows.records_of(batch, range(batch.num_rows))
            self._broken(step, self._error_context(records, error))
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
        if step >= self.taken and not trial.is_hopeless:
            self._make_without(trial.batch, trial.guilty)
            return
        if step >= self.taken:
            records = self._windows.records_of(trial.batch, [min(trial.guilty)])
            self._broken(step, self._error_context(records, trial.too_many()))
        self._withdraw(step)

    def _make_without(self, batch: BatchRange, guilty: Mapping[int, LoaderdError], survived: bool = False) -> None:
        """Have a batch that nobody may make now made without rows, or break it.

        ``survived``: as in ``error_context``.
        """
        for (row, why), record in zip(guilty.items(), self._windows.records_of(batch, list(guilty)), strict=True):
            self._windows.mark_bad(*batch.place_of(row), self._error_context([record], why, survived=survived))
        bad = self._windows.bad_rows(batch.segments)
        if set(bad) == set(batch.omit):
            self._let(batch)
            return
        again = self._range_from(batch.first, batch.segments, bad)
        if again is None:
            self._withdraw(batch.first)
        else:
            self._let(again)

    def _forget_stale(self, task: Task) -> bool:
        """Whether ``task`` is of an older generation; if so, give back what it held."""
        if self.plan is not None and task.generation == self.generation:
            return False
        self._windows.forget(task)
        return True

    # ------------------------------------------------------------------------------------------- report

    @property
    def windows_ready(self) -> int:
        """How many windows are held whose rows are all there."""
        return self._windows.num_ready

    def describe(self) -> list[str]:
        """What waits for what, in a few lines."""
        page = self.page
        free = sum(page.is_free(slot) for slot in range(page.num_slots))
        lines = [f"consumer   has {page.num_slots - free} batches, taken or ready; {free} slots are free"]
        if self.plan is None:
            return [*lines, "batches    none are asked for"]
        steps = f"of {self.plan.num_steps}" if self.plan.num_steps is not None else "without end"
        lines.append(f"batches    {self.taken} {steps} is due; {self.next} is the next to be granted")
        if self._trials or self._loads_alone:
            lines.append(f"again      batches {[*self._trials]}, {len(self._loads_alone)} loads: they failed before")
        if self.storage.num_resting:
            lines.append(f"storage    does not give {self.storage.num_resting} loads, which are tried again")
        if (outage := self.outage) is not None:
            lines.append(f"storage    {outage.in_words()}")
        return [*lines, *self._windows.describe()]

    def why_idle(self) -> str:
        """Why a worker has nothing to do."""
        if self.plan is None or self._past_end(self.taken):
            return "waits for the consumer to ask for batches"
        if not any(self.page.is_free(slot) for slot in range(self.page.num_slots)):
            return "waits for the consumer to give slots back"
        return "waits for what the others are at"
