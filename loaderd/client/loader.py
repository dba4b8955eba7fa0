"""The loader: batches of a data set, in a planned order, made by other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from loaderd.client.batch import Batch, SlotReader
from loaderd.client.connection import Connection
from loaderd.client.dataset import Dataset
from loaderd.client.position import Position
from loaderd.client.progress import IndexProgress
from loaderd.errors import ClosedError, Damage, OptionError
from loaderd.memory.layout import SlotLayout
from loaderd.options import OnCorrupt, Remainder, Shuffle, StreamDescription, StreamOptions, require
from loaderd.plan.batches import BatchPlan
from loaderd.plan.epoch import HostShare
from loaderd.schema import Schema
from loaderd.statistics import Statistics

_MAX_DAMAGES = 1000


class Loader:
    """Batches of TFRecord shards, unpacked by worker processes into shared memory.

    Options:

    - ``shards``: a path, a glob, a URI, a list of them, or a :class:`~loaderd.Dataset` (then ``schema``, ``shuffle``,
      ``seed``, ``on_corrupt`` and ``index_cache`` are the data set's).
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

    Each ``iter(loader)`` is a **pass** of ``epochs`` epochs, and goes on counting epochs where the one before would
    have ended, so that each is shuffled in its own way. Making a loader starts a daemon and its workers and indexes
    the shards; :meth:`close`, or leaving the ``with`` block, ends them. Raises exceptions of :mod:`loaderd.errors`.
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
    ) -> None:
        dataset = _as_dataset(shards, schema, shuffle, seed, on_corrupt, index_cache)
        self._options = StreamOptions(
            batch_size=batch_size,
            epochs=epochs,
            shuffle=dataset.shuffle,
            seed=dataset.seed,
            remainder=remainder,
            shard=shard,
            workers=workers,
            on_corrupt=dataset.on_corrupt,
            held_batches=held_batches,
            index_cache=dataset.index_cache,
        )
        self.schema = dataset.schema
        bar = IndexProgress(progress)
        try:
            self._connection = Connection(
                StreamDescription(dataset.shards, dataset.schema, self._options, dataset.selection), bar
            )
        finally:
            bar.close()
        facts = self._connection.facts
        host, num_hosts = self._options.shard
        window_records = self._options.window_records(self.schema.row_bytes)
        self._plan = BatchPlan(
            HostShare(facts["num_records"], host, num_hosts, window_records),
            batch_size,
            self._options.remainder,
            epochs,
        )
        self._slots = SlotReader(
            self._connection.slots.bytes, SlotLayout(self.schema.specs, batch_size), self._connection.release
        )
        self._lock = threading.Lock()
        self._held_batches = held_batches
        self._num_steps = self._plan.num_steps
        self._closed = False
        self._expected: tuple[int, int] | None = None
        self._next_pass = 0
        self._batches = self._records = self._copies = self._starts = 0
        self._wait_s = 0.0

    # -------------------------------------------------------------------------------------- consuming

    def __iter__(self) -> Iterator[Batch]:
        """A new pass. An iterator of an older pass still works, but each change between the two costs a new start."""
        return self._iterate(self.new_pass())

    def _iterate(self, number: int) -> Iterator[Batch]:
        step = 0
        while (batch := self.fetch(number, step)) is not None:
            step += 1
            yield batch
            del batch  # or the slot would be held until the next batch has come

    def new_pass(self) -> int:
        """Begin a pass; returns its number, for :meth:`fetch`."""
        with self._lock:
            number = self._next_pass
            self._next_pass += 1
            return number

    def fetch(self, pass_number: int, step: int) -> Batch | None:
        """Batch ``step`` (from 0) of a pass; None behind its last.

        Any step can be asked for at any time and is always the same batch. Steps in order are fast; another one makes
        the workers start anew there. Raises the error of a batch that cannot be delivered.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the loader is closed", hint="Make a new one.")
            if self._num_steps is not None and step >= self._num_steps:
                return None
            if self._expected != (pass_number, step):
                self._connection.start(self._first_epoch_of(pass_number), step)
                self._starts += 1
            self._expected = (pass_number, step + 1)
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
        if self._slots.num_lent >= self._held_batches:
            batch = self._slots.copy(slot, num_records)
            connection.release(slot)
            self._copies += 1
            return batch
        return self._slots.lend(slot, num_records)

    def _first_epoch_of(self, pass_number: int) -> int:
        return pass_number * (self._options.epochs or 1)

    # ------------------------------------------------------------------------------------------ facts

    def __len__(self) -> int:
        """Batches of a pass; raises TypeError if it has no end."""
        if self._plan.num_steps is None:
            raise TypeError("a loader with epochs=None has no length; see batches_per_epoch")
        return self._plan.num_steps

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch of this host (``remainder="carry"``: of the first)."""
        return self._plan.steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Records of a batch that is not an epoch's last."""
        return self._options.batch_size

    @property
    def held_batches(self) -> int:
        """How many batches may be held at a time before there are copies."""
        return self._held_batches

    @property
    def position(self) -> Position:
        """The epoch and the number in it of the batch that the consumer will take next."""
        if self._expected is None or not self._plan.steps_per_epoch:
            return Position(0, 0)
        number, step = self._expected
        epoch, batch = self._plan.place_of(step)
        return Position(self._first_epoch_of(number) + epoch, batch)

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
        damages = [Damage(**damage) for damage in connection.damages] + late
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
    shards: Any, schema: Schema | None, shuffle: bool | Shuffle, seed: int, on_corrupt: OnCorrupt, index_cache: str
) -> Dataset:
    if not isinstance(shards, Dataset):
        require(isinstance(schema, Schema), "schema", "a loaderd.Schema", schema)
        assert schema is not None
        return Dataset(shards, schema, shuffle, seed, on_corrupt, index_cache)
    given = (schema, shuffle, seed, on_corrupt, index_cache)
    if given != (None, True, 0, "raise", "user"):
        raise OptionError(
            "schema, shuffle, seed, on_corrupt and index_cache must be left to the Dataset that is given",
            hint="Use dataclasses.replace(dataset, …) for a data set that differs.",
        )
    return shards
