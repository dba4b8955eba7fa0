"""``loaderd doctor SHARDS``: how fast this machine loads them, by stage, and how many workers a training needs."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass

from loaderd.cli.parallel_scan import say
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.observe.diagnose import Diagnosis
from loaderd.options import as_float
from loaderd.progress import ProgressDisplay
from loaderd.schemas.named import SCHEMA_HELP, load_schema
from loaderd.snapshots import Progress


@dataclass(frozen=True)
class Capacity:
    """What the workers of this machine deliver to a consumer that does nothing else."""

    workers: int
    batch_size: int
    found: Diagnosis
    needed: int | None
    """How many workers a step of ``--step-ms`` needs; None without that option."""


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
    capacity = measure(arguments)
    if arguments.json:
        found = {**vars(capacity), "found": vars(capacity.found)}
        say(json.dumps(found, indent=2))
    else:
        say(text_of(capacity, arguments.step_ms))
    return int(capacity.needed is not None and capacity.needed > capacity.workers)


def measure(arguments: argparse.Namespace) -> Capacity:
    """Load the shards for ``--seconds``, from the first batch on. Raises LoaderdError."""
    seconds = as_float(arguments.seconds, "--seconds", "a number of seconds")
    step_ms = arguments.step_ms
    if step_ms is not None:
        step_ms = as_float(step_ms, "--step-ms", "a positive number of milliseconds", sys.float_info.min)
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
    busy_ns = sum(ns for stage, ns in found.stage_ns.items() if stage not in ("slot", "window"))
    needed = None
    if step_ms is not None:
        needed = max(1, math.ceil(busy_ns * arguments.batch_size / (step_ms * 1e6)))
    return Capacity(workers, arguments.batch_size, found, needed)


def text_of(capacity: Capacity, step_ms: float | None) -> str:
    """What was found, in words."""
    found = capacity.found
    lines = [
        f"{capacity.workers} workers deliver {found.records_per_s:,.0f} records/s: "
        f"a batch of {capacity.batch_size:,} each {1e3 / max(1e-9, found.steps_per_s):.2f} ms."
    ]
    spent = {stage: ns for stage, ns in found.stage_ns.items() if stage not in ("slot", "window") and ns >= 1}
    total = sum(spent.values())
    for stage, ns in sorted(spent.items(), key=lambda item: -item[1]):
        lines.append(f"  {stage:<20} {ns:>10,.0f} ns a record  {ns / total:>4.0%}")
    if found.limiting_stage:
        lines.append(f"Limiting stage: {found.limiting_stage}. {found.cause.capitalize()}".rstrip(". ") + ".")
    if capacity.needed is not None and step_ms is not None:
        enough = "which there are" if capacity.needed <= capacity.workers else f"and there are {capacity.workers}"
        lines.append(f"A step of {step_ms:g} ms needs workers={capacity.needed}, {enough}.")
        if capacity.needed > capacity.workers and found.advice:
            lines.append(f"Advice: {found.advice}")
    return "\n".join(lines)
