"""The pool of worker processes, without any process."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from loaderd.daemon.pool import worker_pool
from loaderd.daemon.pool.worker_pool import WorkerPool
from loaderd.errors import DaemonError


def test_no_worker_is_started_that_gets_no_bell(monkeypatch: pytest.MonkeyPatch):
    """It would be in no list: nobody would end it, or close what it is watched by."""
    started = []

    class Forks:
        def start(self) -> Any:
            started.append(1)
            return None, 1, -1

    def no_bell() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(worker_pool, "new_bell", no_bell)
    forks: Any = Forks()
    with pytest.raises(DaemonError, match="cannot start a worker: Too many open files"):
        WorkerPool(forks).start()
    assert not started
