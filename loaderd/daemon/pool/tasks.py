"""The units of work that the daemon hands to workers, and what a source of them does.

Every task can be done again: a load writes the same rows to the same places. So a task whose worker died, or stalled,
is given to another. ``str(work)`` says in a message what it was. Batches are no tasks: workers choose them themselves
(see ``shm.page``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from loaderd.errors import LoaderdError, WorkerError
from loaderd.ipc.worker_messages import Done
from loaderd.plan.batches import Segment
from loaderd.plan.epoch import Slice
from loaderd.shm.batch_range import ArenaSegment
from loaderd.storage.shard_file import ShardFile


class ListWork(NamedTuple):
    """List the shards of set ``set`` (counted from 0), which the user calls ``shards``."""

    set: int
    shards: str

    def __str__(self) -> str:
        return f"the listing of {self.shards}"


class AskWork(NamedTuple):
    """Ask servers what data set ``name`` is."""

    name: str

    def __str__(self) -> str:
        return f"the question to servers for data set {self.name}"


class IndexWork(NamedTuple):
    """Index the shards of a group, which the user knows as ``shards``."""

    group: tuple[ShardFile, ...]
    shards: str

    def __str__(self) -> str:
        return f"the index of {self.shards}"


class CheckWork(NamedTuple):
    """See whether the first record of ``block`` fits the schema; or, with ``any_fits``, any of its first ones."""

    block: int
    any_fits: bool

    def __str__(self) -> str:
        return f"the first records of block {self.block}" if self.any_fits else "the first record"


class LoadWork(NamedTuple):
    """Bring ``slices`` into ``window``, which lies in ``arena``, before batch ``due`` is taken."""

    window: int
    arena: int
    slices: tuple[Slice, ...]
    due: int = 0

    @property
    def num_rows(self) -> int:
        return sum(part.stop - part.first for part in self.slices)

    def __str__(self) -> str:
        return f"the load of {self.num_rows} records of window {self.window}"


class PlannedBatch(NamedTuple):
    """Batch ``step``: the rows of ``segments`` (whose windows lie in ``arenas``)."""

    step: int
    segments: tuple[Segment, ...]
    arenas: tuple[int, ...]
    omit: tuple[int, ...] = ()
    """Rows of the batch, counted from its start, that are left out."""

    @property
    def num_rows(self) -> int:
        """How many rows it has, including those that are left out."""
        return sum(part.stop - part.start for part in self.segments)

    @property
    def arena_segments(self) -> tuple[ArenaSegment, ...]:
        """The segments as workers see them."""
        parts = zip(self.arenas, self.segments, strict=True)
        return tuple(ArenaSegment(arena, part.start, part.stop) for arena, part in parts)

    def place_of(self, row: int) -> tuple[int, int]:
        """(window, place in it) of a row of the batch."""
        for segment in self.segments:
            size = segment.stop - segment.start
            if row < size:
                return segment.window, segment.start + row
            row -= size
        raise IndexError(row)


class Fault(NamedTuple):
    """What a load may end with: places of a window whose records cannot be delivered, and why."""

    places: tuple[int, ...]
    error: LoaderdError


class TrialWork(NamedTuple):
    """Decode these rows of a batch, to see whether a worker survives it."""

    batch: PlannedBatch
    rows: tuple[int, ...]

    @property
    def omit(self) -> list[int]:
        """The other rows."""
        return sorted(set(range(self.batch.num_rows)).difference(self.rows))

    def __str__(self) -> str:
        return f"the decoding of {len(self.rows)} record{'s' * (len(self.rows) != 1)} of batch {self.batch.step}"


TASKS_PER_WORKER = 2
"""One it works on and one that waits, so that a worker never idles while the daemon thinks."""
MAX_DEATHS = 3
HINT_OF_DEATHS = "A derived field that crashes or never ends, or too little memory, are the usual causes."

Work = ListWork | AskWork | IndexWork | CheckWork | LoadWork | TrialWork


class Task:
    """Work that was handed out: by which source, in which generation of it, and how often its worker died.

    It is given up after ``most_deaths`` deaths; unless it ``survives_stalls``, also after the first stall,
    or after the second one if the worker may not have begun it.
    """

    def __init__(
        self,
        source: TaskSource,
        work: Work,
        generation: int = 0,
        most_deaths: int = MAX_DEATHS,
        survives_stalls: bool = True,
    ) -> None:
        self.source = source
        self.work = work
        self.generation = generation
        self.most_deaths = most_deaths
        self.survives_stalls = survives_stalls
        self.deaths = 0
        self.number = -1

    def goes_on_from(self, other: Task) -> bool:
        """Whether it begins with the part of a block that is right behind the part with which ``other`` ends."""
        if self.source is not other.source:
            return False
        if not isinstance(self.work, LoadWork) or not isinstance(other.work, LoadWork):
            return False
        first, last = self.work.slices[0], other.work.slices[-1]
        return first.first > 0 and (first.epoch, first.block, first.first) == (last.epoch, last.block, last.stop)


def current_task(tasks: Iterable[Task]) -> Task | None:
    """The task that a worker with these ``tasks`` is at, unless a page says that it is at another one.

    Workers say on the page when they begin a load or a trial; a load that waits for storage lets later tasks pass.
    """
    return next((task for task in tasks if not isinstance(task.work, (LoadWork, TrialWork))), None)


class TaskSource(ABC):
    """Something that has work to do; the scheduler asks it."""

    @property
    def tasks_per_worker(self) -> int:
        """A worker gets the next task of this source only if it has fewer tasks than that."""
        return TASKS_PER_WORKER

    @abstractmethod
    def next_task(self) -> Task | None:
        """Work that can begin now, or None; what is returned counts as begun."""

    def advanced(self, task: Task, done_bytes: int) -> None:  # noqa: B027 - most do not ask how far a task is
        """The task goes on, and stands at byte ``done_bytes`` of its shard."""

    @abstractmethod
    def done(self, task: Task, result: Done) -> None:
        """The task is done."""

    @abstractmethod
    def failed(self, task: Task, error: LoaderdError) -> None:
        """The task cannot be done: a worker tried, and says why."""

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        """The task cannot be done: worker after worker died at it, or ``stalled``."""
        self.failed(task, error)

    def retry(self, task: Task) -> bool:
        """Whether a task whose worker died is still wanted. If not, it counts as ended."""
        return True
