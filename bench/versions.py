"""Two versions of loaderd beside each other, in turn, on the same records: what has a change brought?

::

    git worktree add /tmp/before cf8b942
    python bench/versions.py /tmp/before . [--consumers python graph] [--batch-size 512] [--rounds 5] [--seconds 4]

Each run is a process of its own, which imports loaderd from the folder that is given. Prints a line a run as JSON,
and at the end, of each consumer, the medians, and the medians of the ratios within a round to the first version.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_WARMUP_S = 1.5


def python_loop(shards: str, batch_size: int, workers: int) -> Iterator[None]:
    """A loop over a Loader."""
    import loaderd

    with loaderd.Loader(shards, _schema(), batch_size=batch_size, epochs=None, workers=workers) as loader:
        for _ in loader:
            yield


def batches_loop(shards: str, batch_size: int, workers: int) -> Iterator[None]:
    """A loop over eager tensors."""
    import loaderd_tf

    import loaderd

    with loaderd.Loader(shards, _schema(), batch_size=batch_size, epochs=None, workers=workers) as loader:
        for _ in loaderd_tf.batches(loader):
            yield


def eager_loop(shards: str, batch_size: int, workers: int) -> Iterator[None]:
    """A loop over a tf.data.Dataset."""
    import loaderd_tf

    for _ in loaderd_tf.make_dataset(shards, _schema(), batch_size=batch_size, epochs=None, workers=workers):
        yield


def graph_loop(shards: str, batch_size: int, workers: int) -> Iterator[None]:
    """The same in a tf.function, 32 batches a call."""
    import loaderd_tf
    import tensorflow as tf

    iterator = iter(loaderd_tf.make_dataset(shards, _schema(), batch_size=batch_size, epochs=None, workers=workers))

    @tf.function
    def consume() -> Any:
        total = 0.0
        for _ in tf.range(32):
            total += next(iterator)["score"][0]
        return total

    while True:
        consume()
        for _ in range(32):
            yield


CONSUMERS: dict[str, Callable[[str, int, int], Iterator[None]]] = {
    "python": python_loop,
    "batches": batches_loop,
    "eager": eager_loop,
    "graph": graph_loop,
}


def _schema() -> Any:
    import loaderd

    return loaderd.schemas.chess_eval(value_a=0.8, value_k=600.0, value_b=50.0)


def cpu_s() -> dict[str, float]:
    """Seconds of user and system time so far: of this process, and of each kind of its descendants."""
    found = {"consumer": time.process_time()}
    parents = {os.getpid()}
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        name, rest = fields[fields.index("(") + 1 : fields.rindex(")")], fields[fields.rindex(")") + 2 :].split()
        if int(rest[1]) in parents and name.startswith("loaderd-"):
            parents.add(pid)
            kind = name.removeprefix("loaderd-")
            found[kind] = found.get(kind, 0.0) + (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measure(consumer: str, shards: str, batch_size: int, workers: int, seconds: float) -> dict[str, float]:
    """Examples a second, and CPU: of the consumer in microseconds a batch, of the others in nanoseconds a record."""
    loop = CONSUMERS[consumer](shards, batch_size, workers)
    until_s = time.perf_counter() + _WARMUP_S
    while time.perf_counter() < until_s:
        next(loop)
    began_s, before, count = time.perf_counter(), cpu_s(), 0
    while time.perf_counter() - began_s < seconds:
        next(loop)
        count += 1
    took_s, now = time.perf_counter() - began_s, cpu_s()
    used_s = {kind: now_s - before.get(kind, 0.0) for kind, now_s in now.items()}
    return {
        "examples_per_s": count * batch_size / took_s,
        "consumer_us_a_batch": 1e6 * used_s.pop("consumer") / count,
        **{f"{kind}_ns_a_record": 1e9 * value / count / batch_size for kind, value in used_s.items()},
    }


def run(folder: str, consumer: str, shards: str, args: argparse.Namespace) -> dict[str, float]:
    """One measurement in a process that imports loaderd from ``folder``."""
    path = Path(folder).resolve()
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": f"{path}{os.pathsep}{path / 'bindings'}",
    }
    command = [sys.executable, __file__, "--measure", consumer, "--shards", shards]
    command += [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("batch_size", "workers", "seconds")]
    done = subprocess.run(command, env=environment, cwd="/", check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", help="checkouts of loaderd; the first is what the others are compared to"
    )
    parser.add_argument("--consumers", nargs="+", choices=CONSUMERS, default=["python"])
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--shards", help="a glob; without it, 200,000 synthetic records")
    parser.add_argument("--measure", choices=CONSUMERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.shards, args.batch_size, args.workers, args.seconds)))
        return
    if not args.folders:
        parser.error("give checkouts of loaderd: the first is what the others are compared to")
    with tempfile.TemporaryDirectory() as scratch:
        if args.shards is None:
            # Not above: a measured process is to import the loaderd that it is given.
            from harness.synthetic import write_shards

            write_shards(scratch, 200_000, num_shards=8)
        shards = os.path.abspath(args.shards) if args.shards else f"{scratch}/*.tfrecord"
        for consumer in args.consumers:
            compare(consumer, shards, args)


def compare(consumer: str, shards: str, args: argparse.Namespace) -> None:
    """All rounds of one consumer."""
    found: dict[str, list[dict[str, float]]] = {folder: [] for folder in args.folders}
    for number in range(args.rounds):
        for folder in args.folders[number % len(args.folders) :] + args.folders[: number % len(args.folders)]:
            one = run(folder, consumer, shards, args)
            found[folder].append(one)
            rounded = {name: round(value, 1) for name, value in one.items()}
            print(json.dumps({"folder": folder, "consumer": consumer, **rounded}), flush=True)
    first = found[args.folders[0]]
    for folder, rounds in found.items():
        ratios = [one["examples_per_s"] / base["examples_per_s"] for one, base in zip(rounds, first, strict=True)]
        medians = {name: round(statistics.median(one[name] for one in rounds), 1) for name in rounds[0]}
        print(
            f"{consumer}, batch {args.batch_size}, {folder}: {statistics.median(ratios):.2f} times "
            f"({min(ratios):.2f}-{max(ratios):.2f}); medians {json.dumps(medians)}"
        )


if __name__ == "__main__":
    main()
