"""``docs/grafana.json`` draws what there is: names and labels are those of the figures that are given."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import loaderd
from loaderd.daemon.totals import Totals
from loaderd.serve.metrics import TOTALS, page_of, samples

_DASHBOARD = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
_FROM_PROMETHEUS = {"instance"}


def names_of(text: str) -> dict[str, set[str]]:
    """Labels by name."""
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_server() -> dict[str, set[str]]:
    dataset = {"name": "train", "state": "ready", "num_shards": 1, "num_records": 1}
    report = {"workers": 1, "memory_bytes": 1, "datasets": [dataset], "consumers": []}
    totals = Totals()
    for what in TOTALS:
        totals.add(what, "train", "", 1)
    return names_of(page_of(samples(True, [report], totals)).decode())


def test_it_draws_what_there_is(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    with loaderd.Loader(write_numbered([50]), numbered_schema, batch_size=50, workers=1) as loader:
        port = loader.serve_metrics(0, "127.0.0.1")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
            of_loader = names_of(answer.read().decode())
    found = json.loads(_DASHBOARD)
    drawn = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in found["panels"]}
    expressions = [expression for each in drawn.values() for expression in each]
    assert len(expressions) > 8
    there = of_server()
    remote = [name for name in there if name.startswith("loaderd_remote_")]
    assert len(remote) == 4 and all(any(name in each for each in expressions) for name in remote)
    assert any("loaderd_remote_records_total" in each for each in drawn["Records"]), "a server of the network alone"
    for expression in expressions:
        (name,) = re.findall(r"loaderd_\w+", expression)
        assert name in of_loader | dict.fromkeys(remote) and name in there, expression
        labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        assert labels - _FROM_PROMETHEUS <= there[name], expression
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found["panels"]]
    assert len(set(places)) == len(places) and all(panel["id"] for panel in found["panels"])
