"""A stream of batches that outlives its daemon.

::

    fetch ──► a batch is there ──────────────────────────────────────────────────────► lend it
         └──► wait ──► the daemon died, or says nothing ──► another one, on the same data, from this batch on ──┘

What a daemon knows follows from the description, the pass and the step, so nothing of it need be saved. A new one is
opened at a position in the data in use, and refuses others itself. It has memory of its own: batches that are held
keep the old one, and nothing of them reaches the new daemon. So has an interrupt (``Connection.torn``) no other
consequence than a new daemon.

An error that the daemon decided on (Failed) is not tried again: it would come again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any
from weakref import WeakSet

import cloudpickle

from loaderd.client.batch import Batch
from loaderd.client.connection import Connection, Counts, DaemonEnded
from loaderd.client.progress import IndexProgress
from loaderd.client.report import DamageReport
from loaderd.dataset import StreamDescription
from loaderd.errors import ClosedError, DaemonError, Damage, LoaderdError, OptionError
from loaderd.memory.layout import SlotLayout
from loaderd.plan.passes import Listing, Pass, listing_of
from loaderd.plan.positions import Course, Position
from loaderd.protocol.messages import Listed

_MAX_FRUITLESS_DAEMONS = 3

_logger = logging.getLogger("loaderd")


class SupervisedStream:
    """The batches of a description, from a daemon that is replaced when it dies or stalls.

    One thread at a time, holding ``lock``; but :meth:`close` from any, at any time, without it. After an exception,
    KeyboardInterrupt included, the next call goes on. Of no use in a fork of the process.
    """

    course: Course
    """The arithmetic for the data in use."""
    data: Listed
    """What the daemon said of them."""

    def __init__(self, description: StreamDescription, start: Position, progress: IndexProgress) -> None:
        """Have the stream opened at ``start``. Raises LoaderdError."""
        self.lock = threading.Lock()
        self._over: str | None = None
        self._maker = os.getpid()
        self._options = description.options
        self._window_records = self._options.window_records(description.schema.row_bytes)
        self._layout = SlotLayout(description.schema.specs, self._options.batch_size)
        # Once: what a function of the user's refers to may have changed when another daemon needs it.
        self._pickled = cloudpickle.dumps(description)
        self._progress = progress
        self._courses: dict[Listing | None, Course] = {}
        self._expected: tuple[Pass, int] | None = None
        self._connection: Connection | None = None
        self._fruitless = 0
        self.counts = Counts(report=DamageReport(self._options.report))
        _streams.add(self)
        try:
            self._open(start, None)
            self._room_for = self.course.find(start)[0].past
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------- data

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of ``Statistics``: sizes."""
        return {**self._sizes, **self.data.facts}

    @property
    def num_lent(self) -> int:
        """Slots that the consumer holds."""
        return self._now.reader.num_lent

    def course_of(self, of: Pass | Position) -> Course:
        """The arithmetic for the data that a pass or a position is of. Raises LoaderdError."""
        if of.listing is None or of.listing in self._courses:
            return self._courses.get(of.listing, self.course)
        self.list_shards(of.listing)
        return self.course

    def list_shards(self, listing: Listing | None) -> None:
        """Have the data be made of the shards that there are now, or of those of ``listing``, where sets grow.

        Raises LoaderdError; then nothing has changed.
        """
        self._check()
        self._expected = None
        place = Position(listing=listing, of=self.data.of)
        if self._now.torn:
            self._open(place, None)
            return
        try:
            self._now.list_shards(listing)
        except DaemonEnded as end:
            self._open(place, end)
        except LoaderdError as error:
            self.counts.report.add("index", error.damages)
            raise
        else:
            self._use_data(listing)
        finally:
            self._progress.close()

    def _use_data(self, wanted: Listing | None) -> None:
        """Take over what the daemon says of its data, and trust it from here on."""
        data = self._now.data
        listing = listing_of(data.listing)
        if wanted is not None and listing != wanted:
            raise OptionError(
                f"the position belongs to other data: to the shards {wanted}, and those there now are {listing}",
                hint="Bring them back, or go without the position.",
            )
        self.data = data
        self.counts.report.add("index", [Damage(**damage) for damage in data.damages])
        self.course = Course(self._options, data.facts["num_records"], self._window_records, data.of, listing)
        self._courses[listing] = self.course
        self._now.torn = False

    # ---------------------------------------------------------------------------------------- batches

    def fetch(self, pass_: Pass, step: int) -> Batch | LoaderdError | None:
        """Batch ``step`` of a pass, or why it cannot be delivered; None behind the last one."""
        while True:
            try:
                connection = self._now
                if self._expected != (pass_, step) or connection.torn or self._over is not None:
                    self._start(pass_, step)
                    connection = self._now
                batch = self._take(connection)
            except DaemonEnded as end:
                self._open_for(pass_, end, step)
            else:
                if batch is not None:
                    self._expected = pass_, step + 1
                connection.torn = False
                return batch

    def _start(self, pass_: Pass, step: int) -> None:
        self._check()
        if self._now.torn or (pass_.past and pass_.past != self._room_for):
            self._open_for(pass_, None)
        elif pass_.listing != self.course.listing:
            self.list_shards(pass_.listing)
        self._expected = None
        self._now.start(pass_, step)
        self._expected = pass_, step
        self.counts.starts += 1

    def _take(self, connection: Connection) -> Batch | LoaderdError | None:
        counts = self.counts
        if not connection.has_batch:
            began_s = time.perf_counter()
            connection.wait_for_batch()
            counts.wait_s += time.perf_counter() - began_s
        found = connection.next_batch()
        if found is None or isinstance(found, LoaderdError):
            return found
        slot, num_records = found
        counts.batches += 1
        counts.records += num_records
        if connection.reader.num_lent < self._options.held_batches:
            return connection.reader.lend(slot, num_records)
        counts.copies += 1
        batch = connection.reader.copy(slot, num_records)
        connection.release(slot)
        return batch

    # --------------------------------------------------------------------------------- another daemon

    @property
    def _now(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _open_for(self, pass_: Pass, end: DaemonEnded | None, step: int = 0) -> None:
        """Have another daemon for a pass: on the same data, with the memory that the pass needs."""
        place = Position(listing=pass_.listing, of=self.data.of)
        course = self._courses.get(pass_.listing)
        if course is None:  # nothing of it was ever delivered
            self._open(place, end)
        else:
            at = course.position(pass_, step)
            self._open(
                course.position(pass_, 0) if pass_.past else place, end, f"batch {at.batch} of epoch {at.epoch}"
            )
        self._room_for = pass_.past

    def _open(self, place: Position, end: DaemonEnded | None, at: str = "its beginning") -> None:
        """Have a daemon, opened at ``place``.

        ``end``: what became of the one before, unless it is we who have no more use for it; ``at``: where it stood.
        """
        self._expected = None
        self._room_for = ()
        while True:
            if self._connection is not None:
                self._take_leave(self._connection, end, at)
            self._connection = connection = Connection(self._options.stall_timeout, self.counts)
            try:
                self._check()  # close() may have come when there was nothing to be ended yet
                connection.open(self._pickled, place.to_json(), self._layout, self._progress)
                break
            except DaemonEnded as died:
                end = died
            except ClosedError:
                connection.close()
                raise
            finally:
                self._progress.close()
        self._sizes = connection.sizes
        self._use_data(place.listing)

    def _take_leave(self, before: Connection, end: DaemonEnded | None, at: str) -> None:
        """Raises LoaderdError if there should be no other daemon."""
        before.kill()
        self._check()
        if end is not None:
            if end.failure is not None:
                self._over = f"the loader ended: {end.failure.message}"
                self.counts.report.add("index", end.failure.damages)
                raise end.failure
            self._fruitless = 0 if before.delivered else self._fruitless + 1
            if self._fruitless == _MAX_FRUITLESS_DAEMONS:
                self._fruitless = 0
                raise DaemonError(
                    f"{_MAX_FRUITLESS_DAEMONS} daemons in a row ended without having delivered a batch; {end}",
                    hint="What ends them, or holds them up, is outside: too little memory is a usual cause.",
                )
            _logger.warning("%s; another one goes on at %s", end, at)
        self.counts.daemon_restarts += 1

    # -------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End the daemon; from any thread. A :meth:`fetch` that waits in another one raises ClosedError."""
        self._over = self._over or "the loader is closed"
        if self._connection is not None:
            self._connection.close()

    def _check(self) -> None:
        if self._over is not None:
            raise ClosedError(self._over, hint="Make a new one.")

    def leave_to_parent(self) -> None:
        """In a fork of the process, whose parent goes on with the stream."""
        self.lock = threading.Lock()  # another thread may have held it, and is not here
        self._over = f"the loader belongs to process {self._maker}, of which this one, {os.getpid()}, is a fork"


_streams: WeakSet[SupervisedStream] = WeakSet()


def _leave_streams_to_parent() -> None:
    for stream in _streams:
        stream.leave_to_parent()


os.register_at_fork(after_in_child=_leave_streams_to_parent)
