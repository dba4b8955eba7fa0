"""The worker processes: started, ended, replaced when they die. Does the I/O that the scheduler does not."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass

from loaderd.errors import DaemonError
from loaderd.machine import available_memory, oom_kills
from loaderd.protocol.channel import Channel
from loaderd.protocol.process import how_it_ended, start_process

# So many workers that die one after the other without having done anything point to the machine, not to the data:
# when a task is given up and cut into parts, a part that can be done comes after a few of them at most.
_MAX_FRUITLESS_DEATHS = 10
# One that is killed while it waits for a disk dies when the disk answers, if ever.
_DEATH_TIMEOUT_S = 0.5


@dataclass
class _WorkerProcess:
    process: subprocess.Popen[bytes]
    pidfd: int


class WorkerPool:
    """Numbers workers from ``first_number`` on; a replacement gets a new number."""

    def __init__(self, first_number: int = 0) -> None:
        self._workers: dict[int, _WorkerProcess] = {}
        self._dying: list[subprocess.Popen[bytes]] = []
        self._next_number = first_number
        self._fruitless_deaths = 0
        self._oom_kills = oom_kills()
        self.restarts = 0

    def start(self) -> tuple[int, Channel, int]:
        """Start a worker; returns its number, its channel, and a descriptor that can be read when it is dead."""
        process, sock = start_process("loaderd.workers.main")
        number = self._next_number
        self._next_number += 1
        self._workers[number] = _WorkerProcess(process, os.pidfd_open(process.pid))
        return number, Channel(sock), self._workers[number].pidfd

    def achieved(self) -> None:
        """Some worker has done something."""
        self._fruitless_deaths = 0

    def bury(self, worker: int) -> str:
        """Take leave of a worker that is dead, or is to be; returns how it ended.

        Raises DaemonError when none of them lives to work.
        """
        reason = self._end(self._workers.pop(worker)) + self._for_memory()
        self.restarts += 1
        self._fruitless_deaths += 1
        if self._fruitless_deaths >= _MAX_FRUITLESS_DEATHS:
            raise DaemonError(
                f"{self._fruitless_deaths} workers died without having done anything; the last {reason}"
            )
        return reason

    def _end(self, worker: _WorkerProcess) -> str:
        os.close(worker.pidfd)
        worker.process.kill()
        try:
            worker.process.wait(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._dying.append(worker.process)
            return "does not die"
        return how_it_ended(worker.process)

    def _for_memory(self) -> str:
        """Why the kernel has killed a process since this was asked last, if that was why."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        ran_out = before is not None and self._oom_kills is not None and self._oom_kills > before
        return f", for memory ran out ({available_memory().limit})" if ran_out else ""

    def reap(self) -> None:
        """Take note of deaths that have taken long."""
        self._dying = [process for process in self._dying if process.poll() is None]

    @property
    def numbers(self) -> list[int]:
        return list(self._workers)

    def pid_of(self, worker: int) -> int:
        return self._workers[worker].process.pid

    def kill(self) -> None:
        """End all workers: they hold nothing that would be lost."""
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._dying:
                process.wait(_DEATH_TIMEOUT_S)
