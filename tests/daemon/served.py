"""A server's daemon, started as the supervisor does it, and consumers that speak the protocol by hand."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import loaderd
from loaderd.client.page_consumer import PageConsumer
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import (
    PROTOCOL,
    AskStatus,
    Bye,
    DataListed,
    Failed,
    Hello,
    Message,
    Opened,
    Serve,
    StartPass,
    Status,
    Subscribe,
    Welcome,
)
from loaderd.ipc.spawn import start_process
from loaderd.ipc.subscription import Subscription
from loaderd.options import StreamOptions
from loaderd.plan.passes import Pass
from loaderd.plan.positions import PassSequence
from loaderd.schema.wire import from_wire as schema_from_wire
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout
from loaderd.shm.page import Page

Kind = TypeVar("Kind", bound=Message)
_LIMIT_S = 60.0


class Consumer:
    """One connection; ``receive`` waits for a message of a class, and keeps what comes before it in ``passed``.

    Batches it takes of the page of its stream, as a loader does.
    """

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.channel = Channel(self.socket)
        self.passed: list[Message] = []
        self._arrived: list[Message] = []
        self._bells: list[int] = []

    def send(self, *messages: Message) -> Consumer:
        for message in messages:
            self.channel.send(message)
        return self

    def next(self, limit_s: float = _LIMIT_S) -> Message:
        until_s = time.monotonic() + limit_s
        while not self._arrived:
            assert select.select([self.socket], [], [], max(0.0, until_s - time.monotonic()))[0], "nothing came"
            self._arrived += self.channel.receive()
        return self._arrived.pop(0)

    def receive(self, kind: type[Kind], limit_s: float = _LIMIT_S) -> Kind:
        while True:
            message = self.next(limit_s)
            if isinstance(message, kind):
                return message
            if isinstance(message, Failed):
                raise message.error
            self.passed.append(message)

    def hello(self, dataset: str = "train") -> Welcome:
        return self.send(Hello(PROTOCOL, loaderd.__version__, dataset)).receive(Welcome)

    def subscribe(self, dataset: str = "train", batch_size: int = 10, **options: Any) -> Consumer:
        """Until the stream is there, with its memory mapped."""
        self.schema = schema_from_wire(self.hello(dataset).dataset["schema"])
        self.send(Subscribe(Subscription(batch_size, **options).to_wire(), None))
        num_slots, num_seats, num_members, number = self.receive(Opened).page
        (listed,) = (message for message in self.passed if isinstance(message, DataListed))
        num_records = listed.facts["num_records"]
        course_options = StreamOptions(batch_size, shard=options.get("shard", (0, 1)))
        self.pass_sequence = PassSequence(course_options, num_records, num_records, {}, None)
        self.memory, words = (SharedMemory(self.channel.take_fd()) for _ in range(2))
        for memory in (self.memory, words):
            memory.close_fd()
        if num_members:
            column = SharedMemory(self.channel.take_fd())
            column.close_fd()
            self.column = column.bytes.data.cast("q")
        self._bells = [self.channel.take_fd() for _ in range(2 + num_seats)]
        self.page = Page(words.bytes, num_slots, num_seats, num_members)
        self.taker = PageConsumer(self.page, self._bells, number, self.column if num_members else None)
        self.layout = SlotLayout(self.schema.specs, batch_size)
        return self

    def ids(self, slot: int, num_records: int) -> list[int]:
        found: list[int] = self.layout.views(self.memory.bytes, slot)["id"][:num_records].tolist()
        return found

    def start(self, pass_: Pass, generation: int = 1) -> Consumer:
        self.taker.begin(generation, 0)
        return self.send(StartPass(generation, pass_, 0))

    def wait_for_batch(self, limit_s: float = _LIMIT_S) -> Consumer:
        """Until one can be taken. Raises what the server says instead."""
        while not self.taker.has_batch():
            if self.taker.fall_asleep():
                arrived = select.select([self.socket, self._bells[0]], [], [], limit_s)[0]
                assert arrived, "nothing came"
                if self.socket in arrived:
                    self._arrived += self.channel.receive()
                for message in self._arrived:
                    if isinstance(message, Failed):
                        raise message.error
            self.taker.wake_up()
        return self

    def read(self, epochs: int = 1, pause_s: float = 0.0) -> list[list[int]]:
        """The ids of each batch of a pass, from its beginning."""
        pass_ = Pass(0, epochs)
        num_steps = self.pass_sequence.batches(pass_).num_steps
        assert num_steps is not None
        self.start(pass_)
        found = []
        while self.taker.step < num_steps:
            slot, num_records = self.wait_for_batch().taker.take()  # type: ignore[misc]
            found.append(self.ids(slot, num_records))
            time.sleep(pause_s)
            self.taker.release(slot)
        return found

    def is_closed(self) -> bool:
        """Whether the server closes the connection, after what else it says."""
        try:
            while True:
                self.next()
        except ChannelClosed:
            return True

    def close(self) -> None:
        self.channel.close()
        for bell in self._bells:
            os.close(bell)
        self._bells = []


class ServedDaemon:
    """The daemon, and a client's path to it."""

    def __init__(self, process: subprocess.Popen[bytes], supervisor: Channel, path: Path) -> None:
        self.process = process
        self.supervisor = supervisor
        self.path = path

    def connect(self) -> Consumer:
        return Consumer(self.path)

    def subscribe(self, *arguments: Any, **options: Any) -> Consumer:
        return self.connect().subscribe(*arguments, **options)

    def report(self) -> dict[str, Any]:
        self.supervisor.send(AskStatus())
        return self.answer(Status).report

    def answer(self, kind: type[Kind]) -> Kind:
        while True:
            for message in self.supervisor.receive():
                if isinstance(message, Failed):
                    raise message.error
                if isinstance(message, kind):
                    return message

    def wait_for_consumers(self, number: int) -> None:
        until_s = time.monotonic() + _LIMIT_S
        while len(self.report()["consumers"]) != number:
            assert time.monotonic() < until_s, self.report()["consumers"]
            time.sleep(0.01)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def goodbye(consumer: Consumer) -> str:
    """Why the server ends the connection, if it says Bye."""
    return consumer.receive(Bye).text


@contextlib.contextmanager
def serve(folder: Path, module: str, source: str, *names: str, **settings: Any) -> Iterator[ServedDaemon]:
    """A daemon that serves data sets of a module of that ``source``."""
    (folder / f"{module}.py").write_text(source)
    path = folder / f"{module}.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener, pytest.MonkeyPatch.context() as patch:
        listener.bind(str(path))
        listener.listen(64)
        patch.syspath_prepend(str(folder))
        process, sock = start_process("loaderd.daemon.server_daemon")
        supervisor = Channel(sock)
        chosen = {
            "targets": [f"{module}:{name}" for name in names],
            "workers": 2,
            "max_consumers": 64,
            "max_held_batches": 64,
            "max_memory": None,
            "idle_timeout": None,
            "log_format": "lines",
            "manifests": None,
            "current": {},
            **settings,
        }
        supervisor.send(Serve(chosen), (listener.fileno(),))
        daemon = ServedDaemon(process, supervisor, path)
        try:
            daemon.answer(Status)
            yield daemon
        finally:
            supervisor.close()
            process.wait(_LIMIT_S)
            path.unlink()


def flat(batches: list[list[int]]) -> list[int]:
    return np.concatenate(batches).tolist() if batches else []
