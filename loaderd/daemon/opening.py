"""Making a stream from its description and the indexes of its shards: the plan, the memories, the messages."""

from __future__ import annotations

from typing import Any

from loaderd.daemon.index_pass import MAX_NAMED_DAMAGES, BlockTable, damage_error
from loaderd.daemon.stream import Stream
from loaderd.daemon.tasks import FillWork, LoadWork, Task
from loaderd.errors import DaemonError, NoShardsError, OptionError
from loaderd.memory.layout import SlotLayout, WindowLayout
from loaderd.memory.shared import SharedMemory
from loaderd.options import StreamDescription
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import Course, Position
from loaderd.plan.rows import SetRows
from loaderd.protocol.messages import Attach, FillTask, LoadTask, Opened, ProbeTask
from loaderd.shards.files import ShardFile
from loaderd.shards.index import ShardIndex

_MIN_ARENAS = 2


class OpenedStream:
    """A stream with its data and memory.

    Raises ShardError where damage forbids it or no record is left, and OptionError where the data do not fit the
    options: a batch larger than the data set, a position of other data.
    """

    def __init__(
        self, description: StreamDescription, pickled: bytes, files: list[ShardFile], indexes: list[ShardIndex]
    ) -> None:
        options = description.options
        schema = description.schema
        self._options = options
        self._pickled = pickled
        self._files = files
        damages = [damage for index in indexes for damage in index.damages]
        if damages and options.on_corrupt == "raise":
            raise damage_error(damages, len(files))
        self._damages = damages[:MAX_NAMED_DAMAGES]
        self._table = table = BlockTable(indexes, options.on_corrupt)
        if not table.num_records:
            raise NoShardsError(
                f"the {len(files)} shards hold no record"
                + (f" that is not damaged: {damages[0]}" if damages else ""),
                hint="Check that the files are TFRecord shards (plain, GZIP or ZLIB).",
            )
        self._rows = SetRows(table.counts, options.seed, bool(options.shuffle))
        _check_batch_size(options.batch_size, options.shard[1], table.num_records)
        window_records = options.window_records(schema.row_bytes)
        self._of = {
            "shards": f"{len(files)} shards, {table.num_records} records",
            "features": schema.stored_fingerprint,
            "seed": options.seed,
            "shuffle": f"windows of {window_records}, blocks of {options.block_records}"
            if options.shuffle
            else "none",
            "remainder": options.remainder,
        }
        self._course = Course(options, table.num_records, window_records, self._of)
        position = Position() if description.start is None else Position.from_json(description.start)
        start, _ = self._course.find(position)
        plans = [self._course.batches(pass_) for pass_ in (start, self._course.next_pass(start))]
        num_arenas = max(_MIN_ARENAS, *[plan.max_windows_of_a_batch for plan in plans])
        max_rows = max(plan.largest_window for plan in plans)
        self._window_layout = WindowLayout(schema.row_bytes, max_rows)
        self._slot_layout = SlotLayout(schema.specs, options.batch_size)
        try:
            self.windows = SharedMemory.create("windows", num_arenas * self._window_layout.arena_bytes)
            self.slots = SharedMemory.create("slots", options.num_slots * self._slot_layout.slot_bytes)
        except OSError as error:
            raise DaemonError(
                f"no shared memory for {num_arenas} windows of {self._window_layout.arena_bytes} bytes and "
                f"{options.num_slots} slots of {self._slot_layout.slot_bytes} bytes: {error}",
                hint="Choose a smaller batch_size, fewer held_batches, or Shuffle(window_records=…).",
            ) from None
        self.stream = Stream(
            self._plan_pass,
            num_slots=options.num_slots,
            num_arenas=num_arenas,
            num_workers=options.num_workers,
            skip_damaged=options.on_corrupt != "raise",
        )
        self._facts: dict[str, Any] = {
            "num_shards": len(files),
            "num_records": table.num_records,
            "workers": options.num_workers,
            "slots": options.num_slots,
            "slot_bytes": self._slot_layout.slot_bytes,
            "window_records": max_rows,
            "window_bytes": num_arenas * self._window_layout.arena_bytes,
        }

    def _plan_pass(self, pass_: Pass) -> PassPlan:
        options = self._options
        batches = self._course.batches(pass_)
        return PassPlan(self._rows, batches, options.seed, bool(options.shuffle), pass_.first_epoch)

    def attach_message(self) -> Attach:
        """What a worker needs; goes with the descriptors of :meth:`fds`."""
        return Attach(
            self._pickled,
            [[file.uri, file.size_bytes, file.mtime_ns] for file in self._files],
            list(self._table.compressions),
            self._window_layout.max_rows,
        )

    def fds(self) -> tuple[int, int]:
        """The descriptors of windows and slots."""
        return self.windows.fd, self.slots.fd

    def opened_message(self, index_s: float, index_cached: int) -> Opened:
        """What the client needs; goes with the descriptor of the slots."""
        facts = {**self._facts, "index_s": index_s, "index_cached": index_cached}
        return Opened(facts, self._of, [damage.to_wire() for damage in self._damages])

    def task_message(self, task: Task) -> LoadTask | FillTask | ProbeTask:
        """The message that gives a task to a worker."""
        work = task.work
        if isinstance(work, LoadWork):
            assert self.stream.plan is not None
            order = self.stream.plan.order_of(work.window)
            slices = [self._table.slice(part, self._options.seed) for part in work.slices]
            return LoadTask(task.number, work.arena, [order.key, order.size, order.first, order.stop], slices)
        if isinstance(work, FillWork):
            batches = [
                [
                    batch.slot,
                    [
                        [arena, segment.start, segment.stop]
                        for arena, segment in zip(batch.arenas, batch.segments, strict=True)
                    ],
                    list(batch.omit),
                ]
                for batch in work.batches
            ]
            return FillTask(task.number, batches)
        return ProbeTask(task.number, self._table.block(0))

    def close(self) -> None:
        """Give the memories' descriptors back."""
        self.windows.close_fd()
        self.slots.close_fd()


def _check_batch_size(batch_size: int, num_hosts: int, num_records: int) -> None:
    if batch_size * num_hosts > num_records:
        raise OptionError(
            f"batch_size must be at most {num_records // num_hosts}, for there are {num_records} records"
            + (f" for {num_hosts} hosts" if num_hosts > 1 else "")
            + f", got {batch_size}",
            hint="Choose a smaller batch, or check that shards names all of them.",
        )
