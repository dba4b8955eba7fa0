"""What consumers ask of servers over HTTP, and the form of the answers.

::

    POST /v1/{dataset}/rows       a RowsTicket            ──► 200: packed rows, then the RowFaults as msgpack
    GET  /v1/{dataset}            ?listing=, ?belongs_to=──► 200: the table (``remote.tables``), with an ETag
    PUT  /v1/{dataset}/{digest}   the shards of a table   ──► 204: the server answers tickets for these, too
    GET  /v1                                              ──► 200: what is served, to whom: a JSON object

    Authorization: Bearer TOKEN     with each request, if the server has a token
    Loaderd-Consumer: NAME; HOST; PROCESS; RANK     for people to read

A ticket, and any error, is a msgpack map (``Content-Type: application/msgpack``) or a JSON object. A row holds the
features of the schema that unpacks it, packed (``schema.packed``); the fields that only the server can make are
finished in it. An answer follows from its ticket alone, so any server that has the data can give it.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from loaderd.errors import OptionError
from loaderd.options import require
from loaderd.plan.passes import Listing, listing_of
from loaderd.redaction import shown

Ranges = npt.NDArray[np.int64]

PROTOCOL = 2
"""The version of this protocol and of the layout of rows. Each ticket names it, and servers refuse any other."""
JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"
CONSUMER = "loaderd-consumer"
SHAPE, NUM_FAULT_BYTES = "loaderd-rows", "loaderd-fault-bytes"
"""Headers of an answer with rows: ``ROWS x ROW_BYTES``; bytes of the faults behind the rows."""

MAX_TICKET_BYTES = 256 << 10
MAX_SHARDS_BYTES = 4 << 20
MAX_RANGES = 8192
MAX_ROWS = 1 << 16
MAX_ANSWER_BYTES = 2 << 20
"""Of rows; a single row may be larger."""
_MOST_STORED_BYTES = 64 << 20
SHARD_BYTES = 8
"""Of a shard in the body of a PUT: see ``tables.shard_hash``."""
_MOST = 1 << 62
_MAX_HEADER = 200


def most_rows(row_bytes: int, stored_bytes: int) -> int:
    """How many rows a ticket may ask for, of ``row_bytes`` each, for which a server unpacks ``stored_bytes`` each."""
    most = min(MAX_ANSWER_BYTES // max(1, row_bytes), _MOST_STORED_BYTES // max(1, stored_bytes), MAX_ROWS)
    return max(1, most)


@dataclass(frozen=True)
class RowsTicket:
    """A request for records of a data set.

    ``data``: the digest of its table (``remote.tables``). ``rows``: int64, (ranges, 4), each [epoch of its set,
    block, first, stop]: of the block's records in the data set, ``first`` to ``stop - 1``. ``listing``: if the data
    set grows, its shards, as in a position.
    """

    data: str
    rows: Ranges
    listing: Listing | None = None
    protocol: int = PROTOCOL

    @property
    def num_rows(self) -> int:
        return int((self.rows[:, 3] - self.rows[:, 2]).sum())

    def encode(self) -> bytes:
        """The body of the request, msgpack."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        body: bytes = msgpack.packb({**values, "rows": self.rows.tolist()})
        return body

    @classmethod
    def decode(cls, body: bytes, content_type: str) -> RowsTicket:
        """A ticket that anybody may have sent. Raises OptionError."""
        found = decode_map(body, content_type, "a ticket")
        known = {each.name for each in fields(cls)}
        if not {"data", "rows"} <= set(found) <= known:
            raise OptionError(
                f"a ticket may have {sorted(known)}, and must have data and rows; got {shown(found, 200)}"
            )
        protocol = found.get("protocol", PROTOCOL)
        if type(protocol) is not int or protocol != PROTOCOL:
            raise OptionError(
                f"this server speaks protocol {PROTOCOL}, and the consumer {protocol!r:.40}",
                hint="Install the same version of loaderd on both sides.",
            )
        require(isinstance(found["data"], str), "data", "the digest of the data", found["data"])
        return cls(found["data"], _checked_ranges(found["rows"]), checked_listing(found.get("listing")))


def _checked_ranges(rows: Any) -> Ranges:
    """int64, (ranges, 4). Raises OptionError for anything that is none."""
    is_list = isinstance(rows, list) and 0 < len(rows) <= MAX_RANGES
    is_list = is_list and all(isinstance(each, list) and len(each) == 4 for each in rows)
    is_list = is_list and all(type(value) is int and 0 <= value <= _MOST for each in rows for value in each)
    is_list = is_list and all(first < stop for _, _, first, stop in rows)
    require(is_list, "rows", f"1 to {MAX_RANGES} ranges [epoch, block, first, stop] with first < stop", rows)
    is_small = sum(stop - first for _, _, first, stop in rows) <= MAX_ROWS
    require(is_small, "rows", f"of at most {MAX_ROWS} records", rows)
    return np.asarray(rows, np.int64)


class RowFault(NamedTuple):
    """Rows that could not be had: their numbers in the answer; and why, as ``errors.to_wire`` says it."""

    rows: list[int]
    error: dict[str, Any]


def encode_faults(faults: list[RowFault]) -> bytes:
    """What is behind the rows; of no fault, nothing."""
    packed: bytes = msgpack.packb(faults) if faults else b""
    return packed


class ConsumerName(NamedTuple):
    """Who asks: for people to read, as anybody can say anything. ``rank``: in a training of several, such as 1/8."""

    name: str = ""
    host: str = ""
    process: str = ""
    rank: str = ""

    def encode(self) -> str:
        """The value of the header."""
        return "; ".join(re.sub(r"[^ -~]", "?", part).replace(";", ",") for part in self)

    @classmethod
    def decode(cls, value: str) -> ConsumerName:
        """What :meth:`encode` wrote; of anything else, something of the kind."""
        parts = [part.strip() for part in value[:_MAX_HEADER].split(";", 3)]
        return cls(*(part if part.isprintable() else ascii(part) for part in parts))


def decode_map(body: bytes, content_type: str, what: str) -> dict[str, Any]:
    """The map in ``body``, msgpack or JSON. Raises OptionError, which names ``what``."""
    found: Any = None
    with suppress(ValueError, RecursionError, msgpack.UnpackException):
        found = msgpack.unpackb(body) if content_type == MSGPACK else json.loads(body)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise OptionError(f"{what} must be a JSON object, or a map of msgpack, got {body[:100]!r}")
    return found


def checked_listing(listing: Any) -> Listing | None:
    """A listing that anybody may have sent. Raises OptionError."""
    try:
        return listing_of(listing)
    except (TypeError, ValueError) as error:
        raise OptionError(f"listing must be as in a position, got {shown(listing, 200)}: {error}") from None
