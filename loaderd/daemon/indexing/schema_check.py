"""The tasks between the index pass and the stream: do the records fit the schema?

A wrong schema must be an error before the training begins. With ``on_corrupt="raise"``, the first record decides.
With the two others, records that do not fit are left out, and the schema is wrong only if none fits: workers look at
some blocks, spread over all of them, one after the other until a record fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from loaderd.daemon.pool.tasks import Task, TaskSource
from loaderd.errors import LoaderdError, RecordMismatchError
from loaderd.ipc.worker_messages import CheckTask
from loaderd.snapshots import Kernels

_MAX_BLOCKS = 8


class SchemaCheck(TaskSource):
    """See the module's docstring. In the end it is ``finished``, with or without an ``error``."""

    def __init__(self, task_of: Callable[[int, bool], CheckTask], num_blocks: int, skips: bool) -> None:
        """``task_of``: the task for (block, whether it is enough that any record fits)."""
        self._task_of = task_of
        self.finished = False
        self.error: LoaderdError | None = None
        self.kernels: Kernels = "numpy"
        """What workers decode with, as the one that did the task says."""
        self.feature_lists: list[str] = []
        """The names of the feature lists of a record, which are not read."""
        self._skips = skips
        count = min(num_blocks, _MAX_BLOCKS) if skips else 1
        self._waiting = deque(number * num_blocks // count for number in range(count))
        self._tried = 0
        self._may_give = True

    def next_task(self) -> Task | None:
        if not self._may_give or self.finished:
            return None
        self._may_give = False
        return Task(self, self._task_of(self._waiting.popleft(), self._skips))

    def done(self, task: Task, result: tuple[Kernels, list[str]]) -> None:
        self.finished, self.error = True, None
        self.kernels, self.feature_lists = result

    def failed(self, task: Task, error: LoaderdError) -> None:
        self._tried += 1
        self.error = self.error or error
        if self._waiting:
            self._may_give = True
            return
        self.finished = True
        if self._skips and isinstance(self.error, RecordMismatchError):
            blocks = "the only block" if self._tried == 1 else f"{self._tried} blocks, spread over all of them,"
            text = f"no record of {blocks} fits the schema; the first of them: {self.error.message}"
            self.error = RecordMismatchError(text, hint=self.error.hint, damages=self.error.damages)
