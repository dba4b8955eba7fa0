"""What the daemon and its workers say to each other.

::

    daemon  ──► worker   Seat, Attach, Detach, Granted, Withdrawn, UseServers,
                         ListTask, AskTask, IndexTask, CheckTask, LoadTask, TrialTask
    daemon  ◄── worker   Attached, TaskProgress, WorkerNotice, OutageReport, TaskFailed, FillFailed,
                         ListDone, AskDone, IndexDone, CheckDone, LoadDone, TrialDone

The daemon numbers tasks, and streams: a worker may be attached to several. Batches are no tasks: each worker makes
the next batch that is granted and that nobody has begun (see ``shm.page``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from loaderd.plan.epoch import Slice, WindowOrder
from loaderd.plan.passes import Listing
from loaderd.plan.selection import Condition
from loaderd.shm.batch_range import ArenaSegment, BatchRange
from loaderd.snapshots import Kernels, Outage
from loaderd.storage.shard_file import Block, Compression, ShardFile

ATTACH_TASK = -1
NO_STREAM = -1


class Shards(NamedTuple):
    """The files that the records of a stream are in, and how each is compressed; ``storage`` as in ListTask."""

    files: list[ShardFile]
    compressions: list[Compression]
    storage: bytes


class BlockSelection(NamedTuple):
    """A block's records in the data set: of the shard's ``low`` to ``high - 1``, those that meet ``conditions``."""

    low: int
    high: int
    conditions: list[Condition]


class FilePlace(NamedTuple):
    """Where the records of a slice are read.

    ``left``: None where all records of ``block`` are in the data set. ``key``: of the shard in its epoch, for the
    random numbers of its records.
    """

    block: Block
    left: BlockSelection | None
    key: int


class LoadFault(NamedTuple):
    """Places of a window that could not be written; and why, as ``errors.to_wire`` says it."""

    places: list[int]
    error: dict[str, Any]


class Seat(NamedTuple):
    """Daemon's first message: the worker has this seat. Its bell comes along, an eventfd that is rung to wake it."""

    seat: int


class Attach(NamedTuple):
    """Daemon: what a worker needs for a stream; ``description`` as in Open.

    The memory of its windows, of its slots and of its page comes along, and the bell of its consumer.
    ``source``: the shards; if servers have the records, a pickle of ``remote.source.RemoteRows``.
    ``num_slots`` and ``num_seats`` are the page's; ``news``: how many Granted and Withdrawn were sent to the seat
    before. This message may come again for the same stream, with other files.
    """

    stream: int
    description: bytes
    source: Shards | bytes
    max_rows: int
    num_slots: int
    num_seats: int
    news: int


class Detach(NamedTuple):
    """Daemon: the stream is over; forget its memory."""

    stream: int


class Granted(NamedTuple):
    """Daemon: these batches may be made, besides those granted before in this generation; older ones may not.

    Without any run, it only wakes the worker, to look at the page again.
    """

    stream: int
    generation: int
    runs: list[BatchRange]


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
    """Daemon: ask servers for a table. ``stream``: a pickled ``remote.source.RemoteStream``.

    ``listing`` as in a ticket; ``belongs_to``: the ``of`` of a position in the data that are wanted, or nothing.
    """

    task: int
    stream: bytes
    listing: Listing | None
    belongs_to: dict[str, Any]


class UseServers(NamedTuple):
    """Consumer to daemon, daemon to workers: from now on, the servers are at these addresses."""

    addresses: list[str]


class IndexTask(NamedTuple):
    """Daemon: index this group of files, and keep the indexes in the cache (``options.index_cache``).

    ``storage`` as in ListTask. ``records``: a pickle of how records of a fixed size are stored (``FixedRecords``), or
    of None.
    """

    task: int
    group: list[ShardFile]
    index_cache: str
    block_records: int
    storage: bytes
    records: bytes


