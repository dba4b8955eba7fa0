"""A server that is fuzzed: ``loaderd serve`` in a folder, what its processes have, and by how much they may grow."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from harness.process_tree import process_tree

from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import PROTOCOL, AskStatus, Hello, Status
from loaderd.version import VERSION
from tests.reliability.numbered import write_shards
from tests.reliability.processes import name_of, num_fds, read

_COMMAND = str(Path(sys.executable).with_name("loaderd"))
_FOLDER = Path(__file__).parent
_SIZES = (9_000, 1_000, 6_500, 3_500)
_MODULE = """
import sys
sys.path.insert(0, {folder!r})
import loaderd
from numbered import SCHEMA
train = loaderd.Dataset("shards/*", SCHEMA, shuffle=loaderd.Shuffle(window_records=3_000, block_records=100))
"""
TOKEN = "that-of-the-fuzz-test"
Usage = dict[int, tuple[str, int, int, float]]
LIMIT_S = 30.0
_MOST_MIB, _MOST_MIB_ON_NETWORK = 8.0, 256.0
"""By how much a process may have grown. gRPC keeps what has come of a message, here up to 9 MiB, in many threads; a
ticket of 65,536 ranges is some 100 MiB of objects, which Python keeps for the next one."""
_MOST_THREADS_OF_GATEWAY = 4
"""By how many the gateway's may have become more: gRPC has a pool of them, and decides on its size."""


class Served:
    """``loaderd serve`` in ``folder``, with its log in a file there."""

    def __init__(self, folder: Path) -> None:
        write_shards(folder / "shards", _SIZES)
        (folder / "sets.py").write_text(_MODULE.format(folder=str(_FOLDER)))
        self.unix = str(folder / "socket")
        self.log = folder / "log"
        arguments = ["sets:train", "--workers", "2", "--unix", self.unix, "--listen", "127.0.0.1:0"]
        environment = {**os.environ, "LOADERD_TOKEN": TOKEN}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([_COMMAND, "serve", *arguments], cwd=folder, stderr=log, env=environment)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        until_s = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(OSError, ChannelClosed):
                listens = re.search(r"grpc://127.0.0.1:(\d+)", self.log.read_text())
                if listens and self.report()["datasets"][0]["state"] == "ready":
                    self.port = int(listens[1])
                    return
            assert time.monotonic() < until_s and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def connect(self) -> Channel:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.unix)  # waits while the queue is full, which it would not with a timeout
        sock.settimeout(LIMIT_S)
        return Channel(sock)

    def report(self) -> dict[str, Any]:
        channel = self.connect()
        channel.send(Hello(PROTOCOL, VERSION, ""))
        channel.send(AskStatus())
        try:
            while True:
                for message in channel.receive():
                    if isinstance(message, Status):
                        return message.report
        finally:
            channel.close()

    def state(self) -> Usage:
        """Of each process, by its number: name, descriptors, threads, memory of its own in MiB."""
        found = {}
        for pid in process_tree(self.process.pid):
            status = dict(line.split(":\t", 1) for line in read(pid, "status").decode().splitlines())
            own_kib = int(status["RssAnon"].split()[0])
            found[pid] = name_of(pid), num_fds(pid), int(status["Threads"]), own_kib / 1024
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def least(served: Served, seconds: float, before: Usage | None = None) -> Usage:
    """Of each process the least that it has in so long, or until it has no more than ``before``.

    The readers go on, so a worker has one descriptor more while it reads a shard; what is kept for ever shows always.
    """
    until_s = time.monotonic() + seconds
    found = served.state()
    while time.monotonic() < until_s and not (before and not grown(before, found)):
        time.sleep(0.05)
        for pid, (name, *now) in served.state().items():
            fds, threads, mib = map(min, now, found.get(pid, (name, *now))[1:])
            found[pid] = name, fds, threads, mib
    return {pid: state for pid, state in found.items() if pid in process_tree(served.process.pid)}


def grown(before: Usage, after: Usage) -> list[int]:
    """The processes that have more than they had."""
    return [pid for pid in before.keys() & after.keys() if has_grown(before[pid], after[pid])]


def has_grown(before: tuple[str, int, int, float], after: tuple[str, int, int, float]) -> bool:
    """Whether a process has more than it may."""
    name, fds, threads, mib = before
    is_gateway = name == "loaderd-gateway"
    is_on_network = name in ("loaderd-gateway", "loaderd-maker")
    most_threads = threads + (_MOST_THREADS_OF_GATEWAY if is_gateway else 0)
    # A maker has the shards of four listings open; whoever asks may make some up.
    most_fds = fds + (3 * len(_SIZES) if name == "loaderd-maker" else 0)
    most_mib = mib + (_MOST_MIB_ON_NETWORK if is_on_network else _MOST_MIB)
    return after[1] > most_fds or after[2] > most_threads or after[3] > most_mib
