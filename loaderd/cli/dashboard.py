"""``loaderd dashboard``: a dashboard for Grafana, of the metrics that loaders and servers give to Prometheus."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_WIDTH, _HEIGHT = 12, 8
# Of each panel: title, unit, and what is drawn: expressions of Prometheus, each with the legend of its lines.
_PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Records",
        "rowsps",
        [
            ("sum by (instance) (rate(loaderd_records_total[1m]))", "{{instance}}"),
            ("sum by (instance) (rate(loaderd_remote_records_total[1m]))", "{{instance}} over the network"),
        ],
    ),
    (
        "Share of the time that consumers wait",
        "percentunit",
        [("sum by (instance, consumer) (rate(loaderd_waiting_seconds_total[1m]))", "{{instance}} {{consumer}}")],
    ),
    (
        "What workers do: workers at each stage",
        "short",
        [('sum by (stage) (rate(loaderd_stage_seconds_total{stage!~"slot|window"}[1m]))', "{{stage}}")],
    ),
    (
        "What workers wait for: workers",
        "short",
        [('sum by (stage) (rate(loaderd_stage_seconds_total{stage=~"slot|window"}[1m]))', "{{stage}}")],
    ),
    ("Batches", "ops", [("sum by (instance) (rate(loaderd_batches_total[1m]))", "{{instance}}")]),
    (
        "Slots",
        "short",
        [("sum(loaderd_slots)", "there are"), ("sum(loaderd_slots_lent)", "held by consumers")],
    ),
    ("Memory of windows and slots", "bytes", [("sum by (instance) (loaderd_memory_bytes)", "{{instance}}")]),
    (
        "Processes that died and were replaced",
        "short",
        [("sum by (instance, process) (increase(loaderd_restarts_total[5m]))", "{{instance}} {{process}}")],
    ),
    (
        "Requests over the network",
        "reqps",
        [
            ("sum by (instance) (rate(loaderd_remote_requests_total[1m]))", "{{instance}}"),
            ("sum by (instance) (rate(loaderd_remote_cache_hits_total[1m]))", "{{instance}} from the cache"),
        ],
    ),
    (
        "Bytes over the network",
        "Bps",
        [("sum by (instance) (rate(loaderd_remote_bytes_total[1m]))", "{{instance}}")],
    ),
]


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "dashboard",
        help="print a dashboard for Grafana",
        description="Print a dashboard to import into Grafana: loaderd dashboard > loaderd.json",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the dashboard. The exit status: 0."""
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
    return 0


def dashboard() -> dict[str, Any]:
    """The dashboard in the form that Grafana imports; Grafana then asks which Prometheus to use."""
    return {
        "title": "loaderd",
        "uid": "loaderd",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(_PANELS)],
    }


def _panel(number: int, title: str, unit: str, lines: list[tuple[str, str]]) -> dict[str, Any]:
    row, column = divmod(number, 2)
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(lines)
        ],
    }
