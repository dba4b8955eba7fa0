"""What a stream's batches come from: a daemon of our own, or a server. What differs between them is here.

::

    EmbeddedSource                     start a daemon           Open                     ◄── Listed, Opened
    ServedSource, on this machine      connect to its socket    Hello, Subscribe         ◄── Welcome, Listed, Opened
    ServedSource, on the network       start a relay            Dial, Hello, Subscribe   ◄── Welcome, Listed, Opened

From Opened on, all speak alike (``connection``). A source also knows how long it is worth to go on trying when the
link is lost (``pause_s``): a daemon that died is replaced at once, but three in a row that delivered nothing are the
end; a server that is away may be started again, so it is called at growing intervals until ``reconnect_timeout``. A
relay is a process of ours that speaks with a server on the network, and unpacks its batches into slots; it says Bye
where the server cannot be reached, now or any more, and Failed where that refuses.
"""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import cloudpickle

from loaderd.client.link import Link, LinkLost, link_to_daemon, link_to_relay, link_to_server
from loaderd.dataset import StreamDescription
from loaderd.errors import BusyError, DaemonError, LoaderdError, OptionError, ServerError
from loaderd.options import Shuffle, StreamOptions
from loaderd.protocol.messages import PROTOCOL, Ask, Dial, Hello, Message, Open, Subscribe, Welcome
from loaderd.schema import Schema
from loaderd.schema.wire import from_wire
from loaderd.subscription import Subscription
from loaderd.version import VERSION

HOW_TO_START = "Is it running? `loaderd serve mypackage.module:dataset` starts one, and says where it listens."

_MAX_FRUITLESS_DAEMONS = 3
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0

_logger = logging.getLogger("loaderd")


class Source(ABC):
    """See the module's docstring. Of one stream; ``options`` are those that its order follows from.

    What a server decides of them, and ``schema``, ``row_bytes`` and ``grows``, is known when the stream is open.
    """

    options: StreamOptions
    schema: Schema
    row_bytes: int
    grows: bool

    @property
    def window_records(self) -> int:
        """Rows of a window, as ``plan.positions.Course`` needs it."""
        return self.options.window_records(self.row_bytes)

    @abstractmethod
    def link(self) -> Link:
        """A new link. Raises LinkLost where it may be had later, LoaderdError where it is not worth to try again."""

    @abstractmethod
    def greeting(self, start: str) -> list[Message]:
        """What to say first, to have the stream opened at ``start`` (the JSON of a position)."""

    def welcomed(self, welcome: Welcome) -> None:  # noqa: B027 - a daemon of our own need not say it
        """A server says what the data set is. Raises LoaderdError where that is not what it was."""

    def may_pass(self, failure: LoaderdError) -> bool:
        """Whether it is worth to go on trying after this answer."""
        return False

    @abstractmethod
    def pause_s(self, lost: LinkLost, fruitful: bool, at: str) -> float:
        """How many seconds to wait before the next :meth:`link`; raises LoaderdError where there should be none.

        ``fruitful``: whether a batch has come over a link since this was asked last. ``at``: where it would go on.
        """

    def is_back(self, at: str) -> None:  # noqa: B027 - the user was not told to wait for a daemon of our own
        """The stream is open, or open again."""


class EmbeddedSource(Source):
    """A daemon of our own, that serves a description."""

    def __init__(self, description: StreamDescription) -> None:
        self.options = description.options
        self.schema = description.schema
        self.row_bytes = description.schema.row_bytes
        self.grows = description.dataset.grows
        # Once: what a function of the user's refers to may have changed when another daemon needs it.
        self._pickled = cloudpickle.dumps(description)
        self._fruitless = 0

    def link(self) -> Link:
        return link_to_daemon()

    def greeting(self, start: str) -> list[Message]:
        return [Open(self._pickled, start), Ask()]  # its answer is a sign of life: from there on, silence counts

    def pause_s(self, lost: LinkLost, fruitful: bool, at: str) -> float:
        self._fruitless = 0 if fruitful else self._fruitless + 1
        if self._fruitless == _MAX_FRUITLESS_DAEMONS:
            self._fruitless = 0
            raise DaemonError(
                f"{_MAX_FRUITLESS_DAEMONS} daemons in a row ended without having delivered a batch; {lost}",
                hint="What ends them, or holds them up, is outside: too little memory is a usual cause.",
            )
        # The text alone: a log that kept the exception would keep what its frames hold, the memory of the slots.
        _logger.warning("%s; another one goes on at %s", str(lost), at)
        return 0.0


