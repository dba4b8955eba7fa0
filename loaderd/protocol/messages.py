"""What the processes say to each other: one frozen dataclass a message, one encoding for all.

::

    client  ──► daemon   Open, List, Start, Release, Ask
    client  ◄── daemon   Progress, Opened, Listed, Ready, Broken, Skipped, Ended, State, Failed, Warned
    daemon  ──► worker   Attach, IndexTask, ProbeTask, LoadTask, FillTask
    daemon  ◄── worker   Attached, Advanced, Done, TaskFailed

On the wire a message is a msgpack array: its number in ``_MESSAGES``, then its fields in order. Bulk data does not go
this way: it lies in shared memory, whose file descriptors travel beside Opened and Attach. ``Open.description`` is a
pickle; it goes from a process to its own child only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args

import msgpack

ATTACH_TASK = -1
# The name of a file and the message of a user's exception may be no valid Unicode.
UNICODE_ERRORS = "surrogatepass"


@dataclass(frozen=True, slots=True)
class Open:
    """Client: make a stream of this description (a pickle of ``dataset.StreamDescription``).

    ``start``: the JSON of the position from which on it is wanted, in place of the description's; it says what the
    data must be, and how much memory the first pass needs. None: from the start, of whatever the data are.
    """

    description: bytes
    start: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Daemon: the index pass has come so far."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class List:
    """Client: of sets that grow, use the shards that there are now, or those of ``listing`` (``plan.passes``)."""

    listing: list[Any] | None


@dataclass(frozen=True, slots=True)
class Listed:
    """Daemon: the data are these; or, with an ``error``, they could not be had, and are what they were.

    ``facts`` are fields of ``Statistics``; ``of`` and ``listing`` are what positions are to say
    (``plan.positions.Position``); ``damages`` (dicts of Damage) is what the index pass left out.
    """

    facts: dict[str, Any]
    of: dict[str, Any]
    listing: Any
    damages: list[dict[str, Any]]
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """Daemon: the stream exists; the memory of its slots comes with this message.

    ``facts`` are fields of ``Statistics``. Listed has come before it.
    """

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Client: deliver the batches of a pass (as ``plan.passes.Pass.to_wire`` has it) from ``step`` on.

    Whatever carries an older ``generation`` is void.
    """

    generation: int
    which: list[Any]
    step: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Daemon: ``batches`` follow each other; each is [step, slot, records] and lent to the client from now on."""

    generation: int
    batches: list[list[int]]


@dataclass(frozen=True, slots=True)
class Broken:
    """Daemon: batch ``step`` cannot be delivered; the next ones can."""

    generation: int
    step: int
    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """Daemon: the pass is over."""

    generation: int


@dataclass(frozen=True, slots=True)
class Release:
    """Client: these slots are not used any more."""

    slots: list[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """Client: is anybody there, and what do I wait for?"""


@dataclass(frozen=True, slots=True)
class State:
    """Daemon: who waits for whom, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Daemon: the stream is at its end, for this reason."""

    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Warned:
    """Daemon: something to tell the user; ``workers_restarted`` is the count so far."""

    text: str
    workers_restarted: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Daemon: ``num_records`` records are left out of batch ``step``, for these reasons; its Ready comes next."""

    generation: int
    step: int
    errors: list[dict[str, Any]]
    num_records: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Daemon: what a worker needs for the tasks to come; ``description`` as in Open.

    With ``files`` empty only index tasks follow; otherwise the memory of windows and of slots comes along.
    """

    description: bytes
    files: list[list[Any]]
    compressions: list[str]
    max_rows: int


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Daemon: index this file ([uri, size_bytes, mtime_ns])."""

    task: int
    file: list[Any]


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Daemon: see whether the first record of this block (to ``left``, as in LoadTask) fits the schema."""

    task: int
    block: list[Any]


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Daemon: bring records into a window, whose rows go where ``order`` (as in ``plan.epoch.WindowOrder``) says.

    Each slice is [shard, offset, num_bytes, count, first_record, anchors, left, first, stop, row, key]: the block's
    place (as in ``shards.blocks.Block``), which of its records are in the data set (as in ``daemon.table``), which of
    these are wanted, the window's row of the first of them, and the key of its shard in its epoch, for the random
    numbers of its records.
    """

    task: int
    arena: int
    order: list[Any]
    slices: list[list[Any]]


@dataclass(frozen=True, slots=True)
class FillTask:
    """Daemon: decode batches; each is [slot, [[arena, start, stop], …], [rows of the batch to leave out]]."""

    task: int
    batches: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Attached:
    """Worker: it is there, and has done what Attach says."""


@dataclass(frozen=True, slots=True)
class Advanced:
    """Worker: the task goes on, and stands at byte ``done_bytes`` of its file."""

    task: int
    done_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """Worker: the task is done.

    ``result``: [index, why it could not be cached] (IndexTask); faults (LoadTask), each [places, error].
    """

    task: int
    result: Any


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """Worker: the task (or Attach, as ``ATTACH_TASK``) cannot be done."""

    task: int
    error: dict[str, Any]


Message = (
    Open
    | Progress
    | List
    | Listed
    | Opened
    | Start
    | Ready
    | Broken
    | Ended
    | Release
    | Ask
    | State
    | Failed
    | Warned
    | Skipped
    | Attach
    | IndexTask
    | ProbeTask
    | LoadTask
    | FillTask
    | Attached
    | Advanced
    | Done
    | TaskFailed
)
_MESSAGES: tuple[type[Message], ...] = get_args(Message)
_NUMBER_OF = {cls: number for number, cls in enumerate(_MESSAGES)}
_FIELDS_OF = {cls: tuple(field.name for field in fields(cls)) for cls in _MESSAGES}


def encode(message: Message) -> bytes:
    """The message as bytes; it is its own frame."""
    cls = type(message)
    values = [_NUMBER_OF[cls], *[getattr(message, name) for name in _FIELDS_OF[cls]]]
    packed: bytes = msgpack.packb(values, unicode_errors=UNICODE_ERRORS)
    return packed


def decode(values: list[Any]) -> Message:
    """The message of an unpacked array."""
    message: Message = _MESSAGES[values[0]](*values[1:])
    return message
