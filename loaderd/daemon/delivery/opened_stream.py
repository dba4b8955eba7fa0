"""A stream whose data are there: its plan, its memories, and what its workers, its consumers and samples are told.

The daemon wakes at least once a second, and then writes a sample to the page (see ``shm.samples``); it writes more
only while it is awake anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loaderd import processes
from loaderd.daemon.delivery.consumers import Consumers
from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.delivery.stream_memory import StreamMemory
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.daemon.pool.worker_usage import EVERY_S
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError, OptionError, ServerError
from loaderd.ipc.messages import DataListed, Message, Opened, PageSize, StorageUnavailable
from loaderd.ipc.worker_messages import Attach, CheckTask, FillFailed, Granted, OutageReport, UseColumn
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import PassSequence, Position, order_of
from loaderd.shm.page import CONSUMER_PID, CONSUMER_THREAD, TAKEN_BATCHES, TAKEN_RECORDS, barrier, ring
from loaderd.shm.samples import Gauge, write_sample
from loaderd.snapshots import Kernels

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemoteData

# Enough for any number of records: they are cut into even windows, and none is smaller than half a batch.
_MIN_ARENAS_OF_GROWING = 4
_MIN_ARENAS = 2

Tell = Callable[[int, Message, tuple[int, ...]], None]


class OpenedStream:
    """See the module's docstring; and :class:`~loaderd.daemon.pool.worker_manager.Attachable`.

    Raises OptionError where the data do not fit the options (a batch larger than the data set, a position of other
    data), and what :class:`StreamMemory` raises. ``pickled``: ``description``, as Attach has it. ``num_members``: as
    of a page. ``number``: by which workers know the stream. ``tell`` sends a consumer a message, with descriptors.
    """

    def __init__(
        self,
        number: int,
        description: StreamDescription,
        pickled: bytes,
        data: LocalData | RemoteData,
        worker_manager: WorkerManager,
        num_members: int,
        tell: Tell,
    ) -> None:
        self.number = number
        self.error: LoaderdError | None = None
        """Why the stream cannot go on: a worker could not be attached to it, or those that it needs are missing."""
        self.kernels: Kernels = "numpy"
        """What the workers unpack bits with: known when the probe is finished."""
        self._worker_manager = worker_manager
        self._tell = tell
        self._missing_s = self._sampled_s = 0.0
        self._description = description
        self._pickled = pickled
        self._data = data
        options = description.options
        self._window_records = options.window_records(description.row_bytes or description.schema.row_bytes)
        self._pass_sequence = self._pass_sequence_of(data)
        position = Position() if description.start is None else Position.from_json(description.start)
        start, _ = self._pass_sequence.find(position)
        least, self._max_rows = self._windows_for(start)
        self._num_arenas = max(least, options.num_windows)
        try:
            self.stream_memory = self._new_memory(start, num_members)
        except (DaemonError, ServerError):
            if self._num_arenas == least:
                raise
            self._num_arenas = least  # slower, but in the same order
            self.stream_memory = self._new_memory(start, num_members)
        self.page = self.stream_memory.page
        self.stream = Stream(number, self._plan_pass, self.page, self._num_arenas, options, data)
        self.consumers = Consumers(self.stream, self.stream_memory.bells, self._renew_column)

    def _new_memory(self, start: Pass, num_members: int) -> StreamMemory:
        steps_per_epoch = self._pass_sequence.batches(start).steps_per_epoch
        num_running = len(self._worker_manager.pool.numbers)
        sizes = steps_per_epoch, self._num_arenas, self._max_rows, num_running, num_members
        return StreamMemory(self._description, self._data, *sizes)

    def _windows_for(self, start: Pass) -> tuple[int, int]:
        """(windows that must be held at a time, rows of the largest), for a pass and for the one behind it."""
        plans = [self._pass_sequence.batches(pass_) for pass_ in (start, self._pass_sequence.next_pass(start))]
        num_arenas = max(_MIN_ARENAS, *[plan.max_windows_of_a_batch for plan in plans])
        if self._data.listing is not None:
            return max(num_arenas, _MIN_ARENAS_OF_GROWING), self._window_records + 1
        return num_arenas, max(plan.largest_window for plan in plans)

    def use(self, data: LocalData | RemoteData) -> None:
        """Go on with other shards of sets that grow; workers must be attached again. Raises OptionError as above."""
        self._pass_sequence = self._pass_sequence_of(data)
        self._data = self.stream.data = data
        self.consumers.stop()

    def _pass_sequence_of(self, data: LocalData | RemoteData) -> PassSequence:
        """Raises OptionError unless each host gets a batch with at least one record.

        With ``remainder="short"``, that batch may be smaller than the others, and the only one of an epoch.
        """
        options, num_records = self._description.options, data.rows.num_records
        batch_size, num_hosts = options.batch_size, options.shard[1]
        hosts = f" for {num_hosts} hosts" if num_hosts > 1 else ""
        if num_hosts > num_records:
            raise OptionError(f"shard must be of at most {num_records} hosts, as there are {num_records} records")
        if options.remainder != "short" and batch_size * num_hosts > num_records:
            raise OptionError(
                f"batch_size must be at most {num_records // num_hosts}, for there are {num_records} records{hosts} "
                f"and remainder={options.remainder!r}, got {batch_size}",
                hint='Choose a smaller batch, or remainder="short", or check that shards names all of them.',
            )
        return PassSequence(options, num_records, self._window_records, self._of(data), data.listing)

    def _of(self, data: LocalData | RemoteData) -> dict[str, Any]:
        options = self._description.options
        return {
            "features": self._description.schema.stored_fingerprint,
            **data.of,
            **order_of(options, self._window_records),
            "remainder": options.remainder,
        }

    def _plan_pass(self, pass_: Pass) -> PassPlan:
        """Raises OptionError where there is no such pass, or the memory was not made for it."""
        options = self._description.options
        batches = self._pass_sequence.batches(pass_)
        if batches.largest_window > self._max_rows or batches.max_windows_of_a_batch > self._num_arenas:
            raise OptionError(
                f"this pass has windows of {batches.largest_window} records and needs "
                f"{batches.max_windows_of_a_batch} at a time; there are {self._num_arenas} of {self._max_rows}",
                hint="A position of another number of hosts is for a new loader: start=position.",
            )
        return PassPlan(self._data.rows, batches, options.seed, bool(options.shuffle), pass_.first_epoch)

    def go_on(self) -> None:
        """See what has changed in the page; tell consumers and workers what there is to tell."""
        self.say()
        self._sample()
        if (error := self.stream.storage.error) is not None:  # those that wait later are told if it fails again
            asleep = self.consumers.waiting()
            for number, generation in asleep:
                self.announce(number, StorageUnavailable(generation, error))
            self.stream.storage.told(bool(asleep))

    def say(self) -> None:
        """Tell the consumers what there is to tell, and all workers what has changed in what they may make."""
        self._tell_consumers()
        while self.stream.grants:
            self._worker_manager.tell(self, self.stream.grants.popleft())

    def tick(self, seconds: float) -> None:
        """So much time has passed. A stream does not wait for ever for slots whose workers cannot be replaced."""
        self.stream.tick(seconds)
        shortage = self._worker_manager.shortage(self.page) if self.stream.is_waited_for else None
        self._missing_s = 0.0 if shortage is None else self._missing_s + seconds
        limit_s = self._worker_manager.stall_timeout
        if limit_s is not None and self._missing_s >= limit_s:
            self.error = self.error or shortage

    # ------------------------------------------------------------------------------------------- samples

    def _sample(self) -> None:
        """Write a sample if it is time."""
        now_s, page = time.monotonic(), self.page
        if now_s - self._sampled_s < EVERY_S:
            return
        self._sampled_s = now_s
        if page.num_members:  # then no consumer has the column in the page
            for word in (TAKEN_BATCHES, TAKEN_RECORDS):
                page.words[word] = max(page.words[word], *(column[word] for column in page.columns))
        write_sample(page, {**self._worker_manager.use.look(now_s), **self._consumer_gauges(), **self._gauges()})

    def _consumer_gauges(self) -> dict[Gauge, int]:
        pid, thread = self.page.words[CONSUMER_PID], self.page.words[CONSUMER_THREAD]
        if not pid:
            return {}
        threads = ((processes.cpu_ns(pid, one), processes.delay_ns(pid, one)) for one in (pid, thread))
        busiest_ns, delay_ns = max(threads)
        return {
            Gauge.CONSUMER_CPU_NS: processes.cpu_ns(pid),
            Gauge.THREAD_CPU_NS: busiest_ns,
            Gauge.THREAD_DELAY_NS: delay_ns,
            Gauge.USES_ACCELERATOR: processes.uses_accelerator(pid),
        }

    def _gauges(self) -> dict[Gauge, int]:
        stream, page = self.stream, self.page
        epoch, batch = (0, 0) if stream.plan is None else stream.plan.place_of(stream.taken)
        outage = stream.outage
        if outage is not None:
            page.say_error(outage.error)
        return {
            Gauge.EPOCH: epoch,
            Gauge.BATCH: batch,
            Gauge.SLOTS_FULL: len(page.filled()),
            Gauge.WINDOWS_READY: stream.windows_ready,
            Gauge.DAMAGED: len(self._data.damages),
            Gauge.IS_COMPILED: self.kernels == "compiled",
            Gauge.OUTAGE_NS: 0 if outage is None else int(outage.for_s * 1e9),
            Gauge.OUTAGE_FAILURES: 0 if outage is None else outage.failures,
        }

    # ------------------------------------------------------------------------------------------- workers

    def attach_message(self, seat: int) -> tuple[Attach, tuple[int, ...]]:
        page = self.page
        sizes = self._max_rows, page.num_slots, page.num_seats, page.num_members
        message = Attach(self.number, self._pickled, self._data.source, *sizes, page.news(seat))
        return message, self.stream_memory.worker_fds

    def attach_failed(self, error: LoaderdError) -> None:
        self.error = self.error or error

    def granted_message(self) -> Granted:
        self._tell_consumers()
        return Granted(self.number, self.stream.generation, [*self.stream.granted])

    def _renew_column(self, column: int) -> None:
        """Give a column new memory, which no member before can write to. Raises DaemonError where there is none."""
        fd = self.stream_memory.renew_column(column)
        self._worker_manager.tell(self, UseColumn(self.number, column), (fd,))

    def is_under_way(self, key: int) -> bool:
        return self.stream.is_under_way(key)

    def received(self, seat: int, message: FillFailed | OutageReport) -> None:
        if isinstance(message, FillFailed):
            self.stream.not_made(message)
        else:
            self.stream.storage.report(seat, message.outage)

    def lose_claims(self, seat: int, reason: str, stalled: bool) -> None:
        page, stream = self.page, self.stream
        stream.storage.report(seat, None)
        stream.lost_at(page.makes(seat), page.row(seat), reason, stalled)
        page.say_makes(seat, 0)
        page.say_row(seat, -1)
        page.say_task(seat, None)
        page.say_sleeps(seat, False)
        self.say()  # workers must know what is withdrawn before they can claim it again
        for slot, _ in page.unfinished(seat):
            page.claim(slot, 0)
        barrier()
        stream.wake_workers()
        self.say()
        for bell in self.stream_memory.bells:  # the worker may have filled a slot, and died before it rang
            ring(bell)

    def check_task(self, block: int, any_fits: bool) -> CheckTask:
        """See whether the first record of a block fits the schema; with ``any_fits``, any of its first records."""
        block, num_records, place = self._data.first_records(block)
        return CheckTask(self.number, block, num_records, place, any_fits)

    @property
    def num_blocks(self) -> int:
        """Blocks of all sets."""
        return self._data.num_blocks

    # ------------------------------------------------------------------------------------------- consumers

    def introduce(self, number: int, index_facts: Mapping[str, Any]) -> None:
        """Give a consumer a column, and tell it what the stream is like."""
        manager, page = self._worker_manager, self.page
        column = self.consumers.join(number)
        facts = {
            "workers": self._description.options.num_workers,
            "slots": page.num_slots,
            "slot_bytes": self.stream_memory.slot_bytes,
            "window_records": self._max_rows,
            "window_bytes": self.stream_memory.windows_bytes,
            **index_facts,
            "kernels": self.kernels,
        }
        size = PageSize(page.num_slots, page.num_seats, page.num_members, column)
        bells = manager.bell, *manager.pool.bells[: page.num_seats]
        self._tell(number, self.listed_message(), ())
        self._tell(number, Opened(facts, size), (*self.stream_memory.consumer_fds(column), *bells))

    def listed_message(self, error: LoaderdError | None = None) -> DataListed:
        """What a consumer must know of the data; ``error``: why the data are still the former ones."""
        data = self._data
        return DataListed(
            {"num_shards": data.num_shards, "num_records": data.rows.num_records},
            self._of(data),
            data.listing,
            [damage.to_wire() for damage in data.damages],
            data.left_out,
            error,
        )

    def announce(self, number: int, message: Message) -> None:
        """Send a message that the consumer reads before it takes the batches behind it."""
        self.page.add_consumer_news(self.consumers.column_of(number))
        self._tell(number, message, ())

    def _tell_consumers(self) -> None:
        """They must know what is wrong with a batch before it is made."""
        for number, note in self.consumers.take():
            self.announce(number, note)
