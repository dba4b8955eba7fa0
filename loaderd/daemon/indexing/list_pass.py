"""The shards of each set, listed by the workers.

Storage may never answer, and then only the end of the process ends the call. So the daemon itself asks storage for
nothing: it is never stuck in a call, can say what it waits for, and ends when the training does.

Pure: a source of tasks that the scheduler asks like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.errors import LoaderdError, ShardReadError, WorkerError
from loaderd.ipc.worker_messages import ListTask
from loaderd.storage.shard_file import HINT_STORAGE, ShardFile


class ListPass(TaskSource):
    """Gives out a task for each of ``sets``; ``files`` fills up.

    ``sets``: the names of the shards of each, which a ``Dataset`` has checked. ``stall_timeout``: after how many
    seconds without progress a worker is ended; then the listing fails.
    """

    def __init__(
        self, sets: Sequence[str | Sequence[str]], stall_timeout: float | None, storage: bytes = b""
    ) -> None:
        """``storage``: as in ListTask."""
        self._storage = storage
        self.sets = sets
        self.files: dict[int, list[ShardFile]] = {}
        self.error: LoaderdError | None = None
        self._waiting = deque(range(len(sets)))
        self._begun: dict[Task, int] = {}
        self._stall_timeout = stall_timeout

    @property
    def finished(self) -> bool:
        return self.error is not None or len(self.files) == len(self.sets)

    @property
    def num_found(self) -> int:
        return sum(map(len, self.files.values())) + sum(self._begun.values())

    def advanced(self, task: Task, done_bytes: int) -> None:
        """So many shards (``done_bytes``) of the task's set were found."""
        self._begun[task] = done_bytes

    def next_task(self) -> Task | None:
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        names = self.sets[number]
        shards = [names] if isinstance(names, str) else list(names)
        return Task(self, ListTask(number, shards, self._storage), survives_stalls=False)

    def done(self, task: Task, result: list[ShardFile]) -> None:
        assert isinstance(task.work, ListTask)
        self._begun.pop(task, None)
        self.files[task.work.set] = result

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.error = self.error or error

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        assert isinstance(task.work, ListTask)
        if not stalled:
            self.failed(task, error)
            return
        text = f"{task.work.names} cannot be listed: the storage has not answered for {self._stall_timeout:g} s"
        hint = f"{HINT_STORAGE} Where it takes longer, pass a larger stall_timeout."
        self.failed(task, ShardReadError(text, hint=hint))
