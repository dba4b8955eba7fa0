"""The loader: batches of a data set, in a planned order, made by other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from loaderd.client.batch import Batch, SlotReader
from loaderd.client.connection import Connection
from loaderd.client.progress import IndexProgress
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, Refresh, StreamDescription
from loaderd.errors import ClosedError, Damage, OptionError
from loaderd.memory.layout import SlotLayout
from loaderd.options import OnCorrupt, Remainder, Shuffle, StreamOptions, require
from loaderd.plan.passes import Listing, Pass, listing_of
from loaderd.plan.positions import Course, Position
from loaderd.schema import Schema
from loaderd.statistics import Statistics

_MAX_DAMAGES = 1000


class Loader:
    """Batches of TFRecord shards, unpacked by worker processes into shared memory.

    Options:

    - ``shards``: a path, a glob, a URI, a list of them, or a :class:`~loaderd.Dataset`, :class:`~loaderd.Mix` or
      :class:`~loaderd.Concat` (then ``schema``, ``shuffle``, ``seed``, ``on_corrupt``, ``index_cache`` and
      ``refresh`` are the data set's).
    - ``epochs``: of one pass; None: for ever.
    - ``shuffle``: True, False (the files' own order), or a :class:`~loaderd.Shuffle`.
    - ``remainder``: what becomes of an epoch's last, partial batch: ``"drop"``, ``"short"``, or ``"carry"`` (it is
      completed from the next epoch).
    - ``shard=(i, n)``: this is host i of n, and gets an n-th of each epoch.
    - ``workers``: worker processes; None: chosen from the cores.
    - ``on_corrupt``: ``"raise"``, ``"skip_record"`` or ``"skip_shard"``.
    - ``held_batches``: how many batches the consumer may hold at a time before it gets copies.
    - ``index_cache``: ``"user"`` (``$LOADERD_CACHE_DIR`` or ``~/.cache/loaderd``), ``"beside"`` (the shards),
      ``"none"``, or a folder.
    - ``progress``: a bar for the index pass; None: if standard error is a terminal.
    - ``refresh``: ``"epoch"``: each epoch is made of the shards that there are when it begins; else ``"never"``.
    - ``stall_timeout``: seconds without progress after which a process of loaderd is replaced; None: never.
    - ``start``: a :class:`~loaderd.Position` to go on from.

    Each ``iter(loader)`` is a **pass** of ``epochs`` epochs, and goes on counting epochs where the one before would
    have ended, so that each is shuffled in its own way. Making a loader starts a daemon and its workers and indexes
    the shards; :meth:`close`, or leaving the ``with`` block, ends them. Raises exceptions of :mod:`loaderd.errors`.

    With ``start``, the first pass goes from there to where it would have ended. A position of another number of hosts
    or another batch size will do: what of its epoch was left is then shared out anew, and nothing of it comes twice.
    One of other data is refused with an OptionError that says what differs.
    """

    def __init__(
        self,
        shards: Any,
        schema: Schema | None = None,
        *,
        batch_size: int,
        epochs: int | None = 1,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        remainder: Remainder = "short",
        shard: tuple[int, int] = (0, 1),
        workers: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        held_batches: int = 4,
        index_cache: str = "user",
        progress: bool | None = None,
        refresh: Refresh = "never",
        stall_timeout: float | None = 120.0,
        start: Position | None = None,
    ) -> None:
        dataset = _as_dataset(shards, schema, shuffle, seed, on_corrupt, index_cache, refresh)
        common = dataset.leaves()[0]
        self._options = StreamOptions(
            batch_size=batch_size,
            epochs=epochs,
            shuffle=common.shuffle,
            seed=common.seed,
            remainder=remainder,
            shard=shard,
            workers=workers,
            on_corrupt=common.on_corrupt,
            held_batches=held_batches,
            index_cache=common.index_cache,
            stall_timeout=stall_timeout,
        )
        self.schema = common.schema
        self._grows = dataset.grows
        if self._grows and remainder == "carry":
            raise OptionError('remainder="carry" cannot complete a batch from an epoch that has not been listed yet')
        require(start is None or isinstance(start, Position), "start", "a loaderd.Position", start)
        start = start or Position()
        bar = IndexProgress(progress)
        try:
            self._connection = Connection(StreamDescription(dataset, self._options, start.to_json()), bar)
        finally:
            bar.close()
        self._slots = SlotReader(
            self._connection.slots.bytes, SlotLayout(self.schema.specs, batch_size), self._connection.release
        )
        self._lock = threading.Lock()
        self._closed = False
        self._courses: dict[Listing | None, Course] = {}
        self._use_data()
        self._expected: tuple[Pass, int] | None = None
        self._next = self._here = self._course.find(start)
        self._first_pass = self._next[0]
        self._batches = self._records = self._copies = self._starts = 0
        self._wait_s = 0.0

    # -------------------------------------------------------------------------------------- consuming

    def __iter__(self) -> Iterator[Batch]:
        """A new pass. An iterator of an older pass still works, but each change between the two costs a new start."""
        if self._grows:
            return self._iterate_growing()
        return self._iterate(*self.new_pass())

    def _iterate_growing(self) -> Iterator[Batch]:
        """Each epoch is a pass of its own, of the shards that there are when it begins."""
        passes = self.passes_of_an_iteration
        for _ in count() if passes is None else range(passes):
            yield from self._iterate(*self.new_pass())

    @property
    def passes_of_an_iteration(self) -> int | None:
        """1; or where data sets grow, as many as the iteration that comes next has epochs (None: no end)."""
        if not self._grows or self._options.epochs is None:
            return None if self._grows else 1
        return self._options.epochs - self._next[0].first_epoch % self._options.epochs

    def _iterate(self, pass_: Pass, step: int) -> Iterator[Batch]:
        while (batch := self.fetch(pass_, step)) is not None:
            step += 1
            yield batch
            del batch  # or the slot would be held until the next batch has come

    def new_pass(self) -> tuple[Pass, int]:
        """Begin a pass; returns which it is, and the step with which it begins, for :meth:`fetch`."""
        with self._lock:
            pass_, step = self._next
            if self._grows and pass_.listing is None:
                self._list(None)
                pass_ = replace(pass_, listing=self._course.listing)
            self._next = self._course.next_pass(pass_), 0
            return pass_, step

    def num_steps(self, pass_: Pass) -> int | None:
        """The step behind the last one of a pass; None if it never ends."""
        return self._course_of(pass_).batches(pass_).num_steps

    def _list(self, listing: Listing | None) -> None:
        """Have the data be made of the shards that there are now, or of those of ``listing``."""
        self._expected = None
        self._connection.list_shards(listing)
        self._use_data()

    def _use_data(self) -> None:
        data = self._connection.data
        window_records = self._options.window_records(self.schema.row_bytes)
        listing = listing_of(data.listing)
        self._course = Course(self._options, data.facts["num_records"], window_records, data.of, listing)
        self._courses[listing] = self._course

    def _course_of(self, of: Pass | Position) -> Course:
        """The arithmetic for the data that a pass or a position is of."""
        if of.listing is None or of.listing in self._courses:
            return self._courses.get(of.listing, self._course)
        self._list(of.listing)
        return self._course

    def fetch(self, pass_: Pass, step: int) -> Batch | None:
        """Batch ``step`` of a pass (from 0, where that pass would begin as a whole); None behind its last.

        Any step can be asked for at any time and is always the same batch. Steps in order are fast; another one makes
        the workers start anew there. Raises the error of a batch that cannot be delivered.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the loader is closed", hint="Make a new one.")
            num_steps = self.num_steps(pass_)
            if num_steps is not None and step >= num_steps:
                return None
            if pass_.listing != self._course.listing:
                self._list(pass_.listing)
            if self._expected != (pass_, step):
                self._connection.start(pass_, step)
                self._starts += 1
            self._here = self._expected = pass_, step + 1
            return self._take()

    def _take(self) -> Batch | None:
        connection = self._connection
        if not connection.has_batch:
            began_s = time.perf_counter()
            connection.wait_for_batch()
            self._wait_s += time.perf_counter() - began_s
        found = connection.next_batch()
        if found is None:
            return None
        _, slot, num_records = found
        self._batches += 1
        self._records += num_records
        if self._slots.num_lent >= self._options.held_batches:
            batch = self._slots.copy(slot, num_records)
            connection.release(slot)
            self._copies += 1
            return batch
        return self._slots.lend(slot, num_records)

    # -------------------------------------------------------------------------------------- positions

    @property
    def position(self) -> Position:
        """Where the consumer stands: the batch that it will take next. What was read ahead does not count."""
        return self._course_of(self._here[0]).position(*self._here)

    @property
    def next_position(self) -> Position:
        """Where the next pass will begin."""
        return self._course_of(self._next[0]).position(*self._next)

    @property
    def next_is_whole(self) -> bool:
        """Whether the next pass begins where a pass begins, and so is as long as those behind it."""
        return self._course.is_whole(*self._next)

    def seek(self, position: Position) -> None:
        """Have the next pass begin at ``position``, and end where it would have ended.

        Raises OptionError where it is of other data, or does not exist. A position from the middle of an epoch on
        another number of hosts is for ``Loader(…, start=position)`` alone: it may take more memory.
        """
        with self._lock:
            pass_, step = self._course_of(position).find(position)
        if self._grows and position.listing is None and step == 0:
            pass_ = replace(pass_, listing=None)
        if pass_.past and pass_ != self._first_pass:
            raise OptionError(
                f"this position of {position.hosts} hosts in batches of {position.batch_size} is for a new loader",
                hint="Give it as Loader(…, start=position).",
            )
        with self._lock:
            self._next = self._here = pass_, step
            self._expected = None

    def after(self, position: Position, batches: int) -> Position:
        """The position so many batches after ``position``, one pass following the other."""
        return self._course_of(position).after(position, batches)

    def pass_to_json(self, pass_: Pass) -> str:
        """A pass as text that says what it belongs to; for :meth:`pass_from_json`, of this loader or of another."""
        return self._course.pass_to_json(pass_)

    def pass_from_json(self, text: str | bytes) -> Pass:
        """The pass of that text; a new pass will begin behind it. Raises OptionError where it is of other data."""
        pass_ = self._course.pass_from_json(text)
        with self._lock:
            if pass_.first_epoch >= self._next[0].first_epoch:
                self._next = self._course.next_pass(pass_), 0
        return pass_

    # ------------------------------------------------------------------------------------------ facts

    def __len__(self) -> int:
        """Batches of the next pass (fewer than of others if it begins in the middle); TypeError if it has no end."""
        pass_, step = self._next
        num_steps = None if self._grows else self.num_steps(pass_)
        if num_steps is None:
            raise TypeError("a loader without an end, or of data that grow, has no length; see batches_per_epoch")
        return num_steps - step

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, on every host (``remainder="carry"``: of the first), of the data as they are."""
        return self._course.batches(self._next[0]).steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Records of a batch that is not an epoch's last."""
        return self._options.batch_size

    @property
    def held_batches(self) -> int:
        """How many batches may be held at a time before there are copies."""
        return self._options.held_batches

    @property
    def static_batch_size(self) -> int | None:
        """The number of records of every batch, or None if they may differ."""
        options = self._options
        whole = options.remainder == "drop" or (options.remainder == "carry" and options.epochs is None)
        return options.batch_size if whole and options.on_corrupt == "raise" else None

    def statistics(self) -> Statistics:
        """Counts so far, and sizes."""
        connection = self._connection
        late = [error.damage for error in connection.skipped if error.damage is not None]
        damages = [Damage(**damage) for damage in connection.data.damages] + late
        return Statistics(
            **connection.facts,
            batches_delivered=self._batches,
            records_delivered=self._records,
            batches_copied=self._copies,
            starts=self._starts,
            wait_s=self._wait_s,
            records_skipped=connection.records_skipped,
            damages=tuple(damages[:_MAX_DAMAGES]),
            workers_restarted=connection.workers_restarted,
            slots_lent=self._slots.num_lent,
        )

    # -------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End the daemon and its workers. Batches that are held stay valid."""
        with self._lock:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _as_dataset(
    shards: Any,
    schema: Schema | None,
    shuffle: bool | Shuffle,
    seed: int,
    on_corrupt: OnCorrupt,
    index_cache: str,
    refresh: Refresh,
) -> AnyDataset:
    if not isinstance(shards, (Dataset, Concat, Mix)):
        require(isinstance(schema, Schema), "schema", "a loaderd.Schema", schema)
        assert schema is not None
        return Dataset(shards, schema, shuffle, seed, on_corrupt, index_cache, refresh)
    given = (schema, shuffle, seed, on_corrupt, index_cache, refresh)
    if given != (None, True, 0, "raise", "user", "never"):
        raise OptionError(
            "schema, shuffle, seed, on_corrupt, index_cache and refresh must be left to the data set that is given",
            hint="Use dataclasses.replace(dataset, …) for a data set that differs.",
        )
    return shards
