"""The figures for Prometheus: as its own parser reads them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from loaderd.server.metrics import MAX_NAMES, OTHER_NAMES, Metrics


def consumer(number: int, batches: int, name: str = "", dataset: str = "train", **more: Any) -> dict[str, Any]:
    counted: dict[str, Any] = {"batches": batches, "records": batches * 100, "bytes": batches * 1000}
    counted |= {"waiting_seconds": batches * 0.5, "stage_s": {"read": batches * 2.0, "board": batches * 4.0}}
    of_slots = {"slots": 12, "slots_lent": 2, "sharing": "independent", "idle_s": 0.5}
    return {"number": number, "stream": number, "name": name, "dataset": dataset, **counted, **of_slots, **more}


def report(*consumers: dict[str, Any], state: str = "ready", **more: Any) -> dict[str, Any]:
    is_ready = state == "ready"
    sizes = {"num_shards": 3 if is_ready else 0, "num_records": 1000 if is_ready else None}
    return {
        "workers": 2,
        "workers_restarted": 0,
        "sent_away": 0,
        "memory_bytes": 1 << 20,
        "datasets": [{"name": "train", "state": state, **sizes}],
        "consumers": list(consumers),
        **more,
    }


def read(metrics: Metrics, *reports: dict[str, Any], is_ready: bool = True, **restarts: int) -> dict[str, float]:
    """Every sample of the page, by its name and the values of its labels: "loaderd_slots train independent"."""
    page = metrics.page(is_ready, reports, restarts)
    assert page.status == 200 and page.content_type.startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(page.body.decode()):
        assert family.name.startswith("loaderd_") and family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found[" ".join([sample.name, *(sample.labels[label] for label in sorted(sample.labels))])] = (
                    sample.value
                )
    return found


def test_what_there_is():
    metrics = Metrics()
    now = report(
        consumer(1, 5, "a"), consumer(2, 7, sharing="mirrored", slots_lent=3, idle_s=9.0), workers_restarted=4
    )
    metrics.heard_daemon(None, now)
    assert read(metrics, now, daemon=1, gateway=0) == {
        "loaderd_ready": 1,
        "loaderd_daemons": 1,
        "loaderd_workers": 2,
        "loaderd_memory_bytes": 1 << 20,
        "loaderd_restarts_total daemon": 1,
        "loaderd_restarts_total gateway": 0,
        "loaderd_restarts_total worker": 4,
        "loaderd_restarts_total maker": 0,
        "loaderd_refused_total unix": 0,
        "loaderd_refused_total network": 0,
        "loaderd_dataset_ready train": 1,
        "loaderd_dataset_shards train": 3,
        "loaderd_dataset_records train": 1000,
        "loaderd_consumers train independent": 1,
        "loaderd_consumers train mirrored": 1,
        "loaderd_slots train independent": 12,
        "loaderd_slots train mirrored": 12,
        "loaderd_slots_lent train independent": 2,
        "loaderd_slots_lent train mirrored": 3,
        "loaderd_consumer_idle_seconds": 9.0,
        "loaderd_batches_total a train": 5,
        "loaderd_batches_total  train": 7,
        "loaderd_records_total a train": 500,
        "loaderd_records_total  train": 700,
        "loaderd_bytes_total a train": 5000,
        "loaderd_bytes_total  train": 7000,
        "loaderd_waiting_seconds_total a train": 2.5,
        "loaderd_waiting_seconds_total  train": 3.5,
        "loaderd_stage_seconds_total train read": 24,
        "loaderd_stage_seconds_total train board": 48,
    }


def test_while_it_starts_and_without_a_daemon():
    found = read(Metrics(), report(state="indexing 41 %"), is_ready=False)
    assert (found["loaderd_ready"], found["loaderd_dataset_ready train"]) == (0, 0)
    assert found["loaderd_dataset_records train"] == 0
    assert read(Metrics(), is_ready=False)["loaderd_daemons"] == 0


def test_a_consumer_that_has_just_come_is_none_yet():
    metrics = Metrics()
    now = report({"number": 1, "name": "", "pid": 7, "dataset": "train", "connected_s": 0.1, "idle_s": 0.1})
    metrics.heard_daemon(None, now)
    assert not [name for name in read(metrics, now) if name.startswith(("loaderd_consumers", "loaderd_batches"))]


def test_two_daemons_after_a_reload():
    found = read(Metrics(), report(consumer(1, 5)), report(consumer(1, 6)))
    assert found["loaderd_daemons"] == 2
    assert found["loaderd_workers"] == 4
    assert found["loaderd_consumers train independent"] == 2


@given(st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_counters_never_fall_and_miss_nothing(daemons: list[list[int]], rng: Any):
    """Daemons one after the other, each with consumers that get so many batches, come and go."""
    metrics = Metrics()
    seen = 0.0
    for daemon in daemons:
        before = None
        alive = {number: 0 for number in range(len(daemon))}
        while alive:
            for number in list(alive):
                alive[number] = min(daemon[number], alive[number] + rng.randrange(1, 30))
            reports = {number: consumer(number, count, "abc"[number]) for number, count in alive.items()}
            # Who has all, may have left by now.
            left = [number for number, count in alive.items() if count == daemon[number] and rng.random() < 0.5]
            there = [each for number, each in reports.items() if number not in left]
            now = report(*there, left=[reports[number] for number in left])
            metrics.heard_daemon(before, now)
            before = now
            lines = metrics.page(True, [now], {}).body.decode().splitlines()
            total = sum(float(line.split()[-1]) for line in lines if line.startswith("loaderd_batches_total"))
            assert total >= seen
            seen = total
            alive = {number: count for number, count in alive.items() if count < daemon[number]}
    assert seen == sum(map(sum, daemons))


def test_the_stages_of_a_group_count_once_whoever_leaves():
    def member(number: int, read_s: float) -> dict[str, Any]:
        return consumer(number, 1, stream=7, sharing="mirrored", stage_s={"read": read_s})

    metrics = Metrics()
    first = report(member(1, 10.0), member(2, 10.5))
    second = report(member(2, 12.0), left=[member(1, 11.0)])
    third = report(member(3, 14.0), left=[member(2, 13.0)])
    for before, now in ((None, first), (first, second), (second, third)):
        metrics.heard_daemon(before, now)
    assert read(metrics, third)["loaderd_stage_seconds_total train read"] == 14.0


def test_what_a_consumer_takes_back_is_not_taken_off():
    """It may have written any number in its page."""
    metrics = Metrics()
    first, second = report(consumer(1, 5)), report(consumer(1, -5))
    metrics.heard_daemon(None, first)
    metrics.heard_daemon(first, second)
    found = read(metrics, second)
    assert (found["loaderd_batches_total  train"], found["loaderd_stage_seconds_total train read"]) == (5, 10)


def test_names_are_bounded():
    metrics = Metrics()
    for number in range(MAX_NAMES + 100):
        metrics.heard_daemon(None, report(consumer(number, 1, f"trainer {number}")))
    found = {name: value for name, value in read(metrics, report()).items() if "batches_total" in name}
    assert len(found) == MAX_NAMES + 1
    assert found[f"loaderd_batches_total {OTHER_NAMES} train"] == 100


def remote(consumer: str, requests: int, **more: Any) -> dict[str, Any]:
    counted = {"requests": requests, "records": 10 * requests, "bytes": 100 * requests, "cache_hits": 0}
    return {"dataset": "train", "consumer": consumer, **counted, **more}


def test_what_goes_over_the_network():
    metrics = Metrics()
    first = {"remote": [remote("a", 3)], "refused": 1, "makers_restarted": 0}
    second = {"remote": [remote("a", 5, cache_hits=2), remote("b", 1)], "refused": 4, "makers_restarted": 1}
    metrics.heard_gateway(None, first)
    metrics.heard_gateway(first, second)
    metrics.heard_gateway(None, first)  # another one, which counts from 0
    found = {name: value for name, value in read(metrics, report()).items() if "remote" in name}
    assert found == {
        "loaderd_remote_requests_total a train": 8,
        "loaderd_remote_requests_total b train": 1,
        "loaderd_remote_records_total a train": 80,
        "loaderd_remote_records_total b train": 10,
        "loaderd_remote_bytes_total a train": 800,
        "loaderd_remote_bytes_total b train": 100,
        "loaderd_remote_cache_hits_total a train": 2,
        "loaderd_remote_cache_hits_total b train": 0,
    }
    now = read(metrics, report())
    assert (now["loaderd_refused_total network"], now["loaderd_restarts_total maker"]) == (5, 1)


def test_what_nobody_uses_any_more_is_0_and_does_not_vanish():
    metrics = Metrics()
    metrics.heard_daemon(None, report(left=[consumer(1, 5, "a")]))
    found = read(metrics, report())
    assert found["loaderd_records_total a train"] == 500
    assert found["loaderd_consumers train independent"] == found["loaderd_slots_lent train independent"] == 0


def test_odd_names_are_quoted():
    metrics = Metrics()
    metrics.heard_daemon(None, report(consumer(1, 1, 'a"b\\c, d="e" ä')))
    assert read(metrics, report())['loaderd_batches_total a"b\\c, d="e" ä train'] == 1
