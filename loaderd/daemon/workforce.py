"""The workers and what they are given: messages to them, messages from them, and their replacement.

::

    sources of tasks ──► Scheduler (who does what) ──► Workforce (how it is said) ──► worker processes
                                                          └ every worker is told of every stream: Attach, Detach

Who listens to the sockets hands over what comes from a worker, and calls :meth:`Workforce.tick` and
:meth:`Workforce.assign` after each round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from loaderd.daemon.outgoing import Fault
from loaderd.daemon.scheduler import Scheduler
from loaderd.daemon.tasks import LoadWork, Task, TaskSource
from loaderd.daemon.wires import Wires
from loaderd.daemon.worker_pool import WorkerPool
from loaderd.errors import LoaderdError, from_wire
from loaderd.protocol.messages import Message
from loaderd.protocol.worker_messages import ATTACH_TASK, Advanced, Attach, Attached, Detach, Done, TaskFailed

_MAX_TICK_S = 1.0
_MIN_TICKS = 8
# To start, a worker imports what the schema needs.
_MIN_START_TIMEOUT_S = 60.0

MakeMessage = Callable[[Task], Message]


class Attachable(Protocol):
    """A stream that workers are to know of."""

    number: int

    def attach_message(self) -> tuple[Attach, tuple[int, ...]]:
        """What a worker needs, and the descriptors that go with it."""

    def attach_failed(self, error: LoaderdError) -> None:
        """A worker cannot take it over."""


class Workforce:
    """See the module's docstring.

    ``warn`` is told of every worker that is replaced.
    """

    def __init__(
        self, wires: Wires, pool: WorkerPool, stall_timeout: float | None, warn: Callable[[str], None]
    ) -> None:
        self.scheduler = Scheduler()
        self.pool = pool
        self.tick_s = _MAX_TICK_S
        if stall_timeout is not None:
            self.tick_s = min(_MAX_TICK_S, stall_timeout / _MIN_TICKS)
        self.stall_timeout = stall_timeout
        self._wires = wires
        self._warn = warn
        self._streams: dict[int, Attachable] = {}
        self._messages_of: dict[TaskSource, MakeMessage] = {}

    # ---------------------------------------------------------------------------------- what there is to do

    def add_source(self, source: TaskSource, message_of: MakeMessage) -> None:
        """Have the tasks of ``source`` done; ``message_of`` puts them in words."""
        self._messages_of[source] = message_of
        self.scheduler.add_source(source)

    def remove_source(self, source: TaskSource) -> None:
        """Forget a source; what its tasks still give is ignored by the source itself."""
        self.scheduler.remove_source(source)
        del self._messages_of[source]

    def attach(self, stream: Attachable) -> None:
        """Have all workers know of a stream, or of other files of it, the present workers and those to come."""
        self._streams[stream.number] = stream
        for worker in self.pool.numbers:
            self._tell_of(worker, stream)

    def detach(self, stream: Attachable) -> None:
        """Have all workers forget a stream."""
        if self._streams.pop(stream.number, None) is not None:
            for worker in self.pool.numbers:
                self._wires.post(worker, Detach(stream.number))

    def _tell_of(self, worker: int, stream: Attachable) -> None:
        self._wires.post(worker, *stream.attach_message())
        self.scheduler.unready(worker)

    # ------------------------------------------------------------------------------------------ workers

    def start(self, number: int) -> None:
        """Have at least so many workers."""
        while len(self.pool.numbers) < number:
            self._start_worker()

    def _start_worker(self) -> None:
        worker, channel, pidfd = self.pool.start()
        self._wires.add(worker, channel, pidfd)
        self.scheduler.add_worker(worker)
        for stream in self._streams.values():
            self._tell_of(worker, stream)

    def received(self, worker: int, messages: list[Message] | None) -> None:
        """What has come from a worker; None: it is dead."""
        if messages is None:
            self._lose(worker)
            return
        for message in messages:
            if isinstance(message, Attached):
                self.scheduler.ready(worker)
                continue
            if isinstance(message, Advanced):
                self.scheduler.advanced(worker, message.task, message.done_bytes)
            elif isinstance(message, Done):
                self.scheduler.end_task(worker, message.task, self._result_of(message))
            elif isinstance(message, TaskFailed):
                self._failed(worker, message)
            self.pool.achieved()

    def _failed(self, worker: int, message: TaskFailed) -> None:
        error = from_wire(message.error)
        if message.task != ATTACH_TASK:
            self.scheduler.end_task(worker, message.task, None, error)
            return
        self.scheduler.ready(worker)
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.attach_failed(error)

    def _result_of(self, message: Done) -> Any:
        if isinstance(self.scheduler.work_of(message.task), LoadWork):
            return [Fault(tuple(places), from_wire(error)) for places, error in message.result]
        return message.result

    def silent(self, source: TaskSource, limit_s: float) -> Task | None:
        """A task of ``source`` that a worker is at, and of which nothing has come for so long."""
        return self.scheduler.silent(source, math.ceil(limit_s / self.tick_s))

    def tick(self) -> None:
        """``tick_s`` have passed, in which this process ran: replace workers that have stalled."""
        self.scheduler.tick()
        timeout_s = self.stall_timeout
        if timeout_s is None:
            return
        limit = math.ceil(timeout_s / self.tick_s)
        start_limit = math.ceil(max(timeout_s, _MIN_START_TIMEOUT_S) / self.tick_s)
        for worker in self.scheduler.stalled(limit, start_limit):
            self._lose(worker, f"made no progress for {timeout_s:g} s")

    def _lose(self, worker: int, stalled: str = "") -> None:
        """A worker is dead, or has ``stalled``: another one takes its place."""
        tasks, pid = self.scheduler.tasks_of(worker), self.pool.pid_of(worker)
        self._wires.remove(worker)
        reason = self.pool.bury(worker)
        at = f" at {tasks[0].work}" if tasks else ""
        self.scheduler.lose_worker(worker, stalled or reason, bool(stalled))
        self._start_worker()
        self._warn(f"worker process {pid} {stalled or reason}{at}; another one does its work again")

    def assign(self) -> None:
        """Give out what can be given out."""
        for worker, task in self.scheduler.assign():
            self._wires.post(worker, self._messages_of[task.source](task))
