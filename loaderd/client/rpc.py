"""What a consumer says over a link, and hears there. Each of its waits ends.

A wait ends when what it is for has come; or with TransportLost, when the other end dies, says goodbye, gives up, or
is silent for longer than ``stall_timeout`` although it was asked for a sign of life. Between waits, nobody listens:
messages stay in the socket.
"""

from __future__ import annotations

import logging
import select
from abc import ABC, abstractmethod
from collections.abc import Callable

from loaderd.client.sources import Source
from loaderd.client.stall_timer import StallTimer
from loaderd.client.transport import TransportLost, limit_sending
from loaderd.errors import LoaderdError, from_wire
from loaderd.ipc.channel import ChannelClosed
from loaderd.ipc.messages import AskState, Bye, Failed, Message, State, Welcome

_MIN_START_LIMIT_S = 30.0

_logger = logging.getLogger("loaderd")


class RpcClient(ABC):
    """The conversation with the daemon or server of ``source``. Messages about the stream go to :meth:`_handle`."""

    def __init__(self, source: Source) -> None:
        """Start the daemon, or connect to the server."""
        self._source = source
        self.link = source.link()
        self._channel = self.link.channel
        self._stall_timeout = source.options.stall_timeout
        sock = self._channel.socket
        limit_sending(sock, self._stall_timeout or 0.0)  # a daemon that does not read must not keep us writing
        self._poll = select.poll()
        self._socket_fd = sock.fileno()  # another thread may close the socket, which has no number then
        self._poll.register(self._socket_fd, select.POLLIN)
        self._heard = False
        self._unsent = False
        self._bye: Bye | None = None

    def _greet(self, start: str) -> None:
        """Say what the source wants, from ``start`` on, and wait for the first message."""
        for message in self._source.greeting(start):
            self._send(message)
        limit_s = self._stall_timeout
        # Before its first message, a daemon may be importing, from a slow file system or on a busy core.
        start_limit_s = None if limit_s is None else max(limit_s, _MIN_START_LIMIT_S)
        self._wait(self.link.what, lambda: self._heard, start_limit_s)

    def _send(self, message: Message) -> None:
        """Raises nothing where the daemon is gone: the next wait reads its last messages, and finds out."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._unsent = True

    def _wait(
        self,
        what: str,
        is_there: Callable[[], object],
        limit_s: float | None,
        sleep: Callable[[float], list[int]] | None = None,
    ) -> None:
        """Wait until ``is_there()``; ``what`` says in words for what. ``sleep`` takes the place of :meth:`_arrived`.

        Raises TransportLost, also after ``limit_s`` seconds of silence (None: never). Asks ``is_there`` after each
        sleep.
        """
        stall_timer = StallTimer(limit_s)
        while True:
            if (news := self._source.news()) is not None:
                self._send(news)
            if self._bye is not None:
                self.link.close()
                raise TransportLost(f"{self.link.what} ends: {self._bye.text}")
            arrived = (sleep or self._arrived)(stall_timer.tick_s)
            if arrived:
                stall_timer.heard()
                for message in self.link.receive() if self._socket_fd in arrived else []:
                    if isinstance(message, State) and stall_timer.must_report():
                        _logger.warning("waiting for %s for %.0f s: %s", what, stall_timer.waited_s, message.text)
                    self._hear(message)
            if is_there():
                return
            if arrived:
                continue
            stall_timer.tick()
            if stall_timer.is_over or self._unsent:
                raise TransportLost(
                    f"{self.link.what} said nothing for {stall_timer.limit_s:g} s and {self.link.kill()}"
                )
            if stall_timer.must_ask():
                self._send(AskState())

    def _arrived(self, limit_s: float) -> list[int]:
        """Wait for up to ``limit_s`` seconds; return the descriptors that can be read."""
        return [fd for fd, _ in self._poll.poll(1000 * limit_s)]

    def _hear(self, message: Message) -> None:
        if isinstance(message, Bye):
            self._bye = message
            return
        self._heard = True
        if isinstance(message, Failed):
            self._give_up(from_wire(message.error))
        if isinstance(message, Welcome):
            try:
                self._source.welcomed(message)
            except LoaderdError as error:
                self._give_up(error)
        self._handle(message)

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """Take in a message about the stream."""

    def _give_up(self, error: LoaderdError) -> None:
        self.link.close()
        raise TransportLost(f"{self.link.what} gave up: {error.message}", error)
