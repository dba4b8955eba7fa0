"""The index of all shards: from the cache where it is there, made by the workers where not.

Pure but for the cache: a source of tasks that the scheduler asks like any other.
"""

from __future__ import annotations

import posixpath
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.daemon.tasks import IndexWork, Task
from loaderd.errors import CorruptRecordError, Damage, LoaderdError, ShardError
from loaderd.options import OnCorrupt
from loaderd.plan.epoch import Slice
from loaderd.randomness import key_of
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ANCHOR_RECORDS, ShardIndex, decode_index
from loaderd.shards.index_cache import IndexCache

MAX_NAMED_DAMAGES = 1000


class IndexPass:
    """Gives out a task for each shard that the cache does not know; ``indexes`` fills up."""

    def __init__(self, files: list[ShardFile], cache: IndexCache) -> None:
        self.files = files
        self.indexes: dict[int, ShardIndex] = {}
        self.error: LoaderdError | None = None
        self.unstored: str | None = None
        for number, file in enumerate(files):
            index = cache.load(file)
            if index is not None:
                self.indexes[number] = index
        self.num_cached = len(self.indexes)
        missing = [number for number in range(len(files)) if number not in self.indexes]
        # The largest first: a large one at the end would keep one worker busy and the others idle.
        self._waiting = deque(sorted(missing, key=lambda number: -files[number].size_bytes))
        self.total_bytes = sum(files[number].size_bytes for number in missing)
        self.done_bytes = 0

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
        self.done_bytes += self.files[task.work.file].size_bytes

    def failed(self, task: Task, error: LoaderdError) -> None:
        self.error = self.error or error

    def retry(self, task: Task) -> bool:
        return True


class BlockTable:
    """The blocks of all shards in one table, in the order of the shards. Takes 48 bytes a block and 4 an anchor.

    With ``"skip_shard"``, shards with damage are left out whole.
    """

    def __init__(self, indexes: list[ShardIndex], on_corrupt: OnCorrupt) -> None:
        self.compressions = [index.compression for index in indexes]
        self._names = [posixpath.basename(index.file.uri) for index in indexes]
        kept = [
            (number, index)
            for number, index in enumerate(indexes)
            if not (on_corrupt == "skip_shard" and index.damages)
        ]

        def column(parts: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
            return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])

        self.counts = column([index.counts for _, index in kept])
        self._shards = column([np.full(len(index.counts), number) for number, index in kept])
        self._offsets = column([index.offsets for _, index in kept])
        self._num_bytes = column([index.num_bytes for _, index in kept])
        self._first_records = column([index.first_records for _, index in kept])
        self._anchors = np.concatenate([*[index.anchors for _, index in kept], np.zeros(0, dtype=np.uint32)])
        anchored = column([np.full(len(index.counts), len(index.anchors) > 0) for _, index in kept])
        self._anchor_ends = np.cumsum(-(-self.counts // ANCHOR_RECORDS) * anchored)

    @property
    def num_records(self) -> int:
        return int(self.counts.sum())

    def block(self, number: int) -> list[Any]:
        """[shard, offset, num_bytes, count, first_record, anchors], as the messages to workers want a block."""
        anchors_start = int(self._anchor_ends[number - 1]) if number else 0
        return [
            int(self._shards[number]),
            int(self._offsets[number]),
            int(self._num_bytes[number]),
            int(self.counts[number]),
            int(self._first_records[number]),
            self._anchors[anchors_start : self._anchor_ends[number]].tobytes(),
        ]

    def slice(self, part: Slice, seed: int) -> list[Any]:
        """A slice of a window as a LoadTask wants it; the keys of its records come from ``seed``."""
        key = key_of("record", seed, part.epoch, self._names[self._shards[part.block]])
        return [*self.block(part.block), part.first, part.stop, part.row, key]


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
