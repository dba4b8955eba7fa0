"""Does `Loader.diagnose()` name what a training waits for, and does its advice bring what it predicts?

::

    python bench/diagnosis.py [--runs 10] [--scenarios a-gzip-shard …] [--records 100000]

Each scenario is a training in a process of its own, in which one thing is wrong. It is run as it is, and then as the
advice has it, in turn. Prints a line a run as JSON, and a table: how often the verdict was right, the gain that was
predicted, the gain that came.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from distant_s3 import ENVIRONMENT, DistantS3

import loaderd
from loaderd.bench.synthetic import write_shards

BATCH_SIZE = 512


def rest(seconds: float) -> Callable[[int], None]:
    """A model on an accelerator: nothing of this process computes."""
    return lambda step: time.sleep(seconds)


def compute(seconds: float) -> Callable[[int], None]:
    """Python code between the steps."""

    def work(step: int) -> None:
        until_s = time.thread_time() + seconds
        while time.thread_time() < until_s:
            pass

    return work


def multiply(size: int) -> Callable[[int], None]:
    """A model on the processor, in a few threads of TensorFlow."""
    import tensorflow as tf

    matrix = tf.random.normal((size, size))
    return lambda step: tf.linalg.matmul(matrix, matrix).numpy()


def bursts(seconds: float) -> Callable[[int], None]:
    """Many batches at once, and then a pause."""
    return lambda step: time.sleep(seconds if step % 40 == 0 else 0)


def with_sleep(seconds_a_record: float) -> loaderd.Schema:
    """Chess, and a field of which the function waits for something."""
    chess = loaderd.schemas.chess_eval()

    def looked_up(stored: Any) -> Any:
        time.sleep(len(stored) * seconds_a_record)
        return stored * 1.0

    fields = {**chess.fields, "looked_up": loaderd.Derived(looked_up, "stored", (), "float32")}
    return loaderd.Schema(chess.features, fields, chess.intermediates)


def with_loop() -> loaderd.Schema:
    """Chess, and a field of which the function goes from record to record."""
    chess = loaderd.schemas.chess_eval()

    def slow(stored: Any) -> Any:
        return np.array([sum(i * float(one) for i in range(40)) for one in stored])

    fields = {**chess.fields, "slow": loaderd.Derived(slow, "stored", (), "float32")}
    return loaderd.Schema(chess.features, fields, chess.intermediates)


@dataclass(frozen=True)
class Scenario:
    """One thing that is wrong. ``advised``: what following the advice changes, where that is no option."""

    verdict: str
    work: Callable[[], Callable[[int], None]]
    limiting: tuple[str, ...] = ("",)
    schema: Callable[[], loaderd.Schema] = loaderd.schemas.chess_eval
    options: Mapping[str, Any] = field(default_factory=dict)
    shards: str = "plain"
    advised: Mapping[str, Any] = field(default_factory=dict)


_WINDOWS = {"shuffle": loaderd.Shuffle(window_records=8192)}
_COMPUTING = ("unpack", "parse", "check")
SCENARIOS: dict[str, Scenario] = {
    "all-is-fine": Scenario("the model", lambda: rest(0.008)),
    "a-slow-model": Scenario("the model", lambda: rest(0.04)),
    "a-model-on-the-processor": Scenario("the model", lambda: multiply(1500)),
    "a-field-that-sleeps": Scenario(
        "one field",
        lambda: rest(0.003),
        ("looked_up",),
        lambda: with_sleep(20e-6),
    ),
    "a-field-that-loops": Scenario(
        "one field", lambda: rest(0.001), ("slow",), with_loop, advised={"schema": loaderd.schemas.chess_eval}
    ),
    "one-worker-too-few": Scenario("workers", lambda: rest(0.0002), _COMPUTING, options={"workers": 1}),
    "gzip-shards": Scenario(
        "storage", lambda: rest(0.001), ("inflate",), options=_WINDOWS, shards="gzip", advised={"shards": "plain"}
    ),
    "a-slow-bucket": Scenario(
        "storage",
        lambda: rest(0.001),
        ("read",),
        options={"shuffle": loaderd.Shuffle(window_records=32_768)},
        shards="bucket",
    ),
    "python-between-steps": Scenario("the consumer's Python", lambda: compute(0.02)),
    "batches-in-bursts": Scenario("too few batches held", lambda: bursts(0.05)),
}


def run_here(name: str, shards: str, seconds: float, advice: str) -> None:
    """A training, in this process, that follows an advice; prints what it finds after so many seconds."""
    scenario = SCENARIOS[name]
    schema = (scenario.advised.get("schema", scenario.schema) if advice else scenario.schema)()
    options = {"workers": 2, **scenario.options, **options_in(advice)}
    work = scenario.work()
    with loaderd.Loader(shards, schema, batch_size=BATCH_SIZE, epochs=None, **options) as loader:
        began_s = None
        for step, _ in enumerate(loader):
            work(step)
            began_s = time.monotonic() if began_s is None else began_s
            if time.monotonic() - began_s > seconds:
                break
        print(json.dumps(asdict(loader.diagnose())))


def options_in(advice: str) -> dict[str, int]:
    """What an advice such as "workers=4 instead of 2." says; other advice is in ``Scenario.advised``."""
    return {name: int(number) for name, number in re.findall(r"^(\w+)=(\d+) instead of", advice)}


def run(name: str, shards: str, seconds: float, advice: str = "") -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--here", name, "--shards", shards, "--seconds", str(seconds)]
    done = subprocess.run(
        [*command, "--advice", advice],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def storage(folder: Path, records: int, delay_ms: float = 100) -> Iterator[dict[str, str]]:
    """The same records as plain shards, gzipped, and in a slow bucket: names of each kind."""
    write_shards(folder / "plain", records, num_shards=4)
    (folder / "gzip").mkdir()
    plain = f"{folder}/plain/*.tfrecord"
    for path in map(Path, glob.glob(plain)):
        (folder / "gzip" / path.name).write_bytes(gzip.compress(path.read_bytes(), 6))
    with DistantS3() as bucket:
        for path in map(Path, glob.glob(plain)):
            bucket.put(path.name, path.read_bytes())
        bucket.delay_s = delay_ms / 1000
        yield {"plain": plain, "gzip": f"{folder}/gzip/*.tfrecord", "bucket": bucket.uri("*.tfrecord")}


def measure(name: str, places: Mapping[str, str], args: argparse.Namespace) -> str:
    """All runs of a scenario; a row of the table."""
    scenario = SCENARIOS[name]
    right, predicted, came = 0, [], []
    for number in range(args.runs):
        found = run(name, places[scenario.shards], args.seconds)
        is_right = found["verdict"] == scenario.verdict and found["limiting_stage"] in scenario.limiting
        right += is_right
        line = {"scenario": name, "right": is_right, **found}
        if (scenario.advised or options_in(found["advice"])) and is_right and number < args.advised_runs:
            shards = places[scenario.advised.get("shards", scenario.shards)]
            changed = run(name, shards, args.seconds, found["advice"])
            predicted.append(found["gain"])
            came.append(changed["steps_per_s"] / found["steps_per_s"])
            line["came"] = came[-1]
        print(json.dumps(line), flush=True)
    gains = f"{statistics.median(predicted):.2f} | {statistics.median(came):.2f}" if came else " | "
    return f"| {name} | {right} of {args.runs} | {gains} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--advised-runs", type=int, default=3)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--here", choices=SCENARIOS, help=argparse.SUPPRESS)
    parser.add_argument("--shards", help=argparse.SUPPRESS)
    parser.add_argument("--advice", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        run_here(args.here, args.shards, args.seconds, args.advice)
        return
    with tempfile.TemporaryDirectory() as folder, storage(Path(folder), args.records) as places:
        rows = [measure(name, places, args) for name in args.scenarios]
    print("| scenario | right | gain predicted | gain that came |\n|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
