"""What the processes say to each other: one named tuple a message, one encoding for all.

::

    consumer    ──► daemon   Open, ListData, StartPass, AskState, UseServers
    consumer    ◄── daemon   Progress, ShardsFound, Opened, DataListed, BatchFailed, RecordsSkipped, State, Failed,
                             Notice, StorageUnavailable
    daemon      ──► worker   see ``worker_messages``
    daemon      ◄── worker

    consumer    ──► server   Hello, Subscribe (in place of Open), AskStatus
    consumer    ◄── server   Welcome, Bye, Status as well
    supervisor  ──► server   Serve, Drain, Stop, AskStatus
    supervisor  ◄── server   Status, Failed

On the wire a message is a msgpack array: its number in ``CLASS_OF``, then its fields in order. What a daemon and its
workers say are pickles, as is ``Open.description``, which a consumer sends only to its own daemon. A server accepts
none. Bulk data does not go this way: it lies in shared memory, whose file descriptors come with messages such as
Opened and Attach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args

import msgpack

from loaderd.errors import LoaderdError, to_wire
from loaderd.ipc.codec import message_of
from loaderd.plan.passes import Listing, Pass
from loaderd.snapshots import Progress

if TYPE_CHECKING:
    from loaderd.ipc.worker_messages import WorkerMessage

# The name of a file and the message of a user's exception may be no valid Unicode.
UNICODE_ERRORS = "surrogatepass"


# The version of what consumers and servers say to each other. A server refuses any other.
PROTOCOL = 8


class Hello(NamedTuple):
    """Consumer's first message: its ``PROTOCOL``, its version of loaderd, and the data set that it wants.

    ``dataset`` is "" if it wants no batches. This message and Failed are the same in every protocol.
    """

    protocol: int
    version: str
    dataset: str


class Failed(NamedTuple):
    """Daemon: the stream cannot go on, for this reason. To a supervisor: the process cannot."""

    error: LoaderdError


class Welcome(NamedTuple):
    """Server: its version, and what a consumer must know of the data set (``remote.tables``)."""

    version: str
    dataset: dict[str, Any]


class Subscribe(NamedTuple):
    """Consumer: make a stream with these ``options`` (``subscription.Subscription``); ``start`` as in Open."""

    options: dict[str, Any]
    start: str | None


class Bye(NamedTuple):
    """Server: it ends, or another process takes its place, for this reason. What it has delivered stays valid.

    Consumer: it needs nothing more of this connection, for this reason; "": it has ended.
    """

    text: str


class AskStatus(NamedTuple):
    """Consumer or supervisor: send a Status."""


class Status(NamedTuple):
    """Server: what it serves, to whom, and how it goes (``ServerDaemon.report``)."""

    report: dict[str, Any]


class Serve(NamedTuple):
    """Supervisor: serve this (``serve.options``).

    What the process needs open comes with the message: the listening socket first.
    """

    settings: dict[str, Any]


class Drain(NamedTuple):
    """Supervisor: take no more consumers, send groups to the next daemon, and end when the last consumer has gone."""


class Stop(NamedTuple):
    """Supervisor: tell all consumers Bye, for this reason, and end."""

    text: str


class Open(NamedTuple):
    """Consumer: make a stream of this (a pickle of ``dataset.StreamDescription`` or ``remote.source.RemoteStream``).

    ``start``: the position, as JSON, from which on it is wanted; it replaces the description's. It says which data
    are needed, and how much memory the first pass needs. None: from the beginning, of the data that there are.
    ``shards``: as in ShardsFound, if a daemon has listed them before; shards that have come since then are left out.
    """

    description: bytes
    start: str | None
    shards: list[list[str] | None] | None = None


class ShardsFound(NamedTuple):
    """Daemon of one consumer: the URIs of the shards of each set; None: the set grows. Comes before Opened."""

    shards: list[list[str] | None]


class ListData(NamedTuple):
    """Consumer: use the shards of ``listing`` for sets that grow (``plan.passes``); None: those there are now."""

    listing: Listing | None


class DataListed(NamedTuple):
    """Daemon: which data the stream has. With an ``error``: others could not be had, so these are as before.

    ``facts`` are fields of ``Statistics``; ``of`` and ``listing`` are what positions are to say
    (``plan.positions.Position``); ``damages`` (dicts of Damage) is what the index pass left out, and ``left_out``
    says so in words ("": nothing).
    """

    facts: dict[str, Any]
    of: dict[str, Any]
    listing: Listing | None
    damages: list[dict[str, Any]]
    left_out: str
    error: LoaderdError | None = None


class PageSize(NamedTuple):
    """The size of the page by which batches come, and the ``number`` of the consumer's column (``shm.page``)."""

    num_slots: int
    num_seats: int
    num_members: int
    number: int


class Opened(NamedTuple):
    """Daemon: the stream exists. DataListed has come before.

    ``facts`` are fields of ``Statistics``. The memory of the slots and of the page comes along, that of the
    column of a member, and the bells: the consumer's, the daemon's, and one of each seat.
    """

    facts: dict[str, Any]
    page: PageSize


class StartPass(NamedTuple):
    """Consumer: deliver the batches of a pass from ``step`` on.

    Messages with an older ``generation`` are void.
    """

    generation: int
    which: Pass
    step: int


class BatchFailed(NamedTuple):
    """Daemon: batch ``step`` cannot be delivered; the next ones can."""

    generation: int
    step: int
    error: LoaderdError


class AskState(NamedTuple):
    """Consumer: send a State, to show that you live and what I wait for."""


class State(NamedTuple):
    """Daemon: what each process waits for, as text."""

    text: str


class Notice(NamedTuple):
    """Daemon: something to tell the user; ``workers_restarted`` is the count so far."""

    text: str
    workers_restarted: int


class RecordsSkipped(NamedTuple):
    """Daemon: ``num_records`` records are left out of batch ``step``, for these reasons. Comes before the batch."""

    generation: int
    step: int
    errors: tuple[LoaderdError, ...]
    num_records: int


class StorageUnavailable(NamedTuple):
    """Daemon: the batch that the consumer waits for needs storage that does not answer. The daemon goes on trying."""

    generation: int
    error: LoaderdError


class UseServers(NamedTuple):
    """Consumer to daemon, daemon to workers: from now on, the servers are at these addresses."""

    addresses: list[str]


# In the order of their numbers. Add a new message at the end, or else change PROTOCOL.
_Numbered = (
    Hello
    | Failed
    | Welcome
    | Subscribe
    | Bye
    | AskStatus
    | Status
    | Serve
    | Drain
    | Stop
    | Open
    | Progress
    | ListData
    | DataListed
    | Opened
    | StartPass
    | BatchFailed
    | AskState
    | State
    | Notice
    | RecordsSkipped
    | StorageUnavailable
    | ShardsFound
    | UseServers
)
Message = Union[_Numbered, "WorkerMessage"]

CLASS_OF: dict[int, type[Message]] = dict(enumerate(get_args(_Numbered)))
_NUMBER_OF = {cls: number for number, cls in CLASS_OF.items()}


def encode(message: Message) -> bytes:
    """The message as bytes, which need no frame: msgpack shows where they end."""
    values = [_NUMBER_OF[type(message)], *message]
    packed: bytes = msgpack.packb(values, default=to_wire, unicode_errors=UNICODE_ERRORS)
    return packed


def decode(values: list[Any]) -> Message:
    message: Message = message_of(CLASS_OF[values[0]], values[1:])
    return message
