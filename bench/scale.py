"""What the plan of a very large data set costs: 1,000,000,000 records in 10,000 shards that nobody has.

::

    python bench/scale.py [--shards 10000] [--records 1000000000] [--rounds 3]

The indexes are made up: blocks of 1,024 records, where each run of 32 takes its own number of bytes, encoded as in
the cache. A process of its own makes one at a time (which is not timed), decodes and keeps it as the daemon does, and

1. makes the table of all blocks,
2. plans an epoch, which is what a first batch waits for,
3. finds the middle of epoch 1000, whose order is another, and describes to the workers the blocks of the window that
   begins there: what resuming waits for.

Memory is by how much the most that the process ever held exceeds what it held before the first index.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.measured import versions
from harness.process_tree import CpuMeter
from harness.questions import parser_of, publish, run_again
from harness.report import Spread

from loaderd.daemon.indexing.block_table import BlockTable
from loaderd.formats.shard_index import ANCHOR_RECORDS, ShardIndex, decode_indexes, encode_indexes, shrunk
from loaderd.options import DEFAULT_BLOCK_RECORDS, DEFAULT_WINDOW_RECORDS
from loaderd.plan.rows import DatasetRows
from loaderd.storage.shard_file import ShardFile

SECONDS, MEGABYTES = 2.0, 200.0
STEPS = ("table", "order of an epoch", "first window in the middle of epoch 1000")
LATE_EPOCH = 1000
RECORD_BYTES = 230


def made_up_index(shard: int, num_records: int) -> ShardIndex:
    """That of a shard of so many records of about 230 bytes, framing included."""
    counts = np.diff(np.arange(0, num_records, DEFAULT_BLOCK_RECORDS), append=num_records)
    num_runs = -(-counts // ANCHOR_RECORDS)
    starts = np.cumsum(num_runs) - num_runs
    run_bytes = np.random.default_rng(shard).integers(-99, 100, num_runs.sum()) + ANCHOR_RECORDS * RECORD_BYTES
    num_bytes = np.add.reduceat(run_bytes, starts)
    runs = np.roll(run_bytes, 1)
    runs[starts] = 0
    columns = (np.cumsum(num_bytes) - num_bytes, num_bytes, counts, np.cumsum(counts) - counts, runs)
    file = ShardFile(f"/made/up/{shard:06}.tfrecord", int(num_bytes.sum()), 0)
    return ShardIndex(file, "none", shard, (), *map(shrunk, columns))


def measure(num_shards: int, num_records: int) -> dict[str, Any]:
    """What each of ``STEPS`` takes, in s, and the memory of this process up to its end, in MB."""
    found: dict[str, Any] = {"seconds": {}, "megabytes": {}, "records": num_records}
    meter = CpuMeter()
    before_bytes = _memory_bytes("VmRSS")
    not_timed_s = 0.0
    began_s = time.perf_counter()

    def end_of(step: str) -> None:
        nonlocal began_s, not_timed_s
        found["seconds"][step] = time.perf_counter() - began_s - not_timed_s
        found["megabytes"][step] = (_memory_bytes("VmHWM") - before_bytes) / 1e6
        began_s, not_timed_s = time.perf_counter(), 0.0

    indexes = []
    for shard in range(num_shards):
        made_s = time.perf_counter()
        index = made_up_index(shard, num_records * (shard + 1) // num_shards - num_records * shard // num_shards)
        encoded = encode_indexes([index])
        not_timed_s += time.perf_counter() - made_s
        indexes += decode_indexes(encoded)
    table = BlockTable(indexes, "raise")
    end_of(STEPS[0])
    rows = DatasetRows(table.counts, 0, shuffle=True)
    rows.slices(0, 0, 1)
    end_of(STEPS[1])
    row = table.num_records // 2
    slices = rows.slices(LATE_EPOCH, row, min(row + DEFAULT_WINDOW_RECORDS, table.num_records))
    for part in slices:
        table.place(part.block, 0, part.epoch)
    end_of(STEPS[2])
    assert table.num_records == num_records
    _, other_cores = meter.read()
    sizes = {"blocks": len(table.counts), "slices": len(slices)}
    return {**found, **sizes, "other_cores": other_cores, "versions": versions()}


def _memory_bytes(name: str) -> int:
    """An entry of /proc/self/status: ``VmRSS`` (now) or ``VmHWM`` (the most so far)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=1_000_000_000)
    parser.add_argument(
        "--measure", action="store_true", help="measure once, in this process, and print a line of JSON"
    )
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.shards, options.records)) + "\n")
        return
    runs = [run_again("--measure") for _ in range(options.rounds)]
    seconds = {step: [one["seconds"][step] for one in runs] for step in STEPS}
    rows = [
        (
            step,
            Spread.of(seconds[step]).shown(".2f"),
            Spread.of([one["megabytes"][step] for one in runs]).shown(".0f"),
        )
        for step in STEPS
    ]
    in_all = Spread.of([sum(one["seconds"].values()) for one in runs])
    memory = Spread.of([one["megabytes"][STEPS[-1]] for one in runs])
    rows.append(("in all", in_all.shown(".2f"), memory.shown(".0f")))
    notes = [
        f"{options.records:,} records in {options.shards:,} shards, {runs[0]['blocks']:,} blocks; "
        f"the window has {runs[0]['slices']} slices",
        f"the target for 1,000,000,000 records is {SECONDS:.0f} s and {MEGABYTES:.0f} MB in all",
    ]
    publish(("step", "s", "peak memory MB"), rows, notes, runs, options)
    sys.exit(0 if in_all.middle <= SECONDS and memory.middle <= MEGABYTES else 1)


if __name__ == "__main__":
    main()
