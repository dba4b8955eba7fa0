"""What a user can choose, checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from loaderd.errors import OptionError
from loaderd.machine import available_memory, usable_cores

OnCorrupt = Literal["raise", "skip_record", "skip_shard"]
Remainder = Literal["drop", "short", "carry"]

DEFAULT_WINDOW_RECORDS = 262_144
DEFAULT_WINDOW_BYTES = 512 << 20
DEFAULT_BLOCK_RECORDS = 1024
_UNSHUFFLED_WINDOW_RECORDS = 16_384
_MAX_DEFAULT_WORKERS = 8
# A worker takes 25 MiB and its share of the slots; what a schema imports comes on top.
_BYTES_PER_DEFAULT_WORKER = 128 << 20
_SPARE_SLOTS = 2
# What a task should decode at least: with 1,024, the daemon and the consumer use half as much CPU again.
RECORDS_PER_FILL = 2048


def require(condition: bool, what: str, must: str, got: Any) -> None:
    """Raise OptionError unless ``condition``."""
    if not condition:
        raise OptionError(f"{what} must be {must}, got {got!r}")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is an integer, and not a bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Shuffle:
    """How thoroughly to shuffle, and for how much memory.

    ``window_records``: rows are permuted inside windows of so many records; two windows are held at a time, packed.
    None: 262,144, or as many as fit in 512 MiB. ``block_records``: the runs of consecutive records that are permuted
    as wholes over the epoch; smaller ones mix better and read more slowly. Another value needs another index.
    """

    window_records: int | None = None
    block_records: int = DEFAULT_BLOCK_RECORDS

    def __post_init__(self) -> None:
        require(
            self.window_records is None or is_count(self.window_records),
            "Shuffle.window_records",
            "a positive integer or None",
            self.window_records,
        )
        require(is_count(self.block_records), "Shuffle.block_records", "a positive integer", self.block_records)


def default_workers() -> int:
    """Both of two cores; of more, all but one for the training process; eight at most, fewer where memory is short.

    The order of records does not depend on it. So it may depend on the machine, which the window may not.
    """
    cores = usable_cores()
    of_cores = cores if cores <= 2 else min(cores - 1, _MAX_DEFAULT_WORKERS)
    return max(1, min(of_cores, available_memory().free_bytes // _BYTES_PER_DEFAULT_WORKER))


@dataclass(frozen=True)
class StreamOptions:
    """Everything that a loader is asked for, beside the shards and the schema. See ``loaderd.Loader``."""

    batch_size: int
    epochs: int | None = 1
    shuffle: bool | Shuffle = True
    seed: int = 0
    remainder: Remainder = "short"
    shard: tuple[int, int] = (0, 1)
    workers: int | None = None
    on_corrupt: OnCorrupt = "raise"
    held_batches: int = 4
    index_cache: str = "user"
    stall_timeout: float | None = 120.0
    report: str | None = None

    def __post_init__(self) -> None:
        require(is_count(self.batch_size), "batch_size", "a positive integer", self.batch_size)
        require(self.epochs is None or is_count(self.epochs), "epochs", "a positive integer or None", self.epochs)
        require(isinstance(self.shuffle, (bool, Shuffle)), "shuffle", "True, False or loaderd.Shuffle", self.shuffle)
        require(isinstance(self.seed, int), "seed", "an integer", self.seed)
        require(self.remainder in ("drop", "short", "carry"), "remainder", "drop, short or carry", self.remainder)
        shard = self.shard
        require(
            isinstance(shard, (tuple, list))
            and len(shard) == 2
            and is_count(shard[0], 0)
            and is_count(shard[1])
            and shard[0] < shard[1],
            "shard",
            "a pair (host, number of hosts) with 0 <= host < number of hosts",
            shard,
        )
        object.__setattr__(self, "shard", (shard[0], shard[1]))
        require(self.workers is None or is_count(self.workers), "workers", "a positive integer or None", self.workers)
        if self.workers is None:  # chosen once: sizes follow from it, and memory comes and goes
            object.__setattr__(self, "workers", default_workers())
        require(
            self.on_corrupt in ("raise", "skip_record", "skip_shard"),
            "on_corrupt",
            "raise, skip_record or skip_shard",
            self.on_corrupt,
        )
        require(is_count(self.held_batches), "held_batches", "a positive integer", self.held_batches)
        require(
            isinstance(self.index_cache, (str, os.PathLike)) and bool(str(self.index_cache)),
            "index_cache",
            '"user", "beside", "none" or a folder',
            self.index_cache,
        )
        object.__setattr__(self, "index_cache", os.fspath(self.index_cache))
        report = self.report
        is_path = isinstance(report, (str, os.PathLike)) and bool(str(report))
        require(report is None or is_path, "report", "a path or None", report)
        object.__setattr__(self, "report", None if report is None else os.path.abspath(os.fspath(report)))
        timeout = self.stall_timeout
        require(
            timeout is None or (isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0),
            "stall_timeout",
            "a positive number of seconds or None",
            timeout,
        )

    @property
    def num_workers(self) -> int:
        assert self.workers is not None
        return self.workers

    @property
    def num_slots(self) -> int:
        """Those that the consumer may hold, two for each worker (in work, in store), and two on their way.

        Of batches so small that a task takes several, four for each worker.
        """
        per_worker = min(4, max(2, RECORDS_PER_FILL // self.batch_size))
        return self.held_batches + per_worker * self.num_workers + _SPARE_SLOTS

    @property
    def block_records(self) -> int:
        return self.shuffle.block_records if isinstance(self.shuffle, Shuffle) else DEFAULT_BLOCK_RECORDS

    def window_records(self, row_bytes: int) -> int:
        """Rows of a window: never fewer than a batch, so that a batch does not need many windows at a time."""
        if not self.shuffle:
            wanted = _UNSHUFFLED_WINDOW_RECORDS
        elif isinstance(self.shuffle, Shuffle) and self.shuffle.window_records is not None:
            wanted = self.shuffle.window_records
        else:
            wanted = min(DEFAULT_WINDOW_RECORDS, DEFAULT_WINDOW_BYTES // row_bytes)
        return max(wanted, self.batch_size)
