"""The loader: batches of a data set, in a planned order, made by other processes; and where the consumer stands."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from loaderd.client.batch import Batch, HandOver, identity
from loaderd.client.shutdown import ProgramEnded
from loaderd.client.skipped_data import warn_user
from loaderd.client.sources import EmbeddedSource, Source
from loaderd.client.stream import Stream
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, StreamDescription, anchored
from loaderd.errors import DaemonError, EmptyBatchError, LoaderdError, OptionError, ServerError, StorageError
from loaderd.options import (
    DEFAULT_STORAGE,
    HINT_GROWING_ON_HOSTS,
    OnCorrupt,
    Refresh,
    Remainder,
    Shuffle,
    Storage,
    StreamOptions,
    Unpack,
    as_count,
    as_shard,
    require,
    suggests_options,
)
from loaderd.plan.passes import Pass
from loaderd.plan.positions import PassSequence, Position, check_epoch, position_of, position_of_pass
from loaderd.plan.sampling import Sample
from loaderd.progress import ProgressDisplay
from loaderd.redaction import shown
from loaderd.schema import Derived, Schema
from loaderd.shm.page import TAKES_AHEAD

if TYPE_CHECKING:
    from loaderd.ipc.subscription import Sharing
    from loaderd.observe.diagnose import Diagnosis
    from loaderd.observe.statistics import Statistics


class Loader:
    """Batches of shards, unpacked by worker processes into shared memory.

    Options (a wrong value raises an OptionError, before any process is started):

    - ``shards``: a path, a glob, a URI, or any number of them (a list, a set, a generator …), whose files come in the
      order of their paths; or a :class:`~loaderd.Dataset`, :class:`~loaderd.Mix` or :class:`~loaderd.Concat` (then
      ``schema``, ``shuffle``, ``seed``, ``on_corrupt``, ``index_cache``, ``refresh``, ``storage``, ``where`` and
      ``sample`` are the data set's). NoShardsError: there is none, or no record.
    - ``schema`` (a :class:`~loaderd.Schema`): what a record holds, and the fields that come out.
    - ``batch_size`` (int): records in a batch.
    - ``epochs`` (int or None, default 1): of one pass; None: for ever.
    - ``shuffle`` (bool or :class:`~loaderd.Shuffle`, default True): False: the files' own order.
    - ``seed`` (int or None, default 0): the order, and all random fields, follow from it. None: one is drawn, which
      ``loader.seed`` says.
    - ``remainder`` (default "short"): what becomes of an epoch's last, partial batch: ``"drop"``, ``"short"``, or
      ``"carry"`` (it is completed from the pass's next epoch; so with ``epochs=1`` it stays short).
    - ``shard`` ((int, int) or None, default None): (i, n): this is host i of n, and gets an n-th of each epoch. None:
      it gets all of it, with a UserWarning where torch.distributed or jax.distributed has several processes: they
      train on the same batches.
    - ``workers`` (int or None, default None): worker processes; None: chosen from the cores.
    - ``on_corrupt`` (default "raise"): ``"raise"`` (CorruptRecordError, RecordMismatchError), ``"skip_record"``,
      ``"skip_shard"`` or ``"skip_any"``. The two in the middle raise RecordMismatchError where more than one record
      in a hundred does not match the schema. What is left out is a SkippedDataWarning.
    - ``held_batches`` (int, default 4): batches that the consumer may hold at a time before it gets copies.
    - ``index_cache`` (str or path, default "user"): ``"user"`` (``$LOADERD_CACHE_DIR`` or ``~/.cache/loaderd``),
      ``"beside"`` (the shards), ``"none"``, or a folder.
    - ``progress`` (bool or None, default None): what standard error shows while shards are listed and indexed: True,
      a bar; False, nothing; None: a bar if it is a terminal, else a line after 5 s, and then one a minute at most.
    - ``refresh`` (default "never"): ``"epoch"``: each epoch is made of the shards that there are when it begins (the
      first one, when the loader is made).
    - ``stall_timeout`` (float or None, default 120.0): seconds without progress after which a process of loaderd is
      replaced; None: never.
    - ``report`` (path or None, default None): a file to which every damaged record is written, a JSON object a line;
      see "When something breaks" in the documentation (docs/failures.md).
    - ``storage`` (a :class:`~loaderd.Storage`, default Storage()): for how long failed requests are tried again, how
      many are under way at a time, a cache on a local disk. StorageError: it does not answer.
    - ``where`` (a :class:`~loaderd.Derived` or None, default None): which records are in the data set: it gives a
      bool for each; see :class:`~loaderd.Dataset`.
    - ``sample`` (float, :class:`~loaderd.Sample` or None, default None): each epoch draws a share of the records
      anew, such as ``1/32``, or by weights.
    - ``start`` (what ``state_dict()`` returned, a :class:`~loaderd.Position`, or None, default None): where to go on
      from. OptionError, which says what differs: it is of other data.
    - ``unpack`` (default "worker"): ``"device"``: batches hold stored features as far as possible. ``batches`` of the
      bindings makes the fields of them, on the device; ``schema`` says what the loader's own batches hold.

    Each ``iter(loader)`` is a **pass** of ``epochs`` epochs. It goes on counting epochs where the pass before would
    have ended, so that each is shuffled in its own way. Making a loader starts a daemon and its workers and indexes
    the shards; :meth:`close`, or leaving the ``with`` block, ends them. Raises exceptions of :mod:`loaderd.errors`.

    :meth:`state_dict` says where the consumer stands, and :meth:`load_state_dict`, or ``start``, goes on from there
    with exactly the next batch, to where the pass would have ended. As ``start``, a state of another number of hosts
    or another batch size will do: what was left of its epoch is then shared out anew, and nothing of it comes twice.
    """

    @suggests_options
    def __init__(
        self,
        shards: Any,
        schema: Schema | None = None,
        *,
        batch_size: int,
        epochs: int | None = 1,
        shuffle: bool | Shuffle = True,
        seed: int | None = 0,
        remainder: Remainder = "short",
        shard: tuple[int, int] | None = None,
        workers: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        held_batches: int = 4,
        index_cache: str = "user",
        progress: bool | None = None,
        refresh: Refresh = "never",
        stall_timeout: float | None = 120.0,
        report: str | os.PathLike[str] | None = None,
        storage: Storage = DEFAULT_STORAGE,
        where: Derived | None = None,
        sample: float | Sample | None = None,
        start: Mapping[str, Any] | Position | None = None,
        unpack: Unpack = "worker",
    ) -> None:
        dataset = as_dataset(
            shards,
            shard,
            schema=schema,
            shuffle=shuffle,
            seed=seed,
            on_corrupt=on_corrupt,
            index_cache=index_cache,
            refresh=refresh,
            storage=storage,
            where=where,
            sample=sample,
        )
        dataset = anchored(dataset)
        options = StreamOptions(
            batch_size=batch_size,
            epochs=epochs,
            remainder=remainder,
            shard=(0, 1) if shard is None else shard,
            workers=workers,
            held_batches=held_batches,
            stall_timeout=stall_timeout,
            report=report,  # type: ignore[arg-type]  # is made a str there
            unpack=unpack,
            **dataset.leaves()[0].order_options(),
        )
        require(progress is None or isinstance(progress, bool), "progress", "True, False or None", progress)
        if dataset.grows:
            options.check_growing()
        first = checked_start(start)
        source = EmbeddedSource(StreamDescription(dataset, options))
        self._open(source, first, ProgressDisplay(progress), shard is not None)

    @classmethod
    def _of_servers(cls, source: Source, start: Position, sharing: Sharing, shard_is_chosen: bool) -> Loader:
        """What ``loaderd.connect`` returns."""
        loader = cls.__new__(cls)
        loader._open(source, start, ProgressDisplay(None), shard_is_chosen, sharing)
        return loader

    def _open(
        self,
        source: Source,
        start: Position,
        progress: ProgressDisplay,
        shard_is_chosen: bool,
        sharing: Sharing = "independent",
    ) -> None:
        """``shard_is_chosen``: else it warns where several processes train."""
        self._stream = stream = Stream(source, start, progress)
        self._options = stream.options
        self.schema = stream.schema
        """What batches hold."""
        self._unpacked_schema = stream.unpacked_schema  # what a binding makes of packed batches
        self._grows = stream.grows  # each epoch is made of the shards that there are when it begins
        self._next = stream.pass_sequence.find(start)
        if self._grows and self._options.shard[1] > 1 and start.listing is None:
            self._next = self._next[0]._replace(listing=None), self._next[1]  # those that this host alone has listed
        self._here: tuple[Pass, int] | None = self._next
        self._first_pass = self._next[0]
        self._is_placed = start != Position()  # or by load_state_dict(), and no pass has begun since
        self._shard_is_chosen, self._sharing = shard_is_chosen, sharing
        self._metrics_ends: list[Callable[[], object]] = []
        self._sized: tuple[Pass | None, float] = (None, 0)  # a pass, and the step behind its last (inf: no end)
        try:
            stream.skipped.warn()
        except BaseException:  # the user's filters make an error of it
            self.close()
            raise

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader cannot be pickled, nor copied: its batches are in the memory of this process\n"
            "Send what it is made of, a loaderd.Dataset, and make a loader of it there, with shard=(i, n) for an "
            "n-th; of a server's data set, call loaderd.connect there."
        )

    # -------------------------------------------------------------------------------------- consuming

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises TypeError: a DataLoader asks for records by number what is not an ``IterableDataset``."""
        raise TypeError(
            f"a Loader gives batches in their order, and none by its number, got [{index!r:.80}]\n"
            "Iterate over it. For PyTorch's DataLoader: DataLoader(loaderd_torch.batches(loader), batch_size=None)."
        )

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over one pass. The pass begins when its first batch is taken.

        The iterator of an older pass still works, but each change between the two restarts the workers. If data grow,
        each epoch is a pass of its own, made of the shards that there are when it begins. The iterator can be used
        after an exception: if a batch could not be delivered, it goes on with the next one; if storage or servers did
        not answer, it waits for the same batch. A new iterator begins the next pass all the same: call
        ``load_state_dict(state_dict())`` before, to go on in this one.
        """
        return self._iterate()

    def _iterate(self, hand_over: HandOver = identity, ahead: int = 0) -> Iterator[Any]:
        """As ``iter(loader)``, but each element is what ``hand_over(batch)()`` returns.

        ``hand_over`` is called for up to ``ahead`` batches of a pass before they are taken, so that it can begin what
        takes time; the function that it returns is called when the batch is taken. :attr:`position` counts batches
        that were taken. If either function raises, no batch is lost: the same batch comes next.
        """
        return _Iteration(self, self._stream, hand_over, ahead)

    def _fetch(self, pass_: Pass, step: int) -> Batch | None:
        """Batch ``step`` of a pass, or None behind its last one. Step 0 is where the whole pass would begin.

        Any step can be asked for at any time, and always gives the same batch. Steps in order are fast; for any other
        one the workers have to begin anew. Raises the error of a batch that cannot be delivered. The caller keeps
        count of the steps: there is no :attr:`position` afterwards.
        """
        with self._stream.lock:
            batch = self._read(pass_, step, takes_ahead=True)
            self._here = None
        if isinstance(batch, LoaderdError):
            batch.instead_of_batch = True
            raise batch
        return batch

    def _read(self, pass_: Pass, step: int, takes_ahead: bool = False) -> Batch | LoaderdError | None:
        if (watched := self._stream.watched) is not None:
            watched.page.words[TAKES_AHEAD] = takes_ahead
        if pass_ is not self._sized[0] or self._grows:
            num_steps = self._num_steps(pass_)
            self._sized = pass_, math.inf if num_steps is None else num_steps
        if step >= self._sized[1]:
            return None
        batch = self._stream.fetch(pass_, step)
        self._stream.skipped.warn()  # if that raises, the same batch comes next
        return batch

    # ------------------------------------------------------------------------------ passes and positions

    @property
    def _num_passes(self) -> int | None:
        """How many passes the next iteration makes: 1, or where data sets grow, one for each epoch (None: no end)."""
        if not self._grows or self._options.epochs is None:
            return None if self._grows else 1
        return self._options.epochs - self._next[0].first_epoch % self._options.epochs

    def _new_pass(self) -> tuple[Pass, int]:
        """Begin a pass; returns which it is, and the step with which it begins, for :meth:`_fetch`."""
        with self._stream.lock:
            return self._begin_pass()

    def _begin_pass(self) -> tuple[Pass, int]:
        pass_, step = self._next
        check_epoch(pass_.first_epoch)
        if not self._shard_is_chosen:
            self._warn_of_same_batches()
        if self._grows and pass_.listing is None:
            if self._options.shard[1] > 1:
                text = f"shard={self._options.shard} of data that grow: no host has listed the shards of this epoch"
                raise OptionError(text, hint=HINT_GROWING_ON_HOSTS)
            pass_ = self._listed(pass_)
        self._next = self._stream.pass_sequence.next_pass(pass_), 0
        self._is_placed = False
        return pass_, step

    def _listed(self, pass_: Pass) -> Pass:
        """A pass of data that grow, made of the shards that there are now."""
        self._stream.list_shards(None)
        return pass_._replace(listing=self._stream.pass_sequence.listing)

    def next_position(self) -> Position:
        """The place where the next iteration will begin. If data grow, this lists the shards of its epoch.

        To have several hosts make the same epoch of the same shards, one calls this and sends the position to the
        others (``to_json``); all give it to :meth:`load_state_dict`. Raises LoaderdError.
        """
        if self._grows:
            with self._stream.lock:
                pass_, step = self._next
                if pass_.listing is None:
                    self._next = self._listed(pass_), step
                    self._is_placed = True
        return self._next_position

    def _warn_of_same_batches(self) -> None:
        for framework in ("torch", "jax"):
            if (number := _num_processes(framework)) > 1:
                self._shard_is_chosen = True  # once is enough
                warn_user(
                    f"{framework}.distributed has {number} processes, and this loader has no shard=: all of them get "
                    f"the same batches. Give each its share, shard=loaderd_{framework}.shard(); or shard=(0, 1), if "
                    "that is meant.",
                    UserWarning,
                )

    def _num_steps(self, pass_: Pass) -> int | None:
        """The step behind the last one of a pass; None if it never ends."""
        return self._stream.pass_sequence_of(pass_).batches(pass_).num_steps

    @property
    def position(self) -> Position:
        """The batch that the consumer will take next. Batches that were only read ahead do not count.

        Raises OptionError if a ``tf.data.Dataset`` takes the batches, because it takes them ahead.
        """
        if self._here is None:
            raise OptionError(
                "loader.position is unknown, because a tf.data.Dataset takes the batches",
                hint="For a tf.data.Dataset save the iterator (tf.train.Checkpoint), use BackupAndRestore, or count: "
                "begin = loader.next_position() in front of the loop, loader.after(begin, batches) in it.",
            )
        return self._stream.pass_sequence_of(self._here[0]).position(*self._here)

    @property
    def _next_position(self) -> Position:
        return self._stream.pass_sequence_of(self._next[0]).position(*self._next)

    @property
    def _next_is_whole(self) -> bool:
        """Whether the next pass begins at its first step, and is as long as those behind it."""
        return self._stream.pass_sequence.is_whole(*self._next)

    def state_dict(self) -> dict[str, Any]:
        """The :attr:`position` in values that JSON can hold, for :meth:`load_state_dict`.

        Raises OptionError where there is no :attr:`position`.
        """
        return {"position": self.position.to_json()}

    def load_state_dict(self, state: Mapping[str, Any] | Position) -> None:
        """Have the next iteration begin with exactly the next batch, and end where it would have ended.

        ``state``: what :meth:`state_dict` returned, here or in another process, or ``state_dict()`` of a binding's
        batches; or a :class:`~loaderd.Position`, such as ``Position(epoch=3)``.

        Raises OptionError if the state is of other data, or does not exist. A state from the middle of an epoch on
        another number of hosts, or in other batches, can only be given as ``Loader(…, start=state)``, because it may
        take more memory.
        """
        position = position_of(state, "the state")
        with self._stream.lock:
            self._stream.use_data_of(position)
            pass_, step = self._stream.pass_sequence_of(position).find(position)
        if self._grows and position.listing is None and step == 0:
            pass_ = pass_._replace(listing=None)
        if pass_.past and pass_ != self._first_pass:
            raise OptionError(
                f"a part of epoch {position.epoch} was taken in other batches, or on another number of hosts, than "
                f"this loader's: the position counts batches of {position.batch_size} on {position.hosts}",
                hint="Give it to a new loader: start=state. Or go on as that epoch began, at least until it ends.",
            )
        with self._stream.lock:
            self._next = self._here = pass_, step
            self._is_placed = True

    def _seek_iteration(self, number: int) -> None:
        """Have the next iteration be number ``number`` (from 0) of those that a loader makes from its beginning on.

        Where ``load_state_dict`` or ``start=`` put the loader into that iteration, it stays there. Raises OptionError
        where they put it into a later one, and none has begun since.
        """
        number = as_count(number, "the number of an iteration", "an integer from 0 on", 0)
        epochs = self._options.epochs or 1
        now = self._next[0].first_epoch // epochs
        if self._options.epochs is None and self._is_placed:
            # Iteration n of a loader without an end begins with epoch n: an epoch may be in several.
            now = min(number, self._next_position.epoch)
        if now == number:
            return
        if self._is_placed and now > number:
            here = self._next_position
            raise OptionError(
                f"iteration {number} is asked for, but start= or load_state_dict() put the loader into "
                f"iteration {now}, at batch {here.batch} of epoch {here.epoch}",
                hint=f"Ask for iteration {now}; or put the loader nowhere, and it begins with the one asked for. "
                f"(accelerate's DataLoaderShard counts from 0 in each process: call its set_epoch({now}).)",
            )
        self.load_state_dict(Position(number * epochs, first_epoch=number * epochs))
        self._is_placed = False

    def after(self, position: Position, batches: int) -> Position:
        """The position ``batches`` batches after ``position``, one pass following the other.

        Batches that did not come, because no record was left in them, are passed over.
        """
        require(isinstance(position, Position), "position", "a loaderd.Position", position)
        # Without the lock, if possible: the handler of a signal may ask in the middle of a fetch.
        if self._stream.has_pass_sequence_of(position):
            return self._after(self._stream.pass_sequence_of(position), position, batches)
        with self._stream.lock:
            return self._after(self._stream.pass_sequence_of(position), position, batches)

    def _after(self, pass_sequence: PassSequence, position: Position, batches: int) -> Position:
        def place_of(position: Position) -> tuple[int, int]:
            pass_, step = pass_sequence.find(position)
            return pass_.first_epoch, step

        end, passed = pass_sequence.after(position, batches), 0
        while (empty := self._stream.num_empty(place_of(position), place_of(end))) > passed:
            end, passed = pass_sequence.after(position, batches + empty), empty
        return end

    def _pass_to_json(self, pass_: Pass) -> str:
        """A pass as text, with what it belongs to; for :meth:`_pass_from_json`, of this loader or of another."""
        return self._stream.pass_sequence.pass_to_json(pass_)

    def _pass_from_json(self, text: str | bytes) -> Pass:
        """The pass that ``text`` says; a new pass will begin behind it. Raises OptionError if it is of other data."""
        with self._stream.lock:
            self._stream.use_data_of(position_of_pass(text))
            pass_ = self._stream.pass_sequence.pass_from_json(text)
            if pass_.first_epoch >= self._next[0].first_epoch:
                self._next = self._stream.pass_sequence.next_pass(pass_), 0
        return pass_

    # ------------------------------------------------------------------------------------------ facts

    def __len__(self) -> int:
        """Batches of a whole pass, also where the next one begins in the middle: training frameworks take this for
        the length of every epoch. See :attr:`batches_left`. TypeError: a pass has no end, or data sets grow.
        """
        return self._known_steps(self._stream.pass_sequence.next_pass(self._next[0]))

    def __bool__(self) -> bool:
        return True  # also where there is no length to ask for, in ``loader or other``

    @property
    def batches_left(self) -> int:
        """Batches of the next iteration: fewer than ``len(loader)`` if it begins in the middle of a pass.

        Raises TypeError where the loader has no length.
        """
        pass_, step = self._next
        return self._known_steps(pass_) - step

    def _known_steps(self, pass_: Pass) -> int:
        num_steps = None if self._grows else self._num_steps(pass_)
        if num_steps is None:
            raise TypeError("a loader without an end, or of data that grow, has no length; see batches_per_epoch")
        return num_steps

    def __repr__(self) -> str:
        facts = self._stream.facts
        at = ""
        if self.closed:
            at = "; closed"
        elif self._here is not None:
            rest = "the rest of " * bool(self.position.past)
            at = f"; at batch {self.position.batch} of {rest}epoch {self.position.epoch}"
        return (
            f"<Loader of {facts['num_records']:,} records in {facts['num_shards']:,} shards: "
            f"{', '.join(self.schema.fields)}, in {'packed ' * (self._options.unpack == 'device')}batches of "
            f"{self.batch_size:,}{at}>"
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
    def seed(self) -> int:
        """The seed that decides the order and all random fields; with ``seed=None``, the one that was drawn."""
        return self._options.seed

    @property
    def _static_batch_size(self) -> int | None:
        """The number of records of every batch, or None if they may differ."""
        options = self._options
        whole = options.remainder == "drop" or (options.remainder == "carry" and options.epochs is None)
        return options.batch_size if whole and options.on_corrupt == "raise" else None

    def statistics(self) -> Statistics:
        """Counts so far, and sizes."""
        from loaderd.observe.statistics import Statistics  # imported late: few programs ask for it

        stream = self._stream
        now = None if stream.watched is None else stream.watched.now()
        return Statistics(
            **stream.facts,
            **stream.counts,
            records_skipped=stream.skipped.num_records,
            damages=tuple(stream.skipped.damages),
            stage_s={} if now is None else now.stage_s,
            field_s={} if now is None else now.field_s,
            waits=() if now is None else now.waits,
            slots_lent=stream.num_lent,
        )

    def diagnose(self) -> Diagnosis:
        """Whether the training waits for data, why, and what would help, judged by the last five seconds.

        Does not wait. Within three seconds of a start, and where no batches are taken, that is "nothing yet".
        """
        from loaderd.observe.diagnose import diagnose_samples, nothing_yet

        watched = self._stream.watched
        if watched is None:
            return nothing_yet("there is no diagnosis for consumers of a group")
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

        A thread that waits for a batch gets a ClosedError.
        """
        self._stream.close()
        while self._metrics_ends:
            self._metrics_ends.pop()()

    @property
    def closed(self) -> bool:
        """Whether the loader delivers no more batches, because of :meth:`close` or of an error that ended it."""
        return self._stream.is_over

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Iteration(Iterator[Any]):
    """One pass, or all passes of an iteration where data sets grow. Threads may share it: each batch goes to one."""

    def __init__(self, loader: Loader, stream: Stream, hand_over: HandOver, ahead: int) -> None:
        self._loader = loader
        self._stream = stream
        self._hand_over = hand_over
        self._ahead = ahead
        self._passes_begun = self._num_passes = 0
        # What was read and is not taken yet, each with the place behind it. _place: the place behind all of them.
        self._ready: tuple[tuple[Callable[[], Any] | LoaderdError, tuple[Pass, int]], ...] = ()
        self._place: tuple[Pass, int] | None = None
        self._is_down = False  # storage, a server or the daemon did not answer when the next batch was read

    def _begin_pass(self) -> tuple[Pass, int]:
        if not self._passes_begun:
            self._num_passes = self._loader._num_passes or sys.maxsize
        if self._passes_begun == self._num_passes:
            raise StopIteration
        place = self._loader._begin_pass()
        self._passes_begun += 1
        return place

    def _read(self) -> bool:
        """Read one more batch. False where it is of a later pass, and batches of this one are still to be taken."""
        while True:
            if self._place is None:
                if self._ready:
                    return False
                self._place = self._begin_pass()
            pass_, step = self._place
            batch = self._loader._read(pass_, step)
            if batch is None:
                self._place = None
                continue
            behind = pass_, step + 1
            if isinstance(batch, EmptyBatchError):  # left out, as its records are
                if self._ready:  # the consumer passes it when it takes the batch before
                    *before, (item, _) = self._ready
                    self._ready = (*before, (item, behind))
                else:
                    self._loader._here = behind
                self._place = behind
                continue
            item = batch if isinstance(batch, LoaderdError) else self._hand_over(batch)
            # Nothing is called between these two assignments, so Ctrl-C cannot come between them.
            self._ready = (*self._ready, (item, behind))
            self._place = behind
            return True

    def _read_ahead(self) -> None:
        """Read what is to be ready. While a batch is, an outage is not raised, and not waited for a second time."""
        ahead = 0 if self._is_down else self._ahead
        try:
            while len(self._ready) <= ahead and self._read():
                self._is_down = False
        except (StorageError, ServerError, DaemonError):
            self._is_down = True
            if not self._ready:
                raise

    def __next__(self) -> Any:
        entry = None
        try:
            with self._stream.lock:
                if self._ready:
                    self._stream.check()
                self._read_ahead()
                item, behind = self._ready[0]
                error, element = (item, None) if isinstance(item, LoaderdError) else (None, item())
                before, entry = self._loader._here, self._ready[0]
                self._ready = self._ready[1:]
                self._loader._here = behind
        except BaseException as caught:
            if entry is not None and self._loader._here is behind:  # Ctrl-C came before the consumer had the batch
                self._ready = (entry, *self._ready)
                self._loader._here = before
            if isinstance(caught, ProgramEnded):
                raise caught.for_thread() from None
            raise
        # Nothing is called from here on, so Ctrl-C can only come when the consumer has the batch.
        if error is not None:
            raise error
        return element


def _num_processes(framework: str) -> int:
    """How many processes train together, as far as ``framework`` has been imported and told."""
    distributed: Any = sys.modules.get(f"{framework}.distributed")
    if distributed is None or not getattr(distributed, "is_initialized", bool)():  # a build of torch may lack it
        return 1
    # JAX is asked only once it is initialized: to count, it looks for devices.
    number: int = distributed.get_world_size() if framework == "torch" else sys.modules["jax"].process_count()
    return number


def checked_start(start: Mapping[str, Any] | Position | None) -> Position:
    """Where a loader is to begin. Raises OptionError for what is no position, and no state."""
    position = Position() if start is None else position_of(start, "start")
    check_epoch(position.epoch)
    return position


def as_dataset(shards: Any, shard: tuple[int, int] | None, **options: Any) -> AnyDataset:
    """The data set that a Loader is to read; ``options``: what a Dataset may have, too. Raises OptionError."""
    require(
        options["seed"] is not None or shard is None or as_shard(shard)[1] == 1,
        "seed",
        f"a number where there are several hosts, shard={shard}",
        options["seed"],
        "Each host would draw another seed: records would be missing, and others would come twice. Draw one seed, "
        "and give it to all.",
    )
    if not isinstance(shards, (Dataset, Concat, Mix)):
        return Dataset(shards, **options)
    own = {name: value for name, value in options.items() if value != getattr(Dataset, name, None)}
    if own:
        what = type(shards).__name__
        texts = {name: "…" if name == "schema" else shown(value, 100) for name, value in own.items()}
        words = ", ".join(f"{name}={text}" for name, text in texts.items())
        where = "the data set" if what == "Dataset" else f"each data set of the {what}"
        raise OptionError(
            f"{' and '.join(own)} must be left out beside a {what}, which has its own; got {words}",
            hint=f"Give {where} what is wanted: Dataset(…, {words}).",
        )
    return shards
