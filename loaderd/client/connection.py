"""The training process's end of one stream: of a private daemon, or of a server (see ``sources``).

There is no thread: whoever wants a batch takes it, one at a time (see ``intake``), and gives back the slots that
nothing refers to any more: as many as a consumer may hold are never missed by the workers.

**Interrupts.** Ctrl-C may come at any bytecode. In the wait for a batch it costs nothing. Anywhere else, messages may
be lost or half read; so ``torn`` is set before anything is touched and taken back when all is in order again, and
whoever finds it set must not go on with this connection, but make another.
"""

from __future__ import annotations

import logging
import select
import subprocess
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from loaderd.client.batch import SlotReader
from loaderd.client.damage_report import DamageReport
from loaderd.client.intake import Intake, TurnIntake
from loaderd.client.link import LinkLost, limit_sending
from loaderd.client.patience import Patience
from loaderd.client.sources import Source
from loaderd.errors import LoaderdError, from_wire
from loaderd.memory.anonymous import SharedMemory
from loaderd.memory.layout import SlotLayout
from loaderd.memory.page import FACTS_BYTES, MAX_GENERATION, Page
from loaderd.memory.watch import Watched
from loaderd.plan.passes import Listing, Pass
from loaderd.protocol.channel import ChannelClosed
from loaderd.protocol.descriptors import standard_is_taken
from loaderd.protocol.messages import (
    Ask,
    Away,
    Broken,
    Bye,
    Ended,
    Failed,
    Joined,
    List,
    Listed,
    Message,
    Opened,
    Progress,
    Skipped,
    Start,
    State,
    Want,
    Warned,
    Welcome,
)
from loaderd.snapshots import StorageCounts

_MIN_START_LIMIT_S = 30.0

_logger = logging.getLogger("loaderd")


@dataclass
class Counts:
    """What all daemons of a loader did, one after the other: fields of ``Statistics``."""

    batches: int = 0
    records: int = 0
    copies: int = 0
    starts: int = 0
    wait_s: float = 0.0
    device_wait_s: float = 0.0
    records_skipped: int = 0
    report: DamageReport = field(default_factory=DamageReport)
    workers_restarted: int = 0
    daemon_restarts: int = 0


