"""The figures for Prometheus: as its own parser reads them."""

from __future__ import annotations

import os
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loaderd.daemon.totals import MAX_NAMES, OTHERS, Totals
from loaderd.remote.tickets import ConsumerName
from loaderd.serve.counters import MAX_READERS, Counters, Readers, write_shared
from loaderd.serve.metrics import page_of, samples, samples_of_totals


def consumer(**more: Any) -> dict[str, Any]:
    return {"dataset": "train", "sharing": "independent", "slots": 12, "slots_lent": 2, "idle_s": 0.5, **more}


def report(*consumers: dict[str, Any], state: str = "ready") -> dict[str, Any]:
    is_ready = state == "ready"
    sizes = {"num_shards": 3 if is_ready else 0, "num_records": 1000 if is_ready else None}
    datasets = [{"name": "train", "state": state, **sizes}]
    return {"workers": 2, "memory_bytes": 1 << 20, "datasets": datasets, "consumers": list(consumers)}


def read(*reports: dict[str, Any], totals: Totals | None = None, is_ready: bool = True) -> dict[str, float]:
    """Every sample of the page, by its name and the values of its labels: "loaderd_slots train independent"."""
    found = {}
    page = page_of(samples(is_ready, reports, totals or Totals())).decode()
    for family in text_string_to_metric_families(page):
        assert family.name.startswith("loaderd_") and family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            labels = [sample.labels[label] for label in sorted(sample.labels)]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_what_there_is():
    totals = Totals()
    totals.add("restarts", "", "daemon", 1)
    totals.add("refused", "", "unix", 4)
    totals.add("batches", "train", "a", 5)
    totals.add("waiting_seconds", "train", "a", 2.5)
    totals.add("stage_seconds", "train", "read", 24.0)
    just_connected = {"number": 1, "name": "", "pid": 7, "dataset": "train", "connected_s": 0.1, "idle_s": 99.0}
    now = report(consumer(), consumer(sharing="mirrored", slots_lent=3, idle_s=9.0), just_connected)
    assert read(now, totals=totals) == {
        "loaderd_ready": 1,
        "loaderd_daemons": 1,
        "loaderd_workers": 2,
        "loaderd_memory_bytes": 1 << 20,
        "loaderd_restarts_total daemon": 1,
        "loaderd_refused_total unix": 4,
        "loaderd_dataset_ready train": 1,
        "loaderd_dataset_shards train": 3,
        "loaderd_dataset_records train": 1000,
        "loaderd_consumers train independent": 1,
        "loaderd_consumers train split": 0,
        "loaderd_consumers train mirrored": 1,
        "loaderd_slots train independent": 12,
        "loaderd_slots train split": 0,
        "loaderd_slots train mirrored": 12,
        "loaderd_slots_lent train independent": 2,
        "loaderd_slots_lent train split": 0,
        "loaderd_slots_lent train mirrored": 3,
        "loaderd_consumer_idle_seconds": 9.0,
        "loaderd_batches_total a train": 5,
        "loaderd_waiting_seconds_total a train": 2.5,
        "loaderd_stage_seconds_total train read": 24,
    }


def test_while_it_starts_without_a_daemon_and_with_two():
    found = read(report(state="indexing 41 %"), is_ready=False)
    assert (found["loaderd_ready"], found["loaderd_dataset_ready train"]) == (0, 0)
    assert found["loaderd_dataset_records train"] == 0
    assert read(is_ready=False)["loaderd_daemons"] == 0
    found = read(report(consumer()), report(consumer()))  # after a reload
    assert (found["loaderd_daemons"], found["loaderd_workers"]) == (2, 4)
    assert found["loaderd_consumers train independent"] == 2


def test_names_are_bounded_over_all_daemons():
    ended = Totals()
    for daemon in range(2):
        of_daemon = Totals()
        for number in range(MAX_NAMES + 10):
            of_daemon.add("batches", "train", f"trainer {daemon} {number}", 1)
        assert of_daemon.sums["batches", "train", OTHERS] == 10
        ended.add_wire(of_daemon.to_wire())
    found = {name: value for name, value in read(totals=ended).items() if "batches_total" in name}
    assert len(found) == MAX_NAMES + 1 and sum(found.values()) == 2 * (MAX_NAMES + 10)


def test_a_name_keeps_its_sum_whoever_leaves_first():
    ended = Totals()
    now = ended.copy()
    for number in range(MAX_NAMES + 1):
        now.add("batches", "train", f"trainer {number}", 1)
    ended.add("batches", "train", f"trainer {MAX_NAMES}", 1)
    assert ended.sums == {("batches", "train", OTHERS): 1}, "it was counted there before"


def test_odd_names_are_quoted():
    totals = Totals()
    totals.add("batches", "train", 'a"b\\c, d="e" ä', 1)
    assert read(totals=totals)['loaderd_batches_total a"b\\c, d="e" ä train'] == 1


def test_of_the_network_each_process_shows_what_all_have_counted():
    shared = os.memfd_create("shared")
    counters = [Counters(shared), Counters(os.dup(shared))]
    consumer = ConsumerName("trainer", "gpu1", "7", "0/2")
    for each in counters:
        each.answered("train", consumer, 8, 800, [])
        each.refused("10.0.0.1", "it has no token")
    totals, readers = Totals(), Readers()
    for each in counters:
        totals.add_wire(each.to_wire()["totals"])
        readers.add_wire(each.to_wire()["readers"])
    times = {"started_s": 1.0, "counted_s": 2.0}
    write_shared(shared, {**times, "totals": totals.to_wire(), "readers": readers.to_wire()})
    for each in counters:
        report = each.report()
        page = page_of(samples_of_totals(report["totals"])).decode()
        assert 'loaderd_remote_records_total{consumer="trainer",dataset="train"} 16.0\n' in page
        assert 'loaderd_refused_total{way="network"} 2.0\n' in page
        (found,) = report["consumers"]
        assert (found["rank"], found["records"], found["bytes"]) == ("0/2", 16, 1600)


def test_the_consumers_that_asked_last_are_kept_for_an_hour():
    now_s, readers = time.time(), Readers()
    assert readers.add(("train", "a", "", "", ""), 1, 1, now_s - 3601) and not readers.to_wire()
    for number in range(MAX_READERS + 10):
        assert readers.add(("train", str(number), "", "", ""), 1, 1, now_s + number)
    assert [row[1] for row in readers.to_wire()] == [str(number) for number in range(10, MAX_READERS + 10)]
