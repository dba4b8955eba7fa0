"""Servers that are fuzzed, one for each socket: what their processes have, and by how much they may grow."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from loaderd.ipc.channel import Channel
from tests.helpers.serving import Server
from tests.reliability.numbered import write_shards
from tests.reliability.processes import name_of, num_fds, own_mib, status_of

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
_MOST_MIB, _MOST_MIB_ON_NETWORK = 8.0, 64.0
"""By how much a process may have grown. Over the network: a ticket, an answer, and what Python keeps of them."""
_MOST_THREADS_ON_NETWORK = 8
"""Those that make rows, and that open listings, come when they are first needed."""
_HTTP = "loaderd-http"


class Served:
    """``loaderd serve`` twice in ``folder``, at a Unix socket and at a port, when both are ready."""

    def __init__(self, folder: Path) -> None:
        write_shards(folder / "shards", _SIZES)
        (folder / "sets.py").write_text(_MODULE.format(folder=str(_FOLDER)))
        self.unix = str(folder / "socket")
        started = "sets:train", "--workers", "2"
        here = Server(folder, *started, unix=self.unix)
        network = Server(folder, *started, network=True, LOADERD_TOKEN=TOKEN)
        self._servers = [here, network]
        here.wait_line("memory:")
        for _ in range(2):
            network.wait_ready()
        self.port = int(network.address.rpartition(":")[2])

    def connect(self) -> Channel:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.unix)  # waits while the queue is full, which it would not with a timeout
        sock.settimeout(LIMIT_S)
        return Channel(sock)

    def state(self) -> Usage:
        """Of each process, by its number: name, descriptors, threads, memory of its own in MiB."""
        found = {}
        for pid in self.family():
            found[pid] = name_of(pid), num_fds(pid), int(status_of(pid)["Threads"]), own_mib(pid)
        return found

    def family(self) -> list[int]:
        """All processes of both servers."""
        return [pid for server in self._servers for pid in server.family()]

    def close(self) -> None:
        for server in self._servers:
            server.process.send_signal(signal.SIGTERM)
            server.wait_end()


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
    return {pid: state for pid, state in found.items() if pid in served.family()}


def grown(before: Usage, after: Usage) -> list[int]:
    """The processes that have more than they had."""
    return [pid for pid in before.keys() & after.keys() if has_grown(before[pid], after[pid])]


def has_grown(before: tuple[str, int, int, float], after: tuple[str, int, int, float]) -> bool:
    """Whether a process has more than it may."""
    name, fds, threads, mib = before
    is_on_network = name == _HTTP
    most_threads = threads + (_MOST_THREADS_ON_NETWORK if is_on_network else 0)
    # The shards of several listings may be open; whoever asks may make some up.
    most_fds = fds + (3 * len(_SIZES) if is_on_network else 0)
    most_mib = mib + (_MOST_MIB_ON_NETWORK if is_on_network else _MOST_MIB)
    return after[1] > most_fds or after[2] > most_threads or after[3] > most_mib
