"""Gives the tasks of sources to workers: a pure state machine.

Events come in (a worker appeared, a task ended, a worker died, a moment passed), assignments come out of
:meth:`Scheduler.assign`. It does no I/O and reads no clock, so it is tested without processes.

A worker has a few tasks: one it works on and one that waits, so that it never idles while the daemon thinks; and more
where what the next tasks need is fetched from far away meanwhile. The tasks of a dead worker go to the others, in
front of anything new. A task that has killed three workers is given up: its source decides what becomes of it.

A load that begins in the middle of a block is given to the worker that loaded the part before it, if that worker has
room and makes progress: if the block can only be inflated from its front, the worker has inflated that part already.
Otherwise any worker gets the load, so that nothing waits for one worker.

A worker **stalls** when it is at something and makes no progress for so many ticks. The caller of
:meth:`Scheduler.tick` says what each worker is at. There are ticks only while this process runs, so no worker stalls
because the job was suspended for a night.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from loaderd.daemon.pool.tasks import HINT_OF_DEATHS, TASKS_PER_WORKER, Task, TaskSource, current_task
from loaderd.errors import LoaderdError, WorkerError


class _Worker:
    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.unready = 1
        """Answers that it owes: that it has started, and that it knows of each stream."""
        self.ticks = 0
        self.at: Hashable = None
        """What it was at when the last tick came."""
        self.last: Task | None = None
        """The task that it was given last."""

    @property
    def ready(self) -> bool:
        return not self.unready


class Scheduler:
    """Sources are asked in turn, so that none of them waits for another's backlog."""

    def __init__(self) -> None:
        self._sources: deque[TaskSource] = deque()
        self._workers: dict[int, _Worker] = {}
        self._again: deque[Task] = deque()
        self._tasks: dict[int, Task] = {}
        self._next_number = 0

    def add_source(self, source: TaskSource) -> None:
        self._sources.append(source)

    def remove_source(self, source: TaskSource) -> None:
        """Forget a source. It still hears of tasks that end later, and ignores them."""
        self._sources.remove(source)
        self._again = deque(task for task in self._again if task.source is not source)

    def add_worker(self, worker: int) -> None:
        """``worker`` was started; it will be given tasks when it is :meth:`ready`."""
        self._workers[worker] = _Worker()

    def unready(self, worker: int) -> None:
        """``worker`` is being attached to a stream; it gets tasks again when it is :meth:`ready`.

        It gets none until then, so that none is blamed if the worker dies of the stream.
        """
        self._workers[worker].unready += 1

    def ready(self, worker: int) -> None:
        """``worker`` has started, or knows of a stream: once for each."""
        self._workers[worker].unready -= 1
        self._workers[worker].ticks = 0

    def advanced(self, worker: int, number: int, done_bytes: int) -> None:
        self._workers[worker].ticks = 0
        task = self._tasks[number]
        task.source.advanced(task, done_bytes)

    def tick(self, at: Callable[[int], Hashable]) -> None:
        """A moment has passed. ``at`` says what a worker is at, and how far it is with it; None: at nothing."""
        for number, worker in self._workers.items():
            before, worker.at = worker.at, at(number)
            goes_on = worker.at is None or worker.at != before
            worker.ticks = 0 if worker.ready and goes_on else worker.ticks + 1

    def stalled(self, limit: int, start_limit: int) -> list[int]:
        """Workers without progress for ``limit`` ticks; of those that are not ready, for ``start_limit`` ticks."""
        return [
            number
            for number, worker in self._workers.items()
            if worker.ticks >= (limit if worker.ready else start_limit)
        ]

    def is_ready(self, worker: int) -> bool:
        return self._workers[worker].ready

    def ticks_of(self, worker: int) -> int:
        return self._workers[worker].ticks

    def tasks_of(self, worker: int) -> list[Task]:
        return list(self._workers[worker].tasks)

    def silent(self, source: TaskSource, limit: int) -> Task | None:
        """A task of ``source`` that is being worked on, and of which nothing has come for ``limit`` ticks or more."""
        for worker in self._workers.values():
            task = current_task(worker.tasks)
            if worker.ready and task is not None and task.source is source and worker.ticks >= limit:
                return task
        return None

    def lose_worker(self, worker: int, reason: str, stalled: bool = False, blamed: Task | None = None) -> None:
        """``worker`` died at its task ``blamed``, or ``stalled`` and was ended. Other workers do its tasks again."""
        lost = self._workers.pop(worker)
        for task in lost.tasks:
            del self._tasks[task.number]
            if task is blamed:
                task.deaths += 1
            # A worker that owes an answer may hang in a stream's schema, and not at the task: another one tries.
            is_sure = lost.ready or task.deaths > 1
            is_ended = task is blamed and stalled and is_sure and not task.survives_stalls
            if task.deaths >= task.most_deaths or is_ended:
                workers = f"{task.deaths} workers were" if task.deaths > 1 else "a worker was"
                error = WorkerError(f"{workers} lost at {task.work}; the last one {reason}", hint=HINT_OF_DEATHS)
                task.source.given_up(task, error, stalled)
            else:
                self._again.append(task)

    def end_task(self, worker: int, number: int, result: Any) -> None:
        """``worker`` did task ``number``, or could not: then ``result`` is a LoaderdError."""
        task = self._tasks.pop(number)
        self._workers[worker].tasks.remove(task)
        self._workers[worker].ticks = 0
        if isinstance(result, LoaderdError):
            task.source.failed(task, result)
        else:
            task.source.done(task, result)

    def assign(self) -> list[tuple[int, Task]]:
        """Give tasks to those workers that are ready, until there are no more tasks or no more room."""
        assigned: list[tuple[int, Task]] = []
        ready = [(number, worker) for number, worker in self._workers.items() if worker.ready]
        while ready:
            number, worker = min(ready, key=lambda item: len(item[1].tasks))
            task = self._next_task(len(worker.tasks))
            if task is None:
                break
            number, worker = next((item for item in ready if _goes_on(item[1], task)), (number, worker))
            task.number = self._next_number
            self._next_number += 1
            self._tasks[task.number] = task
            worker.tasks.append(task)
            worker.last = task
            assigned.append((number, task))
        return assigned

    def _next_task(self, has: int) -> Task | None:
        """The next task for a worker that ``has`` so many, if it may have more."""
        while self._again and has < TASKS_PER_WORKER:
            again = self._again.popleft()
            if again.source in self._sources and again.source.retry(again):
                return again
        for _ in range(len(self._sources)):
            source = self._sources[0]
            self._sources.rotate(-1)
            task = source.next_task() if has < source.tasks_per_worker else None
            if task is not None:
                return task
        return None


def _goes_on(worker: _Worker, task: Task) -> bool:
    """Whether ``task`` goes on from the last task of a worker that makes progress and has room for it."""
    return (
        worker.last is not None
        and not worker.ticks
        and task.goes_on_from(worker.last)
        and len(worker.tasks) < task.source.tasks_per_worker
    )
