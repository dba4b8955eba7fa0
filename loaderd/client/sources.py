"""What a stream's batches come from: a daemon of our own, or a server. What differs between them is here.

::

    EmbeddedSource     shards               start a daemon           Open                ◄── Listed, Opened
    RemoteSource       servers elsewhere    start a daemon           Open                ◄── Welcome, Listed, Opened
    ServedSource       a server here        connect to its socket    Hello, Subscribe    ◄── Welcome, Listed, Opened

After Opened all of them speak alike (``connection``). A source also knows how long to go on trying when the
link is lost (``pause_s``): a daemon that died is replaced at once, but three in a row that delivered nothing are the
end; a server that is away may be started again, so it is called at growing intervals until ``reconnect_timeout``.
Servers elsewhere are called by the workers of our own daemon, and not from here.
"""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from loaderd.client.link import Link, LinkLost, link_to_daemon, link_to_server
from loaderd.dataset import StreamDescription
from loaderd.errors import BusyError, DaemonError, LoaderdError, OptionError, ServerError
from loaderd.options import Shuffle, StreamOptions
from loaderd.protocol.messages import PROTOCOL, Ask, Hello, Message, Open, Subscribe, Welcome
from loaderd.protocol.worker_messages import UseServers
from loaderd.remote.address import checked_addresses
from loaderd.remote.source import RemoteStream
from loaderd.schema import Schema
from loaderd.schema.wire import from_wire
from loaderd.subscription import Subscription
from loaderd.version import VERSION

HOW_TO_START = "Is it running? `loaderd serve mypackage.module:dataset` starts one, and says where it listens."

_MAX_FRUITLESS_DAEMONS = 3
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_ASK_AGAIN_S = 2.0

_logger = logging.getLogger("loaderd")


class Source(ABC):
    """See the module's docstring. Of one stream; ``options`` are those that its order follows from.

    What a server decides of them, and ``schema``, ``row_bytes`` and ``grows``, is known when the stream is open.
    """

    options: StreamOptions
    schema: Schema
    row_bytes: int
    grows: bool
    takes_turns = False
    """Whether batches come to whoever of a group asks for one."""

    @property
    def window_records(self) -> int:
        """Rows of a window, as ``plan.positions.Course`` needs it."""
        return self.options.window_records(self.row_bytes)

    @abstractmethod
    def link(self) -> Link:
        """A new link. Raises LinkLost where another try may succeed, LoaderdError where none will."""

    @abstractmethod
    def greeting(self, start: str) -> list[Message]:
        """What to say first, to have the stream opened at ``start`` (the JSON of a position)."""

    def welcomed(self, welcome: Welcome) -> None:  # noqa: B027 - a daemon of our own has nothing to say
        """A server says what the data set is. Raises LoaderdError where that is not what it was."""

    def may_pass(self, failure: LoaderdError) -> bool:
        """Whether it is worth trying again after this answer."""
        return False

    @abstractmethod
    def pause_s(self, lost: LinkLost, fruitful: bool, at: str) -> float:
        """How many seconds to wait before the next :meth:`link`; raises LoaderdError where there should be none.

        ``fruitful``: whether a batch has come over a link since this was asked last. ``at``: where it would go on.
        """

    def news(self) -> Message | None:
        """What the other end should hear, if there is something; is asked now and then."""
        return None

    def is_back(self, at: str) -> None:  # noqa: B027 - a daemon of our own is back at once, and says nothing
        """The stream is open, or open again."""


class _OwnDaemon(Source):
    """A daemon of our own, that serves what ``wanted`` says."""

    def __init__(self, wanted: StreamDescription | RemoteStream) -> None:
        self.options = wanted.options
        # Pickled once: what a user's function refers to may have changed by the time another daemon is started.
        self._pickled = cloudpickle.dumps(wanted)
        self._fruitless = 0

    def link(self) -> Link:
        return link_to_daemon()

    def greeting(self, start: str) -> list[Message]:
        return [Open(self._pickled, start), Ask()]  # its answer is a sign of life, and from then on silence counts

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


class EmbeddedSource(_OwnDaemon):
    """Shards that its workers read."""

    def __init__(self, description: StreamDescription) -> None:
        super().__init__(description)
        self.schema = description.schema
        self.row_bytes = description.schema.row_bytes
        self.grows = description.dataset.grows


