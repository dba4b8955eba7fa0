"""The daemon's look at its streams and workers, kept in each stream's page (see ``memory.samples``).

It wakes once a second at least, and then looks; more often only where it is awake anyway.
"""

from __future__ import annotations

import time

from loaderd import processes
from loaderd.daemon.opening import OpenedStream
from loaderd.daemon.worker_pool import WorkerPool
from loaderd.machine import memory_stall_ns, throttled_ns
from loaderd.memory.page import CONSUMER_PID, CONSUMER_THREAD, Page
from loaderd.memory.samples import Seen, write_sample

_EVERY_S = 0.45


class WorkersUse:
    """What the workers of all streams have used, and what of the machine concerns them all."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._looked_s = 0.0
        self._known: dict[int, dict[Seen, int]] = {}
        self._used: dict[Seen, int] = {}
        self._seen: dict[Seen, int] = {}

    def look(self, now_s: float) -> dict[Seen, int]:
        """As it is, or was a moment ago. 0.3 ms."""
        if now_s - self._looked_s >= _EVERY_S:
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
        """Add what they have used since: what a worker that died had used stays counted."""
        found = {}
        for pid in pids:
            asked, fetched = processes.read_bytes(pid)
            found[pid] = {
                Seen.WORKER_CPU_NS: processes.cpu_ns(pid),
                Seen.DELAY_NS: processes.delay_ns(pid, pid),
                Seen.ASKED_BYTES: asked,
                Seen.FETCHED_BYTES: fetched,
            }
            for what, value in found[pid].items():
                since = max(0, value - self._known.get(pid, {}).get(what, 0))
                self._used[what] = self._used.get(what, 0) + since
        self._known = found


class Sampler:
    """Of one stream."""

    def __init__(self, opened: OpenedStream, use: WorkersUse) -> None:
        self._opened = opened
        self._use = use
        self._sampled_s = 0.0

    def sample(self) -> None:
        """Write a sample if it is time."""
        now_s = time.monotonic()
        if now_s - self._sampled_s >= _EVERY_S:
            self._sampled_s = now_s
            page = self._opened.page
            write_sample(page, {**self._use.look(now_s), **_of_consumer(page), **self._opened.seen()})


def _of_consumer(page: Page) -> dict[Seen, int]:
    pid, thread = page.words[CONSUMER_PID], page.words[CONSUMER_THREAD]
    if not pid:
        return {}
    of_threads = [(processes.cpu_ns(pid, one), processes.delay_ns(pid, one)) for one in (pid, thread)]
    busiest_ns, delay_ns = max(of_threads)
    return {
        Seen.CONSUMER_CPU_NS: processes.cpu_ns(pid),
        Seen.THREAD_CPU_NS: busiest_ns,
        Seen.THREAD_DELAY_NS: delay_ns,
    }
