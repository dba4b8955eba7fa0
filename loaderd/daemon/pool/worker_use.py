"""What the workers use of the machine: for the samples in the pages of their streams."""

from __future__ import annotations

from loaderd import processes
from loaderd.daemon.pool.worker_pool import WorkerPool
from loaderd.machine import memory_stall_ns, throttled_ns
from loaderd.memory.samples import Seen

EVERY_S = 0.45
"""The least seconds between two looks, and between two samples of a stream."""


class WorkersUse:
    """What all workers together have used, and what the machine says of itself: idle time, throttling, stalls."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._looked_s = 0.0
        self._known: dict[int, dict[Seen, int]] = {}
        self._ran_s: dict[int, float] = {}
        """When each process was last seen to have run, or to have waited for a core."""
        self._used: dict[Seen, int] = {}
        self._seen: dict[Seen, int] = {}

    def look(self, now_s: float) -> dict[Seen, int]:
        """What they have used so far, at most ``EVERY_S`` ago. A new look takes 0.3 ms."""
        if now_s - self._looked_s >= EVERY_S:
            self._looked_s = now_s
            self._look_at_workers([self._pool.pid_of(worker) for worker in self._pool.numbers])
            self._seen = {
                **self._used,
                Seen.IDLE_NS: processes.idle_ns(),
                Seen.THROTTLED_NS: throttled_ns(),
                Seen.MEMORY_STALL_NS: memory_stall_ns(),
                Seen.WORKERS_RESTARTED: self._pool.restarts,
            }
        return self._seen

    def _look_at_workers(self, pids: list[int]) -> None:
        """Add what they have used since the last look, so that what a dead worker has used stays counted."""
        found = {}
        for pid in pids:
            asked, fetched = processes.read_bytes(pid)
            found[pid] = {
                Seen.WORKER_CPU_NS: processes.cpu_ns(pid),
                Seen.DELAY_NS: processes.delay_ns(pid, pid),
                Seen.ASKED_BYTES: asked,
                Seen.FETCHED_BYTES: fetched,
            }
            before = self._known.get(pid, {})
            if any(before.get(what) != found[pid][what] for what in (Seen.WORKER_CPU_NS, Seen.DELAY_NS)):
                self._ran_s[pid] = self._looked_s
            for what, value in found[pid].items():
                since = max(0, value - before.get(what, 0))
                self._used[what] = self._used.get(what, 0) + since
        self._known = found
        self._ran_s = {pid: self._ran_s[pid] for pid in found}

    def asleep_s(self, pid: int, now_s: float) -> float:
        """For how many seconds a worker has slept, without a break."""
        return now_s - self._ran_s.get(pid, now_s)
