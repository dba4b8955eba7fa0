"""Batches for a Flight client that knows nothing of loaderd.

The client sends a ticket: a JSON object of fields of a :class:`Ticket`, of which only "dataset" must be there. It
gets record batches (:mod:`loaderd.gateway.arrow`). The ``app_metadata`` of each is the position behind it, as a JSON
object. A ticket with this position as "start" goes on from there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from loaderd.client.connect import ServedLoader
from loaderd.client.link import ask_server
from loaderd.client.served_sources import ServedSource
from loaderd.client.supervised import SupervisedStream
from loaderd.errors import OptionError
from loaderd.gateway.arrow import Specs, record_batch, stored_specs
from loaderd.options import is_count, require
from loaderd.plan.positions import Position
from loaderd.progress import ProgressDisplay
from loaderd.protocol.messages import Welcome
from loaderd.remote.tickets import Compression, check_compression, check_name, parse_object
from loaderd.schema import Schema
from loaderd.schema.wire import from_wire
from loaderd.subscription import Subscription

_DEFAULT_BATCH_SIZE = 1024
_STALL_TIMEOUT_S = 120.0
# For how long a daemon that is being replaced is called: a client that is not loaderd's is told sooner.
_RECONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ticket:
    """A request for batches. Fields mean what options of ``loaderd.connect`` of these names do. Raises OptionError.

    ``batch_size`` null: 1,024, or the number of records if that is less. ``shard`` [i, n]: part i of n. ``packed``:
    the fields come packed, for a client that unpacks them itself (``schema.packed``).
    """

    dataset: str
    batch_size: int | None = None
    epochs: int | None = 1
    shard: tuple[int, int] = (0, 1)
    start: dict[str, Any] | None = None
    packed: bool = False
    compression: Compression = None

    def __post_init__(self) -> None:
        check_name(self.dataset)
        require(self.start is None or isinstance(self.start, dict), "start", "a JSON object, or null", self.start)
        check_compression(self.compression)
        require(
            self.batch_size is None or is_count(self.batch_size), "batch_size", "a positive integer", self.batch_size
        )
        _ = self.subscription, self.position

    @classmethod
    def parse(cls, text: bytes) -> Ticket:
        """The ticket that :meth:`to_json` wrote; ``text`` may come from anybody. Raises OptionError."""
        wanted = parse_object(text, "a ticket")
        known = {each.name for each in fields(cls)}
        if "dataset" not in wanted or not set(wanted) <= known:
            raise OptionError(f"a ticket has a dataset, and may have {sorted(known)}; got {sorted(wanted)!r:.200}")
        return cls(**wanted)

    @classmethod
    def described(cls, descriptor: flight.FlightDescriptor) -> Ticket:
        """The ticket of a descriptor: its command is a ticket, or its path names a data set. Raises OptionError."""
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            return cls.parse(descriptor.command)
        path = descriptor.path or []
        require(len(path) == 1, "a path", "the name of a data set", path)
        return cls(path[0].decode(errors="replace"))

    def to_json(self) -> bytes:
        """The ticket's bytes."""
        return json.dumps(asdict(self)).encode()

    @property
    def subscription(self) -> Subscription:
        """The options that the daemon is told."""
        options = {
            "batch_size": self.batch_size or _DEFAULT_BATCH_SIZE,
            "epochs": self.epochs,
            "shard": self.shard,
            "packed": self.packed,
        }
        is_part = isinstance(self.shard, (list, tuple)) and tuple(self.shard) != (0, 1)
        sharing = {"sharing": "split", "group": secrets.token_hex(4)} if is_part else {}  # a new group
        return Subscription.from_wire({**options, **sharing, "name": "Flight"})

    @property
    def position(self) -> Position | None:
        """Where to begin; None: at the start."""
        return None if self.start is None else Position.from_json(json.dumps(self.start))

    def sized(self, num_records: int) -> Ticket:
        """The same ticket with a batch size, for a data set of ``num_records`` records."""
        return (
            self if self.batch_size is not None else replace(self, batch_size=min(_DEFAULT_BATCH_SIZE, num_records))
        )

    def specs(self, unpacking: Schema) -> Specs:
        """The fields of the batches. ``unpacking``: the schema that unpacks these (``schema.packed``)."""
        return stored_specs(unpacking) if self.packed else unpacking.specs


def ask_schema(address: str, dataset: str) -> Schema:
    """The schema that unpacks the batches of a data set (``schema.packed``). Raises LoaderdError, LinkLost."""
    return from_wire(ask_server(address, Welcome, dataset=dataset)[0].dataset["schema"])


def batches_of(address: str, ticket: Ticket, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    """Each batch, as columns of ``schema``, with the position behind it, as JSON. Raises LoaderdError."""
    source = _Source(
        address,
        ticket.dataset,
        ticket.subscription,
        stall_timeout=_STALL_TIMEOUT_S,
        report=None,
        reconnect_timeout=_RECONNECT_TIMEOUT_S,
    )
    start = ticket.position or Position()
    with ServedLoader(source, SupervisedStream(source, start, ProgressDisplay(False)), start) as loader:
        for batch in loader:
            yield record_batch(schema, batch, batch.num_records), loader.position.to_json().encode()


class _Source(ServedSource):
    """A source whose batches, if they come packed, stay packed."""

    def welcomed(self, welcome: Welcome) -> None:
        super().welcomed(welcome)
        if self._subscription.packed:
            self.schema = Schema.of_stored(self.schema.features)
