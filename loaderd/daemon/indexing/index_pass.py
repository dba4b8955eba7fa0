"""The indexes of all shards: from the cache, or made by the workers where the cache has none.

Small shards are indexed in groups (``index_cache``). Where a group cannot be, its shards are indexed one by one. A
shard that cannot be indexed, because it cannot be read or because workers are lost at it, does not end the pass: in
place of its index comes one that says so. What becomes of it is the user's choice, as with damaged records. But a
file that is plainly of another kind than the schema says ends it: the names of the shards, or the schema, are wrong.

Pure but for the cache: a source of tasks that the scheduler asks like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields

from loaderd.daemon.pool.tasks import MAX_DEATHS, TASKS_PER_WORKER, Task, TaskSource
from loaderd.errors import (
    CorruptRecordError,
    Damage,
    LoaderdError,
    OptionError,
    RecordMismatchError,
    ShardFormatError,
    StorageError,
)
from loaderd.formats.framing import TOO_LARGE
from loaderd.formats.index_cache import IndexCache, groups_of
from loaderd.formats.shard_index import ShardIndex, decode_indexes
from loaderd.ipc.worker_messages import IndexResult, IndexTask
from loaderd.snapshots import Progress, StorageCounts
from loaderd.storage.access import PIECE_BYTES
from loaderd.storage.shard_file import ShardFile, is_remote

MAX_NAMED_DAMAGES = 1000
# All of them are in one message.
MAX_REPORTED_DAMAGES = 200_000
MOST_IN_A_HUNDRED = 1
"""Records that do not match the schema and may be left out."""
_OF_ONE_VERSION = "Give the files of the version that the schema is of"


class IndexPass(TaskSource):
    """Gives out a task for each group of shards that the cache does not know; ``indexes`` fills up."""

    def __init__(
        self,
        files: list[ShardFile],
        cache: IndexCache,
        known: Mapping[ShardFile, ShardIndex] | None = None,
        requests: int = TASKS_PER_WORKER,
        storage: bytes = b"",
        values: bytes = b"",
    ) -> None:
        """``known``: indexes that are here already. ``requests``: how many a worker may have under way.

        ``storage``, ``values``: as in IndexTask.

        A group of which only some are known is indexed anew, so that its indexes are kept together.
        """
        self.error: LoaderdError | None = None
        self.counts = [0] * len(fields(StorageCounts))
        """What was asked of storage: the fields of ``StorageCounts``."""
        self._requests = requests
        self._storage, self._values = storage, values
        self.indexes: dict[ShardFile, ShardIndex] = {}
        self.unstored: str | None = None
        self._num_files = len(files)
        self._cache = cache
        known = {file: index for file, index in (known or {}).items() if index.error is None}
        missing: list[tuple[ShardFile, ...]] = []
        for group in groups_of(files):
            if known and all(file in known for file in group):
                self.indexes.update((file, known[file]) for file in group)
            elif (kept := cache.load(*group)) is not None:
                self.indexes.update(zip(group, kept, strict=True))
            else:
                missing.append(group)
        self.num_cached = len(self.indexes)
        # The largest first: a large one at the end would keep one worker busy and the others idle.
        self._waiting = deque(sorted(missing, key=lambda group: -_bytes_of(group)))
        self.total_bytes = sum(map(_bytes_of, missing))
        self._done_bytes = 0
        self._begun_bytes: dict[Task, int] = {}

    @property
    def progress(self) -> Progress | None:
        """How far it is with what the cache does not know; None: the cache knows all."""
        if not self.total_bytes:
            return None
        done = len(self.indexes) - self.num_cached
        return Progress("indexing shards", done, self._num_files - self.num_cached, self.done_bytes, self.total_bytes)

    @property
    def done_bytes(self) -> int:
        return self._done_bytes + sum(self._begun_bytes.values())

    def advanced(self, task: Task, done_bytes: int) -> None:
        self._begun_bytes[task] = done_bytes

    @property
    def finished(self) -> bool:
        return self.error is not None or len(self.indexes) == self._num_files

    @property
    def tasks_per_worker(self) -> int:
        """Of remote shards that are one request each, a worker gets as many as it may have requests under way."""
        if not self._waiting:
            return TASKS_PER_WORKER
        group = self._waiting[0]
        if not is_remote(group[0].uri) or group[0].size_bytes > PIECE_BYTES:
            return TASKS_PER_WORKER
        return max(TASKS_PER_WORKER, self._requests // len(group))

    def next_task(self) -> Task | None:
        if not self._waiting:
            return None
        group = self._waiting.popleft()
        # A group of several is given up sooner: its shards, one by one, tell which of them is to blame.
        work = IndexTask(group, self._cache, self._storage, self._values)
        return Task(self, work, most_deaths=MAX_DEATHS if len(group) == 1 else 1)

    def done(self, task: Task, result: IndexResult) -> None:
        assert isinstance(task.work, IndexTask)
        self.unstored = self.unstored or result.unkept
        self.counts = [before + more for before, more in zip(self.counts, result.asked, strict=True)]
        self._take(task, decode_indexes(result.encoded, task.work.group))

    def _take(self, task: Task, indexes: list[ShardIndex]) -> None:
        assert isinstance(task.work, IndexTask)
        self.indexes.update(zip(task.work.group, indexes, strict=True))
        self._begun_bytes.pop(task, None)
        self._done_bytes += _bytes_of(task.work.group)

    def failed(self, task: Task, error: LoaderdError) -> None:
        """A shard that storage does not give, or that is of another kind, is not damaged: the pass ends.

        It ends, too, where the user's function fails. Any other shard is unreadable.
        """
        assert isinstance(task.work, IndexTask)
        group = task.work.group
        if isinstance(error, (StorageError, ShardFormatError, OptionError)):
            self.error = self.error or error
        elif len(group) == 1:
            self._take(task, [ShardIndex.of_unreadable(group[0], error)])
        else:
            self._begun_bytes.pop(task, None)
            for file in group:
                if kept := self._cache.load(file):  # from the last time that this happened
                    self.indexes[file] = kept[0]
                    self.num_cached += 1
                    self._done_bytes += file.size_bytes
                else:
                    self._waiting.append((file,))


def _bytes_of(group: Sequence[ShardFile]) -> int:
    return sum(file.size_bytes for file in group)


def count_damaged(num_damages: int, num_members: int) -> str:
    """Such as "3 damaged records"; ``num_members`` of the damages are members of tars, each of many records."""
    counts = {"damaged record": num_damages - num_members, "damaged member": num_members}
    named = [f"{count:,} {what}{'s' * (count > 1)}" for what, count in counts.items() if count]
    return " and ".join(named) + (" of tars" if num_members else "")


def version_error(damages: Sequence[Damage], num_records: int) -> LoaderdError | None:
    """The error where records of another version, in members of tars, are more than one in a hundred.

    ``num_records``: those of the right version.
    """
    others = [damage for damage in damages if damage.other_records]
    lost = sum(damage.other_records for damage in others)
    if MOST_IN_A_HUNDRED * (num_records + lost) >= 100 * lost:
        return None
    return RecordMismatchError(
        f"{lost:,} of {num_records + lost:,} records do not match the schema, and only one in a hundred may be left "
        f"out: they are in {len(others):,} members of tars. The first: {others[0]}",
        hint=f'{_OF_ONE_VERSION}, or pass on_corrupt="skip_any", to leave out all records that do not match.',
        damages=tuple(others[:MAX_NAMED_DAMAGES]),
    )


def damage_error(
    damages: list[Damage],
    num_files: int,
    unreadable: Sequence[LoaderdError] = (),
    most: int = MAX_NAMED_DAMAGES,
    num_members: int = 0,
) -> LoaderdError:
    """What ``on_corrupt="raise"`` raises for the damage that the index pass found.

    ``unreadable``: why shards could not be indexed; ``damages`` holds these shards, too. ``most``: how many damages
    the error carries. ``num_members``: how many of the damages are members of tars.
    """
    if unreadable:
        named = "\n".join(f"  {error.message}" for error in unreadable[:10])
        more = f"\n  … and {len(unreadable) - 10} more" if len(unreadable) > 10 else ""
        or_pass = f"{unreadable[0].hint} Or pass" if unreadable[0].hint else "Pass"
        text = f"{len(unreadable)} of {num_files} shards cannot be indexed:\n{named}{more}"
        return type(unreadable[0])(
            unreadable[0].message if num_files == 1 else text,
            hint=f'{or_pass} on_corrupt="skip_record" or "skip_shard" to go on without.',
            damages=tuple(damages[:most]),
            traceback=unreadable[0].traceback,
        )
    shards = len({damage.shard for damage in damages})
    are_others = all(damage.other_records for damage in damages)
    counted = count_damaged(len(damages), num_members)
    if are_others:
        others = sum(damage.other_records for damage in damages)
        counted = f"{others:,} records of another version (members of tars: {len(damages):,})"
    count = f"{counted} in {shards} of {num_files} shards"
    named = "\n".join(f"  {damage}" for damage in damages[:10])
    more = f"\n  … and {len(damages) - 10} more" if len(damages) > 10 else ""
    too_large = all(damage.expected == TOO_LARGE for damage in damages)
    remedy = "Write what is larger as several records" if too_large else "Restore the files"
    remedy = _OF_ONE_VERSION if are_others else remedy
    return (RecordMismatchError if are_others else CorruptRecordError)(
        f"{count}:\n{named}{more}",
        hint=f'{remedy}, or pass on_corrupt="skip_record" or "skip_shard" to go on without them.',
        damages=tuple(damages[:most]),
    )
