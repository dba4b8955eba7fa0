"""The server's metrics for Prometheus, from the reports of its daemons and gateways.

A daemon counts for each consumer, from 0 when it connects. Consumers and daemons come and go, but a counter of
Prometheus must never fall: so each report is compared with the one before, and the difference is added to counters by
data set and consumer's name. (The time that workers spend on a group's stream is in the report of each member, and is
counted once.) Consumers choose their names: the first ``MAX_NAMES`` names have a counter each, all others share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from loaderd.server.health import Page

MAX_NAMES = 64
OTHER_NAMES = "(others)"

Report = Mapping[str, Any]
Labels = tuple[str, ...]

_COUNTED = {
    "batches": "Batches that were delivered to consumers",
    "records": "Records that were delivered to consumers",
    "bytes": "Bytes of the batches that were delivered to consumers",
    "waiting_seconds": "Time that consumers waited for batches; unknown for those that share batches out",
}
_COUNTED_REMOTE = {
    "remote_requests": "Requests for rows that were answered over the network",
    "remote_records": "Records of the rows that were sent over the network",
    "remote_bytes": "Bytes of the rows that were sent over the network",
    "remote_cache_hits": "Requests that were answered from the cache",
}


class Metrics:
    """Counters over all reports, and the page that shows them."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[Labels]] = {what: Counter() for what in (*_COUNTED, *_COUNTED_REMOTE)}
        self._stages: Counter[Labels] = Counter()
        self._once: Counter[str] = Counter()
        self._of_consumers_seen: set[Labels] = set()
        self._names: set[str] = set()

    def heard_daemon(self, before: Report | None, report: Report) -> None:
        """Add what a daemon's ``report`` has more than the report ``before``, consumers that have left included."""
        known = {consumer["number"]: consumer for consumer in _reading([before] if before else [])}
        spent = {consumer["stream"]: consumer["stage_s"] for consumer in known.values()}
        for consumer in [*report.get("left", ()), *_reading([report])]:  # of each stream, the latest comes last
            last = known.get(consumer["number"], {})
            labels = (consumer["dataset"], self._label_of(consumer["name"]))
            self._of_consumers_seen.add((consumer["dataset"], consumer["sharing"]))
            for what in _COUNTED:
                self._counts[what][labels] += max(0, consumer[what] - last.get(what, 0))
            spent_before = spent.get(consumer["stream"], {})
            for stage, spent_s in consumer["stage_s"].items():
                self._stages[consumer["dataset"], stage] += max(0.0, spent_s - spent_before.get(stage, 0.0))
            spent[consumer["stream"]] = consumer["stage_s"]
        self._add_once(before, report, "workers_restarted", "sent_away")

    def heard_gateway(self, before: Report | None, report: Report) -> None:
        """The same for a gateway."""
        known = {(each["dataset"], each["consumer"]): each for each in (before["remote"] if before else [])}
        for each in report["remote"]:
            last = known.get((each["dataset"], each["consumer"]), {})
            labels = (each["dataset"], self._label_of(each["consumer"]))
            for what in _COUNTED_REMOTE:
                field = what.removeprefix("remote_")
                self._counts[what][labels] += each[field] - last.get(field, 0)
        self._add_once(before, report, "makers_restarted", "refused")

    def _add_once(self, before: Report | None, report: Report, *names: str) -> None:
        for name in names:
            self._once[name] += report[name] - (before[name] if before else 0)

    def _label_of(self, name: str) -> str:
        if name not in self._names and len(self._names) >= MAX_NAMES:
            return OTHER_NAMES
        self._names.add(name)
        return name

    def page(self, is_ready: bool, reports: Sequence[Report], restarts: Mapping[str, int]) -> Page:
        """All metrics as they are now.

        ``reports``: the last one of each running daemon. ``restarts``: how many processes were started anew, by name;
        without workers and makers.
        """
        registry = CollectorRegistry()
        registry.register(_Collector([*self._of_server(is_ready, reports, restarts), *self._of_consumers(reports)]))
        return Page(200, CONTENT_TYPE_LATEST, generate_latest(registry))

    def _of_server(self, is_ready: bool, reports: Sequence[Report], restarts: Mapping[str, int]) -> Iterator[Metric]:
        yield _gauge("ready", "1 if consumers can be served, else 0", [], {(): is_ready})
        yield _gauge(
            "daemons",
            "Running daemons; after a reload more than one, until the old one's consumers have left",
            [],
            {(): len(reports)},
        )
        yield _gauge("workers", "Worker processes", [], {(): sum(report["workers"] for report in reports)})
        memory = sum(report["memory_bytes"] for report in reports)
        yield _gauge("memory_bytes", "Shared memory of windows and slots", [], {(): memory})
        processes = {**restarts, "worker": self._once["workers_restarted"], "maker": self._once["makers_restarted"]}
        of_processes: dict[Labels, float] = {(process,): number for process, number in processes.items()}
        yield _counter("restarts", "Processes that died and were replaced", ["process"], of_processes)
        refused: dict[Labels, float] = {("unix",): self._once["sent_away"], ("network",): self._once["refused"]}
        yield _counter("refused", "Connections and calls that were refused or ended by the server", ["way"], refused)
        datasets = [dataset for report in reports for dataset in report["datasets"]]
        ready: dict[Labels, float] = {(dataset["name"],): dataset["state"] == "ready" for dataset in datasets}
        yield _gauge("dataset_ready", "1 if the data set is indexed, else 0", ["dataset"], ready)
        for what, about in (("shards", "Shards of the data set"), ("records", "Records of an epoch of the data set")):
            values: dict[Labels, float] = {(dataset["name"],): dataset[f"num_{what}"] or 0 for dataset in datasets}
            yield _gauge(f"dataset_{what}", about, ["dataset"], values)

    def _of_consumers(self, reports: Sequence[Report]) -> Iterator[Metric]:
        consumers = _reading(reports)
        # Labels that no consumer has any more get a 0: a series that vanishes would show as a gap.
        number: Counter[Labels] = Counter(dict.fromkeys(self._of_consumers_seen, 0))
        slots, lent = number.copy(), number.copy()
        for consumer in consumers:
            labels = (consumer["dataset"], consumer["sharing"])
            number[labels] += 1
            slots[labels] += consumer["slots"]
            lent[labels] += consumer["slots_lent"]
        of = ["dataset", "sharing"]
        yield _gauge("consumers", "Consumers that are connected", of, number)
        yield _gauge("slots", "Slots of consumers; those of a group count for each of its consumers", of, slots)
        yield _gauge("slots_lent", "Batches that consumers hold", of, lent)
        idle_s = max([0.0, *(consumer["idle_s"] for consumer in consumers)])
        yield _gauge(
            "consumer_idle_seconds", "Time since the consumer that is idle longest took a batch", [], {(): idle_s}
        )
        for what, about in {**_COUNTED, **_COUNTED_REMOTE}.items():
            yield _counter(what, about, ["dataset", "consumer"], self._counts[what])
        about = "Time of all workers, by stage and field; stages slot and window: waiting for these"
        yield _counter("stage_seconds", about, ["dataset", "stage"], self._stages)


def _reading(reports: Sequence[Report]) -> list[Report]:
    """The consumers that have opened a stream; the others have only connected so far."""
    return [consumer for report in reports for consumer in report["consumers"] if "sharing" in consumer]


class _Collector:
    """Gives finished metrics to a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


_Family = GaugeMetricFamily | CounterMetricFamily


def _family(
    kind: type[_Family], name: str, about: str, labels: Sequence[str], values: Mapping[Labels, float]
) -> Metric:
    family = kind(f"loaderd_{name}", about, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)
