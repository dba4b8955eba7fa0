"""A conversion from beginning to end: its units, the processes that write them, and shards that were whole before.

The order of records, and which of them are in which shard, follow from the sources and the options alone. So any
process may write any unit, at any time, and a restarted conversion writes what is missing with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from loaderd.convert.job_process import JobProcess
from loaderd.convert.journal import FinishedShard, Journal
from loaderd.convert.shard_job import Claims, ShardJob
from loaderd.convert.shard_writers import check_format
from loaderd.convert.work_units import WorkUnit
from loaderd.errors import WorkerError
from loaderd.redaction import redacted
from loaderd.schema import FixedRecords

OnProgress = Callable[[int, int], None]

_SHOW_EVERY_S = 0.1


def job_of(task: ShardJob, units: Sequence[WorkUnit]) -> dict[str, Any]:
    """What is converted, and how, for the journal: values that JSON can hold, without secrets."""
    records = task.features if isinstance(task.features, FixedRecords) else None
    return {
        "version": 4,
        "sources": [[redacted(file.uri), file.size_bytes, file.mtime_ns] for file in task.files],
        "features": [[name, repr(feature)] for name, feature in task.features.items()],  # in the order of new records
        "records": None if records is None else repr(records),
        "shards": task.num_shards,
        "records_per_shard": sorted({size for unit in units for size in unit.sizes}),
        "format": task.format,
        "compression": task.compression,
        "on_corrupt": "skip_record" if task.skips else "raise",
    }


def convert(
    task: ShardJob, units: Sequence[WorkUnit], processes: int, on_progress: OnProgress
) -> Iterator[tuple[FinishedShard, bool]]:
    """Each shard that is whole, and whether it was whole before; in any order.

    Raises LoaderdError and OSError: shards that are whole by then stay, and are not written again. Closing the
    iterator ends the processes.
    """
    check_format(task.features, task.format)
    with closing(Journal(task.folder, job_of(task, units), task.ending)) as journal:
        for written, was_there in _write_all(task, units, journal.claims, processes, on_progress):
            if not was_there:
                journal.note(written)
            yield written, was_there


def _write_all(
    task: ShardJob, units: Sequence[WorkUnit], claims: Claims, processes: int, on_progress: OnProgress
) -> Iterator[tuple[FinishedShard, bool]]:
    total = sum(unit.num_records for unit in units) * task.row_bytes
    done_bytes = 0
    waiting = iter(units)
    busy: dict[Connection[Any, Any], JobProcess] = {}
    started: list[JobProcess] = []
    try:
        for unit in islice(waiting, processes):
            started.append(JobProcess(task, claims))
            started[-1].give(unit)
            busy[started[-1].connection] = started[-1]
        while busy:
            for connection in wait(list(busy), _SHOW_EVERY_S):
                process = busy[cast(Any, connection)]
                news = process.receive()
                if isinstance(news, int):
                    done_bytes += news
                elif news is not None:
                    yield news
                elif (following := next(waiting, None)) is not None:
                    process.give(following)
                else:
                    del busy[process.connection]
            on_progress(min(done_bytes, total), total)
    except EOFError:
        raise WorkerError(
            "a process of the conversion was killed, as the kernel does where memory runs out",
            hint="Start it again, it goes on; with fewer --processes, or a smaller --records-per-shard.",
        ) from None
    finally:
        for process in started:
            process.kill()
