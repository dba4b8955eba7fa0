"""A stream of batches that outlives its daemon, or the connection to its server.

::

    fetch ──► a batch is there ──────────────────────────────────────────────────────► lend it
         └──► wait ──► the daemon died, or says nothing ──► another one, on the same data, from this batch on ──┘

Nothing of a daemon need be saved: all that it does follows from the description, the pass and the step; with a
server, from what the consumer subscribed to. The next daemon is opened at a position in the same data, and refuses if
it finds other data. It has memory of its own; batches that the consumer still holds keep the memory of the old one
(for a group's, see ``batch``). So an interrupt (``StreamClient.torn``) costs a new daemon, or a new connection, and
nothing else.

An error that the daemon itself reports (Failed) is final, as it would come again, unless the source says that it may
pass. After any other end, the source says how long to go on trying (``sources``). Between two attempts,
:meth:`Stream.close` and Ctrl-C end the wait.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from typing import Any

from loaderd.client.batch import Batch
from loaderd.client.shutdown import ProgramEnded, end_with_program, program_has_ended
from loaderd.client.skipped_data import SkippedData
from loaderd.client.sources import Source
from loaderd.client.stream_client import StreamClient
from loaderd.client.transport import TransportLost
from loaderd.errors import (
    HOW_TO_GO_ON_BEHIND,
    ClosedError,
    Damage,
    EmptyBatchError,
    LoaderdError,
    OptionError,
    ShardError,
)
from loaderd.ipc.channel import ChannelClosed
from loaderd.ipc.messages import DataListed
from loaderd.plan.passes import Listing, Pass, pass_of
from loaderd.plan.positions import PassSequence, Position, check_epoch, compare, compare_listings
from loaderd.progress import ProgressDisplay
from loaderd.shm.page import COPIES_AHEAD, COPY_NS, DEVICE_WAIT_NS
from loaderd.shm.samples import PageView

_MOST_PASS_SEQUENCES = 64
_MOST_EMPTY_STEPS = 1_000_000


class Stream:
    """The batches of a source. When the connection to it is lost, another one replaces it.

    For one thread at a time, which holds ``lock``. Any thread may call :meth:`close` at any time, without it. After
    an exception, KeyboardInterrupt included, the next call goes on. Of no use in a fork of the process.
    """

    data: DataListed
    """What the daemon said of the data in use."""
    pass_sequence: PassSequence
    """The arithmetic of passes and positions, for these data."""

    def __init__(self, source: Source, start: Position, progress: ProgressDisplay) -> None:
        """Have the stream opened at ``start``. Raises LoaderdError."""
        self.lock = threading.Lock()
        """Held by the thread that asks for a batch."""
        self.skipped = SkippedData(source.options.report)
        self.counts: dict[str, Any] = {
            **dict.fromkeys(("batches_delivered", "records_delivered", "batches_copied", "starts"), 0),
            **dict.fromkeys(("workers_restarted", "daemon_restarts"), 0),
            **dict.fromkeys(("wait_s", "device_wait_s"), 0.0),
        }
        """Fields of ``Statistics``: what was delivered, over all daemons."""
        self._over: str | type[ProgramEnded] | None = None
        self._not_over = _held_lock()
        self._maker = os.getpid()
        self._source = source
        self._progress = progress
        self._pass_sequences: dict[Listing | None, PassSequence] = {}
        """Those of the last listings; the one in use is the last of them."""
        # Batches of which no record was left, as (first epoch of the pass, step), as far as the consumer has come.
        self._empty: dict[tuple[int, int], None] = {}
        self._empty_in_a_row = 0
        self._connection: StreamClient | None = None
        self._fruitful = False  # whether a batch has come since the source was asked last how long to go on trying
        end_with_program(self)
        try:
            self._open(start, None)
            self._room_for = self.pass_sequence.find(start)[0].past
            self.unpacked_schema, self.schema = source.unpacked_schema, source.schema
            self.options, self.grows = source.options, source.grows
        except BaseException as error:
            self.close()
            if isinstance(error, ProgramEnded):
                raise error.for_thread() from None
            raise

    # ------------------------------------------------------------------------------------------- data

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of ``Statistics``: sizes."""
        return {**self._sizes, **self.data.facts, "storage": self._client.storage_counts}

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return self._client.num_lent

    @property
    def watched(self) -> PageView | None:
        """Its page; None in a group."""
        return self._client.watched

    def count_device_wait(self, waited_ns: int, ahead: int) -> None:
        """Count that the consumer waited ``waited_ns`` for a copy to a device; ``ahead`` copies are begun early."""
        self.counts["device_wait_s"] += waited_ns / 1e9
        if self.watched is not None:
            words = self.watched.page.words
            words[DEVICE_WAIT_NS] += waited_ns
            words[COPIES_AHEAD] = ahead

    def pass_sequence_of(self, of: Pass | Position) -> PassSequence:
        """The :attr:`pass_sequence` of the data that a pass or a position belongs to. Raises LoaderdError.

        Where :meth:`has_pass_sequence_of` returns False, it may list shards, which changes the data in use.
        """
        pass_sequence = self.pass_sequence if of.listing is None else self._pass_sequences.get(of.listing)
        if pass_sequence is None:  # it may have been dropped since has_pass_sequence_of was asked
            self.list_shards(of.listing)
            pass_sequence = self.pass_sequence
        return pass_sequence

    def has_pass_sequence_of(self, of: Pass | Position) -> bool:
        """Whether :meth:`pass_sequence_of` can answer at once; may be asked without ``lock``."""
        return of.listing is None or of.listing in self._pass_sequences

    def list_shards(self, listing: Listing | None) -> None:
        """Where data sets grow, use the shards that there are now, or those of ``listing``.

        Raises LoaderdError; then nothing has changed.
        """
        self.check()
        place = Position(listing=listing, of=self.data.of)
        if self._client.torn:
            self._open(place, None)
            return
        try:
            self._client.list_shards(listing)
        except TransportLost as end:
            self._open(place, end)
        except LoaderdError as error:
            self.skipped.add_damages("index", error.damages)
            raise
        else:
            self._use_data(listing)
        finally:
            self._progress.close()

    def use_data_of(self, position: Position) -> None:
        """Before the first batch is asked for: use the shards that a position belongs to, if a server knows them.

        Raises OptionError where they are not what they were; then nothing has changed.
        """
        ours = {name: text for name, text in self.data.of.items() if name.endswith("shards")}
        is_same = not position.of or all(position.of.get(name) == text for name, text in ours.items())
        if is_same or self.counts["starts"] or not self._source.knows_earlier_shards:
            return
        before = Position(listing=self.pass_sequence.listing, of=self.data.of)
        try:
            self._open(Position(listing=position.listing, of=position.of), None)
        except OptionError:
            self._over = None
            self._open(before, None)
            raise

    def _use_data(self, wanted: Listing | None) -> None:
        """Take over what the daemon says of its data; the connection is in order from here on."""
        data = self._client.data
        listing = data.listing
        compare_listings(wanted, listing)
        self.data = data
        self.skipped.add_damages("index", [Damage(**damage) for damage in data.damages])
        self.skipped.warn_later(data.left_out, data.left_out)
        source = self._source
        self.pass_sequence = PassSequence(
            source.options, data.facts["num_records"], source.window_records, data.of, listing
        )
        self._pass_sequences.pop(listing, None)
        self._pass_sequences[listing] = self.pass_sequence
        if len(self._pass_sequences) > _MOST_PASS_SEQUENCES:
            del self._pass_sequences[next(iter(self._pass_sequences))]
        self._client.torn = False

    # ---------------------------------------------------------------------------------------- batches

    def fetch(self, pass_: Pass, step: int) -> Batch | LoaderdError:
        """Batch ``step`` of a pass, which has one; or why it cannot be delivered."""
        while True:
            try:
                connection = self._client
                if not connection.is_at(pass_, step) or self._over is not None:
                    self._start(pass_, step)
                    connection = self._client
                batch = self._take(connection)
            except TransportLost as end:
                self._open_for(pass_, end)
            else:
                connection.torn = False
                self._fruitful = True
                if isinstance(batch, Batch):
                    self._empty_in_a_row = 0
                    if self._empty:  # it may have been empty before its shard was mended
                        self._empty.pop((pass_.first_epoch, step), None)
                return self._pass_over(pass_, step, batch) if isinstance(batch, EmptyBatchError) else batch

    def _pass_over(self, pass_: Pass, step: int, error: EmptyBatchError) -> LoaderdError:
        """Count a batch of which no record is left. Returns ``error``; another one where it cannot be passed over."""
        batches = self._pass_sequences.get(pass_.listing, self.pass_sequence).batches(pass_)
        hosts = self.options.shard[1]
        if hosts > 1:
            return ShardError(
                error.message,
                hint=f"Without it, this host would take a step less than the other ones of {hosts}, which would wait "
                f"for it. {HOW_TO_GO_ON_BEHIND}",
                damages=error.damages,
            )
        start, stop = batches.rows_of(step)
        self.skipped.add_to_batch(stop - start, [error], self.options.on_corrupt)
        self._empty[pass_.first_epoch, step] = None
        if len(self._empty) > _MOST_EMPTY_STEPS:
            del self._empty[next(iter(self._empty))]
        self._empty_in_a_row += 1
        if self._empty_in_a_row < batches.steps_per_epoch:
            return error
        self._empty_in_a_row = 0
        return ShardError(
            f"no record is left of {batches.steps_per_epoch} batches in a row, as many as an epoch has; at last, "
            f"{error.message}",
            hint=f"Restore the shards, and make a new loader. {HOW_TO_GO_ON_BEHIND}",
            damages=error.damages,
        )

    def num_empty(self, begin: tuple[int, int], last: tuple[int, int]) -> int:
        """How many batches were passed over, because no record was left of them.

        From ``begin`` to ``last``, both included: each the first epoch of a pass, and a step.
        """
        return sum(begin <= place <= last for place in list(self._empty))

    def _start(self, pass_: Pass, step: int) -> None:
        self.check()
        if self._client.torn or (pass_.past and pass_.past != self._room_for):
            self._open_for(pass_, None)
        elif pass_.listing != self.pass_sequence.listing:
            self.list_shards(pass_.listing)
        pass_of(pass_)
        check_epoch(pass_.first_epoch + self.pass_sequence.batches(pass_).place_of(step)[0])
        self._client.start(pass_, step)
        self.counts["starts"] += 1

    def _take(self, connection: StreamClient) -> Batch | LoaderdError:
        connection.tell_news()
        if not connection.has_batch:
            self.counts["wait_s"] += connection.wait_for_batch() / 1e9
        delivery = connection.next_batch()
        if isinstance(delivery, LoaderdError):
            return delivery
        batch = self._lend(connection, *delivery)
        if self._over is not None:  # close() in another thread may have missed this batch, whose slot is free then
            self.check()
        self.counts["batches_delivered"] += 1
        self.counts["records_delivered"] += batch.num_records
        return batch

    def _lend(self, connection: StreamClient, slot: int, num_records: int) -> Batch:
        """The batch in a slot; a copy, where the consumer holds too many."""
        reader = connection.reader
        if reader.num_lent < self.options.held_batches:
            return reader.lend(slot, num_records)
        began_ns = time.perf_counter_ns()
        self.counts["batches_copied"] += 1
        batch = reader.copy(slot, num_records)
        connection.release(slot)
        if connection.watched is not None:
            connection.watched.page.words[COPY_NS] += time.perf_counter_ns() - began_ns
        return batch

    # --------------------------------------------------------------------------------- another daemon

    @property
    def _client(self) -> StreamClient:
        assert self._connection is not None
        return self._connection

    def _open_for(self, pass_: Pass, end: TransportLost | None) -> None:
        """Replace the daemon by one for this pass: on the same data, with the memory that the pass needs."""
        place = Position(listing=pass_.listing, of=self.data.of)
        if pass_.past and pass_.listing in self._pass_sequences:
            place = self._pass_sequences[pass_.listing].position(pass_, 0)
        self._open(place, end)
        self._room_for = pass_.past

    def _open(self, place: Position, end: TransportLost | None) -> None:
        """Replace the connection by a new one, opened at ``place``.

        ``end``: how the connection before was lost; None: we gave it up.
        """
        self._room_for = ()
        while True:
            self._end_connection(end)
            try:
                before, self._connection = self._connection, StreamClient(self._source, self.counts, self.skipped)
                connection = self._connection
                self.counts["daemon_restarts"] += before is not None
                self.check()  # close() may have been called before there was a connection to close
                connection.open(place.to_json(), self._progress)
                break
            except TransportLost as lost:
                end = lost
            except ChannelClosed as closed:  # by close(), while its descriptors were taken over
                end = TransportLost(str(closed))
            except ClosedError:
                self._client.transport.close()
                raise
            finally:
                self._progress.close()
        self._sizes = connection.sizes
        if place.of:  # a group that others have begun anew may have other data
            compare(place.of, connection.data.of)
        self._use_data(place.listing)
        self._source.is_back()

    def _end_connection(self, end: TransportLost | None) -> None:
        """End the connection, and wait until another one may be tried. Raises LoaderdError if none should be."""
        if end is None and self._connection is None:
            return
        self.check()  # a program that is ending must not wait here
        if self._connection is not None:
            self._connection.transport.kill("it connects anew")
            self._connection.torn = True
        self.check()
        if end is None:
            return
        if end.failure is not None and not self._source.may_retry(end.failure):
            self._over = f"the loader ended: {end.failure.message}"
            self.skipped.add_damages("index", end.failure.damages)
            raise end.failure
        fruitful, self._fruitful = self._fruitful, False
        if self._not_over.acquire(timeout=self._source.pause_s(end, fruitful)):
            self._not_over.release()
        self.check()

    # -------------------------------------------------------------------------------------------- end

    @property
    def is_over(self) -> bool:
        """Whether it gives no batches any more."""
        return self._over is not None

    def check(self) -> None:
        """Raise ClosedError where it is over."""
        if isinstance(self._over, str):
            raise ClosedError(self._over, hint="Make a new one.")
        if self._over is not None or program_has_ended():
            raise ProgramEnded

    def close(self) -> None:
        """End it, and give back what it has. From any thread; a wait in another one raises ClosedError."""
        self.end("the loader is closed")
        if self._connection is not None:
            self._connection.transport.close()

    def end(self, why: str | type[ProgramEnded]) -> None:
        """Mark it as over, and wake threads that wait for it. Does not wait, and may be called again."""
        self._over = self._over or why
        with contextlib.suppress(RuntimeError):  # it has ended before
            self._not_over.release()
        if self._connection is not None:
            self._connection.transport.wake()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes that end with it."""
        process = None if self._connection is None else self._connection.transport.process
        return [] if process is None else [process]

    def leave_to_parent(self) -> None:
        """For a fork of the process: the stream is the parent's."""
        self.lock = threading.Lock()  # a thread that held it is not in the fork
        self._not_over = _held_lock()
        self._over = f"the loader belongs to process {self._maker}, of which this one, {os.getpid()}, is a fork"


def _held_lock() -> threading.Lock:
    """A held lock, to wait for with a limit. A signal's handler may release it, which an Event does not allow."""
    lock = threading.Lock()
    lock.acquire()
    return lock
