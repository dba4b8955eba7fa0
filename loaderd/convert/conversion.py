"""A conversion from beginning to end: its lots, the processes that write them, and the shards that were whole before.

The order of records, and which of them are in which shard, follow from the sources and the options alone. So any
process may write any lot, at any time, and a restarted conversion writes what is missing with the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any

from loaderd.convert.journal import Journal, Written
from loaderd.convert.lots import Games, Lot, Span
from loaderd.convert.shard_writers import check_format
from loaderd.convert.write_lot import Task, write_lot
from loaderd.errors import WorkerError
from loaderd.protocol.process import die_with_parent
from loaderd.redaction import redacted
from loaderd.schema import FixedRecords, Schema

OnProgress = Callable[[int, int], None]

_SHOW_EVERY_S = 0.1
_AHEAD = 2  # lots for each process: enough that none waits for the next
_common: Any = None  # in a process of the pool: the task, the shards that were there, and the counter of bytes


def job_of(task: Task, lots: Sequence[Lot]) -> dict[str, Any]:
    """What is converted, and how, for the journal: values that JSON can hold, without secrets."""
    records = task.features if isinstance(task.features, FixedRecords) else None
    return {
        "version": 3,
        "sources": [[redacted(file.uri), file.size_bytes, file.mtime_ns] for file in task.files],
        "features": [[name, repr(feature)] for name, feature in task.features.items()],  # in the order of new records
        "records": None if records is None else repr(records),
        "shards": task.num_shards,
        "records_per_shard": sorted({size for lot in lots for size in lot.sizes if size is not None}),
        "games_per_shard": task.games_per_shard,
        "format": task.format,
        "compression": task.compression,
        "scores": task.scores,
        "on_corrupt": "skip_record" if task.skips else "raise",
    }


def convert(
    task: Task, lots: Sequence[Lot], processes: int, on_progress: OnProgress
) -> Iterator[tuple[Written, bool]]:
    """Each shard that is whole, and whether it was whole before; in any order.

    Raises LoaderdError and OSError: shards that are whole by then stay, and are not written again. Closing the
    iterator ends the processes.
    """
    check_format(task.features, task.format)
    with closing(Journal(task.folder, job_of(task, lots), task.ending)) as journal:
        for written in journal.done.values():
            yield written, True
        done = frozenset(journal.done)
        left = [lot for lot in lots if not _names_of(task, lot) <= done]
        if left:
            for written in _write_all(task, left, done, min(processes, len(left)), on_progress):
                yield written, False


def _names_of(task: Task, lot: Lot) -> set[str]:
    return {task.name_of(lot.first_shard + number) for number in range(len(lot.sizes))}


def _write_all(
    task: Task, lots: list[Lot], done: frozenset[str], processes: int, on_progress: OnProgress
) -> Iterator[Written]:
    total = sum(_bytes_of(part, task) for lot in lots for part in lot.parts)
    # A fresh interpreter each: this one has threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("Q", 0)
    waiting = iter(lots)
    with ProcessPoolExecutor(processes, context, _begin, (os.getpid(), task, done, counter)) as pool:
        try:
            running: set[Future[list[Written]]] = set()
            while True:
                for lot in waiting:
                    running.add(_submit(pool, lot))
                    if len(running) >= _AHEAD * processes:
                        break
                if not running:
                    break
                finished, running = wait(running, _SHOW_EVERY_S, FIRST_COMPLETED)
                on_progress(min(counter.value, total), total)
                for future in finished:
                    yield from future.result()
        except BrokenProcessPool:
            raise WorkerError(
                "a process of the conversion was killed, as the kernel does where memory runs out",
                hint="Start it again, it goes on; with fewer --processes, or a smaller --records-per-shard.",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # shards that it has begun still have temporary names


def _submit(pool: ProcessPoolExecutor, lot: Lot) -> Future[list[Written]]:
    """Give a lot to the pool, which may start a process for it. Ctrl-C comes after that, to this process alone."""
    came: list[int] = []
    # The mask is for the new process, which inherits it. Here, another thread may take the signal.
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_write, lot)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _bytes_of(part: Span | Games, task: Task) -> int:
    """How many bytes of progress a whole part is, as the processes count them."""
    if isinstance(part, Games):
        return part.stop - part.start
    return (part.stop - part.first) * Schema.of_stored(task.features).row_bytes


def _begin(parent: int, *common: Any) -> None:
    """Prepare a process of the pool."""
    global _common
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    _common = common  # once, and not with each lot: a task may have a million files


def _write(lot: Lot) -> list[Written]:
    task, done, _ = _common
    return write_lot(task, lot, done, _count)


def _count(num_bytes: int) -> None:
    counter = _common[2]
    with counter.get_lock():
        counter.value += num_bytes
