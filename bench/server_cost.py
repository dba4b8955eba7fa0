"""What the server costs: against the loader that has a daemon of its own, and over the network.

::

    python bench/server_cost.py [--rounds 5] [--workers 2] [--batch-size 512] [--cases …]

=============  ======================================================================================================
embedded       ``loaderd.Loader``: no server
one            one consumer of a server on the same machine, over its Unix socket
two            two such consumers at a time, each with its own order; the figure is of both together
network        a consumer over the network, on loopback: its own workers ask for packed rows, and unpack them
two-servers    the same consumer, with two servers of the same data set
three-servers  with three
tfdata         tf.data service with as many worker processes: the expert's pipeline, finished batches travel
=============  ======================================================================================================

All read the same shards, and all batches are taken in Python. Each run is a process of its own, with the server below
it; the rounds alternate. Nothing is compressed on the way. CPU time and memory are those of all processes, on both
sides; the consumer's is that of its own process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from harness.interface import Config
from harness.questions import (
    Case,
    Run,
    console_of,
    measure,
    middle,
    of_case,
    publish,
    question_of,
    ratio,
    shards_of,
)
from harness.report import Spread

SPECS = {
    "embedded": "loaderd_python",
    "one": "loaderd_served",
    "two": "loaderd_served_twice",
    "network": "loaderd_http",
    "two-servers": "loaderd_http_two",
    "three-servers": "loaderd_http_three",
    "tfdata": "tfdata_service",
}
COLUMNS = ("case", "examples/s", "CPU µs/example", "consumer µs/batch", "peak PSS MiB")


@dataclass(frozen=True)
class Target:
    """``case`` must reach at least ``factor`` times the examples/s of ``base``."""

    case: str
    base: str
    factor: float

    def verdict(self, runs: Sequence[Run]) -> tuple[bool, str]:
        """Whether the median of the rounds does, and the note that says so."""
        reached = ratio(runs, self.case, self.base).middle >= self.factor
        text = f"{beside(runs, self.case, self.base)}; the target is {self.factor:g}: "
        return reached, text + ("reached" if reached else "MISSED")


def beside(runs: Sequence[Run], case: str, base: str) -> str:
    """The note that says how a case compares with another."""
    return f"{case} against {base}, round by round: {ratio(runs, case, base).shown('.2f')} times"


TARGETS = (
    Target("one", "embedded", 0.95),
    Target("two", "one", 0.95),
    Target("two-servers", "network", 0.95),
    Target("three-servers", "network", 0.95),
    Target("network", "tfdata", 6.0),
)


def row_of(runs: Sequence[Run], case: str) -> tuple[str, ...]:
    """The texts of ``COLUMNS``."""
    # What one of two consumers takes is for half of the batches that are counted.
    consumers = 2 if case == "two" else 1
    return (
        case,
        Spread.of([run["examples_per_s"] for run in of_case(runs, case)]).shown(",.0f"),
        f"{middle(runs, case, 'total_cpu_us_per_example'):.2f}",
        f"{middle(runs, case, 'consumer_cpu_us_per_batch') * consumers:,.0f}",
        f"{middle(runs, case, 'peak_pss_bytes') / (1 << 20):,.0f}",
    )


def main() -> None:
    parser = question_of(__doc__)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--cases", nargs="+", choices=list(SPECS), default=list(SPECS), metavar="CASE")
    options = parser.parse_args()
    config = Config(shards_of(options), batch_size=options.batch_size, workers=options.workers)
    runs = measure([Case(name, SPECS[name], config) for name in options.cases], options, console_of())
    verdicts = [target.verdict(runs) for target in TARGETS if {target.case, target.base} <= set(options.cases)]
    notes = [f"batches of {options.batch_size}, {options.workers} workers", *(note for _, note in verdicts)]
    if {"network", "embedded"} <= set(options.cases):
        notes.append(beside(runs, "network", "embedded"))
    publish(COLUMNS, [row_of(runs, name) for name in options.cases], notes, runs, options)
    sys.exit(0 if all(reached for reached, _ in verdicts) else 1)


if __name__ == "__main__":
    main()
