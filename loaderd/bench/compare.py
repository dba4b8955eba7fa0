"""Compare the candidates: check that they deliver the same, then time them in turn, round after round.

::

    python bench/compare.py [--records 1500000] [--rounds 5] [--batch-size 512] [--candidates …] [SHARDS …]

Every run is a process of its own. A round holds each candidate once, and each round begins with another one.
Writes ``bench/results/NAME.jsonl`` (a line a run) and ``NAME.md`` (the table, with machine, versions, command).
The exit status is 1 if a candidate failed or delivered other records than were written.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from loaderd import Schema
from loaderd.bench.digest import Digest
from loaderd.bench.interface import Config, configure
from loaderd.bench.machine import describe_machine
from loaderd.bench.reference import decode
from loaderd.bench.report import baseline, markdown, summarise, table
from loaderd.bench.run_candidate import CandidateError, add_options, config_of, run_candidate, window_of
from loaderd.bench.synthetic import cached_shards, shard_records

DEFAULT_CANDIDATES = (
    "floor",
    "tfdata_tuned",
    "tfdata_expert",
    "tfdata_expert:noshuffle",
    "tfdata_xla",
    "tfdata_xla:graph",
    "tfdata_xla:noshuffle",
    "tfdata_xla:noshuffle,graph",
    "loaderd_python",
    "loaderd_tfdata",
    "loaderd_tfdata:graph",
)
BUSY_CORES = 0.1  # beyond this, something else was running
CHECK_RECORDS, CHECK_SHARDS = 20_011, 3  # no multiple of a batch, nor of each other

Failures = dict[str, str]


def check(specs: list[str], base: Config, work_dir: Path, timeout_s: float, console: Console) -> Failures:
    """Read one small epoch with each candidate; what is wrong with those that do not deliver what was written."""
    shards = cached_shards(work_dir, CHECK_RECORDS, num_shards=CHECK_SHARDS, compression=base.compression)
    config = replace(base, shards=tuple(map(str, shards)), epochs=1)
    wrong: dict[str, str | None] = {}
    for spec in specs:
        eager = _eager(spec, config)
        if eager not in wrong:
            wrong[eager] = _wrong_with(eager, config, timeout_s, console)
    return {spec: reason for spec in specs if (reason := wrong[_eager(spec, config)]) is not None}


def expected_digest(schema: Schema) -> Digest:
    """The digest of the records of the check, as they were made and as ``reference.py`` decodes them."""
    found = Digest()
    for shard in range(CHECK_SHARDS):
        for boards, scores in shard_records(shard, CHECK_RECORDS, CHECK_SHARDS, seed=0):
            found = found.updated(schema, decode(schema, {"d": boards, "s": scores}))
    return found


def _eager(spec: str, config: Config) -> str:
    """``spec`` without "graph": what a tf.function takes cannot be seen."""
    name, _, options = spec.partition(":")
    rest = ",".join(option for option in options.split(",") if option not in ("", "graph"))
    configure(spec, config)
    return f"{name}:{rest}" if rest else name


def _wrong_with(spec: str, config: Config, timeout_s: float, console: Console) -> str | None:
    reason = None
    try:
        found = run_candidate(spec, config, None, timeout_s=timeout_s)["digest"]
    except CandidateError as error:
        reason = str(error)
    else:
        if found is None:
            console.print(f"{spec}: carries no records, not checked", style="dim")
        elif found != (expected := asdict(expected_digest(configure(spec, config)[1].delivered()))):
            reason = f"{spec}: delivered {found}, but {expected} was written"
    if reason is not None:
        console.print(reason, style="red", markup=False)
    return reason


def take_turns(
    specs: list[str],
    rounds: int,
    attempts: int,
    measure: Callable[[str], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
) -> tuple[list[dict[str, Any]], Failures]:
    """``measure`` every candidate once a round; what counts of each, and what failed.

    A run during which something else was busy is taken again, ``attempts`` times in all: the first undisturbed
    one counts, else the last. The choice looks at the machine alone, never at the speed. ``report`` gets all.
    """
    runs: list[dict[str, Any]] = []
    failures: Failures = {}
    for number in range(rounds):
        first = number % len(specs)
        for spec in specs[first:] + specs[:first]:
            if spec in failures:
                continue
            for attempt in range(attempts):
                try:
                    run = {"round": number, "attempt": attempt, **measure(spec)}
                except CandidateError as error:
                    failures[spec] = str(error)
                    break
                report(run)
                if run["other_cores"] <= BUSY_CORES:
                    break
            if spec not in failures:
                runs.append(run)
    return runs, failures


def facts_of(runs: list[dict[str, Any]], failures: Mapping[str, str], command: list[str]) -> dict[str, str]:
    """What the reader of a table must know: when, where, with what, and what went wrong."""
    versions: dict[str, str] = {}
    for run in runs:
        versions.update(run["versions"])
    busy = sum(run["other_cores"] > BUSY_CORES for run in runs)
    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": f"`{shlex.join(command)}`",
        "best tf.data": str(baseline(runs)),
    }
    if busy:
        facts["disturbed"] = f"{busy} of the {len(runs)} runs that count, with over {BUSY_CORES} cores busy elsewhere"
    if failures:
        facts["failed"] = "; ".join(f"{spec} ({reason.splitlines()[-1]})" for spec, reason in failures.items())
    return facts


def warm_page_cache(shards: list[str]) -> None:
    """Read every shard once, so that no candidate pays for the disk."""
    buffer = bytearray(8 << 20)
    for shard in shards:
        with open(shard, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the candidates of bench/candidates.")
    parser.add_argument("shards", nargs="*", metavar="SHARDS", help="chess_eval shards (default: made, and kept)")
    parser.add_argument("--records", type=int, default=1_500_000, help="of the shards that are made")
    parser.add_argument("--num-shards", type=int, default=16, help="of the shards that are made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attempts", type=int, default=3, help="at a run while something else is busy")
    parser.add_argument("--candidates", default=" ".join(DEFAULT_CANDIDATES), help="separated by spaces")
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "loaderd-bench")
    parser.add_argument("--results-dir", type=Path, default=Path("bench") / "results")
    parser.add_argument("--name", default=datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S"), help="of the results")
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options, console = parse_arguments(given), Console(width=None if sys.stdout.isatty() else 180)
    shards = options.shards or cached_shards(
        options.work_dir, options.records, num_shards=options.num_shards, compression=options.compression
    )
    base = config_of(options, [str(Path(shard).resolve()) for shard in shards])
    specs = options.candidates.split()
    try:
        failures = check(specs, base, options.work_dir, options.timeout, console)
    except ValueError as error:
        sys.exit(str(error))
    specs = [spec for spec in specs if spec not in failures]

    options.results_dir.mkdir(parents=True, exist_ok=True)
    log = options.results_dir / f"{options.name}.jsonl"
    warm_page_cache(list(base.shards))
    window = window_of(options, options.records)

    def measure(spec: str) -> dict[str, Any]:
        return run_candidate(spec, base, window, timeout_s=options.timeout)

    def report(run: dict[str, Any]) -> None:
        with log.open("a") as file:
            file.write(json.dumps(run) + "\n")
        note = f"  ({run['other_cores']:.2f} cores busy elsewhere)" if run["other_cores"] > BUSY_CORES else ""
        place = f"round {run['round'] + 1}/{options.rounds}"
        console.print(f"{place}  {run['candidate']:28} {run['examples_per_s']:12,.0f} examples/s{note}")

    runs, failed = take_turns(specs, options.rounds, options.attempts, measure, report)
    for reason in failed.values():
        console.print(reason, style="red", markup=False)
    failures |= failed

    summaries = summarise(runs)
    facts = facts_of(runs, failures, ["python", "bench/compare.py", *given])
    log.with_suffix(".md").write_text(markdown(summaries, facts))
    console.print(table(summaries))
    for name, value in facts.items():
        console.print(f"{name}: {value}", markup=False)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
