"""What a stream's batches come from: a daemon of our own, or a server. What differs between them is here.

::

    EmbeddedSource     shards               start a daemon           Open                ◄── Listed, Opened
    RemoteSource       servers elsewhere    start a daemon           Open                ◄── Welcome, Listed, Opened
    ServedSource       a server here        connect to its socket    Hello, Subscribe    ◄── Welcome, Listed, Opened

After Opened, all three speak alike (``stream_client``). A source also knows how long to go on trying when the
connection is lost (``pause_s``): a daemon that died is replaced at once, but not after three in a row that
delivered nothing; a server that is away may be started again, so it is called at growing intervals until
``reconnect_timeout``. Servers elsewhere are called by the workers of our own daemon, and not from here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from loaderd.client.transport import Transport, TransportLost, connect_to_daemon
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, LoaderdError
from loaderd.ipc.messages import AskState, Message, Open, Welcome
from loaderd.ipc.spawn import search_path
from loaderd.options import StreamOptions
from loaderd.schema import Schema

if TYPE_CHECKING:
    from loaderd.remote.source import RemoteStream

_MAX_FRUITLESS_DAEMONS = 3

_logger = logging.getLogger("loaderd")


class Source(ABC):
    """What one stream's batches come from: see the module's docstring. Their order follows from ``options``.

    The options that a server decides, ``schema``, ``row_bytes`` and ``grows`` are known when the stream is open.
    """

    options: StreamOptions
    schema: Schema
    row_bytes: int
    grows: bool
    knows_earlier_shards = False
    """Whether the other end can go on with the shards of a position when there are more by now."""

    @property
    def window_records(self) -> int:
        """Rows of a window, as ``plan.positions.PassSequence`` needs it."""
        return self.options.window_records(self.row_bytes)

    @abstractmethod
    def connect(self) -> Transport:
        """A new connection. Raises TransportLost where another try may succeed, LoaderdError where none will."""

    @abstractmethod
    def greeting(self, start: str) -> list[Message]:
        """What to say first, to have the stream opened at ``start`` (the JSON of a position)."""

    def welcomed(self, welcome: Welcome) -> None:  # noqa: B027 - a daemon of our own has nothing to say
        """A server says what the data set is. Raises LoaderdError where that is not what it was."""

    def may_retry(self, failure: LoaderdError) -> bool:
        """Whether to try again after ``failure``, which the other end has reported."""
        return False

    @abstractmethod
    def pause_s(self, lost: TransportLost, fruitful: bool, at: str) -> float:
        """How many seconds to wait before the next :meth:`connect`; raises LoaderdError where there should be none.

        ``fruitful``: whether a batch has come since this was asked last. ``at``: where it would go on.
        """

    def remember_shards(  # noqa: B027 - a server knows its shards itself
        self, shards: list[list[str] | None]
    ) -> None:
        """A daemon has found these shards, as in ShardsFound: the next one need not list them."""

    def news(self) -> Message | None:
        """A message that the other end should get, or None; is asked for now and then."""
        return None

    def is_back(self, at: str) -> None:  # noqa: B027 - a daemon of our own is back at once, and says nothing
        """The stream is open, or open again."""


class EmbeddedSource(Source):
    """A daemon of our own, whose workers read the shards of ``wanted``, or ask servers for its rows."""

    def __init__(self, wanted: StreamDescription | RemoteStream) -> None:
        from loaderd.pickling import pickled_to_send  # with cloudpickle, when there is something to send

        self.options = wanted.options
        dataset = None
        if isinstance(wanted, StreamDescription):
            dataset = wanted.dataset
            self.schema = wanted.schema
            self.row_bytes = wanted.schema.row_bytes
            self.grows = dataset.grows
        # Once: what a user's function refers to, and the working directory, may be others when another daemon starts.
        self._pickled = pickled_to_send(wanted, dataset)
        self._path = search_path()
        self._shards: list[list[str] | None] | None = None
        self._num_fruitless = 0

    def connect(self) -> Transport:
        return connect_to_daemon(self._path)

    def greeting(self, start: str) -> list[Message]:
        # The answer to AskState is a sign of life, and from then on silence counts.
        return [Open(self._pickled, start, self._shards), AskState()]

    def remember_shards(self, shards: list[list[str] | None]) -> None:
        self._shards = shards

    def pause_s(self, lost: TransportLost, fruitful: bool, at: str) -> float:
        self._num_fruitless = 0 if fruitful else self._num_fruitless + 1
        if self._num_fruitless == _MAX_FRUITLESS_DAEMONS:
            self._num_fruitless = 0  # whoever asks again gets as many again
            raise DaemonError(
                f"{_MAX_FRUITLESS_DAEMONS} daemons in a row ended without having delivered a batch; {lost}",
                hint="What ends them, or holds them up, is outside: too little memory is a usual cause.",
            )
        # The text alone: a log that kept the exception would keep what its frames hold, the memory of the slots.
        _logger.warning("%s; another one goes on at %s", str(lost), at)
        return 0.0
