"""A server as its user starts it, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.process_tree import process_tree

from loaderd.ipc.channel import Channel
from loaderd.ipc.messages import PROTOCOL, AskStatus, Hello, Message, Status
from loaderd.processes import name_of
from loaderd.version import VERSION

COMMAND = str(Path(sys.executable).with_name("loaderd"))
_LIMIT_S = 60.0  # of waits for what comes at once, unless the machine is very busy

MODULE = """
import loaderd
schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)
train = loaderd.Dataset("shards/*.tfrecord", schema)
valid = loaderd.Dataset("shards/000.tfrecord", schema, shuffle=False)
"""


class Server:
    """``loaderd serve``, run in ``folder``, with its log as JSON. ``unix``: its socket; None: one in the folder.

    ``network``: it listens at a port of loopback, and says how it is at another one. ``through``: a command that runs
    a command.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        unix: str | None = None,
        network: bool = False,
        through: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.path = unix or str(folder / "x.sock")
        where = ["--unix", self.path]
        if network:
            where = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
            where += ["--health", "127.0.0.1:0", "--state", str(folder / "state")]
        self.process = subprocess.Popen(
            [*through, COMMAND, "serve", *arguments, *where, "--log-format", "json"],
            cwd=folder,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        """All lines so far."""
        self.said: list[str] = []
        """Their texts."""
        self._has_more = threading.Condition()
        self._next: dict[str, int] = {}
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._has_more:
                self.log.append(line)
                try:
                    self.said.append(json.loads(line)["text"])
                except ValueError:
                    self.said.append(line)
                self._has_more.notify_all()
        with self._has_more:
            self._is_over = True
            self._has_more.notify_all()

    def wait_line(self, text: str) -> str:
        """The text of the first line of the log that holds ``text``; called again, of the next one."""
        with self._has_more:
            at = self._next.get(text, 0)
            until_s = time.monotonic() + _LIMIT_S
            while not (at < len(self.said) and text in self.said[at]):
                if at < len(self.said):
                    at += 1
                elif self._is_over or not self._has_more.wait(until_s - time.monotonic()):
                    raise AssertionError(f"it does not say {text!r}, but: {self.said}")
            self._next[text] = at + 1
            return self.said[at]

    @cached_property
    def address(self) -> str:
        """Where consumers find it on the network."""
        return self.wait_line("connect with").split('"')[1]

    @cached_property
    def health(self) -> str:
        """The address of its health pages."""
        return self.wait_line("health: ").split()[1].removesuffix("/readyz")

    def wait_ready(self) -> None:
        """Wait until a process on the network has its data."""
        self.wait_line("is ready")

    def processes(self) -> list[int]:
        """Those that answer on the network."""
        return [pid for pid in self.family()[1:] if name_of(pid) == "loaderd-http"]

    def wait_end(self) -> int:
        """The exit status; all that it said is in ``said``."""
        status = self.process.wait(_LIMIT_S)
        self._reader.join()
        return status

    def family(self) -> list[int]:
        """Its processes, the supervisor first."""
        return process_tree(self.process.pid)

    @property
    def daemon(self) -> int:
        """The process of the daemon that answers now."""
        pid: int = self.report()["pid"]
        return pid

    def report(self) -> dict[str, Any]:
        """Its status."""
        with self.connected("") as consumer:
            consumer.send(AskStatus())
            (message,) = receive(consumer)
            assert isinstance(message, Status)
            return message.report

    @contextlib.contextmanager
    def connected(self, dataset: str) -> Iterator[Channel]:
        """A consumer that has said Hello."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_LIMIT_S)
        sock.connect(self.path)
        channel = Channel(sock)
        channel.send(Hello(PROTOCOL, VERSION, dataset))
        yield channel
        channel.close()

    def close(self) -> None:
        """End it, whatever it is at, and wait until nothing of it is left: its socket is free for another one."""
        family = self.family() if self.process.poll() is None else []
        handles = handles_of(family)
        for pid in reversed(family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        wait_ends(handles)
        self._reader.join()


def wait_until(is_so: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
    """Look again and again."""
    until_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def receive(channel: Channel) -> list[Message]:
    """The next messages; raises ChannelClosed at the end."""
    while True:
        messages = channel.receive()
        if messages:
            return messages


def handles_of(pids: Iterable[int]) -> list[int]:
    """Descriptors that can be read when the processes have ended; none of those that are gone by now."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def wait_ends(handles: list[int]) -> None:
    """Wait until all of these processes are gone."""
    for handle in handles:
        assert select.select([handle], [], [], _LIMIT_S)[0], "a process is still there"
        os.close(handle)
