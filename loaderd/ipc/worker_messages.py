"""What the daemon and its workers say to each other.

::

    daemon  ──► worker   Seat, Attach, Detach, Granted, Withdrawn, UseColumn, UseServers,
                         ListTask, AskTask, IndexTask, CheckTask, LoadTask
    daemon  ◄── worker   Ended, TaskProgress, WorkerNotice, OutageReport, FillFailed

A message is sent as a pickle (``channel.WorkerChannel``). The daemon numbers tasks, and streams: a worker may be
attached to several. Batches are no tasks: each worker makes the next batch that is granted and that nobody has begun
(see ``shm.page``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.errors import LoaderdError
from loaderd.plan.batch_range import BatchRange
from loaderd.plan.epoch import Slice, WindowOrder
from loaderd.plan.passes import Listing
from loaderd.plan.sampling import BlockDraw
from loaderd.plan.selection import Condition, numbers_that
from loaderd.redaction import redacted
from loaderd.snapshots import Outage
from loaderd.storage.names import Columns, some_of
from loaderd.storage.shard_file import Block, Compression, ShardFile

if TYPE_CHECKING:
    from loaderd.formats.index_cache import IndexCache

ATTACH_TASK = -1
NO_STREAM = -1
"""For what belongs to no stream, but to a task."""


class Shards(NamedTuple):
    """The files that the records of a stream are in, and how each is compressed; ``storage`` as in ListTask."""

    files: list[ShardFile]
    compressions: list[Compression]
    storage: bytes


class BlockSelection(NamedTuple):
    """A block's records in the data set: of the shard's ``low`` to ``high - 1``, those that meet ``conditions``.

    ``draw``: what the epoch draws of these; None: all.
    """

    low: int
    high: int
    conditions: list[Condition]
    draw: BlockDraw | None = None

    def numbers(self) -> npt.NDArray[np.int64]:
        """int64, (left,): their numbers in the shard."""
        numbers = numbers_that(self.conditions, self.low, self.high)
        return numbers if self.draw is None else self.draw.of(numbers)


class FilePlace(NamedTuple):
    """Where the records of a slice are read.

    ``left``: None where all records of ``block`` are in the epoch. ``key``: of the shard in its epoch, for the
    random numbers of its records.
    """

    block: Block
    left: BlockSelection | None
    key: int


class IndexResult(NamedTuple):
    """The ``encoded`` indexes; ``unkept``: why they could not be kept; ``asked``: the fields of ``StorageCounts``."""

    encoded: bytes
    unkept: str | None
    asked: list[int]


class LoadFault(NamedTuple):
    """Places of a window whose records cannot be delivered; and why."""

    places: tuple[int, ...]
    error: LoaderdError


class Seat(NamedTuple):
    """Daemon's first message: the worker has this seat. Its bell comes along, an eventfd that is rung to wake it."""

    seat: int


class Attach(NamedTuple):
    """Daemon: what a worker needs for a stream; ``description`` as in Open.

    The memory of its windows, of its slots, of its page and of its members' columns comes along, and the bell of each
    of its consumers. ``source``: the shards; if servers have the records, a pickle of ``remote.source.RemoteRows``.
    ``num_slots``, ``num_seats`` and ``num_members`` are the page's; ``news``: how many messages of News were sent to
    the seat before. This message may come again for the same stream, with other files.
    """

    stream: int
    description: bytes
    source: Shards | bytes
    max_rows: int
    num_slots: int
    num_seats: int
    num_members: int
    news: int


class Detach(NamedTuple):
    """Daemon: the stream is over; forget its memory."""

    stream: int


class Granted(NamedTuple):
    """Daemon: these batches may be made, besides those granted before in this generation; older ones may not.

    Without any range, it only wakes the worker, to look at the page again.
    """

    stream: int
    generation: int
    ranges: list[BatchRange]


class Withdrawn(NamedTuple):
    """Daemon: this batch may not be made any more."""

    stream: int
    generation: int
    step: int


class UseColumn(NamedTuple):
    """Daemon: the memory of a member's column is another one, which comes along."""

    stream: int
    column: int


News = Granted | Withdrawn | UseColumn
"""What the word NEWS of a page counts: a worker reads these before it claims a batch."""


class ListTask(NamedTuple):
    """Daemon: list the shards of ``sets``: paths, globs, URIs of each. Its result: of each, a list of ShardFile.

    ``storage``: a pickle of ``options.Storage``.
    """

    sets: list[list[str] | Columns]
    storage: bytes
    task: int = -1

    def __str__(self) -> str:
        return f"the listing of {self.names}"

    @property
    def names(self) -> str:
        """The shards, in words: all of them would be too long."""
        return some_of([redacted(name) for names in self.sets for name in names], 1)


