"""The life of one stream: its data, its memories, its batches; for one consumer or for a group of them.

::

    Preparation ──► OpenedStream ──► workers attached ──► Probe ──► DataListed, Opened ──► StartPass …
         ▲                                                                                     │
         └──────────────────── ListData, where data sets grow ─────────────────────────────────┘

Its consumers take the batches of its page (see ``delivery.consumers``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from loaderd.daemon.delivery.consumers import Consumers
from loaderd.daemon.delivery.opened_stream import OpenedStream, Tell
from loaderd.daemon.indexing.preparation import Preparation, Prepare
from loaderd.daemon.indexing.schema_check import SchemaCheck
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.daemon.totals import Totals
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.messages import ListData, Message, Notice, StartPass
from loaderd.options import MAX_STEP, require
from loaderd.plan.passes import pass_of
from loaderd.redaction import redacted
from loaderd.shm.page import MAX_GENERATION
from loaderd.storage.names import some_of

_OUTAGE_LOGGED_S = 5.0


class Session:
    """See the module's docstring.

    ``pickled``, ``tell``, ``num_members``: as of OpenedStream. ``prepared``: the preparation of the data. ``prepare``
    makes another one, for a listing; None: other streams use ``prepared``, too. ``earlier``, called when ``prepared``
    is finished, returns the preparation of other data, which the stream's position belongs to, or None. ``log``:
    where else warnings go. ``error``: why the stream cannot go on, for any consumer.
    """

    def __init__(
        self,
        number: int,
        description: StreamDescription,
        pickled: bytes,
        worker_manager: WorkerManager,
        tell: Tell,
        *,
        prepared: Preparation,
        prepare: Prepare | None = None,
        earlier: Callable[[], Preparation | None] | None = None,
        num_members: int = 0,
        dataset: str = "",
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.number = number
        self.description = description
        self.dataset = dataset
        """Its name, at a server."""
        self.error: LoaderdError | None = None
        self.opened: OpenedStream | None = None
        self.consumers: Consumers | None = None
        """Those of ``opened``, as soon as consumers may know of it."""
        self.present: set[int] = set()
        self.preparation: Preparation | None = prepared
        """The preparation of data that the stream waits for; None: it waits for none."""
        self._pickled = pickled
        self._worker_manager = worker_manager
        self._tell = tell
        self._prepare = prepare
        self._own = None if prepare is None else prepared
        self._earlier = earlier
        self._num_members = num_members
        self._log = log
        self._outage_s = 0.0
        self._probe: SchemaCheck | None = None
        self._index_facts: dict[str, Any] = {}

    # ---------------------------------------------------------------------------------------- consumers

    def join(self, number: int) -> None:
        """Add a consumer."""
        self.present.add(number)
        if self.consumers is not None and self.opened is not None:
            self.opened.introduce(number, self._index_facts)

    def leave(self, number: int) -> None:
        """Give a consumer nothing more. It keeps the slots that it holds."""
        self.present.discard(number)
        if self.consumers is not None:
            self.consumers.leave(number)

    def received(self, number: int, message: Message) -> None:
        """Handle a message of a consumer. Raises LoaderdError or ValueError where the message may not come now."""
        if self.consumers is None:
            raise DaemonError(f"{type(message).__name__} came before the stream was there")
        if isinstance(message, StartPass):
            is_key = 0 < message.generation <= MAX_GENERATION and message.step <= MAX_STEP
            require(is_key, "StartPass", f"of generation 1 to {MAX_GENERATION}", message)
            self.consumers.start(number, message.generation, pass_of(message.which), message.step)
        elif isinstance(message, ListData):
            require(self._prepare is not None, "ListData", "for a data set that grows", message)
            assert self._prepare is not None and self._own is not None and self.opened is not None
            self.consumers.stop()
            self._own.cancel()
            self._own = self.preparation = self._prepare(message.listing, self._own.indexes)
        else:
            raise DaemonError(f"{type(message).__name__} is not for the daemon")

    def _tell_all(self, message: Message) -> None:
        for number in self.present:
            self._tell(number, message, ())

    def warn(self, text: str) -> None:
        """Send a warning to all consumers, and log it. One that takes batches reads it with the next one."""
        self._log(text)
        notice = Notice(redacted(text), self._worker_manager.pool.restarts)
        for number in self.present:
            if self.consumers is None or self.opened is None:  # there is no page yet, and it waits
                self._tell(number, notice, ())
            else:
                self.opened.announce(number, notice)

    # ------------------------------------------------------------------------------------------- phases

    def go_on(self) -> None:
        """Go on to the next phase if this one is over; look at the page, and send what there is to tell.

        Raises the error of a phase. ``error`` is then the caller's to set.
        """
        if self.preparation is not None:
            self._after_preparing(self.preparation)
        if self._probe is not None and self._probe.finished and self.opened is not None:
            self._after_probe(self._probe, self.opened)
        if self.opened is not None:
            self.error = self.error or self.opened.error or self.opened.consumers.error
            if self.error is None and self.consumers is not None:
                self.opened.go_on()

    def _after_preparing(self, preparation: Preparation) -> None:
        if preparation.progress is not None:
            self._tell_all(preparation.progress)
        if preparation is self._own:
            preparation.advance()
            for text in preparation.take_warnings():
                self.warn(text)
        if not preparation.finished:
            return
        earlier, self._earlier = self._earlier, None
        self.preparation = None if earlier is None else earlier()
        if self.preparation is not None:
            return
        opened = self.opened
        try:
            self._use(preparation)
        except LoaderdError as error:
            if opened is None:
                raise
            # The consumer keeps the data that it had before the sets grew.
            self._tell_all(opened.listed_message(error))

    def _use(self, preparation: Preparation) -> None:
        """Open the stream with the data that are there, or go on with them; and attach the workers."""
        if preparation.error is not None:
            raise preparation.error
        data, worker_manager, description = preparation.data, self._worker_manager, self.description
        assert data is not None
        if preparation is self._own and data.left_out:  # consumers read it in DataListed
            self._log(data.left_out)
        if self.opened is not None:
            self.opened.use(data)
            worker_manager.attach(self.opened)
            self._tell_all(self.opened.listed_message())
            return
        of_stream = self._pickled, data, worker_manager, self._num_members, self._tell
        self.opened = opened = OpenedStream(self.number, description, *of_stream)
        self._index_facts = {
            "index_s": preparation.index_s,
            "index_cached": preparation.num_cached,
            "storage": preparation.storage_counts,
        }
        worker_manager.attach(opened)
        worker_manager.start(description.options.num_workers)
        any_fits = description.options.on_corrupt != "raise"
        self._probe = SchemaCheck(opened.check_task, opened.num_blocks, any_fits)
        worker_manager.scheduler.add_source(self._probe)

    def _after_probe(self, probe: SchemaCheck, opened: OpenedStream) -> None:
        scheduler = self._worker_manager.scheduler
        scheduler.remove_source(probe)
        self._probe = None
        if probe.error is not None:
            raise probe.error
        opened.kernels = probe.kernels
        if names := probe.feature_lists:
            self.warn(
                "the records are tf.train.SequenceExamples. Their context is read; their feature_lists are not: "
                f"{some_of(names)}"
            )
        scheduler.add_source(opened.stream)
        self.consumers = opened.consumers
        for number in self.present:
            opened.introduce(number, self._index_facts)

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        if self.consumers is not None and self.opened is not None:
            self.consumers.tick(seconds)
            self.opened.tick(seconds)
            self._log_outage(self.opened)

    def _log_outage(self, opened: OpenedStream) -> None:
        """Say once that there is an outage, and once that it is over."""
        outage, source = opened.stream.outage, opened.stream_memory.watched.facts.source
        now_s, before_s = 0.0 if outage is None else outage.for_s, self._outage_s
        self._outage_s = now_s
        if now_s < before_s and before_s >= _OUTAGE_LOGGED_S:  # if it is above 0, another one has begun since
            self.warn(f"answers come from {source} again, after {before_s:.0f} s")
        elif outage is not None and before_s < _OUTAGE_LOGGED_S <= now_s:
            self.warn(f"{outage.in_words(source)}. Requests are made again until there are answers")

    def close(self) -> None:
        """Stop all work for the stream, and give its memory back."""
        worker_manager = self._worker_manager
        if self._own is not None:
            self._own.cancel()
        if self._probe is not None:
            worker_manager.scheduler.remove_source(self._probe)
        if self.opened is not None:
            if self.consumers is not None:
                self.opened.stream.stop()
                worker_manager.scheduler.remove_source(self.opened.stream)
            worker_manager.detach(self.opened)
            self.opened.stream_memory.close()

    # ------------------------------------------------------------------------------------------- report

    @property
    def memory_bytes(self) -> int:
        """Bytes of windows and slots."""
        return 0 if self.opened is None else self.opened.stream_memory.num_bytes

    def describe(self) -> list[str]:
        """Lines of what the stream is at."""
        if self.preparation is not None and (progress := self.preparation.progress) is not None:
            return [f"data       {progress.doing}: {progress.done_bytes} of {progress.num_bytes} bytes"]
        return [] if self.opened is None else self.opened.stream.describe()

    def waits_for(self, number: int) -> str:
        """What a consumer waits for, in words."""
        if self.preparation is not None:
            return f"waits for the data set to be {self.preparation.doing}"
        return "waits for the stream to begin" if self.consumers is None else self.consumers.describe(number)

    def counts_of(self, number: int) -> dict[str, float]:
        """What a consumer has had, and how long it waited."""
        batches, records, _ = (0, 0, 0) if self.consumers is None else self.consumers.taken_by(number)
        waited_s = 0.0
        if self.opened is not None and not self._num_members:  # of a group's stream, nobody knows whose it is
            waited_s = self.opened.stream_memory.watched.now().wait_s
        num_bytes = records * self.description.schema.record_bytes
        return {
            "batches": batches,
            "records": records,
            "bytes": num_bytes % (1 << 63),  # a consumer may write any number in its page
            "waiting_seconds": waited_s,
        }

    def add_to(self, totals: Totals) -> None:
        """Count what its workers spent their time with."""
        if self.opened is not None:
            now = self.opened.stream_memory.watched.now()
            for stage, spent_s in {**now.stage_s, **now.field_s}.items():
                totals.add("stage_seconds", self.dataset, stage, spent_s)

    def report(self, number: int) -> dict[str, Any]:
        """What ``loaderd status`` shows of a consumer: where it stands, what it has taken, what it holds."""
        epoch = batch = held = 0
        diagnosis = None
        if self.opened is not None and self.consumers is not None:
            _, _, step = self.consumers.taken_by(number)
            held = self.consumers.lent_to(number)
            plan, watched = self.opened.stream.plan, self.opened.stream_memory.watched
            epoch, batch = (0, 0) if plan is None else plan.place_of(step)
            if not self._num_members:
                from loaderd.observe.diagnose import diagnose_samples  # imported only when somebody asks

                diagnosis = asdict(diagnose_samples(watched.samples(), watched.facts))
        return {
            "epoch": epoch,
            "batch": batch,
            **self.counts_of(number),
            "slots": self.description.options.num_slots,
            "slots_lent": held,
            "state": self.waits_for(number),
            "stream": self.number,
            "diagnosis": diagnosis,
        }
