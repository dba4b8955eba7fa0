"""The index of all shards: from the cache where it is there, made by the workers where not.

Pure but for the cache: a source of tasks that the scheduler asks like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from loaderd.daemon.tasks import IndexWork, Task
from loaderd.errors import CorruptRecordError, Damage, LoaderdError, ShardError, WorkerError
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ShardIndex, decode_index
from loaderd.shards.index_cache import IndexCache

MAX_NAMED_DAMAGES = 1000


class IndexPass:
    """Gives out a task for each shard that the cache does not know; ``indexes`` fills up."""

    def __init__(
        self, files: list[ShardFile], cache: IndexCache, known: Mapping[ShardFile, ShardIndex] | None = None
    ) -> None:
        """``known``: indexes that are here already."""
        self.files = files
        self.indexes: dict[int, ShardIndex] = {}
        self.error: LoaderdError | None = None
        self.unstored: str | None = None
        for number, file in enumerate(files):
            index = (known or {}).get(file) or cache.load(file)
            if index is not None:
                self.indexes[number] = index
        self.num_cached = len(self.indexes)
        missing = [number for number in range(len(files)) if number not in self.indexes]
        # The largest first: a large one at the end would keep one worker busy and the others idle.
        self._waiting = deque(sorted(missing, key=lambda number: -files[number].size_bytes))
        self.total_bytes = sum(files[number].size_bytes for number in missing)
        self._done_bytes = 0
        self._begun_bytes: dict[int, int] = {}

    @property
    def done_bytes(self) -> int:
        """Of ``total_bytes``."""
        return self._done_bytes + sum(self._begun_bytes.values())

    def advanced(self, task: Task, done_bytes: int) -> None:
        """A shard has been read so far."""
        assert isinstance(task.work, IndexWork)
        self._begun_bytes[task.work.file] = done_bytes

    @property
    def finished(self) -> bool:
        return self.error is not None or len(self.indexes) == len(self.files)

    def next_task(self) -> Task | None:
        return Task(self, IndexWork(self._waiting.popleft())) if self._waiting and self.error is None else None

    def done(self, task: Task, result: Any) -> None:
        assert isinstance(task.work, IndexWork)
        encoded, unstored = result
        self.indexes[task.work.file] = decode_index(encoded)
        self.unstored = self.unstored or unstored
        self._begun_bytes.pop(task.work.file, None)
        self._done_bytes += self.files[task.work.file].size_bytes

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.error = self.error or error

    def given_up(self, task: Task, error: WorkerError, stalled: bool) -> None:
        self.failed(task, error)

    def retry(self, task: Task) -> bool:
        return True


def damage_error(damages: list[Damage], num_files: int) -> ShardError:
    """What ``on_corrupt="raise"`` raises for the damage that the index pass found."""
    shards = len({damage.shard for damage in damages})
    count = f"{len(damages)} damaged record{'s' * (len(damages) > 1)} in {shards} of {num_files} shards"
    named = "\n".join(f"  {damage}" for damage in damages[:10])
    rest = f"\n  … and {len(damages) - 10} more" if len(damages) > 10 else ""
    return CorruptRecordError(
        f"{count}:\n{named}{rest}",
        hint='Restore the files, or pass on_corrupt="skip_record" or "skip_shard" to go on without them.',
        damage=damages[0],
    )
