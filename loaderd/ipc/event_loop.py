"""The channels that a daemon listens to and speaks on. None of them can make it wait.

The process at the other end may be stopped, or busy sending to the daemon: what it does not read at once is kept, and
sent when it reads again.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import Message

_LAST_WORDS_S = 5.0


class EventLoop:
    """Channels by number, and whatever else is waited for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channels: dict[int, Channel] = {}
        self._death_fds: dict[int, int] = {}
        self._watched: dict[int, socket.socket | int] = {}

    def add(self, number: int, channel: Channel, death_fd: int | None) -> None:
        """Listen to ``channel``. ``death_fd``: a pidfd that shows when the process at the other end dies, or None.

        The channel alone does not show it: a fork may still have its other end open. The pidfd stays the caller's.
        """
        self._channels[number] = channel
        self._selector.register(channel, selectors.EVENT_READ, number)
        if death_fd is not None:
            self._death_fds[number] = death_fd
            self._selector.register(death_fd, selectors.EVENT_READ, number)

    def remove(self, number: int) -> None:
        """Forget a channel, and close it."""
        channel = self._channels.pop(number)
        self._selector.unregister(channel)
        death_fd = self._death_fds.pop(number, None)
        if death_fd is not None:
            self._selector.unregister(death_fd)
        channel.close()

    def watch(self, number: int, what: socket.socket | int) -> None:
        """Have :meth:`wait` yield ``(number, [])`` when a socket or a descriptor can be read."""
        self._watched[number] = what
        self._selector.register(what, selectors.EVENT_READ, number)

    def unwatch(self, number: int) -> None:
        """End what :meth:`watch` began; what was watched stays the caller's."""
        self._selector.unregister(self._watched.pop(number))

    def post(self, number: int, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send, now or later. If the other end is gone, :meth:`wait` will say so."""
        channel = self._channels[number]
        with contextlib.suppress(ChannelClosed):
            channel.post(message, fds)
        self._listen(number, channel)

    def _listen(self, number: int, channel: Channel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_posted else 0)
        if self._selector.get_key(channel).events != events:
            self._selector.modify(channel, events, number)

    def wait(self, timeout_s: float) -> Iterator[tuple[int, list[Message] | None]]:
        """Yield (number, what has come); None: the other end is gone, and the caller is to remove the channel."""
        for key, events in self._selector.select(timeout_s):
            number = key.data
            channel = self._channels.get(number)
            if number in self._watched:
                yield number, []
                continue
            if channel is None:  # removed just now
                continue
            if key.fileobj is not channel:
                yield number, None
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    channel.flush()
                    self._listen(number, channel)
                messages = channel.receive() if events & selectors.EVENT_READ else []
            except ChannelClosed:
                yield number, None
            else:
                yield number, messages

    def finish(self, number: int) -> None:
        """Send what is left for ``number``, as far as the other end reads it within 5 s."""
        channel = self._channels[number]
        until_s = time.monotonic() + _LAST_WORDS_S
        with contextlib.suppress(ChannelClosed):
            while channel.has_posted and time.monotonic() < until_s:
                self._selector.select(0.1)
                channel.flush()

    def close(self) -> None:
        for number in list(self._channels):
            self.remove(number)
        for number in list(self._watched):
            self.unwatch(number)
        self._selector.close()
