"""From the results of single runs to a table: medians, ranges, and ratios taken pair by pair.

A ratio is formed within a round, from two runs minutes apart at most, and only then is the median taken: what
slows the machine down for a while slows both sides of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

BASELINE_PREFIX = "tfdata_"

COLUMNS = (
    "candidate",
    "examples/s",
    "× best tf.data",
    "CPU µs/example",
    "consumer µs/batch",
    "first batch s",
    "peak PSS MiB",
    "others' cores",
)

_MIDDLE_ONLY = (
    "total_cpu_us_per_example",
    "consumer_cpu_us_per_batch",
    "time_to_first_batch_s",
    "peak_pss_bytes",
)

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of some runs."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def shown(self, form: str) -> str:
        return f"{self.middle:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclass(frozen=True)
class Summary:
    """One candidate over all rounds. ``ratio`` is None where no round has both it and the baseline."""

    candidate: str
    examples_per_s: Spread
    ratio: Spread | None
    total_cpu_us_per_example: float
    consumer_cpu_us_per_batch: float
    time_to_first_batch_s: float
    peak_pss_bytes: float
    other_cores: Spread

    def cells(self) -> tuple[str, ...]:
        """The texts of one row, in the order of ``COLUMNS``."""
        return (
            self.candidate,
            self.examples_per_s.shown(",.0f"),
            self.ratio.shown(".2f") if self.ratio else "–",
            f"{self.total_cpu_us_per_example:.2f}",
            f"{self.consumer_cpu_us_per_batch:,.0f}",
            f"{self.time_to_first_batch_s:.2f}",
            f"{self.peak_pss_bytes / (1 << 20):,.0f}",
            self.other_cores.shown(".2f"),
        )


def baseline(runs: Sequence[Run]) -> str | None:
    """The tf.data candidate with the highest median examples/s, or None without any."""
    by_candidate = _grouped([run for run in runs if run["candidate"].startswith(BASELINE_PREFIX)])
    medians = {name: median(run["examples_per_s"] for run in of_one) for name, of_one in by_candidate.items()}
    return max(medians, key=medians.__getitem__, default=None)


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary a candidate, in order of appearance. Each run carries its ``round``."""
    best = baseline(runs)
    base = {run["round"]: run["examples_per_s"] for run in runs if run["candidate"] == best}
    return [_summary(name, of_one, base) for name, of_one in _grouped(runs).items()]


def _summary(name: str, runs: Sequence[Run], base: Mapping[int, float]) -> Summary:
    ratios = [run["examples_per_s"] / base[run["round"]] for run in runs if run["round"] in base]
    middle = {key: median(run[key] for run in runs) for key in _MIDDLE_ONLY}
    return Summary(
        candidate=name,
        examples_per_s=Spread.of([run["examples_per_s"] for run in runs]),
        ratio=Spread.of(ratios) if ratios else None,
        other_cores=Spread.of([run["other_cores"] for run in runs]),
        **middle,
    )


def _grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["candidate"], []).append(run)
    return groups


def table(summaries: Sequence[Summary]) -> Table:
    """The summaries for a terminal."""
    result = Table(*COLUMNS)
    for column in result.columns:
        column.justify = "left" if column is result.columns[0] else "right"
    for summary in summaries:
        result.add_row(*summary.cells())
    return result


def markdown(summaries: Sequence[Summary], facts: Mapping[str, str]) -> str:
    """The summaries as a page: ``facts`` (machine, command, …) first, then the table."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    rows = [COLUMNS, ("---",) + ("---:",) * (len(COLUMNS) - 1), *(summary.cells() for summary in summaries)]
    return "\n".join([*lines, "", *("| " + " | ".join(row) + " |" for row in rows), ""])
