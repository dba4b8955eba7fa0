"""What the daemon and its workers say to each other.

::

    daemon  ──► worker   Attach, Detach, IndexTask, ProbeTask, LoadTask, FillTask
    daemon  ◄── worker   Attached, Advanced, Done, TaskFailed

Tasks are numbered by the daemon, streams too: a worker has a place for each stream that it is attached to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTACH_TASK = -1
NO_STREAM = -1


@dataclass(frozen=True, slots=True)
class Attach:
    """Daemon: what a worker needs for the tasks of a stream; ``description`` as in Open.

    The memory of its windows and of its slots comes along. It may come again for the same stream, with other files.
    """

    stream: int
    description: bytes
    files: list[list[Any]]
    compressions: list[str]
    max_rows: int


@dataclass(frozen=True, slots=True)
class Detach:
    """Daemon: the stream is over; forget its memory."""

    stream: int


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Daemon: index this file ([uri, size_bytes, mtime_ns]), and keep that in the cache (``options.index_cache``)."""

    task: int
    file: list[Any]
    index_cache: str
    block_records: int


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Daemon: see whether the first record of this block (to ``left``, as in LoadTask) fits the schema."""

    task: int
    stream: int
    block: list[Any]


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Daemon: bring records into a window, whose rows go where ``order`` (as in ``plan.epoch.WindowOrder``) says.

    Each slice is [shard, offset, num_bytes, count, first_record, anchors, left, first, stop, row, key]: the block's
    place (as in ``shards.blocks.Block``), which of its records are in the data set (as in ``daemon.table``), which of
    these are wanted, the window's row of the first of them, and the key of its shard in its epoch, for the random
    numbers of its records.
    """

    task: int
    stream: int
    arena: int
    order: list[Any]
    slices: list[list[Any]]


@dataclass(frozen=True, slots=True)
class FillTask:
    """Daemon: decode batches; each is [slot, [[arena, start, stop], …], [rows of the batch to leave out]]."""

    task: int
    stream: int
    batches: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Attached:
    """Worker: it has done what Attach says; of stream -1: it has started."""

    stream: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """Worker: the task goes on, and stands at byte ``done_bytes`` of its file."""

    task: int
    done_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """Worker: the task is done.

    ``result``: [index, why it could not be cached] (IndexTask); faults (LoadTask), each [places, error].
    """

    task: int
    result: Any


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """Worker: the task cannot be done; or, with ``task`` -1, the stream cannot be attached."""

    task: int
    stream: int
    error: dict[str, Any]
