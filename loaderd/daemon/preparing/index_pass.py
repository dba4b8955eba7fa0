"""The indexes of all shards: from the cache, or made by the workers where the cache has none.

A shard that cannot be indexed, because it cannot be read or because workers are lost at it, does not end the pass: in
place of its index comes one that says so. What becomes of it is the user's choice, as with damaged records. But a
file that is plainly of another kind than the schema says ends it: the names of the shards, or the schema, are wrong.

Pure but for the cache: a source of tasks that the scheduler asks like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from loaderd.daemon.pool.tasks import TASKS_PER_WORKER, IndexWork, Task, TaskSource
from loaderd.errors import CorruptRecordError, Damage, LoaderdError, ShardFormatError, StorageError
from loaderd.protocol.worker_messages import Done, Indexed
from loaderd.redaction import redacted
from loaderd.shards.access import PIECE_BYTES
from loaderd.shards.framing import TOO_LARGE
from loaderd.shards.index_cache import IndexCache
from loaderd.shards.shard_file import ShardFile, is_remote
from loaderd.shards.shard_index import ShardIndex, decode_index
from loaderd.snapshots import StorageCounts

MAX_NAMED_DAMAGES = 1000
# All of them are in one message.
MAX_REPORTED_DAMAGES = 200_000


class IndexPass(TaskSource):
    """Gives out a task for each shard that the cache does not know; ``indexes`` fills up."""

    def __init__(
        self,
        files: list[ShardFile],
        cache: IndexCache,
        known: Mapping[ShardFile, ShardIndex] | None = None,
        requests: int = TASKS_PER_WORKER,
    ) -> None:
        """``known``: indexes that are here already. ``requests``: how many a worker may have under way."""
        self.error: LoaderdError | None = None
        self.counts = [0] * len(fields(StorageCounts))
        """What was asked of storage: the fields of ``StorageCounts``."""
        self._requests = requests
        self.files = files
        self.indexes: dict[int, ShardIndex] = {}
        self.unstored: str | None = None
        for number, file in enumerate(files):
            index = (known or {}).get(file) or cache.load(file)
            if index is not None and index.error is None:
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
        """Bytes that are indexed, of ``total_bytes``."""
        return self._done_bytes + sum(self._begun_bytes.values())

    def advanced(self, task: Task, done_bytes: int) -> None:
        """A shard has been read up to byte ``done_bytes``."""
        assert isinstance(task.work, IndexWork)
        self._begun_bytes[task.work.file] = done_bytes

    @property
    def finished(self) -> bool:
        return self.error is not None or len(self.indexes) == len(self.files)

    @property
    def tasks_per_worker(self) -> int:
        """Of remote shards that are one request each, a worker gets as many as it may have requests under way."""
        if not self._waiting:
            return TASKS_PER_WORKER
        file = self.files[self._waiting[0]]
        return self._requests if is_remote(file.uri) and file.size_bytes <= PIECE_BYTES else TASKS_PER_WORKER

    def next_task(self) -> Task | None:
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        return Task(self, IndexWork(number, redacted(self.files[number].uri)))

    def done(self, task: Task, result: Done) -> None:
        assert isinstance(task.work, IndexWork) and isinstance(result, Indexed)
        self.unstored = self.unstored or result.unkept
        self.counts = [before + more for before, more in zip(self.counts, result.asked, strict=True)]
        file = self.files[task.work.file]  # whose URI has its secrets, which the index lacks
        self._take(task.work.file, replace(decode_index(result.encoded), file=file))

    def _take(self, number: int, index: ShardIndex) -> None:
        self.indexes[number] = index
        self._begun_bytes.pop(number, None)
        self._done_bytes += self.files[number].size_bytes

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A shard that storage does not give, or that is of another kind, is not damaged: the pass ends.

        Any other one is unreadable.
        """
        assert isinstance(task.work, IndexWork)
        if isinstance(error, (StorageError, ShardFormatError)):
            self.error = self.error or error
            return
        self._take(task.work.file, ShardIndex.of_unreadable(self.files[task.work.file], error))


def damage_error(
    damages: list[Damage],
    num_files: int,
    unreadable: Sequence[LoaderdError] = (),
    most: int = MAX_NAMED_DAMAGES,
) -> LoaderdError:
    """What ``on_corrupt="raise"`` raises for the damage that the index pass found.

    ``unreadable``: why shards could not be indexed; ``damages`` holds these shards, too. ``most``: how many damages
    the error carries.
    """
    if unreadable:
        named = "\n".join(f"  {error.message}" for error in unreadable[:10])
        rest = f"\n  … and {len(unreadable) - 10} more" if len(unreadable) > 10 else ""
        or_pass = f"{unreadable[0].hint} Or pass" if unreadable[0].hint else "Pass"
        text = f"{len(unreadable)} of {num_files} shards cannot be indexed:\n{named}{rest}"
        return type(unreadable[0])(
            unreadable[0].message if num_files == 1 else text,
            hint=f'{or_pass} on_corrupt="skip_record" or "skip_shard" to go on without.',
            damages=tuple(damages[:most]),
            traceback=unreadable[0].traceback,
        )
    shards = len({damage.shard for damage in damages})
    count = f"{len(damages)} damaged record{'s' * (len(damages) > 1)} in {shards} of {num_files} shards"
    named = "\n".join(f"  {damage}" for damage in damages[:10])
    rest = f"\n  … and {len(damages) - 10} more" if len(damages) > 10 else ""
    too_large = all(damage.expected == TOO_LARGE for damage in damages)
    remedy = "Write what is larger as several records" if too_large else "Restore the files"
    return CorruptRecordError(
        f"{count}:\n{named}{rest}",
        hint=f'{remedy}, or pass on_corrupt="skip_record" or "skip_shard" to go on without them.',
        damages=tuple(damages[:most]),
    )
