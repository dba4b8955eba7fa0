"""The figures of a loader, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import gc
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import loaderd
from loaderd.errors import OptionError


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_loader_gives_its_figures(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    paths = write_numbered([200, 100])
    with loaderd.Loader(paths, numbered_schema, batch_size=50, workers=1) as loader:
        port = loader.serve_metrics(0, "127.0.0.1")
        assert scrape(port)["loaderd_batches_total"] == 0
        assert sum(1 for _ in loader) == 6
        found = scrape(port)
        assert (found["loaderd_batches_total"], found["loaderd_records_total"]) == (6, 300)
        assert found["loaderd_workers"] == 1 and found["loaderd_dataset_records"] == 300
        statistics = loader.statistics()
        spent = {**statistics.stage_s, **statistics.field_s}
        stages = {name.split()[1]: value for name, value in found.items() if name.startswith("loaderd_stage_seconds")}
        assert set(stages) == set(spent) and stages["parse"] == spent["parse"] > 0 and stages["bits"] > 0
        assert found["loaderd_waiting_seconds_total"] == pytest.approx(statistics.wait_s)
        with pytest.raises(OptionError, match=f"cannot be served at 127.0.0.1:{port}"):
            loader.serve_metrics(port, "127.0.0.1")
    with pytest.raises(OSError):
        scrape(port)


def test_a_loader_that_nobody_has_is_gone(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    loader = loaderd.Loader(write_numbered([50]), numbered_schema, batch_size=50, workers=1)
    port = loader.serve_metrics(0, "127.0.0.1")
    del loader
    gc.collect()
    assert scrape(port) == {}, "the thread that answers has not kept it"
    with socket.create_connection(("127.0.0.1", port)):
        pass
