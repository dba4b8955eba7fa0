"""The training process's end of one stream: of a private daemon, or of a server (see ``sources``).

It has no thread. The caller's thread takes one batch at a time (see ``batch_receiver``), and gives back the slots
that nothing refers to any more; there are enough slots for the workers even while a consumer holds as many as it may.

**Interrupts.** Ctrl-C may come at any bytecode. While we sleep for a batch, it does no harm. Anywhere else, a message
may get lost or be read by half. So ``torn`` is set before anything is touched, and reset when all is in order again.
A connection that is found torn must not be used any more: another one replaces it.
"""

from __future__ import annotations

import logging
import select
import time
import weakref
from dataclasses import astuple
from itertools import zip_longest
from typing import Any

from loaderd.client.batch import SlotReader
from loaderd.client.batch_receiver import BatchReceiver
from loaderd.client.batch_source import DaemonTotals
from loaderd.client.rpc import RpcClient
from loaderd.client.sources import Source
from loaderd.client.transport import TransportLost
from loaderd.errors import LoaderdError, from_wire
from loaderd.ipc.descriptors import standard_is_taken
from loaderd.ipc.messages import (
    BatchFailed,
    DataListed,
    ListData,
    Message,
    Notice,
    Opened,
    PassEnded,
    RecordsSkipped,
    ShardsFound,
    StartPass,
    StorageUnavailable,
)
from loaderd.plan.passes import Listing, Pass
from loaderd.progress import ProgressDisplay
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout
from loaderd.shm.page import FACTS_BYTES, MAX_GENERATION, Page
from loaderd.shm.page_view import PageView
from loaderd.snapshots import Progress, StorageCounts

_logger = logging.getLogger("loaderd")


