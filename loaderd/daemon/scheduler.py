"""Who does what: a pure state machine between sources of tasks and workers.

Events come in (a worker appeared, a task ended, a worker died), assignments come out of :meth:`Scheduler.assign`. It
does no I/O and reads no clock, so it is tested without processes.

A worker has up to two tasks: one it works on and one that waits in its socket, so that it never idles while the
daemon thinks. The tasks of a dead worker go to the others, in front of anything new. A task that has killed three
workers is given up: whoever wants it gets an error.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from loaderd.daemon.tasks import Task, TaskSource, Work
from loaderd.errors import LoaderdError, WorkerError

TASKS_PER_WORKER = 2
MAX_DEATHS = 3


class Scheduler:
    """Sources are asked in turn, so that none of them waits for another's backlog."""

    def __init__(self) -> None:
        self._sources: deque[TaskSource] = deque()
        self._workers: dict[int, list[Task]] = {}
        self._again: deque[Task] = deque()
        self._tasks: dict[int, Task] = {}
        self._next_number = 0

    def add_source(self, source: TaskSource) -> None:
        self._sources.append(source)

    def remove_source(self, source: TaskSource) -> None:
        """Forget a source; what its tasks still give is ignored by the source itself."""
        self._sources.remove(source)
        self._again = deque(task for task in self._again if task.source is not source)

    def add_worker(self, worker: int) -> None:
        self._workers[worker] = []

    def tasks_of(self, worker: int) -> list[Task]:
        """The tasks that ``worker`` has now, oldest first."""
        return list(self._workers[worker])

    def work_of(self, number: int) -> Work:
        """What task ``number``, which some worker has, is."""
        return self._tasks[number].work

    def lose_worker(self, worker: int, reason: str) -> None:
        """``worker`` died. The first of its tasks is blamed; all of them are done again."""
        tasks = self._workers.pop(worker)
        for position, task in enumerate(tasks):
            del self._tasks[task.number]
            if position == 0:
                task.deaths += 1
            if task.deaths >= MAX_DEATHS:
                task.source.failed(
                    task,
                    WorkerError(
                        f"{task.deaths} workers in a row died at {task.work}; the last one {reason}",
                        hint="A derived field that crashes, or too little memory, are the usual causes.",
                    ),
                )
            else:
                self._again.append(task)

    def end_task(self, worker: int, number: int, result: Any, error: LoaderdError | None = None) -> None:
        """``worker`` did task ``number``, or could not."""
        task = self._tasks.pop(number)
        self._workers[worker].remove(task)
        if error is None:
            task.source.done(task, result)
        else:
            task.source.failed(task, error)

    def assign(self) -> list[tuple[int, Task]]:
        """Give tasks to workers, those with the fewest first, until there are no more tasks or no more room."""
        assigned: list[tuple[int, Task]] = []
        while self._workers:
            worker = min(self._workers, key=lambda one: len(self._workers[one]))
            if len(self._workers[worker]) >= TASKS_PER_WORKER:
                break
            task = self._next_task()
            if task is None:
                break
            task.number = self._next_number
            self._next_number += 1
            self._tasks[task.number] = task
            self._workers[worker].append(task)
            assigned.append((worker, task))
        return assigned

    def _next_task(self) -> Task | None:
        while self._again:
            again = self._again.popleft()
            if again.source in self._sources and again.source.retry(again):
                return again
        for _ in range(len(self._sources)):
            source = self._sources[0]
            self._sources.rotate(-1)
            task = source.next_task()
            if task is not None:
                return task
        return None
