"""Who waits for whom: what the daemon knows of it, as a screen of text."""

from __future__ import annotations

import os

from loaderd.daemon.index_pass import IndexPass
from loaderd.daemon.opening import OpenedStream
from loaderd.daemon.scheduler import Scheduler
from loaderd.daemon.worker_pool import WorkerPool

_MOST_WORKERS = 16


def describe(
    pool: WorkerPool,
    scheduler: Scheduler,
    index_pass: IndexPass | None,
    opened: OpenedStream | None,
    tick_s: float,
) -> str:
    """A line for the consumer, the batches, the windows and for each worker; ``tick_s``: seconds of a tick."""
    lines = [f"daemon {os.getpid()}: {pool.restarts} workers were replaced so far"]
    if index_pass is not None:
        done, total = index_pass.done_bytes, index_pass.total_bytes
        lines.append(
            f"  index      {len(index_pass.indexes)} of {len(index_pass.files)} shards, {done} of {total} bytes"
        )
    if opened is not None:
        lines += [f"  {line}" for line in opened.stream.describe()]
    idle = "idle" if opened is None else opened.stream.why_idle()
    for worker in pool.numbers[:_MOST_WORKERS]:
        lines.append(f"  worker     {pool.pid_of(worker)} {_doing(scheduler, worker, idle, tick_s)}")
    if len(pool.numbers) > _MOST_WORKERS:
        lines.append(f"  … and {len(pool.numbers) - _MOST_WORKERS} more")
    return "\n".join(lines)


def _doing(scheduler: Scheduler, worker: int, idle: str, tick_s: float) -> str:
    tasks = scheduler.tasks_of(worker)
    silent = f"nothing came of it for {scheduler.ticks_of(worker) * tick_s:.0f} s"
    if not scheduler.is_ready(worker):
        return f"starts; {silent}"
    if not tasks:
        return idle
    return f"is at {tasks[0].work}; {silent}" + (f"; {len(tasks) - 1} more wait" if tasks[1:] else "")
