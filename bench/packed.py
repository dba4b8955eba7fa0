"""How fast packed batches come (``unpack="device"``), and where the time goes: of chess, and of 32-byte records.

::

    python bench/packed.py [--rounds 5] [--seconds 2] [--workers 2] [--batch-sizes 512 …] [--ways stages]

**Rates**: a loop over a ``Loader(…, unpack="device")``, by the batch's size, in turn with tf.data's reading and
parsing alone, and with the bound: processes that only copy rows of as many bytes, from a window to slots. With them,
ns of CPU time a record of workers and daemon, and µs a batch of the consumer.

**Stages**: what a worker and the daemon do for a record, stage by stage, all in one process and one thread, in ns of
CPU time: so other processes disturb it little. ``daemon`` is the making and sending of load tasks.

Each figure is of a process of its own. A line of JSON for each; in the end a table. Before anything is timed, each
kind of record is compared with what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from collections.abc import Iterator
from multiprocessing import Process
from statistics import median
from typing import Any

import numpy as np
import versions
from harness.comparison import warm_page_cache
from harness.questions import Run, parser_of, publish, run_in_turns
from harness.report import Spread
from harness.synthetic import cached_shards, shard_records

import loaderd
from loaderd.daemon.delivery.windows import Windows
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.dataset import Dataset, StreamDescription
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.indexer import find_indexes
from loaderd.formats.reader import Reading
from loaderd.options import StreamOptions
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import PassSequence
from loaderd.schema.packed import packed_schema
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout, WindowLayout
from loaderd.stages import Stage
from loaderd.storage.files import list_shards
from loaderd.worker.file_rows import FileRows
from loaderd.worker.task_runner import TaskRunner

NUM_SHARDS = 16
CHESS = loaderd.schemas.chess_eval()
# The layout of bullet's chess records: occupied squares, nibbles of pieces, score, result and kings.
RECORD_DTYPE = np.dtype([("occupied", "u1", 8), ("pieces", "u1", 16), ("score", "<i2"), ("rest", "u1", 6)])
FIXED = loaderd.Schema(
    loaderd.FixedRecords(RECORD_DTYPE, bits=["occupied", "pieces"]),
    {
        "squares": loaderd.Bits("occupied", (8, 8), dtype="float32", bit_order="little"),
        "nibbles": loaderd.Bits("pieces", (32, 4), dtype="float32", bit_order="little"),
        "score": loaderd.Array("score"),
        "rest": loaderd.Array("rest"),
    },
)
SCHEMAS = {"chess": CHESS, "fixed": FIXED}


def fixed_records(first: int, count: int) -> Any:
    """Records ``first`` to ``first + count - 1``; each begins with its number."""
    records = np.random.default_rng(first).integers(0, 256, (count, RECORD_DTYPE.itemsize), np.uint8)
    records[:, :8] = np.arange(first, first + count, dtype="<u8").view(np.uint8).reshape(count, 8)
    return records.view(RECORD_DTYPE)[:, 0]


def shards_of(kind: str, options: argparse.Namespace) -> list[str]:
    """Shards in the page cache: four times as many of the small records."""
    if kind == "chess":
        paths = list(map(str, cached_shards(options.work_dir, options.records, num_shards=NUM_SHARDS)))
    else:
        folder = options.work_dir / f"fixed-32-{4 * options.records}"
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        of_shard = 4 * options.records // NUM_SHARDS
        for number in range(NUM_SHARDS):
            path = folder / f"{number:02}.bin"
            if not path.exists():
                path.with_suffix(".part").write_bytes(fixed_records(number * of_shard, of_shard).tobytes())
                path.with_suffix(".part").rename(path)
            paths.append(str(path))
    warm_page_cache(paths)
    return paths


# ----------------------------------------------------------------------------------------------- are they right


def check(kind: str, options: argparse.Namespace) -> None:
    """Raise AssertionError unless an epoch has each record that was written once, and no other."""
    shards = shards_of(kind, options)
    seen = np.zeros(options.records * (1 if kind == "chess" else 4), np.uint8)
    num_wrong = 0
    with loaderd.Loader(shards, SCHEMAS[kind], batch_size=8192, workers=2, unpack="device") as loader:
        for batch in loader:
            if kind == "chess":
                numbers = np.ascontiguousarray(batch["d"][:, :4]).view(">u4")[:, 0]
            else:
                numbers = np.ascontiguousarray(batch["occupied"]).view("<u8")[:, 0]
            np.add.at(seen, numbers.astype(np.int64), 1)
            num_wrong += num_differences(kind, numbers, batch, options)
    assert (seen == 1).all() and not num_wrong, f"{kind}: {num_wrong} wrong, {(seen != 1).sum()} missing or twice"


def num_differences(kind: str, numbers: Any, batch: Any, options: argparse.Namespace) -> int:
    """How many of the records of the first shard's first piece differ from what was written."""
    if not hasattr(num_differences, kind):
        if kind == "chess":
            written: Any = next(shard_records(0, options.records, NUM_SHARDS, 0))[0]
        else:
            written = fixed_records(0, 4 * options.records // NUM_SHARDS)
        setattr(num_differences, kind, written)
    written = getattr(num_differences, kind)
    known = np.flatnonzero(numbers < len(written))
    if kind == "chess":
        return int((batch["d"][known] != written[numbers[known]]).any(axis=1).sum())
    fields = (
        (batch[name][known], written[name][numbers[known].astype(np.int64)]) for name in RECORD_DTYPE.names or ()
    )
    return sum(int((found != expected).reshape(len(known), -1).any(axis=1).sum()) for found, expected in fields)


# ------------------------------------------------------------------------------------------------------- stages


class Alone:
    """A worker's tasks and batches as the daemon plans them, one after the other in this process."""

    def __init__(self, shards: list[str], schema: loaderd.Schema, batch_size: int, workers: int) -> None:
        schema = packed_schema(schema, for_device=True)
        options = StreamOptions(batch_size, epochs=None, remainder="carry", workers=workers)
        dataset = Dataset(shards, schema)
        files = list_shards(shards)
        cache = IndexCache("user", options.block_records, schema.records)
        indexes = {
            file: one.index
            for file, one in zip(files, find_indexes("user", cache.block_records, schema.records, files), strict=True)
        }
        self.data = LocalData(dataset, options, [files], {dataset.record_values: indexes})
        window_records = options.window_records(schema.row_bytes)
        batches = PassSequence(options, self.data.rows.num_records, window_records, {}).batches(Pass(0, None))
        self.plan = PassPlan(self.data.rows, batches, 0, True, 0)
        max_rows = batches.largest_window
        layout = WindowLayout(schema.row_bytes, max_rows)
        arenas = max(options.num_windows, batches.max_windows_of_a_batch)
        windows = SharedMemory.create("windows", arenas * layout.arena_bytes)
        slots = SharedMemory.create("slots", options.num_slots * SlotLayout(schema.specs, batch_size).slot_bytes)
        self.spent = memoryview(bytearray(8 * 100)).cast("q")
        reading = Reading(spent=self.spent)
        rows = FileRows(schema, self.data.files, self.data.compressions, reading)
        self.runner = TaskRunner(StreamDescription(dataset, options), rows, max_rows, windows, slots, self.spent)
        self.windows = Windows(arenas, workers, 1, batch_size)
        self.windows.begin(self.plan, 1, 0, 0)
        self.num_slots, self.step, self.num_records, self.ns = 2, 0, 0, dict.fromkeys(("daemon", "load", "fill"), 0)

    def go_on(self) -> None:
        """Load what may be loaded, and make the batches that can be made of it."""
        while True:
            began_ns = time.process_time_ns()
            work = self.windows.next_load()
            if work is None:
                break
            work = work._replace(places=tuple(self.data.places(work.slices, 0)))
            sent = pickle.dumps(work)
            self.ns["daemon"] += time.process_time_ns() - began_ns
            work = pickle.loads(sent)
            began_ns = time.process_time_ns()
            faults = self.runner.load(work)
            self.ns["load"] += time.process_time_ns() - began_ns
            assert not faults
            self.windows.loaded(work, faults)
            self.num_records += work.num_rows
        while self.windows.ready(segments := self.plan.segments_of(self.step)):
            segments = list(self.windows.in_arenas(segments))
            began_ns = time.process_time_ns()
            self.runner.fill(self.step % self.num_slots, segments, ())
            self.ns["fill"] += time.process_time_ns() - began_ns
            self.step += 1
        self.windows.close(self.step)


def stages(kind: str, options: argparse.Namespace) -> Run:
    """ns of CPU time a record, by stage, of a worker and of the daemon."""
    time.monotonic_ns = time.process_time_ns  # what the stages count: other processes use the same cores
    alone = Alone(shards_of(kind, options), SCHEMAS[kind], options.batch_size, options.workers)
    until_s = time.process_time() + options.warmup_seconds
    while time.process_time() < until_s:
        alone.go_on()
    before, own, count = alone.spent.tolist(), dict(alone.ns), alone.num_records
    until_s = time.process_time() + options.seconds
    while time.process_time() < until_s:
        alone.go_on()
    count = alone.num_records - count
    spent = [now - then for now, then in zip(alone.spent.tolist(), before, strict=True)]
    found = {stage.name.lower(): spent[stage] / count for stage in Stage if spent[stage]}
    ns = {name: (total - own[name]) / count for name, total in alone.ns.items()}
    found["order"] = ns["load"] - sum(found.values())
    found["fill"] = ns["fill"]
    return {**found, "all": ns["load"] + ns["fill"], "daemon": ns["daemon"]}


# -------------------------------------------------------------------------------------------------------- rates


def loader_steps(kind: str, options: argparse.Namespace) -> Iterator[int]:
    with loaderd.Loader(
        shards_of(kind, options),
        SCHEMAS[kind],
        batch_size=options.batch_size,
        workers=options.workers,
        epochs=None,
        remainder="carry",
        unpack="device",
    ) as loader:
        for _ in loader:
            yield options.batch_size


def tfdata_steps(kind: str, options: argparse.Namespace) -> Iterator[int]:
    """tf.data's reading and parsing alone, shuffled in a buffer of 10,000 records, in a tf.function."""
    import tensorflow as tf

    if kind == "chess":
        features = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}
        files = tf.data.TFRecordDataset(shards_of(kind, options), num_parallel_reads=options.workers)
    else:
        files = tf.data.FixedLengthRecordDataset(
            shards_of(kind, options), RECORD_DTYPE.itemsize, num_parallel_reads=options.workers
        )
    ds = files.shuffle(10_000).repeat().batch(options.batch_size, num_parallel_calls=tf.data.AUTOTUNE)
    if kind == "chess":
        ds = ds.map(lambda batch: tf.io.parse_example(batch, features), num_parallel_calls=tf.data.AUTOTUNE)
    ds = ds.map(lambda batch: tf.io.decode_raw(batch["d"] if kind == "chess" else batch, tf.uint8))
    for _ in ds.prefetch(tf.data.AUTOTUNE):
        yield options.batch_size


