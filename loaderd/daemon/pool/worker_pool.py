"""The worker processes: started, ended, replaced when they die. Does the I/O that the scheduler does not."""

from __future__ import annotations

import os
from typing import NamedTuple

from loaderd.daemon.pool.fork_server import ForkServer
from loaderd.errors import DaemonError
from loaderd.ipc.channel import Channel, WorkerChannel
from loaderd.machine import available_memory, oom_kills, remedy
from loaderd.restarts import RestartPolicy
from loaderd.shm.page import new_bell

# If so many workers in a row die without having done anything, the machine is at fault and not the data: a task that
# kills workers is cut into parts, and one of the first few parts succeeds. Those that had nothing to do don't count,
# nor those that were lost at a batch: ``Stream.lost_at`` finds the records to blame.
_MAX_FRUITLESS_DEATHS = 10


FIRST_WORKER = 1 << 40
"""Above the numbers of all consumers."""


class _Worker(NamedTuple):
    pid: int
    pidfd: int
    seat: int


class WorkerPool:
    """Numbers workers from ``FIRST_WORKER`` on; a replacement gets a new number, and the seat of its predecessor."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks
        self._workers: dict[int, _Worker] = {}
        self._next_number = FIRST_WORKER
        self._policy = RestartPolicy(_MAX_FRUITLESS_DEATHS)
        self._first_fruitless = FIRST_WORKER
        """Workers from this number on were started after the last of them had done something."""
        self._oom_kills = oom_kills()
        self._bells: list[int] = []
        self.restarts = 0

    def start(self) -> tuple[int, Channel, int]:
        """Start a worker; returns its number, its channel, and a descriptor that can be read when it is dead.

        Raises DaemonError as :meth:`ForkServer.start`.
        """
        taken = {worker.seat for worker in self._workers.values()}
        seat = next(seat for seat in range(len(taken) + 1) if seat not in taken)
        if seat == len(self._bells):
            try:
                self._bells.append(new_bell())
            except OSError as error:
                raise DaemonError(f"cannot start a worker: {error.strerror}", hint=remedy(error)) from None
        sock, pid, pidfd = self._forks.start()
        number = self._next_number
        self._next_number += 1
        self._workers[number] = _Worker(pid, pidfd, seat)
        return number, WorkerChannel(sock), pidfd

    def achieved(self) -> None:
        self._policy.achieved()
        self._first_fruitless = self._next_number

    def reap(self, worker: int, excused: bool) -> str:
        """Forget a worker that is dead, after killing it if it is not; returns how it ended.

        ``excused``: it had started, and there was nothing that it should have done, or it was at a batch. Raises
        DaemonError when too many in a row have died without having done anything.
        """
        buried = self._workers.pop(worker)
        os.close(buried.pidfd)
        reason = self._forks.end(buried.pid) + self._for_memory()
        self.restarts += 1
        if not excused and worker >= self._first_fruitless and self._policy.ended_in_vain():
            raise DaemonError(
                f"{self._policy.num_in_vain} workers died without having done anything; the last {reason}",
                hint="Warnings before this may say why. Check the limits of memory and of open files (ulimit -n), "
                "and that the schema's module can be imported.",
            )
        return reason

    def _for_memory(self) -> str:
        """In words, that the kernel has killed for lack of memory since this was asked last; "" if it has not."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        ran_out = before is not None and self._oom_kills is not None and self._oom_kills > before
        return f", for memory ran out ({available_memory().limit})" if ran_out else ""

    @property
    def numbers(self) -> list[int]:
        return list(self._workers)

    def pid_of(self, worker: int) -> int:
        return self._workers[worker].pid

    def seat_of(self, worker: int) -> int:
        """The seat of a worker. Seats count from 0; there are as many as workers."""
        return self._workers[worker].seat

    @property
    def bells(self) -> list[int]:
        return self._bells

    def end(self) -> None:
        """End all workers, and start none any more: they hold nothing that would be lost."""
        self._forks.close()

    def close(self) -> None:
        self.end()
        for fd in [*self._bells, *[worker.pidfd for worker in self._workers.values()]]:
            os.close(fd)
        self._bells.clear()
        self._workers.clear()
