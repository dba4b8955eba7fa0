"""The pool of worker processes, without any process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from loaderd.daemon.pool.worker_pool import WorkerPool
from loaderd.errors import DaemonError


class Forks:
    """Workers that are no processes."""

    def start(self) -> tuple[socket.socket, int, int]:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours, 1, os.open(os.devnull, os.O_RDONLY)

    def end(self, pid: int) -> str:
        return "was killed by SIGKILL"

    def close(self) -> None:
        """There is nobody to end."""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    forks: Any = Forks()
    made = WorkerPool(forks)
    yield made
    made.close()


def test_workers_that_were_there_when_one_had_done_something_may_all_die(pool: WorkerPool):
    """All at once, say. But those that were started later have to do something."""
    workers = [pool.start()[0] for _ in range(12)]
    pool.achieved()
    for worker in workers:
        pool.reap(worker, False)
    for _ in range(9):
        pool.reap(pool.start()[0], False)
    with pytest.raises(DaemonError, match="10 workers died without having done anything"):
        pool.reap(pool.start()[0], False)
