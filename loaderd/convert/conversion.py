"""A conversion: its folder, and the processes that write its shards.

::

    loaderd convert ──ShardJob, then a Task at a time──► a process
                    ◄──FinishedShard, …, None─────────── (or the exception that ended the task)

Which records are in which shard, and in which order, follows from the sources and the options alone. So any process
may write any unit at any time. A shard gets its name when it is whole. A conversion that is started again reads the
sources again, and compares the shards that have their names with what it would write. Then it writes the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from loaderd.convert.shard_job import FinishedShard, ShardJob, Task, do_task, tasks_of
from loaderd.convert.shard_writers import check_format
from loaderd.convert.work_units import WorkUnit
from loaderd.errors import LoaderdError, OptionError, WorkerError
from loaderd.ipc.child import die_with_parent, enter_process
from loaderd.ipc.spawn import kill_group, start_process

LOCK = ".loaderd-convert.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as of Lustre, mounted without flock

_Process = tuple["subprocess.Popen[bytes]", Connection]


def convert(job: ShardJob, units: Sequence[WorkUnit], processes: int) -> Iterator[FinishedShard]:
    """Each shard, once it is whole, in any order.

    Raises LoaderdError and OSError: shards that are whole by then stay, and are not written again. Closing the
    iterator ends the processes.
    """
    check_format(job.features, job.format)
    with lock_folder(job):
        for tasks in tasks_of(job, units):
            yield from _do_all(job, tasks, processes)


@contextlib.contextmanager
def lock_folder(job: ShardJob) -> Iterator[None]:
    """Make the folder, and keep other conversions away from it; nothing half written is left there.

    Raises OptionError where it holds files that a glob over the new shards would find. It is left as it is then.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    _check_others(job)
    # Others may be able to write to the folder, and leave a link or a pipe under that name.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(job.folder / LOCK, flags, 0o644)
    try:
        _lock(lock, job)
        _remove_temporary(job)
        yield
    finally:
        os.close(lock)


def _check_others(job: ShardJob) -> None:
    own = set(map(job.name_of, range(job.num_shards)))
    found = {path.name for pattern in (f"*{job.ending}", "shard-*") for path in job.folder.glob(pattern)}
    others = sorted(name for name in found - own if not name.startswith("."))
    if others:
        raise OptionError(
            f"--to {job.folder} holds other files: {others[0]}" + (", …" if len(others) > 1 else ""),
            hint="A glob over the shards would find them, too. Give the same arguments to go on with a conversion; "
            "or choose another folder, or remove them.",
        )


def _lock(lock: int, job: ShardJob) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OptionError(
            f"--to {job.folder} is being written by another conversion", hint="Wait for it, or end it."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _remove_temporary(job: ShardJob) -> None:
    """Others may be able to write to the folder: what is not this conversion's, or cannot be removed, stays."""
    name = rf"\.shard-\d+-of-{job.num_shards:05}{re.escape(job.ending)}\.\d+\.tmp(\.rows\.tmp)?"
    for found in os.listdir(job.folder):
        if re.fullmatch(name, found):
            with contextlib.suppress(OSError):
                (job.folder / found).unlink()


# ---------------------------------------------------------------------------------------------- the processes


def _do_all(job: ShardJob, tasks: Sequence[Task], processes: int) -> Iterator[FinishedShard]:
    waiting = iter(tasks)
    started: list[_Process] = []
    try:
        for task in islice(waiting, processes):
            started.append(_start(job))
            started[-1][1].send(task)
        busy = [connection for _, connection in started]
        while busy:
            for connection in cast("list[Connection]", wait(busy)):
                message = connection.recv()
                if isinstance(message, Exception):
                    raise message
                if message is not None:
                    yield message
                elif (following := next(waiting, None)) is not None:
                    connection.send(following)
                else:
                    busy.remove(connection)
    except (EOFError, ConnectionError):
        raise WorkerError(
            "a process of the conversion was killed, as the kernel does where memory runs out",
            hint="Start it again, it goes on; with fewer --processes, or a smaller --records-per-shard.",
        ) from None
    finally:
        for process, connection in started:
            kill_group(process)
            process.wait()
            connection.close()
        _remove_temporary(job)


def _start(job: ShardJob) -> _Process:
    process, sock = start_process("loaderd.convert.conversion")
    connection: Connection[Any, Any] = Connection(sock.detach())
    connection.send(job)  # once, and not with each unit: it may name a million files
    return process, connection


def main() -> None:
    """Entry point of a process that writes shards: see ``ipc.spawn.start_process``."""
    sock, parent = enter_process("loaderd-convert")
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(sock.detach())
    with contextlib.suppress(EOFError, ConnectionError):  # the conversion is over
        job = connection.recv()
        while True:
            connection.send(_write(connection, job, connection.recv()))


def _write(connection: Connection[Any, Any], job: ShardJob, task: Task) -> Exception | None:
    try:
        for finished in do_task(job, task):
            connection.send(finished)
    except (LoaderdError, OSError) as error:
        return error
    except Exception as error:
        text = f"a process of the conversion failed: {type(error).__name__}: {error}"
        return WorkerError(text, traceback=traceback.format_exc())
    return None
