"""A process that the supervisor started: the daemon or the gateway."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from typing import Any

from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import how_it_ended
from loaderd.ipc.messages import AskStatus, Failed, Message, Status
from loaderd.ipc.spawn import not_started, start_process
from loaderd.server.output import Output

Report = dict[str, Any]
Heard = Callable[[Report | None, Report], None]


class Child:
    """A process and its channel. ``message`` is the first message to it, which tells it what to do.

    ``heard`` is called with the report before (or None) and the new one. ``captures``: whether what the process
    prints goes to the log. Raises DaemonError if the process cannot be started.
    """

    def __init__(
        self, name: str, module: str, message: Message, fds: tuple[int, ...], heard: Heard, captures: bool
    ) -> None:
        self.name = name
        self._heard = heard
        try:
            self.output = Output(name) if captures else None
        except OSError as error:
            raise not_started(module, error) from None
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
        """A file descriptor that becomes readable when the process ends."""
        self.report: Report | None = None
        """The report of the last Status; None while the process starts."""
        self.error: LoaderdError | None = None
        """Why it gave up, if it said so."""
        self.silent_s = 0.0
        """For how many seconds the last question, or the first message, has had no answer."""
        self.patience_s = 30.0
        """After so many silent seconds, the log says that it is still starting."""
        self._is_asked = True  # the first message is answered with a Status, too
        self.tell(message, fds)

    def __str__(self) -> str:
        return f"{self.name} {self.process.pid}"

    def tell(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. If the process has ended, nothing is raised: ``pid_fd`` shows that."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(message, fds)

    def ask(self, passed_s: float) -> None:
        """Ask for a Status; or, while the last question is unanswered, add ``passed_s`` to ``silent_s``."""
        if self._is_asked:
            self.silent_s += passed_s
        else:
            self._is_asked = True
            self.tell(AskStatus())

    def hear(self) -> bool:
        """Read the messages that have come; returns whether there was a Status. Raises ChannelClosed."""
        reported = False
        for message in self.channel.receive():
            if isinstance(message, Status):
                self._heard(self.report, message.report)
                self.report = message.report
                self._is_asked = False
                self.silent_s = 0.0
                reported = True
            elif isinstance(message, Failed):
                self.error = message.error
        return reported

    def reap(self) -> str:
        """Kill the process if it lives, and release what belongs to it; returns how it ended, in words."""
        with contextlib.suppress(ChannelClosed):
            while select.select([self.channel], [], [], 0)[0]:  # not to its end: forks of the child may keep it open
                self.hear()
        self.channel.close()
        self.process.kill()
        os.close(self.pid_fd)
        how = how_it_ended(self.process.wait())
        if self.output is not None:
            self.output.close()
        return how
