"""What does it cost to check the CRC of every record's data?

::

    python bench/crc_cost.py

loaderd has no switch for it, so the step that checks is measured by itself: ``WindowLoader.load`` reads records,
checks and parses them, and writes them to their places in a window, in tasks of 4,096 records as a worker does. To
leave the check out, the function that makes it is replaced by one that finds nothing; all else stays. Alternated
rounds in one process. The share is that of the CPU time that an example takes over all processes, consumed in Python.

The CRC of a length is compared in the loop that finds the frames, and cannot be left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.interface import Config
from harness.questions import Case, console_of, measure, middle, publish, question_of, shards_of
from harness.reference import chess
from harness.report import Spread
from harness.rounds import turns

from loaderd.daemon.indexing.block_table import BlockTable
from loaderd.formats import blocks
from loaderd.formats.shard_index import build_index
from loaderd.options import DEFAULT_BLOCK_RECORDS, DEFAULT_WINDOW_RECORDS
from loaderd.storage.files import list_shards
from loaderd.worker.window_loader import BlockPlacement, WindowLoader

BLOCKS_PER_TASK = 4
LOAD_ROUNDS = 15
DATA = "check_data_crcs"

# What is left out: function of ``loaderd.formats.blocks`` -> what it returns where nothing is wrong.
VARIANTS: dict[str, dict[str, Any]] = {"both CRCs checked": {}, "that of the length alone": {DATA: []}}
CHECKED, UNCHECKED = VARIANTS


class LoadStep:
    """The load step on all records of some shards, shuffled into one window again and again."""

    def __init__(self, shards: Sequence[str]) -> None:
        schema = chess()
        files = list_shards(shards)
        table = BlockTable([build_index(file, DEFAULT_BLOCK_RECORDS) for file in files], "raise")
        self.num_records = table.num_records
        self._loader = WindowLoader(schema, files, table.compressions)
        self._window: npt.NDArray[np.uint8] = np.zeros((DEFAULT_WINDOW_RECORDS, schema.row_bytes), np.uint8)
        rng = np.random.default_rng(0)
        places = np.resize(rng.permutation(DEFAULT_WINDOW_RECORDS), table.num_records)
        parts, row = [], 0
        for number in rng.permutation(len(table.counts)):
            block = table.place(number).block
            parts.append(BlockPlacement(block, places[row : row + block.num_records]))
            row += block.num_records
        self._tasks = [parts[first : first + BLOCKS_PER_TASK] for first in range(0, len(parts), BLOCKS_PER_TASK)]

    def run(self) -> tuple[float, int]:
        """ns of CPU time a record, and records that could not be loaded."""
        began_s, faulty = time.process_time(), 0
        for task in self._tasks:
            faulty += sum(len(places) for places, _ in self._loader.load(task, self._window))
        return (time.process_time() - began_s) / self.num_records * 1e9, faulty


@contextmanager
def without(left_out: dict[str, Any]) -> Iterator[None]:
    """The load step without these checks: see ``VARIANTS``."""
    checks = {name: getattr(blocks, name) for name in left_out}
    try:
        for name, result in left_out.items():
            setattr(blocks, name, lambda *_, result=result: result)
        yield
    finally:
        for name, check in checks.items():
            setattr(blocks, name, check)


def load_costs(step: LoadStep) -> dict[str, list[float]]:
    """ns of CPU time a record of each variant, by round."""
    costs: dict[str, list[float]] = {name: [] for name in VARIANTS}
    step.run()  # the first run meets fresh memory
    for _, name in turns(list(VARIANTS), LOAD_ROUNDS):
        with without(VARIANTS[name]):
            costs[name].append(step.run()[0])
    return costs


def main() -> None:
    options: argparse.Namespace = question_of(__doc__, rounds=3, records=600_000).parse_args()
    shards = shards_of(options)
    costs = load_costs(LoadStep(shards))
    case = Case("loaderd in Python", "loaderd_python", Config(shards, workers=options.workers))
    runs = measure([case], options, console_of())
    total_ns = middle(runs, case.label, "total_cpu_us_per_example") * 1e3
    rows = []
    for name, of_one in costs.items():
        saved = Spread.of([checked - ns for checked, ns in zip(costs[CHECKED], of_one, strict=True)])
        share = f"{saved.middle / total_ns:.1%}"
        rows.append((name, Spread.of(of_one).shown(".0f"), saved.shown(".0f"), share))
    cost = median(checked - ns for checked, ns in zip(costs[CHECKED], costs[UNCHECKED], strict=True))
    notes = [
        f"checking the CRC of the data costs {cost:.0f} ns a record, {cost / total_ns:.1%} of the {total_ns:,.0f} ns "
        f"of CPU time that an example takes over all processes; the load step is the median of {LOAD_ROUNDS} rounds",
    ]
    publish(
        ("load step", "ns a record", "ns saved", "share of all"),
        rows,
        notes,
        [*runs, {"load_step_ns": costs}],
        options,
    )


if __name__ == "__main__":
    main()
