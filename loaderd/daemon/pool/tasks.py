"""Tasks that were handed out to workers, and what a source of them does.

Batches are no tasks: workers choose them themselves (see ``shm.page``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from loaderd.errors import LoaderdError, WorkerError
from loaderd.ipc.worker_messages import LoadTask, WorkerTask

TASKS_PER_WORKER = 2
"""One it works on and one that waits, so that a worker never idles while the daemon thinks."""
MAX_DEATHS = 3
HINT_OF_DEATHS = "A derived field that crashes or never ends, or too little memory, are the usual causes."


class Task:
    """What becomes of ``work`` that is handed out: of which source it is, and how often its worker died.

    ``generation``: of the source. It is given up after ``most_deaths`` deaths; unless it ``survives_stalls``, also
    after the first stall, or after the second one if the worker may not have begun it.
    """

    def __init__(
        self,
        source: TaskSource,
        work: WorkerTask,
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
        if not isinstance(self.work, LoadTask) or not isinstance(other.work, LoadTask):
            return False
        first, last = self.work.slices[0], other.work.slices[-1]
        return first.first > 0 and (first.epoch, first.block, first.first) == (last.epoch, last.block, last.stop)


def current_task(tasks: Iterable[Task]) -> Task | None:
    """The task that a worker with these ``tasks`` is at, unless a page says that it is at another one.

    Workers say on the page when they begin a load; one that waits for storage lets later tasks pass.
    """
    return next((task for task in tasks if not isinstance(task.work, LoadTask)), None)


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
    def done(self, task: Task, result: Any) -> None:
        """The task is done. ``result`` as the task's message says."""

    @abstractmethod
    def failed(self, task: Task, error: LoaderdError) -> None:
        """The task cannot be done: a worker tried, and says why."""

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        """The task cannot be done: worker after worker died at it, or ``stalled``."""
        self.failed(task, error)

    def retry(self, task: Task) -> bool:
        """Whether a task whose worker died is still wanted. If not, it counts as ended."""
        return True
