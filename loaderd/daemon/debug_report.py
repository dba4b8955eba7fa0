"""What each process waits for, as a screen of text."""

from __future__ import annotations

import os
from collections.abc import Sequence

from loaderd.daemon.pool.worker_manager import WorkerManager
from loaderd.daemon.session import Session

_MOST_WORKERS = 16


def describe(worker_manager: WorkerManager, sessions: Sequence[Session]) -> str:
    """Lines for each stream (the consumer, the batches, the windows), and one for each worker."""
    pool = worker_manager.pool
    lines = [f"daemon {os.getpid()}: {pool.restarts} workers were replaced so far"]
    for session in sessions:
        progress = None if session.preparation is None else session.preparation.progress
        if progress is not None:
            lines.append(f"  data       {progress.doing}: {progress.done_bytes} of {progress.num_bytes} bytes")
        if session.opened is not None:
            lines += [f"  {line}" for line in session.opened.stream.describe()]
    idle = [session.opened.stream.why_idle() for session in sessions if session.opened is not None]
    for worker in pool.numbers[:_MOST_WORKERS]:
        doing = _doing(worker_manager, worker) or (idle[0] if len(idle) == 1 else "idle")
        lines.append(f"  worker     {pool.pid_of(worker)} {doing}")
    if len(pool.numbers) > _MOST_WORKERS:
        lines.append(f"  … and {len(pool.numbers) - _MOST_WORKERS} more")
    return "\n".join(lines)


def _doing(worker_manager: WorkerManager, worker: int) -> str:
    scheduler = worker_manager.scheduler
    silent = f"nothing came of it for {scheduler.ticks_of(worker) * worker_manager.tick_s:.0f} s"
    if not scheduler.is_ready(worker):
        return f"starts; {silent}"
    doing = worker_manager.doing(worker)
    return f"is at {doing}; {silent}" if doing else ""