def copy_rows(row_bytes: int, batch_size: int, memory: SharedMemory, number: int, workers: int) -> None:
    """Copy rows from a window to slots, as long as the parent lives; count them in ``memory``."""
    parent = os.getppid()
    counts = memory.bytes.view(np.int64)
    window = np.ones((max(262_144, batch_size), row_bytes), np.uint8)
    slots = np.ones((4, batch_size, row_bytes), np.uint8)
    while os.getppid() == parent:
        for start in range(0, len(window) - batch_size + 1, batch_size):
            slots[start // batch_size % 4] = window[start : start + batch_size]
            counts[number] += batch_size


def bound_steps(kind: str, options: argparse.Namespace) -> Iterator[int]:
    """As many rows as processes can copy, each row once."""
    memory = SharedMemory.create("counts", 4096)
    counts = memory.bytes.view(np.int64)
    row_bytes = packed_schema(SCHEMAS[kind], for_device=True).record_bytes
    args = row_bytes, options.batch_size, memory
    processes = [
        Process(target=copy_rows, args=(*args, number, options.workers), daemon=True)
        for number in range(options.workers)
    ]
    for process in processes:
        process.start()
    before = 0
    while True:
        time.sleep(0.05)
        now = int(counts.sum())
        yield now - before
        before = now


WAYS = {"loaderd": loader_steps, "tf.data": tfdata_steps, "bound": bound_steps}


def rate(way: str, kind: str, options: argparse.Namespace) -> Run:
    """Records a second, and CPU time."""
    steps = WAYS[way](kind, options)
    until_s = time.perf_counter() + options.warmup_seconds
    while time.perf_counter() < until_s:
        next(steps)
    began_s, before, count, num_batches = time.perf_counter(), versions.cpu_s(), 0, 0
    while time.perf_counter() - began_s < options.seconds:
        count += next(steps)
        num_batches += 1
    took_s, cpu_s = time.perf_counter() - began_s, versions.cpu_s()
    used_s = {name: now_s - before.get(name, 0.0) for name, now_s in cpu_s.items()}
    consumer_us = 1e6 * used_s.pop("consumer") / max(1, num_batches)
    return {
        "records_per_s": count / took_s,
        "consumer_us_a_batch": consumer_us,
        **{f"{name}_ns": 1e9 * value / count for name, value in used_s.items()},
    }


# ------------------------------------------------------------------------------------------------------ command


def table_of(runs: list[Run], cases: list[str]) -> list[tuple[str, ...]]:
    """A row a case: its rate, or its stages."""
    rows = []
    for case in cases:
        of_one = [run for run in runs if run["case"] == case]
        keys = [key for key in of_one[0] if key not in ("case", "round", "cores", "records_per_s")]
        rate = (
            Spread.of([run["records_per_s"] for run in of_one]).shown(",.0f") if "records_per_s" in of_one[0] else ""
        )
        rest = ", ".join(f"{key} {median(run[key] for run in of_one):.0f}" for key in keys)
        rows.append((case, rate, rest))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--records", type=int, default=2_000_000, help="of chess; four times as many of 32 bytes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warmup-seconds", type=float, default=1.5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 4096, 16384, 65536])
    parser.add_argument("--kinds", nargs="+", default=[*SCHEMAS], choices=[*SCHEMAS])
    parser.add_argument("--ways", nargs="+", default=["stages", *WAYS], choices=["stages", *WAYS])
    parser.add_argument(
        "--measure", metavar="WAY:KIND:BATCH", help="one case, in this process; prints a line of JSON"
    )
    options = parser.parse_args()
    if options.measure:
        way, kind, size = options.measure.split(":")
        options.batch_size = int(size)
        found = stages(kind, options) if way == "stages" else rate(way, kind, options)
        rounded = {name: round(value, 1) for name, value in found.items()}
        print(json.dumps({"case": options.measure, "cores": os.cpu_count(), **rounded}), flush=True)
        os._exit(0)  # tf.data's threads go on for ever
    for kind in options.kinds:
        check(kind, options)
    cases = [f"{way}:{kind}:{size}" for kind in options.kinds for way in options.ways for size in options.batch_sizes]
    runs = run_in_turns(cases, options, lambda run: f"{run.get('records_per_s', run.get('all')):,.0f}")
    columns = ("case", "records/s", "medians: ns of CPU time a record by stage or process; consumer, µs a batch")
    publish(columns, table_of(runs, cases), [], runs, options)


if __name__ == "__main__":
    main()
