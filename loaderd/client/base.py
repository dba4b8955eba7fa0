"""What all loaders have in common: batches and facts of a stream, wherever its batches come from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from loaderd.client.batch import Batch, HandOver, identity
from loaderd.client.batch_source import Glimpse, Stream, StreamInfo
from loaderd.client.position import StreamPosition
from loaderd.client.shutdown import ProgramEnded
from loaderd.errors import DaemonError, EmptyBatchError, LoaderdError, ServerError, StorageError
from loaderd.options import MAX_STEP, OnCorrupt, as_count, require
from loaderd.plan.passes import Pass
from loaderd.plan.positions import Position
from loaderd.shm.page import TAKES_AHEAD

if TYPE_CHECKING:
    from loaderd.observe.diagnose import Diagnosis
    from loaderd.observe.statistics import Statistics
    from loaderd.subscription import Sharing

_Any = TypeVar("_Any", bound="BaseLoader")


class BaseLoader(StreamPosition):
    """The base of :class:`~loaderd.Loader`, :class:`~loaderd.ServedLoader` and the loaders of ``loaderd.testing``."""

    sharing: Sharing = "independent"
    """How it shares its data set with other consumers; see ``loaderd.connect``."""

    def __init__(self, described: StreamInfo, stream: Stream, start: Position) -> None:
        """``stream`` delivers what ``described`` describes, and was opened at ``start``."""
        super().__init__(stream, described.options, described.grows, start)
        self.schema = described.schema
        self._metrics_ends: list[Callable[[], object]] = []
        self._sized: tuple[Pass | None, float] = (None, 0)  # a pass, and the step behind its last (inf: no end)
        try:
            stream.counts.skips.warn()
        except BaseException:  # the user's filters make an error of it
            self.close()
            raise

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, nor copied: its batches are in the memory of this process\n"
            "Send what it is made of, a loaderd.Dataset, and make a loader of it there, with shard=(i, n) for an "
            "n-th; of a server's data set, call loaderd.connect there."
        )

    # -------------------------------------------------------------------------------------- consuming

    def __iter__(self) -> Iterator[Batch]:
        """An iterator: its first batch begins a new pass. One of which no batch is taken leaves all as it is.

        An older pass's iterator still works, but each change between the two costs a new start. Where data sets grow,
        each epoch is a pass of its own, made of the shards that there are when it begins. The iterator can be used
        after an exception: if a batch could not be delivered, it goes on with the next one; if storage or servers did
        not answer, it waits for the same batch. A new iterator begins the next pass all the same: call
        ``seek(position)`` before, to go on in this one.
        """
        return self.iterate()

    def iterate(self, hand_over: HandOver = identity, ahead: int = 0) -> Iterator[Any]:
        """As ``iter(loader)``, but each element is what ``hand_over(batch)()`` returns.

        ``hand_over`` is called for up to ``ahead`` batches of a pass before they are taken, so that it can begin what
        takes time; the function that it returns is called when the batch is taken. :attr:`position` counts batches
        that were taken. If either function raises, no batch is lost: the same batch comes next. Either may call
        :meth:`count_device_wait`.
        """
        return _Iteration(self, self._stream, hand_over, ahead)

    def count_device_wait(self, waited_ns: int, ahead: int) -> None:
        """Count that the consumer waited ``waited_ns`` for a copy to a device; ``ahead`` copies are begun early."""
        self._stream.count_device_wait(waited_ns, ahead)

    def fetch(self, pass_: Pass, step: int, copy_ns: int = 0) -> Batch | None:
        """Batch ``step`` of a pass, or None behind its last one. Step 0 is where the whole pass would begin.

        Any step can be asked for at any time, and always gives the same batch. Steps in order are fast; for any other
        one the workers have to begin anew. Raises the error of a batch that cannot be delivered. The caller keeps
        count of the steps: there is no :attr:`position` afterwards. ``copy_ns``: how long the caller will take to
        copy the batch to a device.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = as_count(step, "step", "the number of a batch, 0 or more", 0, MAX_STEP)
        require(isinstance(pass_, Pass), "pass_", "what new_pass() returned", pass_)
        with self._stream.lock:
            found = self._fetch(pass_, step, takes_ahead=True)
            if copy_ns:
                self._stream.count_device_wait(copy_ns, 1)
            self._here = None
        if isinstance(found, LoaderdError):
            found.instead_of_batch = True
            raise found
        return found

    def glimpse(self, num_records: int) -> Glimpse:
        """Ask for a copy of the next batch's first ``num_records`` records; it is there once the batch is taken."""
        glimpse = Glimpse(as_count(num_records, "num_records"))
        self._stream.glimpses.append(glimpse)
        return glimpse

    def _fetch(self, pass_: Pass, step: int, takes_ahead: bool = False) -> Batch | LoaderdError | None:
        if (watched := self._stream.watched) is not None:
            watched.page.words[TAKES_AHEAD] = takes_ahead
        if pass_ is not self._sized[0] or self.grows:
            num_steps = self.num_steps(pass_)
            self._sized = pass_, math.inf if num_steps is None else num_steps
        if step >= self._sized[1]:
            return None
        found = self._stream.fetch(pass_, step)
        self._stream.counts.skips.warn()  # if that raises, the same batch comes next
        return found

    # ------------------------------------------------------------------------------------------ facts

    def __len__(self) -> int:
        """Batches of a whole pass, also where the next one begins in the middle: training frameworks take this for
        the length of every epoch. See :attr:`batches_left`. TypeError: a pass has no end, or data sets grow.
        """
        return self._known_steps(self._stream.pass_sequence.next_pass(self._next[0]))

    @property
    def batches_left(self) -> int:
        """Batches of the next iteration: fewer than ``len(loader)`` if it begins in the middle of a pass.

        Raises TypeError where the loader has no length.
        """
        pass_, step = self._next
        return self._known_steps(pass_) - step

    def _known_steps(self, pass_: Pass) -> int:
        num_steps = None if self.grows else self.num_steps(pass_)
        if num_steps is None:
            raise TypeError("a loader without an end, or of data that grow, has no length; see batches_per_epoch")
        return num_steps

    def __repr__(self) -> str:
        facts = self._stream.facts
        at = ""
        if self._here is not None:  # else batches were taken by step: see fetch
            at = f"; at batch {self.position.batch} of epoch {self.position.epoch}"
        return (
            f"<{type(self).__name__} of {facts['num_records']:,} records in {facts['num_shards']:,} shards: "
            f"{', '.join(self.schema.fields)}, in batches of {self.batch_size:,}{at}>"
        )

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch of the data in use, on every host (``remainder="carry"``: of the first epoch)."""
        return self._stream.pass_sequence.batches(self._next[0]).steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Records of a batch that is not an epoch's last."""
        return self._options.batch_size

    @property
    def shard(self) -> tuple[int, int]:
        """(i, n): this is host i of n, and gets an n-th of each epoch."""
        return self._options.shard

    @property
    def held_batches(self) -> int:
        """How many batches the consumer may hold at a time before it gets copies."""
        return self._options.held_batches

    @property
    def shuffled(self) -> bool:
        """Whether each epoch has an order of its own."""
        return bool(self._options.shuffle)

    @property
    def seed(self) -> int:
        """What the order and all random fields follow from; with ``seed=None``, the seed that was drawn."""
        return self._options.seed

    @property
    def on_corrupt(self) -> OnCorrupt:
        """What becomes of damaged records."""
        return self._options.on_corrupt

    @property
    def static_batch_size(self) -> int | None:
        """The number of records of every batch, or None if they may differ."""
        options = self._options
        whole = options.remainder == "drop" or (options.remainder == "carry" and options.epochs is None)
        return options.batch_size if whole and options.on_corrupt == "raise" else None

    def statistics(self) -> Statistics:
        """Counts so far, and sizes."""
        from loaderd.observe.statistics import Statistics  # imported late: few programs ask for it

        stream, counts, watched = self._stream, self._stream.counts, self._stream.watched
        now = None if watched is None else watched.now()
        return Statistics(
            **stream.facts,
            batches_delivered=counts.batches,
            records_delivered=counts.records,
            batches_copied=counts.copies,
            starts=counts.starts,
            wait_s=counts.wait_s,
            device_wait_s=counts.device_wait_s,
            records_skipped=counts.records_skipped,
            damages=tuple(counts.report.first),
            stage_s={} if now is None else now.stage_s,
            field_s={} if now is None else now.field_s,
            waits=() if now is None else now.waits,
            workers_restarted=counts.workers_restarted,
            daemon_restarts=counts.daemon_restarts,
            slots_lent=stream.num_lent,
        )

    def diagnose(self) -> Diagnosis:
        """Whether the training waits for data, why, and what would help, judged by the last five seconds.

        Does not wait. Within three seconds of a start, and where no batches are taken, that is "nothing yet".
        """
        from loaderd.observe.diagnose import diagnose_samples, nothing_yet

        watched = self._stream.watched
        if watched is None:
            return nothing_yet("there is no diagnosis for consumers of a group, or for batches that are given")
        return diagnose_samples(watched.samples(), watched.facts)

    def serve_metrics(self, port: int, host: str = "") -> int:
        """Serve the figures of :meth:`statistics` to Prometheus at a port of this process, and return the port.

        ``port``: 0 chooses one that is free. ``host``: the address to listen at; "": all. A thread answers until
        :meth:`close`, or until the loader is garbage. Raises OptionError where the port cannot be had, and
        ModuleNotFoundError without prometheus-client (the extra ``metrics``).
        """
        from loaderd.observe.exporter import serve_metrics  # few need it, and the import takes 50 ms

        port, end = serve_metrics(port, host, self)
        self._metrics_ends.append(end)
        return port

    # -------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End the daemon and its workers. From any thread, at any time. Batches that are held stay valid.

        A :meth:`fetch` that waits in another thread raises ClosedError.
        """
        self._stream.close()
        while self._metrics_ends:
            self._metrics_ends.pop()()

    @property
    def closed(self) -> bool:
        """Whether the loader delivers no more batches, because of :meth:`close` or of an error that ended it."""
        return self._stream.is_over

    def __enter__(self: _Any) -> _Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Iteration(Iterator[Any]):
    """One pass, or all passes of an iteration where data sets grow. Threads may share it: each batch goes to one."""

    def __init__(self, loader: BaseLoader, stream: Stream, hand_over: HandOver, ahead: int) -> None:
        self._loader = loader
        self._stream = stream
        self._hand_over = hand_over
        self._ahead = ahead
        self._begun = self._passes = 0
        # What was read and is not taken yet, each with the place behind it. _at: the place behind all of them.
        self._ready: tuple[tuple[Callable[[], Any] | LoaderdError, tuple[Pass, int]], ...] = ()
        self._at: tuple[Pass, int] | None = None
        self._away = False  # what the next batch is read from did not answer

    def _begin(self) -> tuple[Pass, int]:
        if not self._begun:
            self._passes = self._loader.passes_of_an_iteration or sys.maxsize
        if self._begun == self._passes:
            raise StopIteration
        at = self._loader._new_pass()
        self._begun += 1
        return at

    def _read(self) -> bool:
        """Read one more batch. False where it is of a later pass, and batches of this one are still to be taken."""
        while True:
            if self._at is None:
                if self._ready:
                    return False
                self._at = self._begin()
            pass_, step = self._at
            found = self._loader._fetch(pass_, step)
            if found is None:
                self._at = None
                continue
            behind = pass_, step + 1
            if isinstance(found, EmptyBatchError):  # left out, as its records are
                if self._ready:  # the consumer passes it when it takes the batch before
                    *before, (element, _) = self._ready
                    self._ready = (*before, (element, behind))
                else:
                    self._loader._here = behind
                self._at = behind
                continue
            item = found if isinstance(found, LoaderdError) else self._hand_over(found)
            # Nothing is called between these two assignments, so Ctrl-C cannot come between them.
            self._ready = (*self._ready, (item, behind))
            self._at = behind
            return True

    def _read_ahead(self) -> None:
        """Read what is to be ready. While batches are, an outage is not told, and not waited for a second time."""
        most = 0 if self._away else self._ahead
        try:
            while len(self._ready) <= most and self._read():
                self._away = False
        except (StorageError, ServerError, DaemonError):
            self._away = True
            if not self._ready:
                raise

    def __next__(self) -> Any:
        taken = None
        try:
            with self._stream.lock:
                if self._ready:
                    self._stream.check()
                self._read_ahead()
                item, behind = self._ready[0]
                error, element = (item, None) if isinstance(item, LoaderdError) else (None, item())
                before, taken = self._loader._here, self._ready[0]
                self._ready = self._ready[1:]
                self._loader._here = behind
        except BaseException as caught:
            if taken is not None and self._loader._here is behind:  # Ctrl-C came before the consumer had the batch
                self._ready = (taken, *self._ready)
                self._loader._here = before
            if isinstance(caught, ProgramEnded):
                raise caught.for_thread() from None
            raise
        # Nothing is called from here on, so Ctrl-C can only come when the consumer has the batch.
        if error is not None:
            raise error
        return element