class RemoteSource(_OwnDaemon):
    """Servers elsewhere, of which its workers ask for rows. ``ask``: is asked again and again which there are."""

    def __init__(self, wanted: RemoteStream, ask: Callable[[], Sequence[str]] | None) -> None:
        super().__init__(wanted)
        self._wanted = wanted
        self._ask = ask
        self._asked_s = time.monotonic()
        self._known = Known(f"the servers at {', '.join(wanted.of.addresses[:3])}", wanted.of.name)

    def welcomed(self, welcome: Welcome) -> None:
        self._known.take_over(self, welcome.dataset)

    def may_pass(self, failure: LoaderdError) -> bool:
        return isinstance(failure, ServerError) and bool(self._known.said)

    def pause_s(self, lost: LinkLost, fruitful: bool, at: str) -> float:
        if lost.failure is not None:  # the workers have tried long enough; the next iteration has them try again
            raise lost.failure
        return super().pause_s(lost, fruitful, at)

    def news(self) -> Message | None:
        now_s = time.monotonic()
        if self._ask is None or now_s - self._asked_s < _ASK_AGAIN_S:
            return None
        self._asked_s = now_s
        found = self._ask()
        addresses = checked_addresses(found) if found else ()
        if not addresses or addresses == self._wanted.of.addresses:
            return None
        self._wanted = replace(self._wanted, of=replace(self._wanted.of, addresses=addresses))
        self._pickled = cloudpickle.dumps(self._wanted)
        return UseServers(list(addresses))


class Known:
    """What a server said of a data set, which must not change. ``what``: the server, in words."""

    def __init__(self, what: str, dataset: str) -> None:
        self._what = what
        self._dataset = dataset
        self.said: dict[str, Any] = {}

    def take_over(self, source: Source, found: dict[str, Any]) -> None:
        """Have ``source`` be of it. Raises ServerError where it differs from what was said before, OptionError."""
        self.said = self.said or found
        differing = [name for name, value in self.said.items() if found.get(name) != value]
        if differing:
            raise ServerError(
                f"{self._what} has another data set {self._dataset!r} now: another {', '.join(differing)}",
                hint="Connect anew to use that; or have the server started with what it had.",
            )

        shuffle = found["shuffle"]
        source.schema = from_wire(found["schema"])
        source.row_bytes = found["row_bytes"]
        source.grows = found["grows"]
        check_remainder(source.grows, source.options.remainder)
        source.options = replace(
            source.options,
            shuffle=shuffle if isinstance(shuffle, bool) else Shuffle(*shuffle),
            seed=found["seed"],
            on_corrupt=found["on_corrupt"],
        )


class ServedSource(Source):
    """A server on this machine."""

    def __init__(
        self,
        address: str,
        dataset: str,
        subscription: Subscription,
        *,
        stall_timeout: float | None,
        report: str | None,
        reconnect_timeout: float,
    ) -> None:
        """``reconnect_timeout``: seconds. Raises OptionError."""
        self.what = f"the server at {address}"
        # How many workers there are is the server's business.
        self.options = subscription.stream_options(workers=1, stall_timeout=stall_timeout, report=report)
        self._address = address
        self._dataset = dataset
        self._subscription = subscription
        self.takes_turns = subscription.sharing == "shared"
        self._timeout_s = reconnect_timeout
        self._known = Known(self.what, dataset)
        self._was_open = self._away = False
        self._pause_s = _MIN_PAUSE_S
        self._tried_s = 0.0
        self._called_s: float | None = None

    def link(self) -> Link:
        self._called_s = time.monotonic()
        return link_to_server(self._address)

    def greeting(self, start: str) -> list[Message]:
        return [Hello(PROTOCOL, VERSION, self._dataset), Subscribe(self._subscription.to_wire(), start)]

    def welcomed(self, welcome: Welcome) -> None:
        self._called_s = None
        self._known.take_over(self, welcome.dataset)

    def may_pass(self, failure: LoaderdError) -> bool:
        # A server may notice late that a connection is lost, and count us twice until then.
        return isinstance(failure, BusyError) and self._was_open

    def pause_s(self, lost: LinkLost, fruitful: bool, at: str) -> float:
        if not self._known.said:
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
