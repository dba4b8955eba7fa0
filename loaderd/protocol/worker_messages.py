"""What the daemon and its workers say to each other.

::

    daemon  ──► worker   Attach, Detach, ListTask, IndexTask, ProbeTask, LoadTask, FillTask
    daemon  ◄── worker   Attached, Advanced, Done, TaskFailed

Tasks are numbered by the daemon, streams too: a worker has a place for each stream that it is attached to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ATTACH_TASK = -1
NO_STREAM = -1


class Attach(NamedTuple):
    """Daemon: what a worker needs for the tasks of a stream; ``description`` as in Open.

    The memory of its windows and of its slots comes along. It may come again for the same stream, with other files.
    """

    stream: int
    description: bytes
    files: list[list[Any]]
    compressions: list[str]
    max_rows: int


class Detach(NamedTuple):
    """Daemon: the stream is over; forget its memory."""

    stream: int


class ListTask(NamedTuple):
    """Daemon: list these shards: paths, globs, URIs."""

    task: int
    shards: list[str]


class IndexTask(NamedTuple):
    """Daemon: index this file ([uri, size_bytes, mtime_ns]), and keep that in the cache (``options.index_cache``)."""

    task: int
    file: list[Any]
    index_cache: str
    block_records: int


class ProbeTask(NamedTuple):
    """Daemon: see whether the first record of this block (to ``left``, as in LoadTask) fits the schema.

    ``any_fits``: whether any of its first records does.
    """

    task: int
    stream: int
    block: list[Any]
    any_fits: bool


class LoadTask(NamedTuple):
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


class FillTask(NamedTuple):
    """Daemon: decode batches; each is [slot, [[arena, start, stop], …], [rows of the batch to leave out]]."""

    task: int
    stream: int
    batches: list[list[Any]]


class Attached(NamedTuple):
    """Worker: it has done what Attach says; of stream -1: it has started."""

    stream: int


class Advanced(NamedTuple):
    """Worker: the task goes on, and stands at byte ``done_bytes`` of its file, if it reads one."""

    task: int
    done_bytes: int


class Done(NamedTuple):
    """Worker: the task is done.

    ``result``: [uri, size_bytes, mtime_ns] of each shard (ListTask); [index, why it could not be cached] (IndexTask);
    what it decodes with, as in ``Statistics`` (ProbeTask); faults (LoadTask), each [places, error].
    """

    task: int
    result: Any


class TaskFailed(NamedTuple):
    """Worker: the task cannot be done; or, with ``task`` -1, the stream cannot be attached."""

    task: int
    stream: int
    error: dict[str, Any]
