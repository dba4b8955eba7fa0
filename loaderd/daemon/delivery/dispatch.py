"""A stream in the eyes of the workers: what they need, what they may make, what becomes of a dead worker's claims."""

from __future__ import annotations

from collections.abc import Callable

from loaderd.daemon.delivery.opened_stream import OpenedStream
from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.errors import LoaderdError
from loaderd.ipc.worker_messages import Attach, FillFailed, Granted, UseColumn
from loaderd.shm.page import Page, barrier, ring
from loaderd.snapshots import Outage


class Dispatch:
    """See the module's docstring; for its methods, :class:`~loaderd.daemon.pool.worker_manager.Attachable`.

    ``tell_consumers`` sends what there is to tell: consumers must know what is wrong with a batch before it is made.
    """

    def __init__(
        self, opened: OpenedStream, worker_manager: WorkerManager, tell_consumers: Callable[[], None]
    ) -> None:
        self.number = opened.number
        self.error: LoaderdError | None = None
        """Why the stream cannot go on: a worker could not be attached to it, or those that it needs are missing."""
        self._missing_s = 0.0
        self._opened = opened
        self._stream = opened.stream
        self._worker_manager = worker_manager
        self._tell_consumers = tell_consumers

    @property
    def page(self) -> Page:
        return self._opened.page

    def attach_message(self, seat: int) -> tuple[Attach, tuple[int, ...]]:
        return self._opened.attach_message(seat), self._opened.stream_memory.worker_fds

    def attach_failed(self, error: LoaderdError) -> None:
        self.error = self.error or error

    def tick(self, seconds: float, is_waited_for: bool) -> None:
        """So much time has passed. A stream does not wait for ever for slots whose workers cannot be replaced."""
        shortage = self._worker_manager.shortage(self.page) if is_waited_for else None
        self._missing_s = 0.0 if shortage is None else self._missing_s + seconds
        limit_s = self._worker_manager.stall_timeout
        if limit_s is not None and self._missing_s >= limit_s:
            self.error = self.error or shortage

    def granted_message(self) -> Granted:
        """What a worker that is attached now may make. Consumers are told first what there is to tell."""
        self._tell_consumers()
        return Granted(self.number, self._stream.generation, [*self._stream.granted])

    def say(self) -> None:
        """Tell the consumers what there is to tell, and all workers what has changed in what they may make."""
        self._tell_consumers()
        while self._stream.grants:
            self._worker_manager.tell(self, self._stream.grants.popleft())

    def renew_column(self, column: int) -> None:
        """Give a column new memory, which no member before can write to. Raises DaemonError where there is none."""
        fd = self._opened.stream_memory.renew_column(column)
        self._worker_manager.tell(self, UseColumn(self.number, column), (fd,))

    def is_under_way(self, key: int) -> bool:
        return self._stream.is_under_way(key)

    def not_made(self, failed: FillFailed) -> None:
        self._stream.not_made(failed)

    def unanswered(self, seat: int, outage: Outage | None) -> None:
        self._stream.storage.report(seat, outage)

    def read_hangs(self, seat: int, for_s: float) -> None:
        self._stream.storage.read_hangs(seat, for_s)

    def lose_claims(self, seat: int, reason: str, stalled: bool) -> None:
        """The worker of a seat is lost: give up its claims, so that others make these batches, if anybody may."""
        page, stream = self.page, self._stream
        stream.storage.report(seat, None)
        stream.storage.read_hangs(seat, 0.0)
        stream.lost_at(page.makes(seat), reason, stalled)
        given_up = [slot for slot, key in page.unfinished(seat) if not stream.keeps_slot(key)]
        page.say_makes(seat, 0)
        page.say_task(seat, None)
        page.say_sleeps(seat, False)
        self.say()  # workers must know what is withdrawn before they can claim it again
        for slot in given_up:
            page.claim(slot, 0)
        barrier()
        stream.wake_workers()
        self.say()
        for bell in self._opened.stream_memory.bells:  # the worker may have filled a slot, and died before it rang
            ring(bell)
