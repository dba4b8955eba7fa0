"""What a server counts, in all of its processes together: for Prometheus, ``loaderd status`` and the log.

Counters are files of prometheus_client's in a folder that the processes share. So any of them can show all, and what
a process has counted stays when it dies. Consumers choose their names: the first ``MAX_NAMES`` have counters of their
own, all others share one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from loaderd.daemon.totals import MAX_NAMES, OTHERS
from loaderd.errors import from_wire
from loaderd.remote.tickets import ConsumerName, RowFault
from loaderd.snapshots import StorageCounts
from loaderd.version import VERSION

MAX_CONSUMERS = 1024
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client looks at it when it is imported."""
_SAY_EVERY_S = 10.0
_OF_STATUS = "loaderd_status_"

Sample = tuple[str, str, dict[str, str], float]
"""(name, what it is, labels, value)."""

_logger = logging.getLogger("loaderd")


class Limited:
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


class Counters:
    """For use in one thread. The environment's ``FOLDER_VARIABLE`` names the folder."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        self.content_type: str = CONTENT_TYPE_LATEST
        self.started_s = time.time()
        registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"loaderd_{name}", about, labels, registry=registry)

        of = ("dataset", "consumer")
        self._requests = counter("remote_requests", "Requests for rows that were answered over the network", *of)
        self._records = counter("remote_records", "Records of the rows that were sent over the network", *of)
        self._bytes = counter("remote_bytes", "Bytes of the rows that were sent over the network", *of)
        self._lost = counter(
            "remote_lost_records", "Records that could not be read when they were asked for", "dataset"
        )
        self._refused = counter("refused", "Calls that were refused by the server", "way")
        self._storage = counter("storage_requests", "Requests to storage that were answered", "dataset")
        self._storage_retries = counter("storage_retries", "Requests to storage that were made again", "dataset")
        who = ("dataset", *ConsumerName._fields)
        self._of_status = counter("status_records", "Of each consumer, for loaderd status", *who)
        self._bytes_of_status = counter("status_bytes", "Of each consumer, for loaderd status", *who)
        self._seen = Gauge(
            "loaderd_status_seen", "When it asked last", who, registry=registry, multiprocess_mode="mostrecent"
        )
        self._names: set[str] = set()
        self._consumers: set[tuple[str, ConsumerName]] = set()
        self._say_refused, self._say_lost = Limited(), Limited()

    def answered(
        self, dataset: str, consumer: ConsumerName, num_rows: int, num_bytes: int, faults: Sequence[RowFault]
    ) -> None:
        """Rows went to a consumer. The log says so the first time, and names records that could not be read."""
        name = consumer.name
        if name not in self._names:
            name = name if len(self._names) < MAX_NAMES else OTHERS
            self._names.add(name)
        self._requests.labels(dataset, name).inc()
        self._records.labels(dataset, name).inc(num_rows)
        self._bytes.labels(dataset, name).inc(num_bytes)
        key = dataset, consumer
        if key not in self._consumers:
            if len(self._consumers) >= MAX_CONSUMERS:
                consumer = ConsumerName(OTHERS)
            else:
                _logger.info("%s (%s, process %s) reads %s", *consumer[:3], dataset)
                self._consumers.add(key)
        self._of_status.labels(dataset, *consumer).inc(num_rows)
        self._bytes_of_status.labels(dataset, *consumer).inc(num_bytes)
        self._seen.labels(dataset, *consumer).set(time.time())
        if faults:
            self._lost.labels(dataset).inc(sum(len(rows) for rows, _ in faults))
            self._say_lost(f"{dataset}: records cannot be read: {from_wire(faults[0].error).message}")

    def refused(self, host: str, why: str) -> None:
        """A call was refused; the log says so."""
        self._refused.labels("network").inc()
        self._say_refused(f"a call from {host} was refused: {why}")

    def asked_storage(self, dataset: str, counts: StorageCounts) -> None:
        """What was asked of storage since the last call."""
        self._storage.labels(dataset).inc(counts.requests)
        self._storage_retries.labels(dataset).inc(counts.retries)

    def _collect(self) -> Iterator[Any]:
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        collector: Any = MultiProcessCollector
        yield from collector(CollectorRegistry(), os.environ[FOLDER_VARIABLE]).collect()

    def page(self, gauges: Iterable[Sample] = ()) -> bytes:
        """The page for Prometheus. ``gauges``: what is not counted."""
        return page_of(gauges, [each for each in self._collect() if not each.name.startswith(_OF_STATUS)])

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows of the server and its consumers: plain values."""
        consumers: dict[tuple[str, ...], dict[str, Any]] = {}
        for metric in self._collect():
            if metric.name.startswith(_OF_STATUS):
                for sample in metric.samples:
                    key = tuple(sample.labels[name] for name in ("dataset", *ConsumerName._fields))
                    what = metric.name.removeprefix(_OF_STATUS)
                    consumers.setdefault(key, dict(sample.labels))[what] = sample.value
        return {"version": VERSION, "started_s": self.started_s, "consumers": list(consumers.values())}


def page_of(samples: Iterable[Sample], metrics: Sequence[Any] = ()) -> bytes:
    """A page for Prometheus: ``metrics``, and ``samples`` (counters if the name ends in _total, else gauges)."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, Any] = {}
    for name, about, labels, value in samples:
        if name not in families:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(f"loaderd_{name}", about, labels=list(labels))
        families[name].add_metric(list(labels.values()), value)
    registry = CollectorRegistry()
    registry.register(_Metrics([*metrics, *families.values()]))
    return generate_latest(registry)


class _Metrics:
    """Gives finished metrics to a registry."""

    def __init__(self, metrics: list[Any]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Any]:
        return self._metrics
