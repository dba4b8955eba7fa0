"""What the questions share: their options, the alternated rounds, the table, and what they leave in a file.

A question is a list of cases. Each is measured in a process of its own, once a round, and each round begins with
another one, so that what slows the machine down for a while slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import loaderd
from harness.comparison import warm_page_cache
from harness.interface import Config
from harness.measured import Timing
from harness.report import Spread, markdown
from harness.rounds import circumstances_of, take_turns, turns
from harness.run_candidate import run_candidate
from harness.synthetic import cached_shards

COLUMNS = ("examples/s", "× the first", "CPU µs/example", "consumer µs/batch", "first batch s", "peak PSS MiB")

Run = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """``label``: what the table calls it; ``spec``: the candidate, and its options, as on the command line."""

    label: str
    spec: str
    config: Config


def parser_of(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """The options of everything that leaves a table in ``bench/results``."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "loaderd-bench", help="for shards")
    parser.add_argument("--results-dir", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--name", default=Path(sys.argv[0]).stem, help="of the results")
    return parser


def question_of(description: str | None, rounds: int = 5, records: int = 1_500_000) -> argparse.ArgumentParser:
    """The options of a question that measures cases."""
    parser = parser_of(description, rounds)
    parser.add_argument("--records", type=int, default=records, help="of the shards that are made")
    parser.add_argument("--workers", type=int, default=2, help="of loaderd")
    parser.add_argument("--seconds", type=float, default=2.0, help="measure each case at least so long")
    parser.add_argument("--warmup-seconds", type=float, default=1.0)
    parser.add_argument("--attempts", type=int, default=2, help="at a run while something else is busy")
    return parser


def shards_of(options: argparse.Namespace, num_shards: int = 16, compression: str = "") -> tuple[str, ...]:
    """Synthetic chess shards in the page cache, and their index in the cache of indexes."""
    paths = cached_shards(options.work_dir, options.records, num_shards=num_shards, compression=compression)
    shards = tuple(map(str, paths))
    warm_page_cache(shards)
    loaderd.Loader(list(shards), loaderd.schemas.chess_eval(), batch_size=512).close()
    return shards


def measure(cases: Sequence[Case], options: argparse.Namespace, console: Console) -> list[Run]:
    """Runs of every case in alternated rounds, as ``run_candidate`` gives them, with ``case`` and ``round``.

    Raises SystemExit where a case fails: without one of them the question has no answer.
    """
    by_label = {case.label: case for case in cases}
    timing = Timing(1, options.seconds, warmup_steps=2, warmup_s=options.warmup_seconds)

    def measure_one(label: str) -> Run:
        return {"case": label, **run_candidate(by_label[label].spec, by_label[label].config, timing)}

    def report(run: Run) -> None:
        place = f"round {run['round'] + 1}/{options.rounds}"
        console.print(f"{place}  {run['case']:32} {run['examples_per_s']:12,.0f} examples/s")

    runs, failures = take_turns(list(by_label), options.rounds, options.attempts, measure_one, report)
    if failures:
        sys.exit("\n".join(failures.values()))
    return runs


def run_again(*options: str) -> Run:
    """What this script prints as JSON, run with ``options`` besides its own ones, in a process of its own.

    Raises SystemExit where that fails.
    """
    command = [sys.executable, *sys.argv, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ})
    if done.returncode != 0:
        sys.exit(f"{' '.join(options)}: ended with status {done.returncode}\n{done.stderr[-2000:]}")
    found: Run = json.loads(done.stdout.splitlines()[-1])
    return found


def run_in_turns(names: Sequence[str], options: argparse.Namespace, shown: Callable[[Run], str]) -> list[Run]:
    """What this script prints for ``--measure NAME``, of each name once a round; ``shown``: what to tell of it.

    A run has its ``round``, from 0 on. Raises SystemExit where one fails.
    """
    console, runs = console_of(), []
    for number, name in turns(names, options.rounds):
        runs.append({"round": number, **run_again("--measure", name)})
        console.print(f"round {number + 1}/{options.rounds}  {name:16} {shown(runs[-1])}")
    return runs


def of_case(runs: Sequence[Run], case: str) -> list[Run]:
    """The runs of one case, by round."""
    return sorted((run for run in runs if run["case"] == case), key=lambda run: run["round"])


def middle(runs: Sequence[Run], case: str, key: str) -> float:
    """The median of a figure over the rounds of a case."""
    return float(median(run[key] for run in of_case(runs, case)))


def ratio(runs: Sequence[Run], case: str, base: str) -> Spread:
    """Examples/s of a case over those of ``base``, pair by pair of one round."""
    pairs = zip(of_case(runs, case), of_case(runs, base), strict=True)
    return Spread.of([ours["examples_per_s"] / theirs["examples_per_s"] for ours, theirs in pairs])


def row(runs: Sequence[Run], case: str, base: str) -> tuple[str, ...]:
    """The texts of ``COLUMNS`` for a case."""
    return (
        Spread.of([run["examples_per_s"] for run in of_case(runs, case)]).shown(",.0f"),
        ratio(runs, case, base).shown(".2f"),
        f"{middle(runs, case, 'total_cpu_us_per_example'):.2f}",
        f"{middle(runs, case, 'consumer_cpu_us_per_batch'):,.0f}",
        Spread.of([run["time_to_first_batch_s"] for run in of_case(runs, case)]).shown(".2f"),
        f"{middle(runs, case, 'peak_pss_bytes') / (1 << 20):,.0f}",
    )


def answer(
    what: str, cases: Sequence[Case], runs: Sequence[Run], notes: Sequence[str], options: argparse.Namespace
) -> None:
    """:func:`publish` with a row a case; ``what``: in what the cases differ."""
    rows = [(case.label, *row(runs, case.label, cases[0].label)) for case in cases]
    publish((what, *COLUMNS), rows, notes, runs, options)


def publish(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    runs: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
) -> None:
    """Print the table and the notes; write them to ``NAME.md``, and the runs to ``NAME.jsonl``, a line each.

    A run may have ``versions`` and ``other_cores``, as those of ``run_candidate`` do.
    """
    facts = {
        **circumstances_of(runs),
        "command": f"`{shlex.join(['python', *sys.argv])}`",
        "rounds": f"{options.rounds}; figures are medians, with the range in brackets",
    }
    if others := [run["other_cores"] for run in runs if "other_cores" in run]:
        facts["others"] = f"at most {max(others):.2f} cores were busy with something else"
    table = Table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in rows:
        table.add_row(*cells)
    console = console_of()
    console.print(table)
    for line in (*notes, *(f"{name}: {value}" for name, value in facts.items())):
        console.print(line, markup=False, highlight=False)

    page = [markdown(columns, rows, facts), *(f"- {note}" for note in notes), ""]
    options.results_dir.mkdir(parents=True, exist_ok=True)
    log = options.results_dir / f"{options.name}.jsonl"
    log.write_text("".join(json.dumps(run) + "\n" for run in runs))
    log.with_suffix(".md").write_text("\n".join(page))


def console_of() -> Console:
    """A terminal as wide as it is, or a file of 160 columns."""
    return Console(width=None if sys.stdout.isatty() else 160)
