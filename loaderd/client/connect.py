"""Loaders of data sets that a server has: on this machine, or on another one."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from loaderd.client.address import TOKEN_VARIABLE, unix_path
from loaderd.client.base import BaseLoader, checked_start
from loaderd.client.batch import Batch, HandOver, as_it_is
from loaderd.client.link import LinkLost, link_to_relay, link_to_server
from loaderd.client.progress import IndexProgress
from loaderd.client.shared import SharedIteration, SharedStream
from loaderd.client.sources import HOW_TO_START, ServedSource
from loaderd.client.supervised import SupervisedStream
from loaderd.errors import OptionError, ServerError, from_wire
from loaderd.options import Remainder, as_seconds, require
from loaderd.plan.passes import Pass
from loaderd.plan.positions import Position
from loaderd.protocol.channel import ChannelClosed
from loaderd.protocol.messages import PROTOCOL, AskStatus, Bye, Dial, Failed, Hello, Message, Status
from loaderd.subscription import Sharing, Subscription
from loaderd.tls import TLS
from loaderd.version import VERSION

Compression = Literal["lz4", "zstd"]


class ServedLoader(BaseLoader):
    """Batches of a data set that a server has, from :func:`loaderd.connect`: to use as a :class:`~loaderd.Loader`."""


class SharedLoader(ServedLoader):
    """One of the consumers that take batches by turns, each the next one when it asks.

    Iterating goes on with the pass that the group is at, to the end of that pass. :attr:`position` is the group's:
    before it everything is used up, by one consumer or another.
    """

    sharing = "shared"
    _stream: SharedStream

    def iterate(self, hand_over: HandOver = as_it_is, ahead: int = 0) -> Iterator[Any]:
        """``ahead`` is of no effect: each batch is asked for when it is needed."""
        return SharedIteration(self._stream, hand_over)

    @property
    def position(self) -> Position:
        pass_, mark = self._stream.place
        return self._stream.course_of(pass_).position(pass_, mark)

    next_position = position

    def __len__(self) -> int:
        raise TypeError('a loader of sharing="shared" has no length: nobody knows how many batches it will ask for')

    def new_pass(self) -> tuple[Pass, int]:
        self._refuse()

    def fetch(self, pass_: Pass, step: int, wanted: int = 1) -> Batch | None:
        self._refuse()

    def seek(self, position: Position) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OptionError(
            'with sharing="shared", batches go to whoever asks: none can be asked for by its number',
            hint='Iterate; or connect with sharing="independent", "split" or "mirrored".',
        )


def connect(
    address: str,
    *,
    dataset: str,
    batch_size: int,
    epochs: int | None = 1,
    remainder: Remainder = "short",
    sharing: Sharing = "independent",
    shard: tuple[int, int] = (0, 1),
    consumers: int = 1,
    group: str = "",
    held_batches: int = 4,
    start: Position | None = None,
    report: str | os.PathLike[str] | None = None,
    stall_timeout: float | None = 120.0,
    reconnect_timeout: float = 300.0,
    packed: bool = True,
    compression: Compression | None = None,
    token: str | None = None,
    tls: TLS | None = None,
    name: str | None = None,
) -> ServedLoader:
    """A loader of a data set that ``loaderd serve`` has. The order of its batches is that of an embedded Loader.

    - ``address``: ``"unix:///path"``, or ``"unix:"`` for where a server listens by default;
      ``"grpc+tls://host:port"``, or ``"grpc://host:port"`` of a server without TLS.
    - ``dataset``: which, of those that the server has. Its schema, shuffle, seed and on_corrupt are the server's.
    - ``batch_size``, ``epochs``, ``remainder``, ``held_batches``, ``start``, ``report``: as in
      :class:`~loaderd.Loader`.
    - ``sharing``: how it goes with other consumers of the data set. ``"independent"``: each has its own order and
      position. ``"split"``: this is consumer i of n, ``shard=(i, n)``; together they get each record once an epoch.
      ``"shared"``: each batch goes to one consumer of the group, whoever asks next. ``"mirrored"``: each consumer of
      the group gets all batches, which are made once; the fastest waits for the slowest.
    - ``consumers``: how many there are in the group (``"shared"``, ``"mirrored"``). ``group``: its name, where there
      are several such groups. Consumers are in one group if they also agree in the options of the order.
    - ``stall_timeout``: seconds of silence after which the connection is given up; None: never.
    - ``reconnect_timeout``: for how many seconds to call a server that is away. When it is back, the loader goes on
      with exactly the next batch.
    - ``packed``: over the network, send records packed and unpack them here. ``compression``: over the network.
    - ``token``: what the server asks of consumers on the network; None: ``$LOADERD_TOKEN``. ``tls``: certificates.
    - ``name``: what the server calls this consumer; None: the name of the program.

    A server that cannot be reached or refuses (its token, limits, version; a data set that it does not have) raises
    ServerError, here or in the middle of an iteration. With ``"shared"``, the batches that a consumer held when it
    died go to another one; so these may come twice, all others once; there is no ``len()``, ``fetch`` or ``seek``.
    """
    first = checked_start(start)
    require(isinstance(dataset, str) and bool(dataset), "dataset", "the name of one of the server's", dataset)
    reconnect_timeout = as_seconds(reconnect_timeout, "reconnect_timeout", "a number of seconds")
    settings = _network_settings(address, compression, token, tls)
    subscription = Subscription(
        batch_size,
        epochs=epochs,
        remainder=remainder,
        shard=shard,
        held_batches=held_batches,
        sharing=sharing,
        consumers=consumers,
        group=group,
        packed=packed if settings is not None else False,
        name=os.path.basename(sys.argv[0]) if name is None else name,
    )
    source = ServedSource(
        address,
        dataset,
        subscription,
        settings,
        stall_timeout=stall_timeout,
        report=report,  # type: ignore[arg-type]  # is made a str there
        reconnect_timeout=reconnect_timeout,
    )
    if sharing == "shared":
        return SharedLoader(source, SharedStream(source, first, IndexProgress(None)), first)
    loader = ServedLoader(source, SupervisedStream(source, first, IndexProgress(None)), first)
    loader.sharing = sharing
    return loader


def ask_status(
    address: str, *, token: str | None = None, tls: TLS | None = None, timeout_s: float = 10.0
) -> dict[str, Any]:
    """What a server says of itself: data sets, consumers, limits (``protocol.messages.Status``).

    ``address``, ``token`` and ``tls`` as of :func:`connect`. Raises ServerError where it says nothing for
    ``timeout_s`` seconds, OptionError.
    """
    settings = _network_settings(address, None, token, tls)
    questions: list[Message] = [Hello(PROTOCOL, VERSION, ""), AskStatus()]
    try:
        link = link_to_server(address) if settings is None else link_to_relay(address)
        with contextlib.closing(link):
            for message in questions if settings is None else [Dial(address, settings), *questions]:
                link.channel.send(message)
            poll = select.poll()
            poll.register(link.channel, select.POLLIN)
            while poll.poll(1000 * timeout_s):
                for answer in link.receive():
                    if isinstance(answer, Status):
                        return answer.report
                    if isinstance(answer, Failed):
                        raise from_wire(answer.error)
                    if isinstance(answer, Bye):
                        raise LinkLost(f"{link.what} ends: {answer.text}")
            raise ServerError(f"{link.what} said nothing for {timeout_s:g} s")
    except (LinkLost, ChannelClosed) as lost:
        raise ServerError(str(lost), hint=HOW_TO_START) from None


def _network_settings(
    address: str, compression: Compression | None, token: str | None, tls: TLS | None
) -> dict[str, Any] | None:
    """Those of Dial; None: the server is on this machine. Raises OptionError."""
    require(isinstance(address, str), "address", '"unix:", "grpc+tls://host:port" or the like', address)
    require(token is None or isinstance(token, str), "token", "a string or None", token)
    require(compression in (None, "lz4", "zstd"), "compression", '"lz4", "zstd" or None', compression)
    require(tls is None or isinstance(tls, TLS), "tls", "a loaderd.TLS or None", tls)
    if tls is not None and not address.startswith("grpc+tls:"):
        raise OptionError(f"tls is for an address grpc+tls://HOST:PORT, got {address}")
    if unix_path(address) is not None:
        require(compression is None, "compression", "None on the same machine, where nothing is sent", compression)
        return None
    return {
        "token": os.environ.get(TOKEN_VARIABLE) if token is None else token,
        "tls": (tls or TLS()).to_wire() if address.startswith("grpc+tls:") else None,
        "compression": compression,
    }
