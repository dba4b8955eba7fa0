"""The metrics of both servers, for Prometheus: from what they count, and from the reports of daemons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast, get_args

from loaderd.daemon.totals import Totals, WireTotal
from loaderd.ipc.subscription import Sharing

Sample = tuple[str, str, dict[str, str], float]
"""(name, what it is, labels, value)."""

TOTALS = {
    "restarts": ("process", "Processes that died and were replaced"),
    "refused": ("way", "Connections and calls that were refused or ended by the server"),
    "batches": ("consumer", "Batches that were delivered to consumers"),
    "records": ("consumer", "Records that were delivered to consumers"),
    "bytes": ("consumer", "Bytes of the batches that were delivered to consumers"),
    "waiting_seconds": ("consumer", "Time that consumers waited for batches; unknown for groups"),
    "stage_seconds": ("stage", "Time of all workers, by stage and field; stages slot and window: waiting for these"),
    "remote_requests": ("consumer", "Requests for rows that were answered over the network"),
    "remote_records": ("consumer", "Records of the rows that were sent over the network"),
    "remote_bytes": ("consumer", "Bytes of the rows that were sent over the network"),
    "remote_lost_records": (None, "Records that could not be read when they were asked for"),
    "storage_requests": (None, "Requests to storage that were answered"),
    "storage_retries": (None, "Requests to storage that were made again"),
}
"""What is counted: the label beside the data set's, and what it is."""
_OF_SERVER = ("restarts", "refused")


def samples(is_ready: bool, reports: Sequence[Mapping[str, Any]], totals: Totals) -> Iterator[Sample]:
    """All metrics. ``reports``: the last one of each daemon; ``totals``: of these, and of those that have ended."""
    yield "ready", "1 if consumers can be served, else 0", {}, is_ready
    yield "daemons", "Running daemons; after a reload two, until the old one's consumers have left", {}, len(reports)
    yield "workers", "Worker processes", {}, sum(each["workers"] for each in reports)
    yield "memory_bytes", "Shared memory of windows and slots", {}, sum(each["memory_bytes"] for each in reports)
    datasets = {dataset["name"]: dataset for report in reports for dataset in report["datasets"]}
    yield from samples_of_datasets(datasets.values())
    # Those that have opened a stream; the others have only connected so far.
    consumers = [each for report in reports for each in report["consumers"] if "sharing" in each]
    for name in datasets:
        for sharing in get_args(Sharing):  # 0, too: a series that vanishes would show as a gap
            these = [each for each in consumers if (each["dataset"], each["sharing"]) == (name, sharing)]
            labels = {"dataset": name, "sharing": sharing}
            slots, lent = (sum(each[what] for each in these) for what in ("slots", "slots_lent"))
            yield "consumers", "Consumers that are connected", labels, len(these)
            yield "slots", "Slots of consumers; those of a group count for each of its consumers", labels, slots
            yield "slots_lent", "Batches that consumers hold", labels, lent
    idle_s = max((each["idle_s"] for each in consumers), default=0.0)
    yield "consumer_idle_seconds", "Time since the consumer that is idle longest took a batch", {}, idle_s
    yield from samples_of_totals(totals.to_wire())


def samples_of_datasets(datasets: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    """``datasets``: as in the reports of both servers."""
    for dataset in datasets:
        labels = {"dataset": dataset["name"]}
        yield "dataset_ready", "1 if the data set can be served, else 0", labels, dataset["state"] == "ready"
        yield "dataset_shards", "Shards of the data set", labels, dataset["num_shards"] or 0
        yield "dataset_records", "Records of an epoch of the data set", labels, dataset["num_records"] or 0


def samples_of_totals(totals: Iterable[WireTotal]) -> Iterator[Sample]:
    """Counters."""
    for what, dataset, label, number in totals:
        of, about = TOTALS[what]
        labels = {} if what in _OF_SERVER else {"dataset": dataset}
        yield f"{what}_total", about, labels if of is None else {**labels, of: label}, number


def page_of(samples: Iterable[Sample]) -> bytes:
    """A page for Prometheus. ``samples``: counters if the name ends in _total, else gauges."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, Any] = {}
    for name, about, labels, value in samples:
        if name not in families:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(f"loaderd_{name}", about, labels=list(labels))
        families[name].add_metric(list(labels.values()), value)
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=families.values)))
