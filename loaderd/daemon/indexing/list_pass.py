"""The shards of all sets, listed by a worker.

Storage may never answer, and then only the end of the process ends the call. So the daemon itself asks storage for
nothing: it is never stuck in a call, can say what it waits for, and ends when the training does.

Pure: a source of one task that the scheduler asks like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.errors import LoaderdError, ShardReadError, WorkerError
from loaderd.ipc.worker_messages import ListTask
from loaderd.storage.names import Columns
from loaderd.storage.shard_file import HINT_STORAGE, ShardFile


class ListPass(TaskSource):
    """Has the shards of ``sets`` listed: the names of each, which a ``Dataset`` has checked.

    ``stall_timeout``: after how many seconds without progress a worker is ended; then the listing fails. ``storage``:
    as in ListTask.
    """

    def __init__(
        self, sets: Sequence[str | Sequence[str] | Columns], stall_timeout: float | None, storage: bytes = b""
    ) -> None:
        self.files: list[list[ShardFile]] | None = None
        """Those of each set; None: it is not finished, or failed."""
        self.error: LoaderdError | None = None
        self.num_found = 0
        named = [[names] if isinstance(names, str) else names for names in sets]
        self._work: ListTask | None = ListTask(
            [names if isinstance(names, Columns) else list(names) for names in named], storage
        )
        self._stall_timeout = stall_timeout

    @property
    def finished(self) -> bool:
        return self.error is not None or self.files is not None

    def advanced(self, task: Task, done_bytes: int) -> None:
        """So many shards (``done_bytes``) were found."""
        self.num_found = done_bytes

    def next_task(self) -> Task | None:
        work, self._work = self._work, None
        return None if work is None else Task(self, work, survives_stalls=False)

    def done(self, task: Task, result: list[list[ShardFile]]) -> None:
        self.files = result

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.error = error

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        assert isinstance(task.work, ListTask)
        if not stalled:
            self.failed(task, error)
            return
        text = f"{task.work.names} cannot be listed: the storage has not answered for {self._stall_timeout:g} s"
        hint = f"{HINT_STORAGE} Where it takes longer, pass a larger stall_timeout."
        self.failed(task, ShardReadError(text, hint=hint))
