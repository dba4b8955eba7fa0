"""A server's consumers: who they are, what they may do, and what they have had."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from loaderd.daemon.session import Session
from loaderd.daemon.totals import Totals
from loaderd.errors import BusyError, ServerError
from loaderd.ipc.channel import peer_of
from loaderd.ipc.messages import PROTOCOL, AskState, AskStatus, Hello, Message
from loaderd.ipc.subscription import Subscription
from loaderd.ipc.untrusted import UntrustedChannel
from loaderd.version import VERSION

_HELLO_LIMIT_S = 10.0
_MESSAGE_LIMIT_S = 10.0
_ROOM_FOR_QUESTIONS = 32
# What a consumer may leave unread of the messages to it. Batches do not count: its slots bound them.
_MAX_POSTED_BYTES = 4 << 20


@dataclass(frozen=True)
class Limits:
    """What consumers may take; the supervisor has checked the values. None: as much as they want.

    ``max_consumers``: how many there may be at a time. ``max_held_batches``: the most that the option
    ``held_batches`` may be. ``max_memory``: bytes of the windows and slots of a stream, which a group has in common.
    ``idle_timeout``: seconds after which a consumer must go if it takes none of the batches that are there for it.
    """

    max_consumers: int = 64
    max_held_batches: int = 64
    max_memory: int | None = None
    idle_timeout: float | None = None

    @property
    def max_connections(self) -> int:
        """How many connections there may be: to bound what those cost that ask for nothing, and no more than that.

        Consumers that have come back or been refused may be counted twice for a moment. Monitors and
        ``loaderd status`` connect for each question, and must not take the room of consumers.
        """
        return 2 * self.max_consumers + _ROOM_FOR_QUESTIONS

    def check_room(self, num_consumers: int) -> None:
        """Raise BusyError where there is no room for another one beside ``num_consumers``."""
        if num_consumers >= self.max_consumers:
            raise BusyError(
                f"the server already has its maximum of {self.max_consumers} consumers",
                hint="The server was started with that limit: --max-consumers.",
            )

    def check(self, wanted: Subscription) -> None:
        """Raise ServerError where a consumer asks for more than it may have."""
        for what, most in (("held_batches", self.max_held_batches), ("consumers", self.max_consumers)):
            if getattr(wanted, what) > most:  # each consumer of a group would get slots
                raise ServerError(
                    f"{what} must be at most {most} here, got {getattr(wanted, what)}",
                    hint=f"The server was started with that limit: --max-{what.replace('_', '-')}.",
                )


@dataclass
class Consumer:
    """One connection. Times are those of ``time.monotonic``, in seconds."""

    number: int
    channel: UntrustedChannel
    pid: int
    pidfd: int | None
    connected_s: float = field(default_factory=time.monotonic)
    heard_s: float = field(default_factory=time.monotonic)
    offered_s: float | None = None
    """Since when there is something that it could take; None: there is nothing. Only with an ``idle_timeout``."""
    greeted: bool = False
    bye: str | None = None
    """Why it ends, in its own words; "": it has ended. None: it has not said that it ends."""
    dataset: str = ""
    wanted: Subscription | None = None
    session: Session | None = None
    counted: dict[str, float] = field(default_factory=dict)

    @classmethod
    def accepted(cls, number: int, sock: socket.socket) -> Consumer:
        """The process that connected to the Unix socket; raises ServerError unless it is this user's or root's."""
        pid, uid = peer_of(sock)
        channel = UntrustedChannel(sock)
        if uid not in (os.getuid(), 0):
            channel.close()
            raise ServerError(f"process {pid} of user {uid} may not connect: the server is user {os.getuid()}'s")
        pidfd = None
        with contextlib.suppress(OSError):  # a process in another container may have no pid here
            pidfd = os.pidfd_open(pid)
        return cls(number, channel, pid, pidfd)

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})" if self.name else f"process {self.pid}"

    @property
    def name(self) -> str:
        """The name that it has chosen, or ""."""
        return "" if self.wanted is None else self.wanted.name

    def greet(self, hello: Hello) -> None:
        """Take its first message. Raises ServerError if that comes again, or is of another protocol."""
        if hello.protocol != PROTOCOL:
            raise ServerError(
                f"this server is loaderd {VERSION} and speaks protocol {PROTOCOL}; "
                f"the consumer is loaderd {hello.version:.40} and speaks {hello.protocol}",
                hint="Install the same version on both sides.",
            )
        if self.greeted:
            raise ServerError("Hello came twice")
        self.greeted = True

    @property
    def is_member(self) -> bool:
        """Whether it is a member of a group. All members of a group must be connected to the same daemon."""
        return self.wanted is not None and self.wanted.is_group

    def is_beside(self, other: Consumer) -> bool:
        """Whether it has a session, and the same data set, kind of sharing and group as ``other``."""
        if self is other or self.session is None or self.wanted is None or other.wanted is None:
            return False
        ours, theirs = self.wanted, other.wanted
        return (self.dataset, ours.sharing, ours.group) == (other.dataset, theirs.sharing, theirs.group)

    def overdue(self, now_s: float, limits: Limits) -> ServerError | None:
        """Why this consumer must go: it is too slow, does not read, or says nothing; None: it may stay."""
        consumers = None if self.session is None else self.session.consumers
        if consumers is not None and consumers.has_moved(self.number):
            self.heard_s = now_s
        if consumers is not None and consumers.holds_too_many(self.number):
            return ServerError("this consumer holds more batches than its share of the group's")
        if self.channel.fault:
            return ServerError(f"this is no message of loaderd: {self.channel.fault}")
        if self.session is None and now_s - self.heard_s > _HELLO_LIMIT_S:
            return ServerError(f"this consumer connected and asked for nothing within {_HELLO_LIMIT_S:g} s")
        began_s = self.channel.unfinished_since
        if began_s is not None and now_s - began_s > _MESSAGE_LIMIT_S:
            return ServerError(f"a message was begun and not finished for {_MESSAGE_LIMIT_S:g} s")
        if (unread := self.channel.posted_bytes) > _MAX_POSTED_BYTES:
            text = f"this consumer has left {unread:,} bytes of messages unread; is its process stopped?"
            return ServerError(text)
        return None if limits.idle_timeout is None else self._idle_for(now_s, limits.idle_timeout)

    def _idle_for(self, now_s: float, limit_s: float) -> ServerError | None:
        """Whether it has left batches untaken for longer than ``limit_s``: an error that says so, or None.

        Time in which there was nothing to take does not count: the clock starts when this first sees a batch there.
        So a consumer that has waited for long gets a moment in which to take what has come.
        """
        consumers = None if self.session is None else self.session.consumers
        if consumers is None or not consumers.has_waiting(self.number):
            self.offered_s = None
            return None
        self.offered_s = now_s if self.offered_s is None else max(self.offered_s, self.heard_s)
        idle_s = now_s - self.offered_s
        if idle_s <= limit_s:
            return None
        return ServerError(
            f"this consumer has left its batches untaken for {idle_s:.0f} s",
            hint=f"The server was started with --idle-timeout {limit_s:g}. Connect again, with "
            "start=loader.position, to go on.",
        )

    def add_to(self, totals: Totals) -> None:
        """Count what it has had. It may write any number in its page: no count falls."""
        counts = {} if self.session is None else self.session.counts_of(self.number)
        for what, number in counts.items():
            self.counted[what] = max(number, self.counted.get(what, 0))
            totals.add(what, self.dataset, self.name, self.counted[what])

    def report(self, now_s: float) -> dict[str, Any]:
        """What ``loaderd status`` shows of the consumer: plain values."""
        session, wanted = self.session, self.wanted
        found: dict[str, Any] = {
            "number": self.number,
            "name": self.name,
            "pid": self.pid,
            "dataset": self.dataset,
            "connected_s": now_s - self.connected_s,
            "idle_s": now_s - self.heard_s,
        }
        if wanted is None or session is None:
            return found
        return {
            **found,
            "sharing": wanted.sharing,
            "group": wanted.group,
            "shard": list(wanted.shard),
            "batch_size": wanted.batch_size,
            **session.report(self.number),
        }


def asked_once(messages: list[Message]) -> list[Message]:
    """The messages, each question once and at the end: one of two bytes takes milliseconds to answer."""
    questions = {type(message): message for message in messages if isinstance(message, (AskState, AskStatus))}
    return [message for message in messages if type(message) not in questions] + list(questions.values())
