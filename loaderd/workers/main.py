"""The worker process: takes a task, does it, says so. Started by the daemon, ends with it."""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
import time
import traceback

from loaderd.errors import LoaderdError, WorkerError, to_wire
from loaderd.machine import be_killed_first, remedy
from loaderd.memory.shared import SharedMemory
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import Message
from loaderd.protocol.worker_messages import (
    ATTACH_TASK,
    NO_STREAM,
    Advanced,
    Attach,
    Attached,
    Detach,
    Done,
    FillTask,
    IndexTask,
    ListTask,
    LoadTask,
    ProbeTask,
    TaskFailed,
)
from loaderd.shards.files import ShardFile
from loaderd.workers.execute import Executor, index_shard, list_set

_TELL_EVERY_S = 0.2

AnyTask = ListTask | IndexTask | ProbeTask | LoadTask | FillTask


class Worker:
    """Answers each task message with Done or TaskFailed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._executors: dict[int, Executor] = {}
        self._task = ATTACH_TASK
        self._told_s = 0.0

    def attach(self, message: Attach, windows: SharedMemory, slots: SharedMemory) -> None:
        """Take over a stream: its description, its files, its memory."""
        self.detach(message.stream)  # it may come again, with other files
        files = [ShardFile(*file) for file in message.files]
        self._executors[message.stream] = Executor(
            pickle.loads(message.description),
            files,
            message.compressions,
            message.max_rows,
            windows,
            slots,
            self._tell,
        )

    def detach(self, stream: int) -> None:
        """Forget a stream, if there is one of that number."""
        if stream in self._executors:
            self._executors.pop(stream).close()

    def _try_attach(self, message: Attach) -> Message:
        try:
            windows, slots = (SharedMemory(self._channel.take_fd()) for _ in range(2))
            windows.close_fd()
            slots.close_fd()
            self.attach(message, windows, slots)
        except LoaderdError as error:
            return TaskFailed(ATTACH_TASK, message.stream, to_wire(error))
        except Exception as error:
            failure = WorkerError(
                f"a worker cannot take the schema over: {type(error).__name__}: {error}",
                hint="A derived field's function must be importable, or picklable by value, in another process.",
                traceback=traceback.format_exc(),
            )
            return TaskFailed(ATTACH_TASK, message.stream, to_wire(failure))
        return Attached(message.stream)

    def _tell(self, done_bytes: int) -> None:
        """Say, now and then, that a long task gets on."""
        now_s = time.monotonic()
        if now_s - self._told_s > _TELL_EVERY_S:
            self._told_s = now_s
            self._channel.send(Advanced(self._task, done_bytes))

    def answer(self, task: AnyTask) -> Message:
        """Do the task; whatever goes wrong in it becomes an answer."""
        self._task = task.task
        try:
            return Done(task.task, self._do(task))
        except LoaderdError as error:
            return TaskFailed(task.task, NO_STREAM, to_wire(error))
        except Exception as error:
            failure = WorkerError(
                f"a worker failed at {type(task).__name__}: {type(error).__name__}: {error}",
                hint=remedy(error),
                traceback=traceback.format_exc(),
            )
            return TaskFailed(task.task, NO_STREAM, to_wire(failure))

    def _do(self, task: AnyTask) -> object:
        if isinstance(task, ListTask):
            return list_set(task, self._tell)
        if isinstance(task, IndexTask):
            return index_shard(task, self._tell)
        executor = self._executors[task.stream]
        if isinstance(task, LoadTask):
            return executor.load(task)
        if isinstance(task, ProbeTask):
            return executor.probe(task)
        executor.fill(task)
        return None

    def run(self) -> None:
        """Until the daemon closes the channel."""
        self._channel.send(Attached(NO_STREAM))
        while True:
            for message in self._channel.receive():
                if isinstance(message, Attach):
                    self._channel.send(self._try_attach(message))
                elif isinstance(message, Detach):
                    self.detach(message.stream)
                elif isinstance(message, AnyTask):
                    self._channel.send(self.answer(message))


def main(sock: socket.socket) -> None:
    """What a worker process does; it speaks with the daemon through ``sock``."""
    be_killed_first()
    if "numpy.random" in sys.modules:  # a fork's state is that of all other workers
        sys.modules["numpy.random"].seed()
    with contextlib.suppress(ChannelClosed):
        Worker(Channel(sock)).run()
