"""Does `Loader.diagnose()` name what a training waits for, and does its advice bring what it predicts?

::

    python bench/diagnosis.py [--runs 10] [--scenarios a-gzip-shard …] [--records 100000] [--beside 2]

Each scenario is a training in a process of its own, in which one thing is wrong. It is run as it is, and then as the
advice has it, in turn. Prints a line a run as JSON, and a table: how often the verdict was right, how often it was
that the training gets too little of the CPU, the gain that was predicted, the gain that came. ``--beside`` starts so
many processes that keep a core busy: then the second verdict is right, too, wherever the training needs these cores.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from distant_s3 import ENVIRONMENT, DistantS3
from harness.process_tree import process_tree
from harness.synthetic import write_shards

import loaderd
from loaderd.processes import name_of

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
    setting: Literal["", "nice", "pinned", "stopped"] = ""
    """Beside two busy processes, which come first; on one core; of each 100 ms, the workers have 10."""
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
        advised={"shards": "plain"},
    ),
    "python-between-steps": Scenario("the consumer's Python", lambda: compute(0.02)),
    "batches-in-bursts": Scenario("too few batches held", lambda: bursts(0.05)),
    "nice-beside-busy-processes": Scenario("too little CPU", lambda: rest(0.002), setting="nice"),
    "one-core-for-two-workers": Scenario("too little CPU", lambda: rest(0.0002), setting="pinned"),
    "workers-that-are-stopped": Scenario("too little CPU", lambda: rest(0.002), setting="stopped"),
}


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """So many processes that keep a core busy each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def stopping(pids: list[int]) -> Iterator[None]:
    """These processes run for 10 ms of each 100."""
    over = threading.Event()

    def send(number: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    def stop() -> None:
        while not over.wait(0.01):
            send(signal.SIGSTOP)
            over.wait(0.09)
            send(signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        yield
    finally:
        over.set()
        stopper.join()


@contextlib.contextmanager
def in_setting(setting: str) -> Iterator[None]:
    """What holds for the whole training."""
    with busy_processes(2 if setting == "nice" else 0):
        if setting == "nice":
            os.nice(15)
        elif setting == "pinned":
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        yield


def run_here(name: str, shards: str, seconds: float, advice: str) -> None:
    """A training, in this process, that follows an advice; prints what it finds after so many seconds."""
    scenario = SCENARIOS[name]
    schema = (scenario.advised.get("schema", scenario.schema) if advice else scenario.schema)()
    options = {"workers": 2, **scenario.options, **options_in(advice)}
    work = scenario.work()
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_setting(scenario.setting))
        loader = stack.enter_context(loaderd.Loader(shards, schema, batch_size=BATCH_SIZE, epochs=None, **options))
        if scenario.setting == "stopped":
            workers = [pid for pid in process_tree(os.getpid()) if name_of(pid) == "loaderd-worker"]
            stack.enter_context(stopping(workers))
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
    right, lacking, predicted, came = 0, 0, [], []
    for number in range(args.runs):
        found = run(name, places[scenario.shards], args.seconds)
        is_right = found["verdict"] == scenario.verdict and found["limiting_stage"] in scenario.limiting
        right += is_right
        lacking += not is_right and found["verdict"] == "too little CPU"
        line = {"scenario": name, "right": is_right, **found}
        if (scenario.advised or options_in(found["advice"])) and is_right and number < args.advised_runs:
            shards = places[scenario.advised.get("shards", scenario.shards)]
            changed = run(name, shards, args.seconds, found["advice"])
            predicted.append(found["gain"])
            came.append(changed["steps_per_s"] / found["steps_per_s"])
            line["came"] = came[-1]
        print(json.dumps(line), flush=True)
    gains = f"{statistics.median(predicted):.2f} | {statistics.median(came):.2f}" if came else " | "
    return f"| {name} | {right} of {args.runs} | {lacking} | {gains} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--advised-runs", type=int, default=3)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--beside", type=int, default=0, help="processes that keep a core busy meanwhile")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--here", choices=SCENARIOS, help=argparse.SUPPRESS)
    parser.add_argument("--shards", help=argparse.SUPPRESS)
    parser.add_argument("--advice", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        run_here(args.here, args.shards, args.seconds, args.advice)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        storage(Path(folder), args.records) as places,
        busy_processes(args.beside),
    ):
        rows = [measure(name, places, args) for name in args.scenarios]
    head = "| scenario | right | too little CPU | gain predicted | gain that came |\n|---|---|---|---|---|"
    print(head, *rows, sep="\n")


if __name__ == "__main__":
    main()
