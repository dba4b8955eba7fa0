"""A worker's end of a page, as the tests of the daemon move it: step by step, and without a process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from loaderd.client.page_consumer import PageConsumer
from loaderd.daemon.delivery.notes import Note
from loaderd.daemon.delivery.opened_stream import OpenedStream
from loaderd.daemon.delivery.stream import Stream
from loaderd.daemon.pool.tasks import Task
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.ipc.messages import BatchFailed, RecordsSkipped
from loaderd.ipc.worker_messages import Attach, LoadFault, LoadTask, News
from loaderd.options import Remainder, StreamOptions
from loaderd.plan.batches import BatchPlan
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.rows import DatasetRows
from loaderd.plan.shares import EpochRemainder, HostShare
from loaderd.shm.page import NEVER, Page, key_of, words_of
from loaderd.worker.page_producer import Claim, PageProducer


def new_page(num_slots: int, num_seats: int) -> Page:
    """On memory of its own."""
    return Page(np.zeros(8 * words_of(num_slots, num_seats), np.uint8), num_slots, num_seats)


def plan_of(
    num_records: int,
    batch_size: int,
    window: int,
    *,
    remainder: Remainder = "short",
    epochs: int | None = 1,
    block_records: int = 10,
    first_epoch: int = 0,
) -> PassPlan:
    """Of one host, shuffled."""
    batches = BatchPlan(HostShare(EpochRemainder(num_records), 0, 1, window), batch_size, remainder, epochs)
    counts = np.full(num_records // block_records, block_records)
    return PassPlan(DatasetRows(counts, 0, True), batches, 0, True, first_epoch)


def stream_of(
    plan: PassPlan | Callable[[Pass], PassPlan],
    page: Page,
    *,
    number: int = 0,
    num_arenas: int = 2,
    num_workers: int | None = None,
    skip_damaged: bool = False,
    error_context: Any = lambda records, error, **_: error,
) -> Stream:
    """Of passes with this plan. An error stays as it is, whatever it is of, without another ``error_context``."""
    options = StreamOptions(
        1, workers=num_workers or page.num_seats, on_corrupt="skip_any" if skip_damaged else "raise"
    )
    places = lambda slices, seed: ()  # noqa: E731
    data: Any = SimpleNamespace(error_context=error_context, places=places, is_far_away=False, per_passing=1.0)
    return Stream(number, plan if callable(plan) else lambda _: plan, page, num_arenas, options, data)


class Opened(OpenedStream):
    """As far as workers are told of a stream: it has no data and no memory of its own.

    Of the ``worker_manager``, it needs ``tell`` and the ``bell``.
    """

    def __init__(
        self, number: int, stream: Stream, worker_manager: WorkerManager, tell_consumers: Callable[[], None]
    ) -> None:
        self.number, self.stream, self.page = number, stream, stream.page
        self.error = None
        self.stream_memory: Any = SimpleNamespace(bells=[worker_manager.bell])
        self._worker_manager = worker_manager
        self._tell_consumers = tell_consumers  # type: ignore[method-assign]
        self._missing_s = 0.0

    def attach_message(self, seat: int) -> tuple[Attach, tuple[int, ...]]:
        sizes = self.page.num_slots, self.page.num_seats, 0
        return Attach(self.number, b"", b"", 0, *sizes, self.page.news(seat)), ()


def answer_to(task: Task, faults: Sequence[LoadFault] = ()) -> list[LoadFault] | None:
    """The result of a load, or of a trial."""
    return list(faults) if isinstance(task.work, LoadTask) else None


def free_arenas(stream: Stream) -> list[int]:
    """The arenas that no window has, in order.

    Only the stream knows: one that is lost shows in nothing but windows that are loaded later than they could be.
    """
    return sorted(stream._windows._free_arenas)


class Delivery(NamedTuple):
    """Batch ``step``, of ``num_records`` records, is in ``slot``. ``omission``: what is left out of it."""

    step: int
    slot: int
    num_records: int
    omission: RecordsSkipped | None = None


class Taker:
    """The only consumer of a stream, which takes what there is. What it lacks is read from the stream itself."""

    def __init__(self, stream: Stream, bell: int, seat_bells: Sequence[int]) -> None:
        self.consumer = PageConsumer(stream.page, [bell, bell])
        self.consumer._bells = seat_bells  # type: ignore[assignment] # more workers may come
        self.ended = True
        self._stream = stream
        self._notes: dict[int, Note] = {}

    def start(self, generation: int, pass_: Pass, step: int) -> None:
        self.stop()
        self.consumer.begin(generation, step)
        self._stream.page.start_at(0, key_of(generation, step), generation)
        self.consumer.has_batch()  # it goes there
        self._stream.start(generation, pass_, step)
        self.ended = False

    def stop(self) -> None:
        self._stream.stop()
        self._notes.clear()
        self.ended = True
        self._stream.page.start_at(0, NEVER, 0)  # else what workers make yet would fill all slots

    def take(self) -> Delivery | BatchFailed | None:
        """The next batch, or why it cannot be had; None: it is not there, or the pass is over."""
        self._notes.update((note.step, note) for note in self._stream.notes)
        self._stream.notes.clear()
        plan, step = self._stream.plan, self.consumer.step
        if self.ended or plan is None:
            return None
        self.ended = step == plan.num_steps
        note = self._notes.get(step)
        if isinstance(note, BatchFailed):
            self.consumer.skip()
            return note
        if self.ended or (not self.consumer.has_batch() and self.consumer.fall_asleep()):
            return None
        return Delivery(step, *self.consumer.take(), note)  # type: ignore[misc]


class PageWorker:
    """The worker of a seat: it reads what it is told no sooner than it must, as a process that is slow."""

    def __init__(self, page: Page, seat: int, news: int, bells: Sequence[int]) -> None:
        self.filler = PageProducer(page, seat, news, bells)
        self.unread: deque[tuple[News, Any]] = deque()

    def tell(self, message: News, memory: Any = None) -> None:
        """It is on its way; that it is, the page says already. ``memory`` comes with UseColumn."""
        self.unread.append((message, memory))

    def read(self) -> bool:
        """Read the next message, if it has come."""
        if self.unread:
            self.filler.received(*self.unread.popleft())
            return True
        return False

    def claim(self) -> Claim | None:
        """What it makes next."""
        while self.filler.has_news:
            assert self.read(), "nobody waits for what was never sent"
        return self.filler.claim()
