"""How does loaderd scale with its workers, consumed in Python, and what would more cores give?

::

    python bench/workers.py

Measured with 1, 2 and 4 workers, whatever the cores of this machine, and beside them the floor: as many processes
that only write as many bytes as the batches have. What n cores would give is worked out from the CPU time that an
example takes over all processes: n seconds of it a second. Two things end that: the consumer, one thread that must
take every batch, and the floor, the memory bandwidth of this machine (as a rule one with more cores has more of it).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness.interface import Config
from harness.questions import Case, Run, answer, console_of, measure, middle, question_of, ratio, shards_of

from loaderd.machine import usable_cores

WORKERS = (1, 2, 4)
MORE_CORES = (4, 8, 16)


def cases(options: argparse.Namespace) -> list[Case]:
    shards = shards_of(options)
    return [
        Case(f"{spec}, {number} worker{'s' * (number > 1)}", spec, Config(shards, workers=number))
        for spec in ("loaderd_python", "floor")
        for number in WORKERS
    ]


def estimate(cores: int, cpu_us: float, consumer_us: float, floor: float) -> tuple[float, str]:
    """Examples/s of so many cores, and what they are bound by.

    ``cpu_us``, ``consumer_us``: of an example, over all processes and in the consumer; ``floor``: in examples/s.
    """
    limits = {"the cores": cores / cpu_us * 1e6, "the consumer": 1e6 / consumer_us, "this machine's floor": floor}
    bound = min(limits, key=limits.__getitem__)
    return limits[bound], bound


def conclusions(runs: Sequence[Run]) -> list[str]:
    cores = usable_cores()
    # What 2 workers need holds for more; one alone takes fewer cores than there are, and less CPU time.
    cpu_us = middle(runs, "loaderd_python, 2 workers", "total_cpu_us_per_example")
    batch_size = runs[0]["config"]["batch_size"]
    consumer_us = middle(runs, "loaderd_python, 2 workers", "consumer_cpu_us_per_batch") / batch_size
    floor = max(middle(runs, run["case"], "examples_per_s") for run in runs if run["candidate"] == "floor")
    scaling = ratio(runs, "loaderd_python, 2 workers", "loaderd_python, 1 worker")
    measured = middle(runs, "loaderd_python, 2 workers", "examples_per_s")
    notes = [
        f"2 workers against 1, round by round: {scaling.shown('.2f')} times",
        f"an example takes {cpu_us:.2f} µs of CPU time, {consumer_us:.3f} of it in the consumer: {cores} cores have "
        f"time for {cores / cpu_us * 1e6:,.0f} examples/s, 2 workers reached {measured:,.0f}",
        f"the consumer alone could take {1e6 / consumer_us:,.0f} examples/s; the floor is {floor:,.0f}",
    ]
    for number in MORE_CORES:
        rate, bound = estimate(number, cpu_us, consumer_us, floor)
        unbound = f"; {number / cpu_us * 1e6:,.0f} from the cores alone" * (bound != "the cores")
        notes.append(f"{number} cores, estimated: {rate:,.0f} examples/s, bound by {bound}{unbound}")
    return notes


def main() -> None:
    options = question_of(__doc__).parse_args()
    found = cases(options)
    runs = measure(found, options, console_of())
    answer("processes", found, runs, conclusions(runs), options)


if __name__ == "__main__":
    main()
