"""The server's figures for Prometheus, made from what its daemons report.

A daemon counts by consumer, from its connection on. Consumers come and go, and daemons too, while a counter here
never falls: so each report is compared with the one before, and what has been added is counted by data set and
consumer's name. Names are the consumers' choice: the first ``MAX_NAMES`` have counters of their own, all others one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "waiting_seconds": "Time that consumers have waited for batches, where they take these by themselves",
}


class Metrics:
    """Counts on from report to report, and makes the page."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[Labels]] = {what: Counter() for what in _COUNTED}
        self._stages: Counter[Labels] = Counter()
        self._workers_restarted = 0
        self._names: set[str] = set()

    def heard(self, before: Report | None, report: Report) -> None:
        """Count what a daemon has added to its report ``before``."""
        known = {consumer["number"]: consumer for consumer in _reading([before] if before else [])}
        for consumer in _reading([report]):
            last = known.get(consumer["number"], {})
            labels = (consumer["dataset"], self._label_of(consumer["name"]))
            for what, counts in self._counts.items():
                counts[labels] += consumer[what] - last.get(what, 0)
            for stage, spent_s in consumer["stage_s"].items():
                spent_before_s = last.get("stage_s", {}).get(stage, 0.0)
                self._stages[consumer["dataset"], stage] += max(0.0, spent_s - spent_before_s)
        self._workers_restarted += report["workers_restarted"] - (before["workers_restarted"] if before else 0)

    def _label_of(self, name: str) -> str:
        if name not in self._names and len(self._names) >= MAX_NAMES:
            return OTHER_NAMES
        self._names.add(name)
        return name

    def page(self, is_ready: bool, reports: Sequence[Report], restarts: Mapping[str, int]) -> Page:
        """All figures as they are now.

        ``reports`` are the last ones of the daemons that run, ``restarts`` those of processes other than workers.
        """
        registry = CollectorRegistry()
        registry.register(_Collector([*self._of_server(is_ready, reports, restarts), *self._of_consumers(reports)]))
        return Page(200, CONTENT_TYPE_LATEST, generate_latest(registry))

    def _of_server(self, is_ready: bool, reports: Sequence[Report], restarts: Mapping[str, int]) -> Iterator[Metric]:
        yield _gauge("ready", "1 if consumers can be served, else 0", [], {(): is_ready})
        yield _gauge("daemons", "Daemons that run: more than one after a reload", [], {(): len(reports)})
        yield _gauge("workers", "Worker processes", [], {(): sum(report["workers"] for report in reports)})
        memory = sum(report["memory_bytes"] for report in reports)
        yield _gauge("memory_bytes", "Shared memory of windows and slots", [], {(): memory})
        processes = {**restarts, "worker": self._workers_restarted}
        of_processes: dict[Labels, float] = {(process,): number for process, number in processes.items()}
        yield _counter("restarts", "Processes that died and were replaced", ["process"], of_processes)
        datasets = [dataset for report in reports for dataset in report["datasets"]]
        ready: dict[Labels, float] = {(dataset["name"],): dataset["state"] == "ready" for dataset in datasets}
        yield _gauge("dataset_ready", "1 if the data set is indexed, else 0", ["dataset"], ready)
        for what, about in (("shards", "Shards of the data set"), ("records", "Records of an epoch of the data set")):
            values: dict[Labels, float] = {(dataset["name"],): dataset[f"num_{what}"] or 0 for dataset in datasets}
            yield _gauge(f"dataset_{what}", about, ["dataset"], values)

    def _of_consumers(self, reports: Sequence[Report]) -> Iterator[Metric]:
        consumers = _reading(reports)
        number: Counter[Labels] = Counter()
        slots: Counter[Labels] = Counter()
        lent: Counter[Labels] = Counter()
        for consumer in consumers:
            labels = (consumer["dataset"], consumer["sharing"])
            number[labels] += 1
            slots[labels] += consumer["slots"]
            lent[labels] += consumer["slots_lent"]
        of = ["dataset", "sharing"]
        yield _gauge("consumers", "Consumers that are connected", of, number)
        yield _gauge(
            "slots", "Batches that consumers' memory has room for; a group's counts for each of it", of, slots
        )
        yield _gauge("slots_lent", "Batches that consumers hold", of, lent)
        idle_s = max([0.0, *(consumer["idle_s"] for consumer in consumers)])
        yield _gauge("consumer_idle_seconds", "Since the idlest consumer last took a batch", [], {(): idle_s})
        for what, about in _COUNTED.items():
            yield _counter(what, about, ["dataset", "consumer"], self._counts[what])
        about = "Time of all workers by stage, and by field; slot, window: waiting for these"
        yield _counter("stage_seconds", about, ["dataset", "stage"], self._stages)


def _reading(reports: Sequence[Report]) -> list[Report]:
    """The consumers that have said what they want; the others have come just now."""
    return [consumer for report in reports for consumer in report["consumers"] if "sharing" in consumer]


class _Collector:
    """What a registry takes: metrics that are there already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _gauge(name: str, about: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(f"loaderd_{name}", about, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def _counter(name: str, about: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
    family = CounterMetricFamily(f"loaderd_{name}", about, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
