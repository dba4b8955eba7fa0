"""The training process's end of one stream: of a private daemon, or of a server (see ``sources``).

It has no thread. The caller's thread takes one batch at a time (see ``page_consumer``), and gives back the slots
that nothing refers to any more; there are enough slots for the workers even while a consumer holds as many as it may.

**Waits.** Each wait ends: when what it is for has come; or with TransportLost, when the other end dies, says goodbye,
gives up, or is silent for longer than ``stall_timeout`` although it was asked for a sign of life. Between waits
nobody reads the socket, and messages stay there.

**Interrupts.** Ctrl-C may come at any bytecode. While we sleep for a batch, it does no harm. Anywhere else, a message
may get lost or be read by half. So ``torn`` is set before anything is touched, and reset when all is in order again.
A connection that is found torn must not be used any more: another one replaces it.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
import weakref
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from loaderd.client.batch import SlotReader
from loaderd.client.page_consumer import PageConsumer
from loaderd.client.skipped_data import SkippedData
from loaderd.client.sources import Source
from loaderd.client.transport import TransportLost, limit_sending
from loaderd.errors import LoaderdError
from loaderd.ipc.channel import ChannelClosed
from loaderd.ipc.descriptors import standard_is_taken
from loaderd.ipc.messages import (
    AskState,
    BatchFailed,
    Bye,
    DataListed,
    Failed,
    ListData,
    Message,
    Notice,
    Opened,
    RecordsSkipped,
    ShardsFound,
    StartPass,
    State,
    StorageUnavailable,
    Welcome,
)
from loaderd.plan.passes import Listing, Pass
from loaderd.progress import ProgressDisplay
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout
from loaderd.shm.page import MAX_GENERATION, STORAGE_COUNTERS, Page
from loaderd.shm.samples import PageView
from loaderd.snapshots import Progress, StorageCounts

_COUNTED = (RecordsSkipped, BatchFailed, StorageUnavailable, Notice)
"""What CONSUMER_NEWS counts, once the stream is open."""
_MIN_START_LIMIT_S = 30.0
_TICK_S = 1.0
_ASK_AFTER_S = 30.0
_REPORT_AFTER_S = 30.0

_logger = logging.getLogger("loaderd")


class StreamClient:
    """The connection to what serves a stream: a private daemon or a server."""

    data: DataListed
    """The daemon's description of the data in use."""
    reader: SlotReader
    """Makes batches of slots."""
    _page: Page
    _consumer: PageConsumer
    _progress: ProgressDisplay
    """These are set when the stream is open."""

    def __init__(self, source: Source, counts: dict[str, Any], skipped: SkippedData) -> None:
        """Start the daemon, or connect to the server; :meth:`open` comes next. ``counts``: see ``stream``."""
        self._source = source
        self._counts = counts
        self._skipped = skipped
        self.transport = source.connect()
        self._channel = self.transport.channel
        self._stall_timeout = source.options.stall_timeout
        sock = self._channel.socket
        limit_sending(sock, self._stall_timeout or 0.0)  # a daemon that does not read must not keep us writing
        self._poll = select.poll()
        self._socket_fd = sock.fileno()  # another thread may close the socket, which has no number then
        self._poll.register(self._socket_fd, select.POLLIN)
        self._has_answered = self._is_open = self._unsent = False
        self._bye: Bye | None = None
        self.sizes: dict[str, Any] = {}
        """Fields of ``Statistics``, when the stream is open."""
        self.watched: PageView | None = None
        """The stream's page and facts; None in a group, whose members do not see them."""
        self._generation = 0
        self._pass: Pass | None = None
        self._skips: dict[int, RecordsSkipped] = {}  # by step
        self._outage: LoaderdError | None = None
        self.torn = True
        """Whether it must not be used any more: see the module's docstring."""
        self._workers_restarted = 0

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return self.reader.num_lent if self._is_open else 0

    @property
    def storage_counts(self) -> StorageCounts:
        """What was asked of storage: see ``Statistics``."""
        if not self._is_open:  # Ctrl-C may have stopped open()
            return StorageCounts()
        of_stream = [self._page.total(counter) for counter in STORAGE_COUNTERS]
        return StorageCounts(*map(sum, zip_longest(self.sizes.get("storage", ()), of_stream, fillvalue=0)))

    # ---------------------------------------------------------------------------- opening and starting

    def open(self, start: str, progress: ProgressDisplay) -> None:
        """Open the stream at ``start`` (as in Open), and wait. Torn until the caller has taken the data over."""
        self._progress = progress
        for message in self._source.greeting(start):
            self._send(message)
        limit_s = self._stall_timeout
        # Before its first message, a daemon may be importing, from a slow file system or on a busy core.
        start_limit_s = None if limit_s is None else max(limit_s, _MIN_START_LIMIT_S)
        self._wait(self.transport.what, lambda: self._has_answered, start_limit_s)
        self._wait("the data", lambda: self._is_open, limit_s)

    def _map(self, opened: Opened) -> None:
        """Map the memory that came with ``opened``."""
        num_slots, num_seats, num_members, number = opened.page
        with standard_is_taken():
            memory, words = self._take_memory(), self._take_memory()
            own = self._take_memory().bytes.data.cast("q") if num_members else None
            self._page = Page(words.bytes, num_slots, num_seats, num_members)
            bells: list[int] = []
            weakref.finalize(self, _close_all, bells).atexit = False  # also of those that came before a Ctrl-C
            while len(bells) < 2 + num_seats:
                bells.append(self._channel.take_fd())
        self._consumer = PageConsumer(self._page, bells, number, own)
        self._poll.register(bells[0], select.POLLIN)
        specs, batch_size = self._source.schema.specs, self._source.options.batch_size
        self.reader = SlotReader(memory, SlotLayout(specs, batch_size, several_readers=not memory.writable))
        if not memory.writable:
            self.transport.before_end.append(self.reader.make_private)
        self.sizes = opened.facts
        self.watched = PageView.of(words.bytes) if own is None else None
        self._is_open = True

    def _take_memory(self) -> SharedMemory:
        memory = SharedMemory(self._channel.take_fd())
        memory.close_fd()
        return memory

    def list_shards(self, listing: Listing | None) -> None:
        """Where data sets grow, have the daemon use the shards that there are now, or those of ``listing``.

        Drops batches that were on their way; :meth:`start` must come next. The connection stays torn until the caller
        has taken the data over. Raises LoaderdError; then the data are the same as before.
        """
        self.torn = True
        self._begin(None, 0)
        before = self.data
        self._send(ListData(listing))
        self._wait("the data", lambda: self.data is not before, self._stall_timeout)
        error = self.data.error
        if error is not None:
            self.data = before
            self.torn = False
            raise error

    def start(self, pass_: Pass, step: int) -> None:
        """Have a pass delivered from ``step`` on; drops what was on its way."""
        self.torn = True
        self._begin(pass_, step)
        self._send(StartPass(self._generation, pass_, step))
        self.torn = False

    def _begin(self, pass_: Pass | None, step: int) -> None:
        if self._generation == MAX_GENERATION:
            raise TransportLost(f"{self.transport.what} has begun {MAX_GENERATION} times, and can count no further")
        self._generation += 1
        self._pass = pass_
        self._skips.clear()
        self._consumer.begin(self._generation, step)

    def is_at(self, pass_: Pass, step: int) -> bool:
        """Whether batch ``step`` of a pass is the next one that comes."""
        return self._pass == pass_ and self._consumer.step == step and not self.torn

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
        return self._consumer.can_take and not self._consumer.has_news

    def wait_for_batch(self) -> int:
        """Wait until :meth:`next_batch` can answer. Returns how many ns that took.

        Raises StorageError, or ServerError, where storage or servers do not answer; the next wait is for the same
        batch.
        """
        began_ns = time.perf_counter_ns()
        self.torn = True
        self._outage = None
        self._wait("a batch", lambda: self.has_batch or self._outage, self._stall_timeout, self._sleep)
        waited_ns = time.perf_counter_ns() - began_ns
        self._consumer.waited(waited_ns)
        self.torn = False
        outage, self._outage = self._outage, None
        if outage is not None and not self.has_batch:
            raise outage
        return waited_ns

    def next_batch(self) -> tuple[int, int] | LoaderdError:
        """(slot, records) of the next batch; or the error that comes in its place.

        The slot is the consumer's then. Leaves the connection torn, until the caller has made a batch of the slot.
        """
        self.torn = True
        reader = self.reader
        if reader.ended:
            self._consumer.release(*reader.take_back())
        step = self._consumer.step
        delivery = self._consumer.take()
        skipped = self._skips.pop(step, None) if self._skips else None
        if isinstance(delivery, BatchFailed):
            error = delivery.error
            self._skipped.add_damages("epoch", error.damages)
            return error
        if skipped is not None:
            errors = skipped.errors
            self._skipped.add_to_batch(skipped.num_records, errors, self._source.options.on_corrupt)
        return delivery

    def release(self, slot: int) -> None:
        """Give back a slot of which no lease was made."""
        self._consumer.release(slot)

    # ----------------------------------------------------------------------------- sending and waiting

    def _send(self, message: Message) -> None:
        """Raises nothing where the daemon is gone: the next wait reads its last messages, and finds out."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._unsent = True

    def _wait(
        self,
        what: str,
        has_come: Callable[[], object],
        limit_s: float | None,
        sleep: Callable[[float], list[int]] | None = None,
    ) -> None:
        """Wait until ``has_come()``; ``what``: its name for messages. ``sleep`` takes the place of :meth:`_poll_for`.

        Raises TransportLost, also after ``limit_s`` seconds of silence (None: never). Counts waits in which nothing
        came, and reads no clock: time in which nobody waits does not count, as when the whole job is stopped.
        """
        silence_s = math.inf if limit_s is None else limit_s
        ask_after_s = min(_ASK_AFTER_S, silence_s / 2)
        tick_s = min(_TICK_S, ask_after_s)
        silent_s = unasked_s = waited_s = 0.0
        report_after_s = _REPORT_AFTER_S
        while not has_come():
            if (news := self._source.news()) is not None:
                self._send(news)
            if self._bye is not None:
                self.transport.close()
                raise TransportLost(f"{self.transport.what} ends: {self._bye.text}")
            readable = (sleep or self._poll_for)(tick_s)
            for message in self.transport.receive() if self._socket_fd in readable else []:
                if isinstance(message, State) and waited_s >= report_after_s:
                    report_after_s *= 2
                    _logger.warning("waiting for %s for %.0f s: %s", what, waited_s, message.text)
                self._handle(message)
            if readable:
                silent_s = unasked_s = 0.0
                continue
            silent_s, unasked_s, waited_s = silent_s + tick_s, unasked_s + tick_s, waited_s + tick_s
            if (silent_s >= silence_s or self._unsent) and not has_come():
                how = self.transport.kill()
                raise TransportLost(f"{self.transport.what} said nothing for {silence_s:g} s and {how}")
            if unasked_s >= ask_after_s:
                unasked_s = 0.0
                self._send(AskState())

    def _poll_for(self, limit_s: float) -> list[int]:
        """Wait for up to ``limit_s`` seconds; return the descriptors that can be read."""
        return [fd for fd, _ in self._poll.poll(1000 * limit_s)]

    def _sleep(self, limit_s: float) -> list[int]:
        """As :meth:`_poll_for`, but gives slots back first, and Ctrl-C in the sleep leaves nothing torn."""
        consumer = self._consumer
        self.torn = True
        consumer.release(*self.reader.take_back())
        began_ns = time.perf_counter_ns()
        must_sleep = consumer.fall_asleep() or consumer.has_news
        self.torn = not must_sleep
        readable = self._poll_for(limit_s if must_sleep else 0)
        self.torn = True
        consumer.wake_up(time.perf_counter_ns() - began_ns)
        return readable

    # ----------------------------------------------------------------------------------------- messages

    def _handle(self, message: Message) -> None:
        if isinstance(message, Bye):
            self._bye = message
            return
        self._has_answered = True
        if isinstance(message, _COUNTED) and self._is_open:
            self._consumer.noted()
        if isinstance(message, Failed):
            self._give_up(message.error)
        elif isinstance(message, Welcome):
            try:
                self._source.welcomed(message)
            except LoaderdError as error:
                self._give_up(error)
        elif isinstance(message, RecordsSkipped):
            if message.generation == self._generation:
                self._skips[message.step] = message
        elif isinstance(message, BatchFailed):
            self._consumer.failed(message)
        elif isinstance(message, Progress):
            self._progress(message)
        elif isinstance(message, ShardsFound):
            self._source.shards = message.shards
        elif isinstance(message, DataListed):
            self.data = message
        elif isinstance(message, Opened):
            self._map(message)
        elif isinstance(message, Notice):
            self._counts["workers_restarted"] += message.workers_restarted - self._workers_restarted
            self._workers_restarted = message.workers_restarted
            _logger.warning("%s", message.text)
        elif isinstance(message, StorageUnavailable) and message.generation == self._generation:
            self._outage = message.error

    def _give_up(self, error: LoaderdError) -> None:
        self.transport.close()
        raise TransportLost(f"{self.transport.what} gave up: {error.message}", error)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