class CheckTask(NamedTuple):
    """Daemon: see whether the first record of ``block`` fits the schema; with ``any_fits``, any of its first records.

    ``num_records`` of the block are in the data set. ``place``: as those of LoadTask; None if servers read it.
    """

    task: int
    stream: int
    block: int
    num_records: int
    place: FilePlace | None
    any_fits: bool


class LoadTask(NamedTuple):
    """Daemon: bring ``slices`` into the window in ``arena``, each row to where ``order`` says.

    ``due``: when POSITION has come to this key, the task comes before batches. ``places``: where each slice is read;
    empty if servers read it.
    """

    task: int
    stream: int
    due: int
    arena: int
    order: WindowOrder
    slices: list[Slice]
    places: list[FilePlace]


class TrialTask(NamedTuple):
    """Daemon: decode the batch of ``segments``, without the rows ``omit`` (as in Granted), and discard it."""

    task: int
    stream: int
    segments: list[ArenaSegment]
    omit: list[int]


class Attached(NamedTuple):
    """Worker: it has done what Attach says. The first one says that it has started."""


class TaskProgress(NamedTuple):
    """Worker: the task goes on, and ``done_bytes`` of its files are read, if it reads any."""

    task: int
    done_bytes: int


class ListDone(NamedTuple):
    """Worker: a ListTask is done."""

    task: int
    files: list[ShardFile]


class AskDone(NamedTuple):
    """Worker: an AskTask is done; ``table`` as ``remote.tables`` has it."""

    task: int
    table: bytes


class IndexDone(NamedTuple):
    """Worker: an IndexTask is done.

    ``encoded``: the indexes; ``unkept``: why they could not be kept, or None; ``asked``: the fields of
    ``StorageCounts``.
    """

    task: int
    encoded: bytes
    unkept: str | None
    asked: list[int]


class CheckDone(NamedTuple):
    """Worker: a CheckTask is done; this worker decodes batches with ``kernels``.

    ``feature_lists``: those of the first record, which are not read.
    """

    task: int
    kernels: Kernels
    feature_lists: list[str]


class LoadDone(NamedTuple):
    """Worker: a LoadTask is done, except for the places in ``faults``."""

    task: int
    faults: list[LoadFault]


class TrialDone(NamedTuple):
    """Worker: a TrialTask is done."""

    task: int


Done = ListDone | AskDone | IndexDone | CheckDone | LoadDone | TrialDone


class WorkerNotice(NamedTuple):
    """Worker: something that the user should hear."""

    text: str


class OutageReport(NamedTuple):
    """Worker: how long the requests that it makes for a stream have had no answer; None: they have again.

    ``stream`` as in TaskFailed: NO_STREAM for requests of tasks that belong to no stream.
    """

    stream: int
    outage: Outage | None


class TaskFailed(NamedTuple):
    """Worker: the task cannot be done; or, with ``task`` -1, the stream cannot be attached."""

    task: int
    stream: int
    error: dict[str, Any]


class RowFault(NamedTuple):
    """Why a row of a batch cannot be made, even alone."""

    row: int
    error: dict[str, Any]


MOST_ROW_FAULTS = 32
"""If more rows of a batch cannot be made, that is not the data's fault."""


class FillFailed(NamedTuple):
    """Worker: this batch, without the rows ``omit``, cannot be made.

    Its claim stays until the batch is Granted anew or Withdrawn. ``faults``: of the rows that cannot be made alone;
    if not ``all_faults``, of the first of them, if of any.
    """

    stream: int
    generation: int
    step: int
    omit: list[int]
    faults: list[RowFault]
    all_faults: bool
    error: dict[str, Any]


WorkerMessage = (
    Attach
    | Detach
    | ListTask
    | IndexTask
    | CheckTask
    | LoadTask
    | TrialTask
    | Attached
    | TaskProgress
    | LoadDone
    | TaskFailed
    | Seat
    | Granted
    | Withdrawn
    | FillFailed
    | AskTask
    | UseServers
    | WorkerNotice
)
"""In the order of their numbers (see ``messages.Message``). Those that are not here come later there."""
