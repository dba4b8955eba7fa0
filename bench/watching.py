"""What does it cost a training that `loaderd top` watches it?

::

    python bench/watching.py [--rounds 60] [--seconds 1.5] [--sleep-ms 0]

One training runs all the while, and `loaderd top` in a terminal of its own, which is stopped and goes on in turn, for
so many seconds each. Prints the steps a second of each pair of stretches as JSON, and the median of their ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from loaderd import processes
from loaderd.bench.synthetic import write_shards
from loaderd.client.running import running_streams

_TRAINING = """
import sys, time, loaderd
with loaderd.Loader(sys.argv[1], loaderd.schemas.chess_eval(), batch_size=512, epochs=None, workers=2) as loader:
    for _ in loader:
        time.sleep(float(sys.argv[2]))
"""
_COMMAND = "import sys; from loaderd.cli.main import main; main(sys.argv[1:])"


def steps_per_s(training: int, terminal: int, seconds: float) -> float:
    """Of a training, over so many seconds. What is shown in the terminal is read, for nobody else reads it."""
    (stream,) = running_streams(frozenset([training]))
    before = stream.watched.now()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if select.select([terminal], [], [], 0.2)[0]:
            os.read(terminal, 1 << 20)
    now = stream.watched.now()
    return (now.batches - before.batches) / (now.time_s - before.time_s)


@contextlib.contextmanager
def top() -> Iterator[tuple[int, int]]:
    """``loaderd top``, when it shows something: its process, and the terminal that it is in."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _COMMAND, "top"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        shown = b""
        while b"q quit" not in shown:
            shown += os.read(ours, 1 << 16)
        yield process.pid, ours
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="what a step takes besides")
    args = parser.parse_args()
    ratios, cores = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder, 200_000, num_shards=8)
        command = [sys.executable, "-c", _TRAINING, f"{folder}/*.tfrecord", str(args.sleep_ms / 1000)]
        with subprocess.Popen(command) as training, top() as (watcher, terminal):
            time.sleep(6)
            for _ in range(args.rounds):
                found = {}
                for watched in random.sample([False, True], 2):
                    os.kill(watcher, signal.SIGCONT if watched else signal.SIGSTOP)
                    cpu_ns = processes.cpu_ns(watcher)
                    found[watched] = steps_per_s(training.pid, terminal, args.seconds)
                    cores += [(processes.cpu_ns(watcher) - cpu_ns) / 1e9 / args.seconds] if watched else []
                ratios.append(found[True] / found[False])
                print(json.dumps({"alone": found[False], "watched": found[True], "ratio": ratios[-1]}), flush=True)
            training.terminate()
    ratio, busy = statistics.median(ratios), statistics.mean(cores)
    print(f"watched / alone: {ratio:.3f}; top itself keeps {busy:.4f} cores busy")


if __name__ == "__main__":
    main()