class Connection:
    """A stream that somebody serves. Every wait raises LinkLost when they are gone or stalled, or say goodbye."""

    _intake: Intake
    """Since the stream is open."""

    def __init__(self, source: Source, counts: Counts) -> None:
        """Start the daemon, or connect to the server; :meth:`open` comes next."""
        self._source = source
        self._link = link = source.link()
        self._channel = link.channel
        self._stall_timeout = stall_timeout = source.options.stall_timeout
        sock = self._channel.socket
        limit_sending(sock, stall_timeout or 0.0)  # a daemon that does not read must not keep us writing
        self._poll = select.poll()
        self._socket_fd = sock.fileno()  # another thread may close the socket, which has no number then
        self._poll.register(self._socket_fd, select.POLLIN)
        self._generation = 0
        self.watched: Watched | None = None
        """The page, and what it is of; None in a group, whose members do not see that of their stream."""
        self._skips: dict[int, Skipped] = {}
        self._heard = False
        self._unsent = False
        self._reader: SlotReader | None = None
        self._opened: Opened | None = None
        self._listed: Listed | None = None
        self._bye: Bye | None = None
        self._joined: Joined | None = None
        self._away: LoaderdError | None = None
        self.torn = True
        """Whether nobody knows what was said: see the module's docstring."""
        self.delivered = False
        """Whether a batch has come."""
        self._counts = counts
        self._workers_restarted = 0

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Of ours, that ends with the connection."""
        return self._link.process

    @property
    def data(self) -> Listed:
        """What the daemon said of the data that it uses now."""
        assert self._listed is not None
        return self._listed

    @property
    def reader(self) -> SlotReader:
        """What makes batches of slots."""
        assert self._reader is not None
        return self._reader

    @property
    def step(self) -> int:
        """That of the batch which :meth:`next_batch` gave last."""
        return self._intake.step

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return 0 if self._reader is None else self._reader.num_lent

    @property
    def storage_counts(self) -> StorageCounts:
        """What was asked of storage: see ``Statistics``."""
        of_index = () if self._opened is None else self._opened.facts.get("storage", ())
        of_stream = () if self._reader is None else self._intake.storage_counts()  # Ctrl-C may have stopped open()
        return StorageCounts(*map(sum, zip_longest(of_index, of_stream, fillvalue=0)))

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of ``Statistics``."""
        assert self._opened is not None
        return self._opened.facts

    # -------------------------------------------------------------------------------------- speaking

    def open(self, start: str, on_progress: Callable[[int, int], None]) -> None:
        """Wait until the stream is there; ``start`` as in Open. Torn until the data are taken over."""
        self._on_progress = on_progress
        for message in self._source.greeting(start):
            self._send(message)
        limit_s = self._stall_timeout
        # Until it says something it may be importing, from a slow file system or on a busy core.
        start_limit_s = None if limit_s is None else max(limit_s, _MIN_START_LIMIT_S)
        self._wait(self._link.what, lambda: self._heard, start_limit_s)
        self._wait("the data", lambda: self._opened, limit_s)
        assert self._opened is not None
        with standard_is_taken():
            memory = SharedMemory(self._channel.take_fd())
            memory.close_fd()
            self._open_page(*self._opened.page)
        specs, batch_size = self._source.schema.specs, self._source.options.batch_size
        self._reader = SlotReader(memory.bytes, SlotLayout(specs, batch_size, several_readers=not memory.writable))

    def _open_page(self, num_slots: int, num_seats: int) -> None:
        words = SharedMemory(self._channel.take_fd())
        words.close_fd()
        bells = [self._channel.take_fd() for _ in range(2 + num_seats)]
        page = Page(words.bytes, num_slots, num_seats)
        self.watched = Watched.of(words.bytes) if page.words[FACTS_BYTES] else None
        self._intake = TurnIntake(page, bells) if self._source.takes_turns else Intake(page, bells)
        weakref.finalize(self, self._intake.close).atexit = False
        self._poll.register(bells[0], select.POLLIN)

    def list_shards(self, listing: Listing | None) -> None:
        """Have the daemon use the shards that there are now, or those of ``listing``, where sets grow.

        Drops what was on its way, and needs a :meth:`start`. It stays torn until the data are taken over. Raises
        LoaderdError; then nothing has changed.
        """
        self.torn = True
        self._drop(0)
        before, self._listed = self._listed, None
        self._send(List(listing))
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
        self._send(Start(self._generation, pass_, step))
        self.torn = False

    def join(self, pass_: Pass, step: int, taken: list[int]) -> None:
        """Take part in the pass of a group, of which this is what we know; drops what was on its way.

        Waits until it is known where the group is. ``taken`` as in Start. Leaves the connection torn.
        """
        self.torn = True
        self._drop(step)
        self._send(Start(self._generation, pass_, step, taken))
        self._wait("the group", lambda: self._joined, self._stall_timeout)

    @property
    def joined(self) -> tuple[Pass, int]:
        """The pass that the group is at, and the step before which all is used up."""
        assert self._joined is not None
        return self._joined.which, self._joined.step

    def want(self, count: int) -> None:
        """Ask for so many batches of the group's. Leaves the connection torn."""
        self.torn = True
        self._send(Want(count))

    def _drop(self, step: int) -> None:
        if self._generation == MAX_GENERATION:
            raise LinkLost(f"{self._link.what} has begun {MAX_GENERATION} times, and can count no further")
        self._generation += 1
        self._joined = None
        self._skips.clear()
        self._intake.begin(self._generation, step)

    def tell_news(self) -> None:
        """Pass on what the source has to say. Not in the middle of anything."""
        if (news := self._source.news()) is not None:
            self.torn = True
            self._send(news)
            self.torn = False

    # --------------------------------------------------------------------------------------- batches

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`next_batch` can answer now."""
        return self._intake.has_batch and not self._intake.has_news

    def wait_for_batch(self, wanted: int) -> int:
        """Wait until :meth:`next_batch` can answer; where one wait can be for ``wanted`` batches, so many times.

        Returns how many ns that took. Raises StorageError, or ServerError, where storage or servers do not answer;
        the next wait is for the same batch.
        """
        began_ns = time.perf_counter_ns()
        self.torn = True
        self._wait("a batch", lambda: self.has_batch or self._away, self._stall_timeout, wanted)
        waited_ns = time.perf_counter_ns() - began_ns
        self._intake.waited(waited_ns)
        self.torn = False
        away, self._away = self._away, None
        if away is not None and not self.has_batch:
            raise away
        return waited_ns

    def next_batch(self) -> tuple[int, int] | LoaderdError | None:
        """(slot, records) of the next batch, the slot being ours; or why it cannot be had; None: the pass is over.

        Leaves the connection torn: whoever has used the slot takes that back.
        """
        self.torn = True
        if self.reader.ended:
            self._intake.give_back(self.reader.take_back())
        found = self._intake.take()
        if found is None:
            return None
        self.delivered = True
        skipped = self._skips.pop(self.step, None) if self._skips else None
        if skipped is not None:
            self._counts.records_skipped += skipped.num_records
            self._counts.report.add("epoch", [one for error in skipped.errors for one in from_wire(error).damages])
        if isinstance(found, Broken):
            error = from_wire(found.error)
            self._counts.report.add("epoch", error.damages)
            return error
        return found

    def release(self, slot: int) -> None:
        """Give back a slot that was not lent on."""
        self._intake.give_back([slot])

    # ------------------------------------------------------------------------------------- the socket

    def _send(self, message: Message) -> None:
        """Raises nothing where the daemon is gone: the next wait reads its last words, and finds out."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._unsent = True

    def _wait(self, what: str, is_there: Callable[[], object], limit_s: float | None, batches: int = 0) -> None:
        """``batches``: how many are waited for, if any: then slots are given back, and Ctrl-C leaves nothing torn."""
        patience = Patience(limit_s)
        while not is_there():
            if (news := self._source.news()) is not None:
                self._send(news)
            if self._bye is not None:
                self.close()
                raise LinkLost(f"{self._link.what} ends: {self._bye.text}")
            arrived = self._sleep(patience.tick_s, batches) if batches else self._arrived(patience.tick_s)
            if arrived:
                patience.heard()
                for message in self._link.receive() if self._socket_fd in arrived else []:
                    if isinstance(message, State) and patience.must_report():
                        _logger.warning("waiting for %s for %.0f s: %s", what, patience.waited_s, message.text)
                    self._handle(message)
                continue
            patience.tick()
            if patience.is_over or self._unsent:
                raise LinkLost(f"{self._link.what} said nothing for {patience.limit_s:g} s and {self._link.kill()}")
            if patience.must_ask():
                self._send(Ask())

    def _arrived(self, limit_s: float) -> list[int]:
        """Which descriptors can be read, within so long."""
        return [fd for fd, _ in self._poll.poll(1000 * limit_s)]

    def _sleep(self, limit_s: float, wanted: int) -> list[int]:
        """The same, while ``wanted`` batches are waited for."""
        intake = self._intake
        self.torn = True
        intake.give_back(self.reader.take_back())
        began_ns = time.perf_counter_ns()
        must_sleep = intake.fall_asleep(wanted) or intake.has_news
        self.torn = not must_sleep
        arrived = self._arrived(limit_s if must_sleep else 0)
        self.torn = True
        intake.wake_up(time.perf_counter_ns() - began_ns)
        return arrived

    def _handle(self, message: Message) -> None:
        if isinstance(message, Bye):
            self._bye = message
            return
        self._heard = True
        if isinstance(message, (Skipped, Broken, Ended, Joined)):
            self._intake.noted()
        if isinstance(message, Skipped):
            if message.generation == self._generation:
                self._skips[message.step] = message
        elif isinstance(message, Broken):
            self._intake.broken(message)
        elif isinstance(message, Ended):
            self._intake.ended(message)
        elif isinstance(message, Progress):
            self._on_progress(message.done_bytes, message.total_bytes)
        elif isinstance(message, Listed):
            self._listed = message
        elif isinstance(message, Opened):
            self._opened = message
        elif isinstance(message, Warned):
            self._counts.workers_restarted += message.workers_restarted - self._workers_restarted
            self._workers_restarted = message.workers_restarted
            _logger.warning("%s", message.text)
        elif isinstance(message, Away):
            self._away = from_wire(message.error)
        elif isinstance(message, Joined):
            if message.generation == self._generation:
                self._joined = message
        elif isinstance(message, Welcome):
            try:
                self._source.welcomed(message)
            except LoaderdError as error:
                self._give_up(error)
        elif isinstance(message, Failed):
            self._give_up(from_wire(message.error))

    def _give_up(self, error: LoaderdError) -> None:
        self.close()
        raise LinkLost(f"{self._link.what} gave up: {error.message}", error)

    def wake(self) -> None:
        """Have a wait in another thread end, and the daemon; without waiting for it."""
        self._link.wake()

    def kill(self) -> None:
        """End the stream, whatever a daemon of ours is at. Its workers end with it, a moment later."""
        self._link.kill()

    def close(self) -> None:
        """End the stream, and wait for the end of our daemon; from any thread. A wait in another one ends, too."""
        self._link.close()
