"""From the results of single runs to a table: medians, ranges, and ratios taken pair by pair.

A ratio is formed within a round, from two runs that are minutes apart at most, and then the median of the ratios is
taken: what slows the machine down for a while slows both sides of a pair. Only like is compared with like: candidates
that deliver the same values (float32, int8, packed bits), and a floor of as many processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

TFDATA, EXPERT, PARSE_ALONE, FLOOR = "tfdata_", "tfdata_expert", "tfdata_parse", "floor"

# The most telling first: a narrow terminal shows as many as fit.
COLUMNS = (
    "candidate",
    "examples/s",
    "× expert's tf.data",
    "× best tf.data",
    "of the floor",
    "CPU µs/example",
    "consumer µs/batch",
    "peak PSS MiB",
    "first batch s, cold index",
    "warm",
    "others' cores",
    "note",
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
    """One candidate over all rounds. A ratio is None if no round has both of its sides.

    ``delivered``: what the bits of a batch are, as its process says: a dtype, "packed", or "as the schema says".
    ``to_expert``: the ratio to the expert's tf.data, shuffled and eager (for packed bits: to tf.data's parsing only).
    ``to_best``: to the tf.data candidate with the highest median, shuffled or not. ``cold_s``: seconds to the first
    batch, with no index of the shards yet, measured once. ``warm_s``: the same with an index, None where no run had
    one. ``note``: what the candidate says of itself.
    """

    candidate: str
    delivered: str
    examples_per_s: Spread
    to_expert: Spread | None
    to_best: Spread | None
    to_floor: Spread | None
    total_cpu_us_per_example: float
    consumer_cpu_us_per_batch: float
    peak_pss_bytes: float
    cold_s: float | None
    warm_s: float | None
    other_cores: Spread
    note: str

    def cells(self) -> tuple[str, ...]:
        """The texts of one row, in the order of ``COLUMNS``."""
        return (
            self.candidate,
            self.examples_per_s.shown(",.0f"),
            self.to_expert.shown(".2f") if self.to_expert else "–",
            self.to_best.shown(".2f") if self.to_best else "–",
            f"{self.to_floor.middle:.0%}" if self.to_floor else "–",
            f"{self.total_cpu_us_per_example:.2f}",
            f"{self.consumer_cpu_us_per_batch:,.0f}",
            f"{self.peak_pss_bytes / (1 << 20):,.0f}",
            "–" if self.cold_s is None else f"{self.cold_s:.2f}",
            "–" if self.warm_s is None else f"{self.warm_s:.2f}",
            self.other_cores.shown(".2f"),
            self.note,
        )


def module_of(run: Run) -> str:
    """The candidate's name without its options."""
    return str(run["candidate"]).partition(":")[0]


def best_tfdata(runs: Sequence[Run]) -> str | None:
    """The tf.data candidate with the highest median examples/s, or None without any."""
    by_candidate = _grouped([run for run in runs if run["candidate"].startswith(TFDATA)])
    medians = {name: median(run["examples_per_s"] for run in of_one) for name, of_one in by_candidate.items()}
    return max(medians, key=medians.__getitem__, default=None)


def summarise(runs: Sequence[Run], cold: Sequence[Run] = ()) -> list[Summary]:
    """A summary of each candidate, in order of appearance. Each run carries its ``round``.

    ``cold``: the runs that began without an index, one a candidate.
    """
    cold_s = {run["candidate"]: run["time_to_first_batch_s"] for run in cold}
    return [_summary(name, of_one, runs, cold_s.get(name)) for name, of_one in _grouped(runs).items()]


def _summary(name: str, runs: Sequence[Run], all_runs: Sequence[Run], cold_s: float | None) -> Summary:
    delivered, workers = runs[0]["delivered"], runs[0]["config"]["workers"]
    alike = [run for run in all_runs if run["delivered"] == delivered]
    best = best_tfdata(alike)

    def ratio(is_base: Callable[[Run], bool]) -> Spread | None:
        base = {run["round"]: run["examples_per_s"] for run in alike if is_base(run)}
        ratios = [run["examples_per_s"] / base[run["round"]] for run in runs if run["round"] in base]
        return Spread.of(ratios) if ratios else None

    def middle(key: str) -> float:
        return float(median(run[key] for run in runs))

    # Where there was no cold start, the run of the first round has made the index.
    warm = [run["time_to_first_batch_s"] for run in runs if cold_s is not None or run["round"] > 0]

    return Summary(
        candidate=name,
        delivered=delivered,
        examples_per_s=Spread.of([run["examples_per_s"] for run in runs]),
        to_expert=ratio(_is_expert),
        to_best=ratio(lambda run: run["candidate"] == best),
        to_floor=ratio(lambda run: module_of(run) == FLOOR and run["config"]["workers"] == workers),
        total_cpu_us_per_example=middle("total_cpu_us_per_example"),
        consumer_cpu_us_per_batch=middle("consumer_cpu_us_per_batch"),
        peak_pss_bytes=middle("peak_pss_bytes"),
        cold_s=cold_s,
        warm_s=median(warm) if warm else None,
        other_cores=Spread.of([run["other_cores"] for run in runs]),
        note=runs[0]["note"],
    )


def _is_expert(run: Run) -> bool:
    config = run["config"]
    expert = PARSE_ALONE if config["packed"] else EXPERT
    return module_of(run) == expert and config["shuffle"] and not config["graph"]


def _grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["candidate"], []).append(run)
    return groups


def table(summaries: Sequence[Summary], console: Console) -> Table:
    """The summaries for a terminal, as many of the columns as it has room for."""
    unbounded = console.options.update(width=1000)
    for count in range(len(COLUMNS), 1, -1):
        result = Table()
        for column in COLUMNS[:count]:
            result.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
        for summary in summaries:
            result.add_row(*summary.cells()[:count])
        if console.measure(result, options=unbounded).maximum <= console.width:
            break
    return result


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], facts: Mapping[str, str]) -> str:
    """A page: ``facts`` (machine, command, …) first, then the table."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    marks = ["---"] + ["---:"] * (len(columns) - 1)
    return "\n".join([*lines, "", *("| " + " | ".join(row) + " |" for row in (columns, marks, *rows)), ""])
