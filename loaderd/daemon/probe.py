"""The one task between the index pass and the stream."""

from __future__ import annotations

from typing import Any

from loaderd.daemon.tasks import ProbeWork, Task
from loaderd.errors import LoaderdError, WorkerError


class Probe:
    """Does the first record fit the schema?"""

    def __init__(self) -> None:
        self._given = False
        self.finished = False
        self.error: LoaderdError | None = None

    def next_task(self) -> Task | None:
        if self._given:
            return None
        self._given = True
        return Task(self, ProbeWork())

    def advanced(self, task: Task, done_bytes: int) -> None: ...

    def done(self, task: Task, result: Any) -> None:
        self.finished = True

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.finished, self.error = True, error

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        self.failed(task, error)

    def retry(self, task: Task) -> bool:
        return True