class AskTask(NamedTuple):
    """Daemon: ask servers for the table of data set ``name``. Its result: bytes, as ``remote.tables`` has them.

    ``stream``: a pickled ``remote.source.RemoteStream``.
    ``listing`` as in a ticket; ``belongs_to``: the ``of`` of a position in the data that are wanted, or nothing.
    """

    name: str
    stream: bytes
    listing: Listing | None
    belongs_to: dict[str, Any]
    task: int = -1

    def __str__(self) -> str:
        return f"the question to servers for data set {self.name}"


class IndexTask(NamedTuple):
    """Daemon: index this group of files, and keep the indexes. Its result: an IndexResult.

    ``values``: a pickle of the ``RecordValues`` that the indexes are to hold; empty: none; None: that of the worker's
    last task, which was an IndexTask, too.
    """

    group: tuple[ShardFile, ...]
    cache: IndexCache
    storage: bytes
    values: bytes | None = b""
    task: int = -1

    def __str__(self) -> str:
        return f"the index of {self.names}"

    @property
    def names(self) -> str:
        """The shards, in words."""
        return some_of([redacted(file.uri) for file in self.group], 1)


class CheckTask(NamedTuple):
    """Daemon: see whether the first record of ``block`` fits the schema; with ``any_fits``, any of its first records.

    ``num_records`` of the block are in the data set. ``place``: as those of LoadTask; None if servers read it. Its
    result: with which kernels this worker decodes batches, and the feature lists of the first record, which are not
    read.
    """

    stream: int
    block: int
    num_records: int
    place: FilePlace | None
    any_fits: bool
    task: int = -1

    def __str__(self) -> str:
        return f"the first records of block {self.block}" if self.any_fits else "the first record"


class LoadTask(NamedTuple):
    """Daemon: bring ``slices`` into ``window``, which lies in ``arena``, each row to where ``order`` says.

    ``due``: when POSITION has come to this key, the task comes before batches. ``places``: where each slice is read;
    empty if servers read it. Its result: a list of LoadFault.
    """

    stream: int
    window: int
    arena: int
    due: int
    order: WindowOrder
    slices: tuple[Slice, ...]
    places: tuple[FilePlace, ...]
    task: int = -1

    @property
    def num_rows(self) -> int:
        return sum(part.stop - part.first for part in self.slices)

    def __str__(self) -> str:
        return f"the load of {self.num_rows} records of window {self.window}"

    def __reduce__(self) -> tuple[Any, ...]:
        """With plain tuples in it: there may be hundreds of slices, and named ones take five times as long."""
        slices = [tuple(part) for part in self.slices]
        places = [(tuple(place.block), place.left, place.key) for place in self.places]
        return _load_task, (self[:4], tuple(self.order), slices, places, self.task)


def _load_task(
    numbers: tuple[int, int, int, int],
    order: tuple[int | None, int, int, int],
    slices: list[tuple[int, int, int, int, int]],
    places: list[tuple[tuple[Any, ...], BlockSelection | None, int]],
    task: int,
) -> LoadTask:
    found = tuple(FilePlace(Block._make(block), left, key) for block, left, key in places)
    return LoadTask(*numbers, WindowOrder(*order), tuple(map(Slice._make, slices)), found, task)


WorkerTask = ListTask | AskTask | IndexTask | CheckTask | LoadTask
"""Each can be done again: a load writes the same rows to the same places. So a task whose worker died, or stalled, is
given to another. ``str(task)`` says in a message what it was; the daemon numbers it, as ``task``, when it is sent."""


class TaskProgress(NamedTuple):
    """Worker: the task goes on, and ``done_bytes`` of its files are read, if it reads any."""

    task: int
    done_bytes: int


class Ended(NamedTuple):
    """Worker: the task is done, or cannot be done: then ``result`` is a LoaderdError.

    With ATTACH_TASK: it has started, or has done what Attach says of ``stream``.
    """

    task: int
    result: Any = None
    stream: int = NO_STREAM


class WorkerNotice(NamedTuple):
    """Worker: something that the user should hear."""

    text: str


class OutageReport(NamedTuple):
    """Worker: how long the requests that it makes for a stream have had no answer; None: they have again.

    ``stream``: NO_STREAM for requests of tasks that belong to no stream.
    """

    stream: int
    outage: Outage | None


MOST_ROW_FAULTS = 32
"""If more rows of a batch cannot be made, that is not the data's fault."""


class FillFailed(NamedTuple):
    """Worker: this batch, without the rows ``omit``, cannot be made.

    Its claim stays until the batch is Granted anew or Withdrawn. ``faults``: by row, why it cannot be made, even
    alone; if not ``all_faults``, of the first such row, if of any.
    """

    stream: int
    generation: int
    step: int
    omit: list[int]
    faults: dict[int, LoaderdError]
    all_faults: bool
    error: LoaderdError


WorkerMessage = (
    WorkerTask
    | Seat
    | Attach
    | Detach
    | Granted
    | Withdrawn
    | UseColumn
    | Ended
    | TaskProgress
    | WorkerNotice
    | OutageReport
    | FillFailed
)
