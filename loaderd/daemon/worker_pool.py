"""The worker processes: started, spoken to, replaced when they die. Does the I/O that the scheduler does not."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass

from loaderd.errors import DaemonError
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import Message
from loaderd.protocol.process import how_it_ended, start_process

# So many workers that die one after the other without having done anything point to the machine, not to the data:
# more than three tasks in a row that are given up.
_MAX_FRUITLESS_DEATHS = 10


@dataclass
class _WorkerProcess:
    process: subprocess.Popen[bytes]
    channel: Channel


class WorkerPool:
    """Numbers workers from 0; a replacement gets a new number."""

    def __init__(self) -> None:
        self._workers: dict[int, _WorkerProcess] = {}
        self._next_number = 0
        self._fruitless_deaths = 0
        self.restarts = 0

    def start(self) -> tuple[int, Channel]:
        """Start a worker; returns its number and channel."""
        process, sock = start_process("loaderd.workers.main")
        number = self._next_number
        self._next_number += 1
        self._workers[number] = _WorkerProcess(process, Channel(sock))
        return number, self._workers[number].channel

    def send(self, worker: int, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message; a worker that is dead doesn't hear it, and its death is noticed by its channel's end."""
        with contextlib.suppress(ChannelClosed):
            self._workers[worker].channel.send(message, fds)

    def receive(self, worker: int) -> list[Message]:
        """The messages of a worker; raises ChannelClosed when it died."""
        messages = self._workers[worker].channel.receive()
        self._fruitless_deaths = 0
        return messages

    def bury(self, worker: int) -> str:
        """Take leave of a dead worker; returns how it ended. Raises DaemonError when none of them lives to work."""
        dead = self._workers.pop(worker)
        dead.channel.close()
        dead.process.kill()
        reason = how_it_ended(dead.process)
        self.restarts += 1
        self._fruitless_deaths += 1
        if self._fruitless_deaths >= _MAX_FRUITLESS_DEATHS:
            raise DaemonError(
                f"{self._fruitless_deaths} workers died without having done anything; the last {reason}"
            )
        return reason

    @property
    def numbers(self) -> list[int]:
        return list(self._workers)

    def kill(self) -> None:
        """End all workers: they hold nothing that would be lost."""
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()
            worker.channel.close()
        self._workers.clear()
