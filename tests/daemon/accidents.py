"""The processes of a loader, and what can happen to them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loaderd
from loaderd.errors import LoaderdError
from loaderd.plan.passes import Pass

Check = Callable[[loaderd.Batch], list[int]]


def children_of(parent: int) -> list[int]:
    """The processes whose parent is ``parent``, dead ones that nobody has waited for left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, ppid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(ppid) == parent and state != "Z":
                found.append(int(entry))
    return found


def daemon_of(loader: loaderd.Loader) -> int:
    return loader._stream._now.process.pid


def fork_server_of(daemon: int) -> int:
    (found,) = children_of(daemon)
    return found


def workers_of(daemon: int) -> list[int]:
    return children_of(fork_server_of(daemon))


def family_of(daemon: int) -> list[int]:
    """The daemon, what its workers are forks of, and these."""
    return [daemon, fork_server_of(daemon), *workers_of(daemon)]


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
    wait_ends(pid_fds, 30)


def fetch_all(
    loader: loaderd.Loader, check: Check, *, before: Callable[[int], None] = lambda step: None
) -> list[Any]:
    """The numbers of each batch of the first pass, or the error in its place."""
    found: list[Any] = []
    steps = range(len(loader))
    first_pass = Pass(0, 1)
    for step in steps:
        before(step)
        try:
            batch = loader.fetch(first_pass, step)
        except LoaderdError as error:
            found.append(error)
        else:
            assert batch is not None
            found.append(check(batch))
    return found


def crashing_schema(function: Callable[[Any], Any]) -> loaderd.Schema:
    """The numbered records, and a field that ``function`` makes of their numbers."""
    fields = {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")}
    derived = loaderd.Derived(function, "id", dtype="int64")
    return loaderd.Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, {**fields, "x": derived})


@contextlib.contextmanager
def job_of(script: Path, code: str, first_line: str) -> Iterator[tuple[subprocess.Popen[str], int, list[int]]]:
    """A process that runs ``code``, its daemon and its workers, as they are when it has printed ``first_line``."""
    script.write_text(code)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == f"{first_line}\n"
            (daemon,) = children_of(job.pid)
            yield job, daemon, workers_of(daemon)
        finally:
            job.kill()
