"""The processes of the loaders of this process, as the kernel knows them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection
from pathlib import Path

from loaderd.observe.running_streams import RunningStream, running_streams
from loaderd.snapshots import Snapshot

DAEMON = "loaderd-daemon"


def children_of(parent: int, name: str = "") -> list[int]:
    """The processes whose parent is ``parent``, the oldest first; dead ones that nobody has waited for left out.

    ``name``: only those that are named so.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                comm, _, rest = Path(f"/proc/{entry}/stat").read_text().partition("(")[2].rpartition(") ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, ppid, *others = rest.split()
            if int(ppid) == parent and state != "Z" and name in ("", comm):
                found.append((int(others[17]), int(entry)))
    return [pid for _, pid in sorted(found)]


def newest_daemon() -> int:
    """Of the loader of this process that has started one last."""
    return children_of(os.getpid(), DAEMON)[-1]


def seen_of_newest() -> Snapshot:
    """What another process, as ``loaderd top``, sees of the stream of that daemon."""
    return _newest_stream().watched.now()


def _newest_stream() -> RunningStream:
    (stream,) = running_streams(frozenset({newest_daemon()}))
    return stream


def fork_server_of(daemon: int) -> int:
    (found,) = children_of(daemon)
    return found


def workers_of(daemon: int) -> list[int]:
    return children_of(fork_server_of(daemon))


def all_workers_of(daemon: int, number: int, limit_s: float = 60.0) -> list[int]:
    """Its workers, as soon as it has all of them: one will do for the first batch, and for those behind a death."""
    deadline_s = time.monotonic() + limit_s
    while len(found := workers_of(daemon)) != number:
        assert time.monotonic() < deadline_s, f"it has {len(found)} workers, and not {number}"
        time.sleep(0.01)
    return found


def family_of(daemon: int) -> list[int]:
    """The daemon, what its workers are forks of, and these."""
    return [daemon, fork_server_of(daemon), *workers_of(daemon)]


def wait_for_no_daemon(but: Collection[int] = (), limit_s: float = 60.0) -> None:
    """Until no loader of this process has one, but for these. What close() had to kill may need a moment to die."""
    deadline_s = time.monotonic() + limit_s
    while left := set(children_of(os.getpid(), DAEMON)) - set(but):
        assert time.monotonic() < deadline_s, f"{left} live on"
        time.sleep(0.01)


def wait_ends(pid_fds: list[int], limit_s: float) -> None:
    """Wait until all of these processes are gone."""
    deadline_s = time.monotonic() + limit_s
    waiting = set(pid_fds)
    while waiting:
        ended, _, _ = select.select(waiting, [], [], max(0.0, deadline_s - time.monotonic()))
        assert ended, f"{len(waiting)} of {len(pid_fds)} processes live on after {limit_s} s"
        waiting -= set(ended)
    for pid_fd in pid_fds:
        os.close(pid_fd)


def kill(*pids: int) -> None:
    """SIGKILL, and wait until they are gone."""
    pid_fds = [os.pidfd_open(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_ends(pid_fds, 60)
