"""``loaderd doctor SHARDS``: how fast this machine loads them, by stage, and how many workers a training needs."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import closing

from loaderd.cli.parallel_scan import say
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.observe.diagnose import Diagnosis
from loaderd.options import as_float
from loaderd.progress import ProgressDisplay
from loaderd.schemas.named import SCHEMA_HELP, load_schema
from loaderd.snapshots import Progress


def add_shard_options(parser: argparse.ArgumentParser) -> None:
    """Options that make TARGET mean shards."""
    options = parser.add_argument_group("of shards instead of trainings")
    options.add_argument("--schema", metavar="MODULE:NAME", help=SCHEMA_HELP)
    options.add_argument("--batch-size", type=int, default=512, metavar="N", help="default: %(default)s")
    options.add_argument("--workers", type=int, metavar="N", help="default: as many as a Loader takes")
    options.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="milliseconds that a step of the model takes, to tell how many workers it needs",
    )
    options.add_argument(
        "--seconds", type=float, default=6.0, metavar="S", help="for how long to load; default: %(default)g"
    )


def examine(arguments: argparse.Namespace) -> int:
    """Load for some seconds, and print what was measured. The exit status: 1 if --step-ms needs more workers."""
    if not arguments.targets:
        raise OptionError("TARGET must name shards, as --schema is given; got none")
    seconds = as_float(arguments.seconds, "--seconds", "a number of seconds")
    step_ms = arguments.step_ms
    if step_ms is not None:
        step_ms = as_float(step_ms, "--step-ms", "a positive number of milliseconds", sys.float_info.min)
    workers, found = _measure(arguments, seconds)
    work_ns = {stage: ns for stage, ns in found.stage_ns.items() if stage not in ("slot", "window")}
    needed = None
    if step_ms is not None:
        needed = max(1, math.ceil(sum(work_ns.values()) * arguments.batch_size / (step_ms * 1e6)))
    if arguments.json:
        about = {"workers": workers, "batch_size": arguments.batch_size, "found": vars(found), "needed": needed}
        say(json.dumps(about, indent=2))
    else:
        _say_measured(workers, arguments.batch_size, found, work_ns)
        if needed is not None:
            enough = "which there are" if needed <= workers else f"and there are {workers}"
            say(f"A step of {step_ms:g} ms needs workers={needed}, {enough}.")
            if needed > workers and found.advice:
                say(f"Advice: {found.advice}")
    return int(needed is not None and needed > workers)


def _measure(arguments: argparse.Namespace, seconds: float) -> tuple[int, Diagnosis]:
    """Load the shards for some seconds, from the first batch on: how many workers did, and what took their time."""
    loader = Loader(
        arguments.targets,
        load_schema(arguments.schema),
        batch_size=arguments.batch_size,
        epochs=None,
        workers=arguments.workers,
    )
    measuring = Progress("measuring how fast the shards load", remark=f"This takes {seconds:g} s")
    with loader, closing(ProgressDisplay(None)) as display, display.repeating(lambda: measuring):
        until_s = math.inf
        for _ in loader:
            now_s = time.monotonic()
            until_s = min(until_s, now_s + seconds)
            if now_s > until_s:
                break
        found, workers = loader.diagnose(), loader.statistics().workers
    if found.verdict == "nothing yet":
        raise OptionError(f"--seconds {seconds:g} is too short: {found.cause}", hint="Give it more seconds.")
    return workers, found


def _say_measured(workers: int, batch_size: int, found: Diagnosis, work_ns: dict[str, float]) -> None:
    step_ms = 1e3 / max(1e-9, found.steps_per_s)
    say(
        f"{workers} workers deliver {found.records_per_s:,.0f} records/s: "
        f"a batch of {batch_size:,} each {step_ms:.2f} ms."
    )
    total_ns = max(1, sum(work_ns.values()))
    for stage, ns in sorted(work_ns.items(), key=lambda item: -item[1]):
        if ns >= 1:
            say(f"  {stage:<20} {ns:>10,.0f} ns a record  {ns / total_ns:>4.0%}")
    if found.limiting_stage:
        say(f"Limiting stage: {found.limiting_stage}. {found.cause.capitalize()}".rstrip(". ") + ".")