class StreamClient(RpcClient):
    """The connection to what serves a stream: a private daemon or a server."""

    _intake: BatchReceiver
    """Set when the stream is open."""

    def __init__(self, source: Source, counts: DaemonTotals, before: StreamClient | None = None) -> None:
        """:meth:`open` comes next. ``before``: what it replaces, or None."""
        super().__init__(source)
        self._asked_before = StorageCounts() if before is None else before._asked
        self._generation = 0
        self.watched: PageView | None = None
        """The stream's page and facts; None in a group, whose members do not see them."""
        self._skips: dict[int, RecordsSkipped] = {}
        self._reader: SlotReader | None = None
        self._opened: Opened | None = None
        self.sizes: dict[str, Any] = {}
        """Fields of ``Statistics``, when the stream is open."""
        self._listed: DataListed | None = None
        self._away: LoaderdError | None = None
        self.torn = True
        """Whether it must not be used any more: see the module's docstring."""
        self.delivered = False
        """Whether a batch has come."""
        self._counts = counts
        self._workers_restarted = 0

    @property
    def data(self) -> DataListed:
        """The daemon's description of the data in use."""
        assert self._listed is not None
        return self._listed

    @property
    def reader(self) -> SlotReader:
        """Makes batches of slots."""
        assert self._reader is not None
        return self._reader

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return 0 if self._reader is None else self._reader.num_lent

    @property
    def storage_counts(self) -> StorageCounts:
        """What was asked of storage, also over the connections before: see ``Statistics``."""
        return self._counted(with_index=True)

    @property
    def _asked(self) -> StorageCounts:
        """Of that, what the next connection does not find out: a server says again what its index has asked."""
        return self._counted(with_index=self.link.process is not None)

    def _counted(self, with_index: bool) -> StorageCounts:
        of_index = self.sizes.get("storage", ()) if with_index else ()
        of_stream = () if self._reader is None else self._intake.storage_counts()  # Ctrl-C may have stopped open()
        return StorageCounts(*map(sum, zip_longest(astuple(self._asked_before), of_index, of_stream, fillvalue=0)))

    # -------------------------------------------------------------------------------------- speaking

    def open(self, start: str, progress: ProgressDisplay) -> None:
        """Open the stream at ``start`` (as in Open), and wait. Torn until the caller has taken the data over."""
        self._progress = progress
        self._greet(start)
        if self._opened is None:
            self._wait("the data", lambda: self._opened, self._stall_timeout)
        assert self._opened is not None
        with standard_is_taken():
            memory = SharedMemory(self._channel.take_fd())
            memory.close_fd()
            self._open_page(*self._opened.page)
        specs, batch_size = self._source.schema.specs, self._source.options.batch_size
        self._reader = SlotReader(memory, SlotLayout(specs, batch_size, several_readers=not memory.writable))
        if not memory.writable:
            self.link.before_end.append(self._reader.make_private)

    def _open_page(self, num_slots: int, num_seats: int) -> None:
        words = SharedMemory(self._channel.take_fd())
        words.close_fd()
        bells = [self._channel.take_fd() for _ in range(2 + num_seats)]
        page = Page(words.bytes, num_slots, num_seats)
        self.watched = PageView.of(words.bytes) if page.words[FACTS_BYTES] else None
        self._intake = BatchReceiver(page, bells)
        weakref.finalize(self, self._intake.close).atexit = False
        self._poll.register(bells[0], select.POLLIN)

    def list_shards(self, listing: Listing | None) -> None:
        """Where data sets grow, have the daemon use the shards that there are now, or those of ``listing``.

        Drops batches that were on their way; :meth:`start` must come next. The connection stays torn until the caller
        has taken the data over. Raises LoaderdError; then the data are the same as before.
        """
        self.torn = True
        self._drop(0)
        before, self._listed = self._listed, None
        self._send(ListData(listing))
        self._wait("the data", lambda: self._listed, self._stall_timeout)
        error = self.data.error
        if error is not None:
            self._listed = before
            self.torn = False
            raise from_wire(error)

    def start(self, pass_: Pass, step: int) -> None:
        """Have a pass delivered from ``step`` on; drops what was on its way."""
        self.torn = True
        self._drop(step)
        self._send(StartPass(self._generation, pass_, step))
        self.torn = False

    def _drop(self, step: int) -> None:
        if self._generation == MAX_GENERATION:
            raise TransportLost(f"{self.link.what} has begun {MAX_GENERATION} times, and can count no further")
        self._generation += 1
        self._skips.clear()
        self._intake.begin(self._generation, step)

    def tell_news(self) -> None:
        """Send what the source has to tell the other end, if anything; to be called between batches."""
        if (news := self._source.news()) is not None:
            self.torn = True
            self._send(news)
            self.torn = False

    # --------------------------------------------------------------------------------------- batches

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`next_batch` can answer now."""
        return self._intake.has_batch and not self._intake.has_news

    def wait_for_batch(self) -> int:
        """Wait until :meth:`next_batch` can answer. Returns how many ns that took.

        Raises StorageError, or ServerError, where storage or servers do not answer; the next wait is for the same
        batch.
        """
        began_ns = time.perf_counter_ns()
        self.torn = True
        self._away = None
        self._wait("a batch", lambda: self.has_batch or self._away, self._stall_timeout, self._sleep)
        waited_ns = time.perf_counter_ns() - began_ns
        self._intake.waited(waited_ns)
        self.torn = False
        away, self._away = self._away, None
        if away is not None and not self.has_batch:
            raise away
        return waited_ns

    def next_batch(self) -> tuple[int, int] | LoaderdError | None:
        """(slot, records) of the next batch; or the error that comes in its place; or None: the pass is over.

        The slot is the consumer's then. Leaves the connection torn, until the caller has made a batch of the slot.
        """
        self.torn = True
        reader = self.reader
        if reader.ended:
            self._intake.give_back(reader.take_back())
        found = self._intake.take()
        if found is None:
            return None
        self.delivered = True
        skipped = self._skips.pop(self._intake.step, None) if self._skips else None
        if isinstance(found, BatchFailed):
            error = from_wire(found.error)
            self._counts.report.add("epoch", error.damages)
            return error
        if skipped is not None:
            counts, errors = self._counts, [from_wire(error) for error in skipped.errors]
            counts.records_skipped += skipped.num_records
            counts.report.add("epoch", [one for error in errors for one in error.damages])
            for error in errors:
                counts.skips.of_batch(error, counts.records_skipped, self._source.options.on_corrupt)
        return found

    def release(self, slot: int) -> None:
        """Give back a slot of which no lease was made."""
        self._intake.give_back([slot])

    def _sleep(self, limit_s: float) -> list[int]:
        """As :meth:`_arrived`, but gives slots back first, and Ctrl-C in the sleep leaves nothing torn."""
        intake = self._intake
        self.torn = True
        intake.give_back(self.reader.take_back())
        began_ns = time.perf_counter_ns()
        must_sleep = intake.fall_asleep() or intake.has_news
        self.torn = not must_sleep
        arrived = self._arrived(limit_s if must_sleep else 0)
        self.torn = True
        intake.wake_up(time.perf_counter_ns() - began_ns)
        return arrived

    # ------------------------------------------------------------------------------------- what is heard

    def _handle(self, message: Message) -> None:
        if isinstance(message, (RecordsSkipped, BatchFailed, PassEnded, StorageUnavailable)):
            self._intake.noted()
        if isinstance(message, RecordsSkipped):
            if message.generation == self._generation:
                self._skips[message.step] = message
        elif isinstance(message, BatchFailed):
            self._intake.broken(message)
        elif isinstance(message, Progress):
            self._progress(message)
        elif isinstance(message, ShardsFound):
            self._source.found(message.shards)
        elif isinstance(message, DataListed):
            self._listed = message
        elif isinstance(message, Opened):
            self._opened, self.sizes = message, message.facts
        elif isinstance(message, Notice):
            self._counts.workers_restarted += message.workers_restarted - self._workers_restarted
            self._workers_restarted = message.workers_restarted
            _logger.warning("%s", message.text)
            self._progress.said()
        elif isinstance(message, StorageUnavailable) and message.generation == self._generation:
            self._away = from_wire(message.error)
