"""What a process of the network server counts: for Prometheus, ``loaderd status`` and the log.

Each process tells the supervisor once a second what it has counted. The supervisor adds it up, with what processes
had counted that have ended, and writes the sums where every process can read them (``SharedValue``).
Consumers choose their names: the first ``MAX_NAMES`` have counters of their own, all others share one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from loaderd.daemon.totals import Totals
from loaderd.errors import from_wire
from loaderd.remote.tickets import ConsumerName, RowFault
from loaderd.serve.metrics import Sample, page_of, samples_of_totals
from loaderd.serve.shared_value import SharedValue
from loaderd.snapshots import StorageCounts
from loaderd.version import VERSION

MAX_READERS = 1024
_FORGOTTEN_S = 3600.0
_SAY_EVERY_S = 10.0

_logger = logging.getLogger("loaderd")


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
        is_new = self._add(reader, records, num_bytes, seen_s)
        if len(self._rows) > 2 * MAX_READERS:  # finding the oldest ones takes as long for many as for one
            self._forget()
        return is_new

    def _add(self, reader: tuple[str, ...], records: float, num_bytes: float, seen_s: float) -> bool:
        had = self._rows.get(reader)
        before = had or (0.0, 0.0, 0.0)
        self._rows[reader] = before[0] + records, before[1] + num_bytes, max(before[2], seen_s)
        return had is None

    def _forget(self) -> None:
        since_s = time.time() - _FORGOTTEN_S
        rows = {reader: had for reader, had in self._rows.items() if had[2] > since_s}
        if len(rows) > MAX_READERS:
            rows = dict(sorted(rows.items(), key=lambda each: each[1][2])[-MAX_READERS:])
        self._rows = rows

    def to_wire(self) -> list[tuple[Any, ...]]:
        """The values of ``FIELDS`` of each, for :meth:`add_wire`."""
        self._forget()
        return [(*reader, *had) for reader, had in self._rows.items()]

    def add_wire(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add those of a process."""
        for row in rows:
            *reader, records, num_bytes, seen_s = row
            self._add(tuple(reader), records, num_bytes, seen_s)


class Counters:
    """For use in one thread. ``shared``: the sums of all processes; one of a second ago is good enough."""

    def __init__(self, shared: SharedValue) -> None:
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        self.content_type: str = CONTENT_TYPE_LATEST
        self._shared = shared
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

    def asked_storage(self, dataset: str, counts: StorageCounts) -> None:
        """What was asked of storage since the last call."""
        self._totals.add("storage_requests", dataset, "", counts.requests)
        self._totals.add("storage_retries", dataset, "", counts.retries)

    def to_wire(self) -> dict[str, Any]:
        """What this process has counted, for the supervisor."""
        return {"totals": self._totals.to_wire(), "readers": self._readers.to_wire()}

    def page(self, gauges: Iterable[Sample] = ()) -> bytes:
        """The page for Prometheus, of all processes. ``gauges``: what is not counted."""
        return page_of([*gauges, *samples_of_totals(self._shared.read()["totals"])])

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows of the server and its consumers: plain values.

        ``counted_s``: when they were counted, as a Unix time.
        """
        shared = self._shared.read()
        consumers = [dict(zip(Readers.FIELDS, row, strict=True)) for row in shared["readers"]]
        times = {name: shared[name] for name in ("started_s", "counted_s")}
        return {"version": VERSION, **times, "consumers": consumers}
