"""What the workers use of the machine: for the samples in the pages of their streams."""

from __future__ import annotations

from loaderd import processes
from loaderd.daemon.pool.worker_pool import WorkerPool
from loaderd.machine import memory_stall_ns, throttled_ns
from loaderd.shm.samples import Gauge

EVERY_S = 0.45
"""The least seconds between two looks, and between two samples of a stream."""


class WorkerUsage:
    """What all workers together have used, and what the machine says of itself: idle time, throttling, stalls."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._looked_s = 0.0
        self._known: dict[int, dict[Gauge, int]] = {}
        self._used: dict[Gauge, int] = {}
        self._seen: dict[Gauge, int] = {}
        self._idle: dict[int, int] = {}
        self._all_idle_ns = 0

    def look(self, now_s: float) -> dict[Gauge, int]:
        """What they have used so far, at most ``EVERY_S`` ago. A new look takes 0.3 ms."""
        if now_s - self._looked_s >= EVERY_S:
            passed_ns, self._looked_s = int((now_s - self._looked_s) * 1e9), now_s
            pids = [self._pool.pid_of(worker) for worker in self._pool.numbers]
            self._look_at_workers(pids, passed_ns)
            cores = set().union(*map(processes.cores_of, pids))
            self._seen = {
                **self._used,
                Gauge.CORES: len(cores),
                Gauge.NICE: min(map(processes.nice_of, pids), default=0),
                Gauge.IDLE_NS: self._idle_ns(cores),
                Gauge.THROTTLED_NS: throttled_ns(),
                Gauge.MEMORY_STALL_NS: memory_stall_ns(),
                Gauge.WORKERS_RESTARTED: self._pool.restarts,
            }
        return self._seen

    def _idle_ns(self, cores: set[int]) -> int:
        """Add the idle time of the cores that the workers may run on now."""
        before, self._idle = self._idle, processes.idle_ns()
        self._all_idle_ns += sum(ns - before.get(core, ns) for core, ns in self._idle.items() if core in cores)
        return self._all_idle_ns

    def _look_at_workers(self, pids: list[int], passed_ns: int) -> None:
        """Add what they have used since the last look, so that what a dead worker has used stays counted."""
        now = {}
        for pid in pids:
            asked, fetched = processes.read_bytes(pid)
            now[pid] = {
                Gauge.WORKER_CPU_NS: processes.cpu_ns(pid),
                Gauge.DELAY_NS: processes.delay_ns(pid, pid),
                Gauge.ASKED_BYTES: asked,
                Gauge.FETCHED_BYTES: fetched,
            }
            before = self._known.get(pid, {})
            if before and processes.is_stopped(pid):  # for how long is known to the second
                self._used[Gauge.STOPPED_NS] = self._used.get(Gauge.STOPPED_NS, 0) + passed_ns
            for what, value in now[pid].items():
                since = max(0, value - before.get(what, 0))
                self._used[what] = self._used.get(what, 0) + since
        self._known = now
