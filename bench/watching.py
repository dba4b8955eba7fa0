"""What does it cost a training that `loaderd top` watches it?

::

    python bench/watching.py [--rounds 20] [--seconds 4] [--sleep-ms 0]

One training runs all the while; `loaderd top` is attached to it, in a terminal of its own, in every second stretch of
so many seconds. Prints the steps a second of each pair of stretches as JSON, and the median of their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time

from loaderd import processes
from loaderd.client.running import running_streams

_TRAINING = """
import sys, time, loaderd
with loaderd.Loader(sys.argv[1], loaderd.schemas.chess_eval(), batch_size=512, epochs=None, workers=2) as loader:
    for _ in loader:
        time.sleep(float(sys.argv[2]))
"""
_COMMAND = "import sys; from loaderd.cli.main import main; main(sys.argv[1:])"


def steps_per_s(training: int, seconds: float, watched: bool) -> tuple[float, float]:
    """Of a training, over so many seconds; and the cores that the watcher has kept busy."""
    ours, theirs = pty.openpty()
    watcher = None
    if watched:
        environment = {**os.environ, "TERM": "xterm"}
        command = [sys.executable, "-c", _COMMAND, "top"]
        watcher = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        shown = b""
        while b"q quit" not in shown:  # its start is no part of what it costs
            shown += os.read(ours, 1 << 16)
    (stream,) = running_streams(frozenset([training]))
    cpu_ns = 0 if watcher is None else processes.cpu_ns(watcher.pid)
    before = stream.watched.now()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.2)
        if watcher is not None and select.select([ours], [], [], 0)[0]:
            os.read(ours, 1 << 20)
    now = stream.watched.now()
    used = 0.0
    if watcher is not None:
        used = (processes.cpu_ns(watcher.pid) - cpu_ns) / 1e9 / seconds
        watcher.terminate()
        watcher.wait()
    os.close(ours)
    os.close(theirs)
    return (now.batches - before.batches) / (now.time_s - before.time_s), used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="what a step takes besides")
    args = parser.parse_args()
    ratios, cores = [], []
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "loaderd.bench.synthetic", folder, "--records", "200000", "--shards", "8"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-c", _TRAINING, f"{folder}/*.tfrecord", str(args.sleep_ms / 1000)]
        with subprocess.Popen(command) as training:
            time.sleep(6)
            for _ in range(args.rounds):
                found = {}
                for watched in random.sample([False, True], 2):
                    found[watched], used = steps_per_s(training.pid, args.seconds, watched)
                    cores += [used] if watched else []
                ratios.append(found[True] / found[False])
                print(json.dumps({"alone": found[False], "watched": found[True], "ratio": ratios[-1]}), flush=True)
            training.terminate()
    ratio, busy = statistics.median(ratios), statistics.median(cores)
    print(f"watched / alone: {ratio:.3f}; top itself keeps {busy:.3f} cores busy")


if __name__ == "__main__":
    main()
