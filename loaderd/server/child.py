"""A process that the supervisor has started: the daemon, or the gateway."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from typing import Any

from loaderd.errors import DaemonError, LoaderdError, from_wire
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import AskStatus, Failed, Message, Status
from loaderd.protocol.process import how_it_ended
from loaderd.protocol.starting import start_process
from loaderd.server.output import Output

Report = dict[str, Any]
Heard = Callable[[Report | None, Report], None]


class Child:
    """Started with ``message``, what it is to do; ``heard`` is called with the last Status and each new one.

    ``captures``: what it prints becomes the log's.

    Raises DaemonError where the process cannot be started.
    """

    def __init__(
        self, name: str, module: str, message: Message, fds: tuple[int, ...], heard: Heard, captures: bool
    ) -> None:
        self.name = name
        self._heard = heard
        self.output = Output(name) if captures else None
        try:
            self.process, sock = start_process(module, None if self.output is None else self.output.write_fd)
        except DaemonError:
            if self.output is not None:
                self.output.close()
            raise
        finally:
            if self.output is not None:
                self.output.close_write_end()
        self.channel = Channel(sock)
        self.pid_fd = os.pidfd_open(self.process.pid)
        """Can be read when the process has ended."""
        self.report: Report | None = None
        """Of the last Status; None until the first one: the process starts."""
        self.error: LoaderdError | None = None
        """Why it has given up, if it has said so."""
        self.silent_s = 0.0
        """Seconds since it was asked how it is, or was started, and has not answered."""
        self.patience_s = 30.0
        """After so many of them the log is told that it still starts."""
        self._is_asked = True  # by the first message
        self.tell(message, fds)

    def __str__(self) -> str:
        return f"{self.name} {self.process.pid}"

    def tell(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. A process that is gone is no error here: ``pid_fd`` shows that."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(message, fds)

    def ask(self, passed_s: float) -> None:
        """Ask for a Status, unless the last question is unanswered; then add ``passed_s`` to ``silent_s``."""
        if self._is_asked:
            self.silent_s += passed_s
        else:
            self._is_asked = True
            self.tell(AskStatus())

    def hear(self) -> bool:
        """Take the messages that have come; returns whether there was a Status. Raises ChannelClosed."""
        reported = False
        for message in self.channel.receive():
            if isinstance(message, Status):
                self._heard(self.report, message.report)
                self.report = message.report
                self._is_asked = False
                self.silent_s = 0.0
                reported = True
            elif isinstance(message, Failed):
                self.error = from_wire(message.error)
        return reported

    def bury(self) -> str:
        """How the process ended, in words; kills it if it is alive."""
        with contextlib.suppress(ChannelClosed):
            while select.select([self.channel], [], [], 0)[0]:  # its forks may keep the pipe open
                self.hear()
        self.channel.close()
        self.process.kill()
        os.close(self.pid_fd)
        how = how_it_ended(self.process.wait())
        if self.output is not None:
            self.output.close()
        return how
