"""What the daemon and its workers say to each other.

::

    daemon  ──► worker   Seat, Attach, Detach, Granted, Withdrawn, UseServers,
                         ListTask, AskTask, IndexTask, ProbeTask, LoadTask, TrialTask
    daemon  ◄── worker   Attached, Advanced, Said, Done, TaskFailed, FillFailed

Tasks are numbered by the daemon, streams too: a worker has a place for each stream that it is attached to. Batches
are no tasks: of what is granted, each worker makes the next one that nobody has begun (see ``memory.page``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

ATTACH_TASK = -1
NO_STREAM = -1


class Seat(NamedTuple):
    """Daemon, first: the worker has this seat. Its bell comes along, an eventfd that is rung while it sleeps."""

    seat: int


class Attach(NamedTuple):
    """Daemon: what a worker needs for a stream; ``description`` as in Open.

    The memory of its windows, of its slots and of its page comes along, and the bell of its consumer.
    ``source``: [files (as in IndexTask), compressions], or a pickle of ``remote.source.RemoteRows``.
    ``num_slots`` and ``num_seats`` are the page's; ``news``: how many Granted and Withdrawn were sent to the seat
    before. It may come again for the same stream, with other files.
    """

    stream: int
    description: bytes
    source: list[Any] | bytes
    max_rows: int
    num_slots: int
    num_seats: int
    news: int


class Detach(NamedTuple):
    """Daemon: the stream is over; forget its memory."""

    stream: int


class Granted(NamedTuple):
    """Daemon: these batches may be made, beside those granted before in the same generation; older ones may not.

    Each run is [first step, how many, segments of the first, rows of it to leave out]: a segment is
    [arena, start, stop], and in a run of several batches each lies behind the one before. No run: look again.
    """

    stream: int
    generation: int
    runs: list[list[Any]]


class Withdrawn(NamedTuple):
    """Daemon: this batch may not be made any more."""

    stream: int
    generation: int
    step: int


class ListTask(NamedTuple):
    """Daemon: list these shards: paths, globs, URIs. ``storage``: a pickle of ``options.Storage``."""

    task: int
    shards: list[str]
    storage: bytes


class AskTask(NamedTuple):
    """Daemon: ask servers what a data set is: a pickle of ``remote.source.RemoteSet``. ``listing`` as in a ticket."""

    task: int
    of: bytes
    listing: Any


class UseServers(NamedTuple):
    """Client, daemon: these are the addresses of the servers from now on."""

    addresses: list[str]


class IndexTask(NamedTuple):
    """Daemon: index this file ([uri, size_bytes, mtime_ns]), and keep that in the cache (``options.index_cache``).

    ``storage`` as in ListTask. ``records``: how those of fixed size are stored (``FixedRecords``, or None), pickled.
    """

    task: int
    file: list[Any]
    index_cache: str
    block_records: int
    storage: bytes
    records: bytes


class ProbeTask(NamedTuple):
    """Daemon: see whether the first record of this block (to ``left``, as in LoadTask) fits the schema.

    Of a stream whose source are servers, the block is [block, count].

    ``any_fits``: whether any of its first records does.
    """

    task: int
    stream: int
    block: list[Any]
    any_fits: bool


class LoadTask(NamedTuple):
    """Daemon: bring records into a window, whose rows go where ``order`` (as in ``plan.epoch.WindowOrder``) says.

    ``due``: the key to which POSITION comes when this should be done before more batches are made. Each slice is
    [shard, offset, num_bytes, count, first_record, anchors, left, first, stop, row, key]: the block's place (as in
    ``shards.blocks.Block``), which of its records are in the data set (as in ``BlockTable``), which of these are
    wanted, the window's row of the first of them, and the key of its shard in its epoch, for the random numbers of
    its records. Of a stream whose source are servers, it is [block, first, stop, row, epoch].
    """

    task: int
    stream: int
    due: int
    arena: int
    order: list[Any]
    slices: list[list[Any]]


class TrialTask(NamedTuple):
    """Daemon: decode a batch, of ``segments`` and without the rows ``omit`` (as in Granted), and forget it."""

    task: int
    stream: int
    segments: list[list[int]]
    omit: list[int]


class Attached(NamedTuple):
    """Worker: it has done what Attach says; of stream -1: it has started."""

    stream: int


class Advanced(NamedTuple):
    """Worker: the task goes on, and stands at byte ``done_bytes`` of its file, if it reads one."""

    task: int
    done_bytes: int


class Done(NamedTuple):
    """Worker: the task is done.

    ``result``: [uri, size_bytes, mtime_ns] of each shard (ListTask); [index, why it could not be cached, what was
    asked of storage: the fields of ``StorageCounts``] (IndexTask); what the servers say (AskTask); what it decodes
    with, as in ``Statistics`` (ProbeTask); faults (LoadTask), each [places, error].
    """

    task: int
    result: Any


class Said(NamedTuple):
    """Worker: something that the user should hear."""

    text: str


class TaskFailed(NamedTuple):
    """Worker: the task cannot be done; or, with ``task`` -1, the stream cannot be attached."""

    task: int
    stream: int
    error: dict[str, Any]


class FillFailed(NamedTuple):
    """Worker: this batch cannot be made. Its claim stays until the batch is Withdrawn."""

    stream: int
    generation: int
    step: int
    error: dict[str, Any]
