"""What is asked of a server on the network, and the form of its answers.

::

    DoGet      ticket: a RowsTicket as JSON             ──► one record batch: COLUMN, a row a record;
                                                            app_metadata: the Faults, as msgpack; none: no metadata
    DoAction   TABLE, body: a TableRequest as JSON      ──► what the data set holds, and how its blocks are cut
    header     authorization: Bearer TOKEN;  loaderd-consumer: a name, for people to read

A row holds the features of the schema that unpacks it, packed (``schema.packed``); the fields that only the server
can make are finished in it. The answer follows from the ticket alone, so any server that has the data can give it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgpack

from loaderd.errors import OptionError
from loaderd.options import is_count, require
from loaderd.plan.passes import Listing, listing_of
from loaderd.redaction import shown

Compression = Literal["lz4", "zstd"] | None
Range = tuple[int, int, int, int]
"""(its set's epoch, block, first, stop): of the block's records in the data set, ``first`` to ``stop - 1``."""

TABLE = "table"
COLUMN = "row"
AUTHORIZATION = "authorization"
CONSUMER = "loaderd-consumer"
REMOTE_PROTOCOL = 1
"""The version of this protocol. A TableRequest names it, and servers refuse any other."""

MAX_RANGES = 1 << 16
MAX_ROWS = 1 << 16
MAX_REQUEST_BYTES = 4 << 20  # enough for MAX_RANGES ranges of large numbers, and a listing
_COMPRESSIONS = (None, "lz4", "zstd")
_MAX_EPOCH = 1 << 62

_Request = TypeVar("_Request", bound="RowsTicket | TableRequest")


@dataclass(frozen=True)
class RowsTicket:
    """A request for records of a data set. Raises OptionError.

    ``data``: the digest of its data (``remote.tables``); ``listing``: if it grows, its shards, as in a position.
    """

    dataset: str
    data: str
    rows: tuple[Range, ...]
    listing: Listing | None = None
    compression: Compression = None

    def __post_init__(self) -> None:
        check_name(self.dataset)
        require(isinstance(self.data, str), "data", "the digest of the data", self.data)
        is_list = isinstance(self.rows, (list, tuple)) and 0 < len(self.rows) <= MAX_RANGES
        require(is_list, "rows", f"a list of 1 to {MAX_RANGES} ranges", self.rows)
        for each in self.rows:
            is_range = (
                isinstance(each, (list, tuple)) and len(each) == 4 and all(is_count(value, 0) for value in each)
            )
            is_range = is_range and each[0] <= _MAX_EPOCH and each[2] < each[3]
            require(is_range, "a range of rows", "[epoch, block, first, stop] with first < stop", each)
        object.__setattr__(self, "rows", tuple(tuple(each) for each in self.rows))
        require(self.num_rows <= MAX_ROWS, "rows", f"of at most {MAX_ROWS} records", self.num_rows)
        object.__setattr__(self, "listing", _checked_listing(self.listing))
        check_compression(self.compression)

    @property
    def num_rows(self) -> int:
        return sum(stop - first for _, _, first, stop in self.rows)


@dataclass(frozen=True)
class TableRequest:
    """A request for a data set's table. ``listing`` as in RowsTicket; None: what there is now. Raises OptionError."""

    dataset: str
    listing: Listing | None = None
    protocol: int = REMOTE_PROTOCOL

    def __post_init__(self) -> None:
        check_name(self.dataset)
        object.__setattr__(self, "listing", _checked_listing(self.listing))


def to_json(request: RowsTicket | TableRequest) -> bytes:
    """The bytes of a ticket, or of the body of an action."""
    return json.dumps(asdict(request)).encode()


def parse(cls: type[_Request], text: bytes) -> _Request:
    """What :func:`to_json` wrote; ``text`` may come from anybody. Raises OptionError."""
    found = parse_object(text, "a ticket")
    known = {each.name for each in fields(cls)}
    if not set(found) <= known:
        raise OptionError(f"a ticket may have {sorted(known)}; got {sorted(found)!r:.200}")
    try:
        return cls(**found)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"a ticket has a wrong value: {error}") from None


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises OptionError, which names ``what``."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"{what} must be a JSON object, got {text[:100]!r}")
    return found


class Fault(NamedTuple):
    """Rows that could not be had: their numbers in the answer; and why, as ``errors.to_wire`` says it."""

    rows: list[int]
    error: dict[str, Any]


def faults_to_wire(faults: list[Fault]) -> bytes:
    """The ``app_metadata`` of an answer."""
    packed: bytes = msgpack.packb(faults) if faults else b""
    return packed


def faults_from_wire(metadata: bytes) -> list[Fault]:
    """What :func:`faults_to_wire` encoded."""
    return [Fault(*fault) for fault in msgpack.unpackb(metadata)] if metadata else []


def check_compression(value: Any) -> Compression:
    """``value``, if it names a compression, or is None; else raises OptionError."""
    is_known = value is None or (isinstance(value, str) and value in _COMPRESSIONS)
    require(is_known, "compression", 'None, "lz4" or "zstd"', value)
    return cast(Compression, value)


def check_name(name: Any) -> None:
    """Raise OptionError if ``name`` cannot be the name of a data set."""
    require(isinstance(name, str) and bool(name), "dataset", "the name of a data set", name)


def _checked_listing(listing: Any) -> Listing | None:
    try:
        return listing_of(listing)
    except (TypeError, ValueError) as error:
        raise OptionError(f"listing must be as in a position, got {shown(listing, 200)}: {error}") from None
