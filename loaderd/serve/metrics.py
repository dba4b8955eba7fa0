"""The metrics of a server at a Unix socket, from the reports of its daemons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from loaderd.daemon.totals import Totals
from loaderd.ipc.subscription import Sharing
from loaderd.serve.counters import Sample

_TOTALS = {
    "restarts": ("process", "Processes that died and were replaced"),
    "refused": ("way", "Connections and calls that were refused or ended by the server"),
    "batches": ("consumer", "Batches that were delivered to consumers"),
    "records": ("consumer", "Records that were delivered to consumers"),
    "bytes": ("consumer", "Bytes of the batches that were delivered to consumers"),
    "waiting_seconds": ("consumer", "Time that consumers waited for batches; unknown for groups"),
    "stage_seconds": ("stage", "Time of all workers, by stage and field; stages slot and window: waiting for these"),
}
_OF_SERVER = ("restarts", "refused")


def samples(is_ready: bool, reports: Sequence[Mapping[str, Any]], totals: Totals) -> Iterator[Sample]:
    """All metrics. ``reports``: the last one of each daemon; ``totals``: of these, and of those that have ended."""
    yield "ready", "1 if consumers can be served, else 0", {}, is_ready
    yield "daemons", "Running daemons; after a reload two, until the old one's consumers have left", {}, len(reports)
    yield "workers", "Worker processes", {}, sum(each["workers"] for each in reports)
    yield "memory_bytes", "Shared memory of windows and slots", {}, sum(each["memory_bytes"] for each in reports)
    datasets = {dataset["name"]: dataset for report in reports for dataset in report["datasets"]}
    for name, dataset in datasets.items():
        labels = {"dataset": name}
        yield "dataset_ready", "1 if the data set is indexed, else 0", labels, dataset["state"] == "ready"
        yield "dataset_shards", "Shards of the data set", labels, dataset["num_shards"] or 0
        yield "dataset_records", "Records of an epoch of the data set", labels, dataset["num_records"] or 0
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
    for (what, name, label), number in totals.sums.items():
        of, about = _TOTALS[what]
        labels = {of: label} if what in _OF_SERVER else {"dataset": name, of: label}
        yield f"{what}_total", about, labels, number
