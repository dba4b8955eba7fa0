"""Batches for a Flight client that knows nothing of loaderd.

It asks with a ticket, a JSON object of a :class:`Ticket`'s fields, of which all but "dataset" may be missing, and gets
record batches (:mod:`loaderd.remote.arrow`). The ``app_metadata`` of each is a JSON object, the position behind it:
given as "start", it has the batches go on from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from loaderd.errors import OptionError
from loaderd.options import require
from loaderd.plan.positions import Position
from loaderd.remote.arrow import Specs, record_batch, stored_specs
from loaderd.remote.wire import Compression, check_compression, parse_object
from loaderd.schema import Schema
from loaderd.subscription import Subscription

_DEFAULT_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Ticket:
    """What is wanted: fields of the same names as the options of ``loaderd.connect``. Raises OptionError.

    ``shard`` [i, n]: part i of n. ``packed``: the fields as they travel to a consumer that unpacks them itself.
    """

    dataset: str
    batch_size: int = _DEFAULT_BATCH_SIZE
    epochs: int | None = 1
    shard: tuple[int, int] = (0, 1)
    start: dict[str, Any] | None = None
    packed: bool = False
    compression: Compression = None

    def __post_init__(self) -> None:
        require(isinstance(self.dataset, str), "dataset", "the name of a data set", self.dataset)
        require(self.start is None or isinstance(self.start, dict), "start", "a JSON object, or null", self.start)
        check_compression(self.compression)
        _ = self.subscription, self.position

    @classmethod
    def parse(cls, text: bytes) -> Ticket:
        """The way back from :meth:`to_json`; of anybody. Raises OptionError."""
        wanted = parse_object(text, "a ticket")
        known = {each.name for each in fields(cls)}
        if "dataset" not in wanted or not set(wanted) <= known:
            raise OptionError(f"a ticket has a dataset, and may have {sorted(known)}; got {sorted(wanted)!r:.200}")
        return cls(**wanted)

    @classmethod
    def described(cls, descriptor: flight.FlightDescriptor) -> Ticket:
        """A path is the name of a data set, a command a ticket. Raises OptionError."""
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
        """What this is to the daemon."""
        options = {"batch_size": self.batch_size, "epochs": self.epochs, "shard": self.shard, "packed": self.packed}
        is_part = isinstance(self.shard, (list, tuple)) and tuple(self.shard) != (0, 1)
        return Subscription.from_wire({**options, "sharing": "split" if is_part else "independent", "name": "Flight"})

    @property
    def position(self) -> Position | None:
        """Where to begin, if that was said."""
        return None if self.start is None else Position.from_json(json.dumps(self.start))

    def specs(self, unpacking: Schema) -> Specs:
        """The fields of the batches, of the schema that unpacks them (``schema.packed``)."""
        return stored_specs(unpacking) if self.packed else unpacking.specs


def batches_of(unix_path: str, ticket: Ticket, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    """Each batch with the position behind it, as JSON."""
    ...
