"""The page of a stream, the workers at its seats, its consumer, and what the daemon says to both: without processes.

What is said lies unread until somebody reads it, as in a socket. Who sleeps does nothing until it is rung for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from loaderd.client.page_consumer import PageConsumer
from loaderd.daemon.delivery.notes import Note
from loaderd.errors import LoaderdError
from loaderd.ipc.messages import BatchFailed, RecordsSkipped
from loaderd.ipc.worker_messages import FillFailed, News
from loaderd.shm.page import Page, barrier, new_bell, split_key
from loaderd.worker.page_producer import Claim
from tests.daemon.page_workers import Delivery, Opened, PageWorker, new_page
from tests.helpers.bells import was_rung


class Hand(PageWorker):
    """The worker of a seat, as far as it makes batches."""

    def __init__(self, page: Page, seat: int, bell: int, consumer_bell: int) -> None:
        super().__init__(page, seat, page.news(seat), [consumer_bell])
        self.unheard: deque[FillFailed] = deque()
        """Of which the daemon has not heard."""
        self.at: Claim | None = None
        """What it makes."""
        self.asleep = False
        self._bell = bell

    def read_some(self, most: int = 1000) -> None:
        """Read so much of what the daemon has said."""
        for _ in range(most):
            if not self.read():
                return
            self._wake_up()

    def _wake_up(self) -> None:
        self.asleep = False
        self.filler.page.say_sleeps(self.filler.seat, False)

    def try_claim(self) -> Claim | None:
        """Claim a batch, if it is at none, and need not read first; fall asleep where there is none."""
        page, seat = self.filler.page, self.filler.seat
        if self.asleep and not (was_rung(self._bell) or self.unread):
            return None
        assert self.filler.has_news == bool(self.unread), "the page says how much is on its way"
        if self.at is not None or self.unread:
            return None
        self.at = self.filler.claim()
        self.asleep = self.at is None
        page.say_sleeps(seat, self.asleep)
        if self.asleep:
            barrier()
            self.at = self.filler.claim()  # a slot may have come back in front of this
            self.asleep = self.at is None
        return self.at

    def made(self) -> None:
        """Its batch is there."""
        assert self.at is not None
        claim, self.at = self.at, None
        self.filler.made(claim)

    def not_made(
        self, error: LoaderdError, faults: Mapping[int, LoaderdError] | None = None, all_faults: bool = True
    ) -> None:
        """Its batch cannot be made, because of these rows; the daemon is told."""
        assert self.at is not None
        claim, self.at = self.at, None
        self.filler.not_made(claim)
        of_rows = dict(faults or {})
        omit = list(claim.batch.omit)
        self.unheard.append(FillFailed(0, *claim.place, omit, of_rows, all_faults, error))


class Consumer:
    """Takes batches as a client does: what the daemon has said of a batch is read before it is taken."""

    def __init__(self, page: Page, bell: int, daemon_bell: int, bells: list[int]) -> None:
        self.taker = PageConsumer(page, [bell, daemon_bell, *bells])
        self.unread: deque[Note] = deque()
        self.asleep = False
        self._page = page
        self._bell = bell
        self._num_read = self._generation = 0
        self._broken: dict[int, BatchFailed] = {}
        self._omissions: dict[int, RecordsSkipped] = {}

    def begin(self, generation: int, step: int) -> None:
        """Take from here on."""
        self._generation = generation
        self._broken.clear()
        self._omissions.clear()
        self.wake_up()
        self.taker.begin(generation, step)

    def wake_up(self) -> None:
        """It is told something."""
        if self.asleep:
            self.taker.wake_up()
            was_rung(self._bell)
        self.asleep = False

    def next(self) -> Delivery | BatchFailed | None:
        """The next batch, or why it cannot be had; None: it is not there, and the consumer sleeps."""
        if self.asleep and not (was_rung(self._bell) or self.unread):
            return None
        self.wake_up()
        self._read()
        is_there, step = self.taker.has_batch(), self.taker.step
        if step in self._broken:
            self.taker.skip()
            return self._broken.pop(step)
        if is_there or not self.taker.fall_asleep():
            return Delivery(step, *self.taker.take(), self._omissions.pop(step, None))  # type: ignore[misc]
        self.asleep = True
        return None

    def _read(self) -> None:
        while self._page.consumer_news(0) != self._num_read:
            self._num_read += 1
            note = self.unread.popleft()
            if note.generation != self._generation:
                continue
            if isinstance(note, BatchFailed):
                self._broken[note.step] = note
            else:
                self._omissions[note.step] = note


class Floor:
    """All of them: the page, a worker at each seat, the consumer; and what the daemon does for them."""

    def __init__(self, num_slots: int, num_seats: int) -> None:
        self.page = new_page(num_slots, num_seats)
        self.daemon_bell, self.consumer_bell = new_bell(), new_bell()
        self.bells = [new_bell() for _ in range(num_seats)]
        self.consumer = Consumer(self.page, self.consumer_bell, self.daemon_bell, self.bells)
        self.hands = [self._new_hand(seat) for seat in range(num_seats)]
        self.stream: Any = None
        """Must be set before anything is said."""

    def close(self) -> None:
        """Give the bells back."""
        for bell in (self.daemon_bell, self.consumer_bell, *self.bells):
            os.close(bell)

    def _new_hand(self, seat: int) -> Hand:
        return Hand(self.page, seat, self.bells[seat], self.consumer_bell)

    @property
    def _opened(self) -> Opened:
        def tell_all(_: object, message: News) -> None:
            for seat in range(len(self.hands)):
                self._tell(seat, message)

        manager: Any = SimpleNamespace(bell=self.consumer_bell, tell=tell_all)
        return Opened(0, self.stream, manager, self._tell_consumer)

    def say(self) -> None:
        """What ``Session.go_on`` does."""
        self.stream.look()
        self._opened.say()

    def _tell_consumer(self) -> None:
        while self.stream.notes:
            self.page.add_consumer_news()
            self.consumer.unread.append(self.stream.notes.popleft())

    def _tell(self, seat: int, said: News) -> None:
        self.page.add_news(seat)
        self.hands[seat].tell(said)

    def wake_daemon(self) -> bool:
        """Have the daemon look, if its bell was rung; whether it was."""
        rung = was_rung(self.daemon_bell)
        if rung:
            self.say()
        return rung

    def hear(self, seat: int) -> None:
        """The daemon hears what a worker could not make."""
        hand = self.hands[seat]
        while hand.unheard:
            self.stream.not_made(hand.unheard.popleft())
        self.say()

    def lose(self, seat: int, reason: str, stalled: bool = False) -> None:
        """The worker of a seat, which has been heard to the end, is lost; another one takes the seat."""
        self.hear(seat)
        self._opened.lose_claims(seat, reason, stalled)
        self.hands[seat] = self._new_hand(seat)
        self._tell(seat, self._opened.granted_message())
        self.consumer.wake_up()  # it is warned
        self.say()

    def steps_claimed(self, seat: int) -> list[int]:
        """Of batches that may be made, those which a worker makes, or keeps a slot for."""
        found = []
        for _, key in self.page.unfinished(seat):
            if self.stream.is_under_way(key):
                found.append(split_key(key)[1])
        return found
