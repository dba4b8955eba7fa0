"""One stream and its workers, of which nobody is a process, and a consumer that takes all."""

from __future__ import annotations

from collections.abc import Iterator

from loaderd.ipc.worker_messages import LoadTask
from loaderd.options import Remainder
from loaderd.plan.passes import Pass
from loaderd.worker.page_producer import Claim
from tests.daemon.page_workers import Delivery, Taker, new_page, plan_of, stream_of
from tests.daemon.worker_manager_run import Crew, Hand

STALL_TIMEOUT_S = 8.0
STALL_TICKS = 8


class Line:
    """A stream whose consumer takes all and gives it back at once, and the ``workers`` of it alone."""

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        window: int,
        *,
        workers: int = 1,
        slots: int = 8,
        remainder: Remainder = "short",
        epochs: int = 1,
    ) -> None:
        self.plan = plan_of(num_records, batch_size, window, remainder=remainder, epochs=epochs)
        self.crew = Crew(STALL_TIMEOUT_S)
        num_arenas = max(2, self.plan.batches.max_windows_of_a_batch)
        self.stream = stream_of(self.plan, new_page(slots, workers), num_arenas=num_arenas)
        self.opened = self.crew.attach(self.stream)
        self.taker = Taker(self.stream, self.crew.worker_manager.bell, self.crew.pool.bells)
        self.crew.start(workers)
        for hand in self.crew.hands.values():
            hand.start()
        self.begun: list[LoadTask | Claim] = []
        self.taken: list[Delivery] = []
        self.keeps = False
        self.taker.start(1, Pass(0, epochs), 0)
        self.listen()

    @property
    def ended(self) -> bool:
        """Whether all batches have come."""
        return self.taker.ended

    def listen(self) -> None:
        """What the daemon does, and the consumer, until nothing wakes them."""
        self.crew.hear()
        self._listen_once()
        while self.crew.hear():
            self._listen_once()

    def _listen_once(self) -> None:
        self.stream.look()
        while (item := self.taker.take()) is not None:
            assert isinstance(item, Delivery)
            self.taken.append(item)
            if not self.keeps:
                self.taker.consumer.release(item.slot)
        self.opened.say()
        self.crew.assign()

    def begin(self, hand: Hand) -> None:
        hand.begin()
        if hand.job is not None:
            what = hand.job.claim or (hand.job.task and hand.job.task.work)
            assert isinstance(what, (LoadTask, Claim))
            self.begun.append(what)

    def work(self) -> Iterator[LoadTask | Claim]:
        """Until nobody has anything to do: what workers begin with, when they do. One after the other gets on."""
        idle = 0
        while idle < 2:
            idle += 1
            for hand in self.crew.hands.values():
                if hand.job is not None:
                    idle = 0
                    hand.end()
                    self.listen()
                before = len(self.begun)
                self.begin(hand)
                yield from self.begun[before:]

    def tick(self, times: int) -> list[int]:
        """Moments pass; who was lost."""
        return [worker for _ in range(times) for worker in self.crew.tick()]


def at_a_batch(line: Line) -> Hand:
    """The worker that comes to make a batch first."""
    for what in line.work():
        if isinstance(what, Claim):
            break
    return next(hand for hand in line.crew.hands.values() if hand.job and hand.job.claim)
