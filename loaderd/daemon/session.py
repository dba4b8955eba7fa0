"""The life of one stream: its data, its memories, its batches; for one consumer or for a group of them.

::

    Preparation ──► OpenedStream ──► workers attached ──► Probe ──► Listed, Opened ──► Start …
         ▲                                                                                │
         └──────────────────── List, where data sets grow ────────────────────────────────┘

Its consumers are its **members**. A member that has the stream to itself takes batches from the stream's page. Each
member of a group has its own page, by which the daemon hands on what it takes from the stream's (``groups.lane``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from loaderd.daemon.delivery.dispatch import Dispatch
from loaderd.daemon.delivery.events import Delivery, FailedBatch, Omission
from loaderd.daemon.delivery.opened_stream import OpenedStream
from loaderd.daemon.delivery.sampling import Sampler
from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.groups.feed import Feed
from loaderd.daemon.groups.lane import Had, Lane, WholeStream
from loaderd.daemon.groups.members import Handed, Members, PageReader
from loaderd.daemon.indexing.preparation import Preparation, Prepare
from loaderd.daemon.indexing.schema_check import SchemaCheck
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.messages import (
    BatchFailed,
    ListData,
    Message,
    Notice,
    PassEnded,
    RecordsSkipped,
    StartPass,
    StorageUnavailable,
)
from loaderd.options import MAX_STEP, require
from loaderd.plan.passes import pass_of
from loaderd.redaction import redacted
from loaderd.shm.page import MAX_GENERATION
from loaderd.shm.page_consumer import PageConsumer
from loaderd.snapshots import Facts, Outage
from loaderd.storage.names import some_of

Tell = Callable[[int, Message, tuple[int, ...]], None]
_OUTAGE_LOGGED_S = 5.0


class Session:
    """See the module's docstring.

    ``pickled``: ``description``, as Attach has it. ``tell`` sends a message, with descriptors, to a member.
    ``prepared``: the preparation of the data. ``prepare`` makes another one, for a listing; None: other streams use
    ``prepared``, too. ``earlier``, called when ``prepared`` is finished, returns the preparation of other data, which
    the stream's position belongs to, or None. ``group`` makes what shares the stream among its members; None: there
    is one member, which reads the stream's page. ``log``: where else warnings go. ``error``: why the stream cannot go
    on, for any member.
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
        group: Callable[[Feed], Members] | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.number = number
        self.error: LoaderdError | None = None
        self.opened: OpenedStream | None = None
        self.members: Members | None = None
        self.present: set[int] = set()
        self.dataset = ""
        """Its name, at a server."""
        self.held_batches = description.options.held_batches
        """How many batches each member may hold."""
        self._description = description
        self._pickled = pickled
        self._record_bytes = description.schema.record_bytes
        self._worker_manager = worker_manager
        self._tell = tell
        self._prepare = prepare
        self._own = None if prepare is None else prepared
        self._preparation: Preparation | None = prepared
        self._earlier = earlier
        self._group = group
        self._log = log
        self._outage_s = 0.0
        self._feed: Feed | None = None
        self._lanes: dict[int, Lane | WholeStream] = {}
        self._granting: Dispatch | None = None
        self._sampler: Sampler | None = None
        self._probe: SchemaCheck | None = None
        self._index_facts: dict[str, Any] = {}

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of data that the stream waits for; None: it waits for none."""
        return self._preparation

    # ------------------------------------------------------------------------------------------ members

    def join(self, member: int) -> None:
        """Add a member."""
        self.present.add(member)
        if self.members is not None:
            self.members.join(member)
            self._introduce(member)

    def leave(self, member: int) -> None:
        """Give a member nothing more. The slots that it has stay lent to it."""
        self.present.discard(member)
        if self.members is not None:
            self.members.leave(member)
        if member in self._lanes:
            self._lanes.pop(member).close()

    def holds(self, member: int) -> bool:
        """Whether slots are lent to a member, which may have left."""
        return self.members is not None and self.members.held_by(member) > 0

    def give_back_all(self, member: int) -> None:
        """Take all slots back from a member that has left, and reads nothing any more."""
        if self.members is not None:
            self.members.give_back_all(member)

    def received(self, member: int, message: Message) -> None:
        """Handle a message of a member. Raises LoaderdError or ValueError where the message may not come now."""
        members = self.members
        if members is None:
            raise DaemonError(f"{type(message).__name__} came before the stream was there")
        if isinstance(message, StartPass):
            is_key = 0 < message.generation <= MAX_GENERATION and message.step <= MAX_STEP
            require(is_key, "StartPass", f"of generation 1 to {MAX_GENERATION}", message)
            members.start(member, message.generation, pass_of(message.which), message.step)
        elif isinstance(message, ListData):
            require(self._prepare is not None, "ListData", "for a data set that grows", message)
            assert self._prepare is not None and self._own is not None and self.opened is not None
            self.opened.stream.stop()
            self._own.cancel()
            self._own = self._preparation = self._prepare(message.listing, self._own.indexes)
        else:
            raise DaemonError(f"{type(message).__name__} is not for the daemon")

    def _tell_all(self, message: Message) -> None:
        for member in self.present:
            self._tell(member, message, ())

    def warn(self, text: str) -> None:
        """Send a warning to all members, and log it."""
        self._log(text)
        self._tell_all(Notice(redacted(text), self._worker_manager.pool.restarts))

    # ------------------------------------------------------------------------------------------- phases

    def advance(self) -> None:
        """Go on to the next phase if this one is over."""
        try:
            if self._preparation is not None:
                self._after_preparing(self._preparation)
            if self._probe is not None and self._probe.finished:
                self._after_probe(self._probe)
        except LoaderdError as error:
            self.error = error
        if self._granting is not None:
            self.error = self.error or self._granting.error

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
        self._preparation = None if earlier is None else earlier()
        if self._preparation is not None:
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
        data, worker_manager = preparation.data, self._worker_manager
        assert data is not None
        if preparation is self._own and data.left_out:  # consumers read it in Listed
            self._log(data.left_out)
        if self.opened is not None and self._granting is not None:
            self.opened.use(data)
            worker_manager.attach(self._granting)
            self._tell_all(self.opened.listed_message())
            return
        running = len(worker_manager.pool.numbers)
        bell = None if self._group is None else worker_manager.bell
        self.opened = opened = OpenedStream(self.number, self._description, self._pickled, data, running, bell)
        self._sampler = Sampler(opened, worker_manager.use)
        self._index_facts = {
            "index_s": preparation.index_s,
            "index_cached": preparation.num_cached,
            "storage": preparation.storage_counts,
        }
        self._granting = Dispatch(opened, worker_manager, self._tell_members)
        worker_manager.attach(self._granting)
        worker_manager.start(self._description.options.num_workers)
        self._probe = SchemaCheck(
            opened.check_task, opened.num_blocks, self._description.options.on_corrupt != "raise"
        )
        worker_manager.scheduler.add_source(self._probe)

    def _after_probe(self, probe: SchemaCheck) -> None:
        self._worker_manager.scheduler.remove_source(probe)
        self._probe = None
        if probe.error is not None:
            raise probe.error
        assert self.opened is not None
        opened = self.opened
        opened.kernels = probe.kernels
        if names := probe.feature_lists:
            self.warn(
                "the records are tf.train.SequenceExamples. Their context is read; their feature_lists are not: "
                f"{some_of(names)}"
            )
        self._worker_manager.scheduler.add_source(opened.stream)
        if self._group is None:
            self.members = PageReader(opened.stream)
        else:
            bell = self._worker_manager.bell
            self._feed = Feed(opened.stream, PageConsumer(opened.page, bell, self._worker_manager.pool.bells))
            self.members = self._group(self._feed)
        for member in self.present:
            self.members.join(member)
            self._introduce(member)

    def _introduce(self, member: int) -> None:
        """Tell a member what the stream is like."""
        assert self.opened is not None
        opened = self.opened
        self._tell(member, opened.listed_message(), ())
        self._lanes[member] = lane = self._new_lane(opened)
        message = opened.opened_message(self._index_facts, len(lane.fds) - 3)
        self._tell(member, message, (opened.stream_memory.consumer_fd, *lane.fds))

    def _new_lane(self, opened: OpenedStream) -> Lane | WholeStream:
        """The page by which one more member gets its batches."""
        bell, bells = self._worker_manager.bell, self._worker_manager.pool.bells[: opened.page.num_seats]
        if self._group is not None:
            return Lane(opened.page.num_slots, bell)
        return WholeStream(opened.stream, [opened.stream_memory.page_fd, opened.stream_memory.bell, bell, *bells])

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        if self.members is not None and self.opened is not None and self._granting is not None:
            self.opened.stream.tick(seconds)
            self._log_outage(self.opened.stream.outage, self.opened.stream_memory.watched.facts)
            self.members.tick(seconds)
            self._granting.tick(seconds, bool(self._asleep(self.members)))

    def _log_outage(self, outage: Outage | None, facts: Facts) -> None:
        """Say once that there is an outage, and once that it is over."""
        now_s, before_s = 0.0 if outage is None else outage.for_s, self._outage_s
        self._outage_s = now_s
        if now_s < before_s and before_s >= _OUTAGE_LOGGED_S:  # if it is above 0, another one has begun since
            self.warn(f"answers come from {facts.source} again, after {before_s:.0f} s")
        elif outage is not None and before_s < _OUTAGE_LOGGED_S <= now_s:
            self.warn(f"{outage.in_words(facts.source)}. Requests are made again until there are answers")

    def _asleep(self, members: Members) -> list[tuple[int, int]]:
        """(member, generation) of those that sleep until the stream's next batch is there."""
        return [(member, generation) for member, generation in members.waiting() if self._lanes[member].sleeps]

    def hand_over(self) -> None:
        """Take slots back, look at the page, and send members and workers what there is to tell."""
        if self.members is None or self.opened is None or self._granting is None or self._sampler is None:
            return
        for member, lane in self._lanes.items():
            if slots := lane.take_back():
                self.members.release(member, slots)
            if isinstance(lane, Lane):
                self.members.reached(member, *lane.place)
        self.opened.stream.look()
        self._sampler.sample()
        if self._feed is not None:
            self._feed.collect()
        self._granting.say()
        self._tell_away(self.members, self.opened.stream)

    def _tell_away(self, members: Members, stream: Stream) -> None:
        """Tell members that sleep now that storage has failed; those that wait later are told if it fails again."""
        error = stream.storage.error
        if error is None:
            return
        asleep = self._asleep(members) if stream.is_waited_for else []
        for member, generation in asleep:
            self._announce(member, StorageUnavailable(generation, error))
        stream.storage.told(bool(asleep))

    def _tell_members(self) -> None:
        while self.members is not None:
            for handed in self.members.take():
                self._hand(handed)
            if self._feed is None or not self._feed.collect():
                return

    def _hand(self, handed: Handed) -> None:
        member, generation, item = handed.member, handed.generation, handed.item
        if isinstance(item, Delivery):
            if item.omission is not None:
                self._tell_of_damage(member, _skipped(generation, item.omission))
            lane = self._lanes[member]
            assert isinstance(lane, Lane)  # whoever has a stream to itself takes batches itself
            lane.fill(generation, item)
        elif isinstance(item, Omission):
            self._tell_of_damage(member, _skipped(generation, item))
        elif isinstance(item, FailedBatch):
            self._tell_of_damage(member, BatchFailed(generation, item.step, item.error))
        else:
            self._announce(member, PassEnded(generation))

    def _tell_of_damage(self, member: int, message: RecordsSkipped | BatchFailed) -> None:
        lane = self._lanes[member]
        if isinstance(lane, Lane):
            lane.wake_behind(message.generation, message.step)
        self._announce(member, message)

    def _announce(self, member: int, message: Message) -> None:
        """Send a message that the member must read before it takes the batches behind it."""
        self._lanes[member].announce()
        self._tell(member, message, ())

    # -------------------------------------------------------------------------------------------- progress

    def has_waiting(self, member: int) -> bool:
        """Whether there are batches that a member could take."""
        return self.members is not None and self.members.has_waiting(member)

    def has_moved(self, member: int) -> bool:
        """Whether a member has taken batches since this was asked last."""
        return member in self._lanes and self._lanes[member].has_moved()

    # ----------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Stop all work for the stream, and give its memory back."""
        worker_manager = self._worker_manager
        if self._own is not None:
            self._own.cancel()
        if self._probe is not None:
            worker_manager.scheduler.remove_source(self._probe)
        if self.opened is not None:
            if self.members is not None:
                self.opened.stream.stop()
                worker_manager.scheduler.remove_source(self.opened.stream)
            if self._granting is not None:
                worker_manager.detach(self._granting)
            self.opened.stream_memory.close()
        for lane in self._lanes.values():
            lane.close()

    # ------------------------------------------------------------------------------------------- report

    @property
    def memory_bytes(self) -> int:
        """Bytes of windows and slots."""
        return 0 if self.opened is None else self.opened.stream_memory.num_bytes

    def waits_for(self, member: int) -> str:
        """What a member waits for, in words."""
        if self._preparation is not None:
            return f"waits for the data set to be {self._preparation.doing}"
        return "waits for the stream to begin" if self.members is None else self.members.describe(member)

    def report(self, member: int) -> dict[str, Any]:
        """What ``loaderd status`` shows of a member: where it stands, what it has taken, what it holds."""
        had = self._lanes[member].had if member in self._lanes else Had()
        plan = None if self.opened is None else self.opened.stream.plan
        epoch, batch = (0, 0) if plan is None else plan.place_of(had.next_step)
        held = 0 if self.members is None else self.members.held_by(member)
        watched = None if self.opened is None else self.opened.stream_memory.watched
        now = None if watched is None else watched.now()
        diagnosis = None
        if watched is not None and self._group is None:
            from loaderd.observe.diagnose import diagnose_samples  # imported only when somebody asks

            diagnosis = asdict(diagnose_samples(watched.samples(), watched.facts))
        return {
            "epoch": epoch,
            "batch": batch,
            "batches": had.batches,
            "records": had.records,
            "bytes": had.records * self._record_bytes % (1 << 63),  # a consumer may write any number in its page
            "slots": self._description.options.num_slots,
            "slots_lent": held,
            "state": self.waits_for(member),
            "stream": self.number,
            "stage_s": {} if now is None else {**now.stage_s, **now.field_s},  # of the whole stream
            "waiting_seconds": 0.0 if now is None else now.wait_s,
            "diagnosis": diagnosis,
        }


def _skipped(generation: int, omission: Omission) -> RecordsSkipped:
    return RecordsSkipped(generation, omission.step, omission.errors, omission.num_skipped)
