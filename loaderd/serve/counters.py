"""What a process of the network server counts: for Prometheus, ``loaderd status`` and the log.

Each process tells the supervisor once a second what it has counted. The supervisor adds it up, with what processes
had counted that have ended, and writes the sums where every process can read them.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from loaderd.daemon.totals import Totals
from loaderd.errors import from_wire
from loaderd.remote.tickets import ConsumerName, RowFault
from loaderd.version import VERSION

MAX_READERS = 1024
_FORGOTTEN_S = 3600.0
_SAY_EVERY_S = 10.0
_HEAD = struct.Struct("<QI")  # the length of what follows, and its checksum

_logger = logging.getLogger("loaderd")


def write_shared(fd: int, value: dict[str, Any]) -> None:
    """Write a map to an anonymous file, for those who read it meanwhile."""
    packed = msgpack.packb(value)
    os.pwrite(fd, _HEAD.pack(len(packed), zlib.crc32(packed)) + packed, 0)


def read_shared(fd: int) -> dict[str, Any]:
    """What was written last."""
    while True:
        length, checksum = _HEAD.unpack(os.pread(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
        packed = os.pread(fd, length, _HEAD.size)
        if packed and zlib.crc32(packed) == checksum:
            return dict(msgpack.unpackb(packed))
        time.sleep(0.001)  # it is being written


class RateLimitedLog:
    """Says what may happen often, at most every ten seconds, with how often it happened."""

    def __init__(self) -> None:
        self._said_s = -_SAY_EVERY_S
        self._number = 0

    def __call__(self, text: str) -> None:
        self._number += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_EVERY_S:
            more = f" ({self._number} times since the last such line)" if self._number > 1 else ""
            self._said_s, self._number = now_s, 0
            _logger.warning("%s%s", text, more)


class Readers:
    """What each consumer has had: the ``MAX_READERS`` that asked last, until they have not asked for an hour."""

    FIELDS = ("dataset", *ConsumerName._fields, "records", "bytes", "seen")

    def __init__(self, rows: Iterable[Sequence[Any]] = ()) -> None:
        self._rows: dict[tuple[str, ...], tuple[float, float, float]] = {}
        self.add_wire(rows)

    def add(self, reader: tuple[str, ...], records: float, num_bytes: float, seen_s: float) -> bool:
        """``seen_s``: when it asked last, as a Unix time. Returns whether it is a new one."""
        is_new = reader not in self._rows
        had = self._rows.get(reader, (0.0, 0.0, 0.0))
        self._rows[reader] = had[0] + records, had[1] + num_bytes, max(had[2], seen_s)
        if len(self._rows) > 2 * MAX_READERS:  # finding the oldest ones takes as long for many as for one
            self.to_wire()
        return is_new

    def to_wire(self) -> list[tuple[Any, ...]]:
        """The values of ``FIELDS`` of each, for :meth:`add_wire`."""
        since_s = time.time() - _FORGOTTEN_S
        by_age = sorted(self._rows.items(), key=lambda each: each[1][2])
        self._rows = {reader: had for reader, had in by_age[-MAX_READERS:] if had[2] > since_s}
        return [(*reader, *had) for reader, had in self._rows.items()]

    def add_wire(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add those of a process."""
        for row in rows:
            self.add(tuple(row[:-3]), *row[-3:])


class Counters:
    """For use in one thread. ``shared_fd``: a file with the sums of all processes, as of a second ago."""

    def __init__(self, shared_fd: int) -> None:
        self._shared_fd = shared_fd
        self._totals, self._readers = Totals(), Readers()
        self._say_refused, self._say_lost = RateLimitedLog(), RateLimitedLog()

    def answered(
        self, dataset: str, consumer: ConsumerName, num_rows: int, num_bytes: int, faults: Sequence[RowFault]
    ) -> None:
        """Rows went to a consumer. The log says so the first time, and names records that could not be read."""
        for what, number in (("requests", 1), ("records", num_rows), ("bytes", num_bytes)):
            self._totals.add(f"remote_{what}", dataset, consumer.name, number)
        if self._readers.add((dataset, *consumer), num_rows, num_bytes, time.time()):
            _logger.info("%s (%s, process %s) reads %s", *consumer[:3], dataset)
        if faults:
            self._totals.add("remote_lost_records", dataset, "", sum(len(rows) for rows, _ in faults))
            self._say_lost(f"{dataset}: records cannot be read: {from_wire(faults[0].error).message}")

    def refused(self, host: str, why: str) -> None:
        """A call was refused; the log says so."""
        self._totals.add("refused", "", "network", 1)
        self._say_refused(f"a call from {host} was refused: {why}")

    def asked_storage(self, dataset: str, requests: int, retries: int) -> None:
        """What was asked of storage since the last call."""
        self._totals.add("storage_requests", dataset, "", requests)
        self._totals.add("storage_retries", dataset, "", retries)

    def to_wire(self) -> dict[str, Any]:
        """What this process has counted, for the supervisor."""
        return {"totals": self._totals.to_wire(), "readers": self._readers.to_wire()}

    def report(self) -> dict[str, Any]:
        """The sums of all processes, as plain values: for ``loaderd status``, and ``totals`` for Prometheus.

        ``counted_s``: when they were counted, as a Unix time.
        """
        shared = read_shared(self._shared_fd)
        consumers = [dict(zip(Readers.FIELDS, row, strict=True)) for row in shared.pop("readers")]
        return {"version": VERSION, **shared, "consumers": consumers}
