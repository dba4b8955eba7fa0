"""The streams that run on this machine: their pages, read by another process of the same user.

A page is a memfd that a daemon, or a server, has open. Processes of the same user find it in /proc/PID/fd, and can
open it there for reading. So no training has to announce itself, nothing is left behind, and being watched costs it
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loaderd import processes
from loaderd.errors import DaemonError
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.samples import PAGE_NAME, PageView

_PROC = Path("/proc")
_SERVER = "loaderd-server"
_DAEMONS = ("loaderd-daemon", _SERVER)
_LINK = f"/memfd:loaderd-{PAGE_NAME} "
"""How the link of a page's descriptor begins."""


@dataclass(frozen=True)
class RunningStream:
    """A stream of process ``daemon``, a private daemon or a server. ``command``: its consumer's command line."""

    daemon: int
    inode: int
    """Tells the streams of a server apart."""
    command: str
    watched: PageView

    @property
    def consumer(self) -> int:
        """The process that takes its batches; the daemon's parent, if none has begun."""
        return self.watched.now().consumer_pid or processes.parent_of(self.daemon)


def running_streams(pids: frozenset[int] = frozenset()) -> list[RunningStream]:
    """This user's streams; only those whose consumer or daemon is one of ``pids``, if any. Sorted by consumer.

    Those of other versions of loaderd are left out, and so are a server's streams of groups: how their members wait
    is in columns of their own, not in the page.
    """
    found: dict[int, RunningStream] = {}
    for daemon in _own_daemons():
        for number in _numbers(_PROC / f"{daemon}/fd"):
            with suppress(OSError, DaemonError):  # the stream is over, or its page is of another version
                stream = _open(daemon, number)
                if stream is not None and (not pids or {stream.consumer, daemon} & pids):
                    found[stream.inode] = stream  # a descriptor that is being sent is there twice
    return sorted(found.values(), key=lambda stream: (stream.consumer, stream.inode))


def _own_daemons() -> Iterator[int]:
    for pid in _numbers(_PROC):
        with suppress(OSError):
            if (_PROC / str(pid)).stat().st_uid == os.geteuid() and processes.name_of(pid) in _DAEMONS:
                yield pid


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def _open(daemon: int, number: int) -> RunningStream | None:
    path = _PROC / f"{daemon}/fd/{number}"
    if not os.readlink(path).startswith(_LINK):
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_size == 0:  # it is being made in this moment
        os.close(fd)
        return None
    memory = SharedMemory(fd)
    memory.close_fd()
    watched = PageView.of(memory.bytes)
    consumer = watched.now().consumer_pid
    if not consumer:
        if processes.name_of(daemon) == _SERVER:
            return None
        consumer = processes.parent_of(daemon)
    return RunningStream(daemon, status.st_ino, processes.command_of(consumer), watched)
