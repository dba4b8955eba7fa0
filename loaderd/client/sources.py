"""What a stream's batches come from: a daemon of our own, or a server. What differs between them is here.

::

    EmbeddedSource     shards               start a daemon        Open                ◄── DataListed, Opened
    EmbeddedSource     servers elsewhere    start a daemon        Open                ◄── Welcome, DataListed, Opened
    ServedSource       a server here        connect to its socket Hello, Subscribe    ◄── Welcome, DataListed, Opened

After Opened, all three speak alike (``stream_client``). A source also knows how long to go on trying when the
connection is lost (``pause_s``): a daemon that died is replaced at once, but not after three in a row that
delivered nothing; a server that is away may be started again, so it is called at growing intervals until
``reconnect_timeout``. Servers elsewhere are called by the workers of our own daemon, and not from here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderd.client.transport import Transport, TransportLost, connect_to_daemon
from loaderd.dataset import StreamDescription, delivered_schema
from loaderd.errors import DaemonError, LoaderdError, ServerError
from loaderd.ipc.messages import AskState, Message, Open, UseServers, Welcome
from loaderd.ipc.spawn import search_path
from loaderd.options import Shuffle, StreamOptions
from loaderd.schema import Schema

if TYPE_CHECKING:
    from loaderd.remote.source import RemoteStream

_MAX_FRUITLESS_DAEMONS = 3

_logger = logging.getLogger("loaderd")


class Source(ABC):
    """What one stream's batches come from: see the module's docstring. Their order follows from ``options``.

    The options that a server decides, the schemas, ``row_bytes`` and ``grows`` are known when the stream is open.
    """

    unpacked_schema: Schema
    """Of the data set: what :attr:`schema`, of the batches, is unpacked to (``options.unpack``)."""
    schema: Schema
    row_bytes: int
    grows: bool
    shards: list[list[str] | None] | None = None
    """Those that a daemon has found, as in ShardsFound: the next one need not list them."""
    knows_earlier_shards = False
    """Whether the other end can go on with the shards of a position when there are more by now."""

    def __init__(self, options: StreamOptions, what: str = "", dataset: str = "") -> None:
        """``what``: what messages call the server of ``dataset``."""
        self.options = options
        self._what = what
        self._dataset = dataset
        self._announced: dict[str, Any] = {}

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

    @abstractmethod
    def may_retry(self, failure: LoaderdError) -> bool:
        """Whether to try again after ``failure``, which the other end has reported."""

    @abstractmethod
    def pause_s(self, lost: TransportLost, fruitful: bool) -> float:
        """How many seconds to wait before the next :meth:`connect`; raises LoaderdError where there should be none.

        ``fruitful``: whether a batch has come since this was asked last.
        """

    def news(self) -> Message | None:
        """A message that the other end should get, or None; is asked for now and then."""
        return None

    def is_back(self) -> None:  # noqa: B027 - a daemon of our own is back at once, and says nothing
        """The stream is open, or open again."""

    def welcomed(self, welcome: Welcome) -> None:
        """A server says what the data set is.

        Raises ServerError where that is not what it was; OptionError for options that do not suit it.
        """
        dataset = welcome.dataset
        if not self._announced:
            self._announced.update(dataset)
        differing = [key for key, value in self._announced.items() if dataset.get(key) != value]
        if differing:
            raise ServerError(
                f"{self._what} has another data set {self._dataset!r} now: another {', '.join(differing)}",
                hint="Connect anew to use that; or have the server started with what it had.",
            )
        from loaderd.schema.wire import from_wire  # for servers only

        shuffle = dataset["shuffle"]
        self.unpacked_schema = from_wire(dataset["schema"])
        self.schema = delivered_schema(self.unpacked_schema, self.options.unpack)
        self.row_bytes = dataset["row_bytes"]
        self.grows = dataset["grows"]
        if self.grows:
            self.options.check_growing()
        self.options = replace(
            self.options,
            shuffle=shuffle if isinstance(shuffle, bool) else Shuffle(*shuffle),
            seed=dataset["seed"],
            on_corrupt=dataset["on_corrupt"],
        )


class EmbeddedSource(Source):
    """A daemon of our own, whose workers read the shards of ``wanted``, or ask servers for its rows.

    ``new_addresses`` says, now and then, that there are other servers; (): it has no news.
    """

    def __init__(
        self,
        wanted: StreamDescription | RemoteStream,
        new_addresses: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        from loaderd.pickling import pickled_to_send  # with cloudpickle, when there is something to send

        self._remote: RemoteStream | None = None
        dataset = None
        if isinstance(wanted, StreamDescription):
            super().__init__(wanted.options)
            dataset = wanted.dataset
            self.unpacked_schema, self.schema = dataset.schema, wanted.schema
            self.row_bytes = wanted.schema.row_bytes
            self.grows = dataset.grows
        else:
            servers = ", ".join(wanted.of.addresses[:3])
            super().__init__(wanted.options, f"the servers at {servers}", wanted.of.name)
            self._remote = wanted
        self._new_addresses = new_addresses
        # Once: what a user's function refers to, and the working directory, may be others when another daemon starts.
        self._pickled = pickled_to_send(wanted, dataset)
        self._path = search_path()
        self._num_fruitless = 0

    def connect(self) -> Transport:
        return connect_to_daemon(self._path)

    def greeting(self, start: str) -> list[Message]:
        # The answer to AskState is a sign of life, and from then on silence counts.
        return [Open(self._pickled, start, self.shards), AskState()]

    def welcomed(self, welcome: Welcome) -> None:
        super().welcomed(welcome)
        assert self._remote is not None
        self._use(replace(self._remote, has_begun=True))

    def news(self) -> Message | None:
        if self._remote is None:
            return None
        addresses = self._new_addresses()
        if not addresses or addresses == self._remote.of.addresses:
            return None
        self._use(replace(self._remote, of=replace(self._remote.of, addresses=addresses)))
        return UseServers(list(addresses))

    def _use(self, wanted: RemoteStream) -> None:
        """For the next daemon."""
        from loaderd.pickling import pickled

        self._remote = wanted
        self._pickled = pickled(wanted)

    def may_retry(self, failure: LoaderdError) -> bool:
        return isinstance(failure, ServerError) and bool(self._announced)

    def pause_s(self, lost: TransportLost, fruitful: bool) -> float:
        if lost.failure is not None:  # the workers have tried long enough; the next call has them try again
            raise lost.failure
        self._num_fruitless = 0 if fruitful else self._num_fruitless + 1
        if self._num_fruitless == _MAX_FRUITLESS_DAEMONS:
            self._num_fruitless = 0  # whoever asks again gets as many again
            raise DaemonError(
                f"{_MAX_FRUITLESS_DAEMONS} daemons in a row ended without having delivered a batch; {lost}",
                hint="What ends them, or holds them up, is outside: too little memory is a usual cause.",
            )
        # The text alone: a log that kept the exception would keep what its frames hold, the memory of the slots.
        _logger.warning("%s; another one takes its place", str(lost))
        return 0.0