class ServedSource(Source):
    """A server, on this machine or on the network."""

    def __init__(
        self,
        address: str,
        dataset: str,
        subscription: Subscription,
        settings: dict[str, Any] | None,
        *,
        stall_timeout: float | None,
        report: str | None,
        reconnect_timeout: float,
    ) -> None:
        """``settings``: those of Dial; None: on this machine. ``reconnect_timeout``: seconds. Raises OptionError."""
        self.what = f"the server at {address}"
        self.options = StreamOptions(
            subscription.batch_size,
            epochs=subscription.epochs,
            remainder=subscription.remainder,
            shard=subscription.shard,
            workers=1,  # the server's business
            held_batches=subscription.held_batches,
            stall_timeout=stall_timeout,
            report=report,
        )
        self._address = address
        self._dataset = dataset
        self._subscription = subscription
        self._settings = settings
        self._timeout_s = reconnect_timeout
        self._known: dict[str, Any] | None = None
        self._was_open = self._away = False
        self._pause_s = _MIN_PAUSE_S
        self._tried_s = 0.0
        self._called_s: float | None = None

    def link(self) -> Link:
        self._called_s = time.monotonic()
        return link_to_server(self._address) if self._settings is None else link_to_relay(self._address)

    def greeting(self, start: str) -> list[Message]:
        dial = [] if self._settings is None else [Dial(self._address, self._settings)]
        subscribe = Subscribe(self._subscription.to_wire(), start, reads_page=self._settings is None)
        return [*dial, Hello(PROTOCOL, VERSION, self._dataset), subscribe]

    def welcomed(self, welcome: Welcome) -> None:
        self._called_s = None
        found = welcome.dataset
        if self._known is None:
            shuffle = found["shuffle"]
            self.schema = from_wire(found["schema"])
            self.row_bytes = found["row_bytes"]
            self.grows = found["grows"]
            self.options = replace(
                self.options,
                shuffle=shuffle if isinstance(shuffle, bool) else Shuffle(*shuffle),
                seed=found["seed"],
                on_corrupt=found["on_corrupt"],
            )
            check_remainder(self.grows, self.options.remainder)
            self._known = found
        differing = [name for name, value in self._known.items() if found.get(name) != value]
        if differing:
            raise ServerError(
                f"{self.what} has another data set {self._dataset!r} now: another {', '.join(differing)}",
                hint="Connect anew to use that; or have the server started with what it had.",
            )

    def may_pass(self, failure: LoaderdError) -> bool:
        # A server may notice late that a connection is lost, and count us twice until then.
        return isinstance(failure, BusyError) and self._was_open

    def pause_s(self, lost: LinkLost, fruitful: bool, at: str) -> float:
        if self._known is None:
            raise ServerError(str(lost), hint=HOW_TO_START)
        if fruitful:
            self._end_outage()
        if self._called_s is not None:  # in vain
            self._tried_s += time.monotonic() - self._called_s
            self._called_s = None
        if self._tried_s >= self._timeout_s:
            self._end_outage()
            raise ServerError(
                f"{lost}; it was called for {self._timeout_s:g} s, and no batch came",
                hint="Iterating once more goes on trying, and then with the same batch.",
            )
        if not self._away:
            self._away = True
            _logger.warning("%s; calling it for up to %g s, to go on at %s", str(lost), self._timeout_s, at)
        pause_s = self._pause_s * random.uniform(0.5, 1)  # of many consumers, not all at once
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._tried_s += pause_s
        return pause_s

    def is_back(self, at: str) -> None:
        self._was_open = True
        if self._away:
            self._away = False
            _logger.warning("%s is back; going on at %s", self.what, at)

    def _end_outage(self) -> None:
        self._pause_s = _MIN_PAUSE_S
        self._tried_s = 0.0


def check_remainder(grows: bool, remainder: str) -> None:
    """Raise OptionError for what data that grow cannot have."""
    if grows and remainder == "carry":
        raise OptionError('remainder="carry" cannot complete a batch from an epoch that has not been listed yet')
