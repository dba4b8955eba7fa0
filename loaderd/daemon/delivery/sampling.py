"""What the daemon measures of its streams and workers: samples, kept in each stream's page (see ``shm.samples``).

The daemon wakes at least once a second, and then takes a sample; it takes more only while it is awake anyway.
"""

from __future__ import annotations

import time

from loaderd import processes
from loaderd.daemon.delivery.opened_stream import OpenedStream
from loaderd.daemon.pool.worker_usage import EVERY_S, WorkerUsage
from loaderd.shm.page import CONSUMER_PID, CONSUMER_THREAD, TAKEN_BATCHES, TAKEN_RECORDS, Page
from loaderd.shm.samples import Gauge, write_sample


class Sampler:
    """Takes the samples of one stream."""

    def __init__(self, opened: OpenedStream, use: WorkerUsage) -> None:
        self._opened = opened
        self._use = use
        self._sampled_s = 0.0

    def sample(self) -> None:
        """Write a sample if it is time."""
        now_s = time.monotonic()
        if now_s - self._sampled_s >= EVERY_S:
            self._sampled_s = now_s
            page = self._opened.page
            if page.num_members:  # then no consumer has the column in the page
                for word in (TAKEN_BATCHES, TAKEN_RECORDS):
                    page.words[word] = max(page.words[word], *(column.words[word] for column in page.columns))
            write_sample(page, {**self._use.look(now_s), **_of_consumer(page), **self._opened.seen()})


def _of_consumer(page: Page) -> dict[Gauge, int]:
    pid, thread = page.words[CONSUMER_PID], page.words[CONSUMER_THREAD]
    if not pid:
        return {}
    of_threads = [(processes.cpu_ns(pid, one), processes.delay_ns(pid, one)) for one in (pid, thread)]
    busiest_ns, delay_ns = max(of_threads)
    return {
        Gauge.CONSUMER_CPU_NS: processes.cpu_ns(pid),
        Gauge.THREAD_CPU_NS: busiest_ns,
        Gauge.THREAD_DELAY_NS: delay_ns,
        Gauge.USES_ACCELERATOR: processes.uses_accelerator(pid),
    }
