"""Loaders of data sets that a server has: on this machine, or on another one."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from loaderd.client.discovery import Discovery, first_addresses
from loaderd.client.loader import Loader, checked_start
from loaderd.client.served_source import HOW_TO_START, ServedSource, connect_to_server
from loaderd.client.sources import EmbeddedSource, Source
from loaderd.client.transport import Transport, TransportLost
from loaderd.dataset import Concat, Dataset, Mix
from loaderd.errors import OptionError, ServerError
from loaderd.ipc.channel import ChannelClosed
from loaderd.ipc.messages import PROTOCOL, AskStatus, Bye, Failed, Hello, Status
from loaderd.ipc.subscription import Sharing, Subscription
from loaderd.options import Remainder, Unpack, as_float, as_shard, is_path, require, suggests_options
from loaderd.plan.positions import Position
from loaderd.remote.address import TOKEN_VARIABLE, Addresses, checked_addresses, network_address, unix_path
from loaderd.remote.security import TLS
from loaderd.remote.source import RemoteSet, RemoteStream, Settings, Token, check_token_function
from loaderd.remote.tickets import ConsumerName
from loaderd.version import VERSION


@partial(suggests_options, elsewhere="where the server's data set is made")
def connect(
    address: Addresses,
    dataset: str,
    *,
    batch_size: int,
    epochs: int | None = 1,
    remainder: Remainder = "short",
    sharing: Sharing | None = None,
    shard: tuple[int, int] | None = None,
    consumers: int = 1,
    group: str = "",
    workers: int | None = None,
    held_batches: int = 4,
    start: Mapping[str, Any] | Position | None = None,
    unpack: Unpack = "worker",
    report: str | os.PathLike[str] | None = None,
    stall_timeout: float | None = 120.0,
    reconnect_timeout: float = 300.0,
    token: Token | None = None,
    tls: TLS | None = None,
    name: str | None = None,
) -> Loader:
    """A loader of a data set that ``loaderd serve`` has. Its batches come in the same order as a Loader's.

    - ``address``: on this machine ``"unix:///path"``, or ``"unix:"`` for where a server listens by default. On the
      network ``"https://host:port"`` (``"http://…"`` of a server without TLS), a list of these, or a function that
      returns such a list, and is called again every few seconds: servers may come, go and die meanwhile.
    - ``dataset``: the name of a data set of the server's, which has its own schema, shuffle, seed and on_corrupt.
    - ``batch_size``, ``epochs``, ``remainder``, ``held_batches``, ``start``, ``unpack``, ``report``: as in
      :class:`~loaderd.Loader`. ``workers``, too, but only on the network: these ask the servers for packed records,
      and unpack them here.
    - ``sharing``: how this consumer shares the data set with others. ``"independent"``: each has its own order and
      position. ``"split"``: this is consumer i of n, ``shard=(i, n)``; together they get each record once an epoch.
      On one machine also ``"mirrored"``: each consumer of the group gets all batches, which are made once; the
      fastest waits for the slowest. None: ``"split"`` where a shard is given, else ``"independent"``.
    - ``consumers``: how many there are in the group (``"mirrored"``). ``group``: its name, where there are several.
      A consumer is refused if its options of the order differ from the group's, or its shard is taken.
    - ``stall_timeout``: seconds of silence after which the connection is given up; None: never.
    - ``reconnect_timeout``: for how many seconds to go on calling servers that are away, or at first a function that
      fails or names none. (At first, a server on this machine is called only once.) When one is back, the loader goes
      on with exactly the next batch.
    - ``token``: what servers ask of consumers on the network; or the path (a ``pathlib.Path``) of a file that holds
      it, or a function that returns it, which are asked again when a server refuses it; None: ``$LOADERD_TOKEN``.
      ``tls``: certificates.
    - ``name``: what servers call this consumer; None: the name of the program.

    Raises ServerError, here or in the middle of an iteration, if a server cannot be reached or refuses (its token,
    limits, version; a data set that it does not have). If it was away for too long, the same iterator goes on with
    the same batch when it is asked again; a new one begins the next pass, unless
    ``loader.load_state_dict(loader.state_dict())`` was called.
    """
    first = checked_start(start)
    if isinstance(dataset, (Dataset, Concat, Mix)):
        raise OptionError(
            f"dataset must be the name of one of the server's, got a {type(dataset).__name__}",
            hint="Serve it, `loaderd serve MODULE:NAME`, and give its name; or read it with loaderd.Loader.",
        )
    require(isinstance(dataset, str) and bool(dataset), "dataset", "the name of one of the server's", dataset)
    is_token = token is None or is_path(token) or callable(token)
    require(is_token, "token", "a string, the path of a file, a function or None", token)
    require(tls is None or isinstance(tls, TLS), "tls", "a loaderd.TLS or None", tls)
    reconnect_timeout = as_float(reconnect_timeout, "reconnect_timeout", "a number of seconds")
    subscription = _subscription(
        sharing,
        shard,
        name,
        batch_size=batch_size,
        epochs=epochs,
        remainder=remainder,
        held_batches=held_batches,
        unpack=unpack,
        consumers=consumers,
        group=group,
    )
    timeouts: dict[str, Any] = {"stall_timeout": stall_timeout, "report": report}
    source: Source
    if isinstance(address, str) and unix_path(address) is not None:
        for what, value in (("workers", workers), ("tls", tls)):
            require(value is None, what, f"None at {address}: it is for servers on the network", value)
        source = ServedSource(address, dataset, subscription, **timeouts, reconnect_timeout=reconnect_timeout)
    else:
        if subscription.is_group:
            raise OptionError(
                f"sharing={subscription.sharing!r} is for consumers of one machine, at its server's Unix socket",
                hint='Over the network, sharing="split" with shard=(i, n) gives each record to one of n consumers; '
                "consumers without a shard all get the same batches, and servers make their rows once.",
            )
        options = subscription.stream_options(workers=workers, **timeouts)
        new_addresses: Callable[[], tuple[str, ...]] = tuple
        if callable(address):
            addresses = first_addresses(address, reconnect_timeout)
            new_addresses = Discovery(address).news
        else:
            addresses = checked_addresses([address] if isinstance(address, str) else address)
        rank = "{}/{}".format(*subscription.shard) if subscription.shard[1] > 1 else ""
        consumer = ConsumerName(subscription.name, socket.gethostname(), str(os.getpid()), rank)
        settings = network_settings(addresses, token, tls, consumer)
        servers = RemoteSet(addresses, settings, dataset, reconnect_timeout)
        source = EmbeddedSource(RemoteStream(servers, options), new_addresses)
    is_chosen = shard is not None or sharing is not None
    return Loader._of_servers(source, first, subscription.sharing, is_chosen)


def _subscription(
    sharing: Sharing | None, shard: tuple[int, int] | None, name: str | None, **options: Any
) -> Subscription:
    """What a server is asked for, with a choice in place of each None. Raises OptionError."""
    if isinstance(sharing, str) and sharing == "split" and shard is None:
        raise OptionError('sharing="split" needs shard=(i, n): this is consumer i of n')
    place = (0, 1) if shard is None else as_shard(shard)
    return Subscription(
        **options,
        shard=place,
        sharing=("split" if place[1] > 1 else "independent") if sharing is None else sharing,
        name=os.path.basename(sys.argv[0]) if name is None else name,
    )


def network_settings(
    addresses: Sequence[str], token: Token | None, tls: TLS | None, consumer: ConsumerName
) -> Settings:
    """How to call servers on the network. Raises OptionError."""
    if tls is not None and not all(network_address(address)[2] for address in addresses):
        raise OptionError(f"tls is for addresses https://HOST:PORT, got {', '.join(addresses)}")
    token = os.environ.get(TOKEN_VARIABLE) or None if token is None else token
    if callable(token):
        check_token_function(token)
    return Settings(token, tls, consumer)


def ask_status(
    address: str, *, token: Token | None = None, tls: TLS | None = None, timeout_s: float = 10.0
) -> dict[str, Any]:
    """What a server says of itself: data sets, consumers, limits (``ipc.messages.Status``).

    ``address``, ``token`` and ``tls`` as in :func:`connect`. Raises OptionError, and ServerError where the server
    says nothing for ``timeout_s`` seconds.
    """
    require(isinstance(address, str), "address", '"unix:", "https://host:port" or the like', address)
    if unix_path(address) is None:
        from loaderd.remote.calls import Calls, OutOfReach  # only for the network

        calls = Calls(address, network_settings([address], token, tls, ConsumerName("status")))
        try:
            return calls.status(timeout_s)
        except OutOfReach as away:
            raise ServerError(str(away), hint=HOW_TO_START) from None
    require(tls is None, "tls", "None at a Unix socket", tls)
    try:
        with closing(connect_to_server(address)) as transport:
            return _status_over(transport, timeout_s)
    except TransportLost as lost:
        raise ServerError(str(lost), hint=HOW_TO_START) from None


def _status_over(transport: Transport, timeout_s: float) -> dict[str, Any]:
    poll = select.poll()
    poll.register(transport.channel, select.POLLIN)
    with suppress(ChannelClosed):  # what it said before it closed is still to be read
        transport.channel.send(Hello(PROTOCOL, VERSION, ""))
        transport.channel.send(AskStatus())
    while poll.poll(1000 * timeout_s):
        for message in transport.receive():
            if isinstance(message, Status):
                return message.report
            if isinstance(message, Failed):
                raise message.error
            if isinstance(message, Bye):
                raise TransportLost(f"{transport.what} ends: {message.text}")
    raise TransportLost(f"{transport.what} said nothing for {timeout_s:g} s")
