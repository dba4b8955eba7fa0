"""What does it cost a training that `loaderd top` watches it, and that it writes for TensorBoard?

::

    python bench/watching.py [--loops bare model] [--rounds 60] [--seconds 1.5]

One training runs all the while, and `loaderd top` in a terminal of its own. In turn, for so many seconds each, both
are on, or neither: `top` is stopped, and the training writes nothing. When it does, it writes figures every so many
steps. The loop "bare" takes eager tensors and does nothing with them; "model" trains a
small net on them, with TensorFlow on the same cores. Prints the steps a second of each pair of stretches as JSON, and
of each loop the median of their ratios, and between which two a half of them lie.
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
from typing import Any

from harness.synthetic import write_shards

from loaderd import processes
from loaderd.observe.running_streams import running_streams

_TRAINING = """
import os, signal, sys, loaderd, loaderd_tf
import tensorflow as tf

shards, log_dir, loop, every = *sys.argv[1:4], int(sys.argv[4])
writes = False

def switch(number, frame):
    global writes
    writes = number == signal.SIGUSR1

signal.signal(signal.SIGUSR1, switch)
signal.signal(signal.SIGUSR2, switch)
weights = [tf.Variable(tf.random.normal(shape, stddev=0.02)) for shape in ((1536, 32), (32, 1))]

@tf.function
def train(board, score):
    with tf.GradientTape() as tape:
        hidden = tf.nn.relu(tf.reshape(board, [-1, 1536]) @ weights[0])
        loss = tf.reduce_mean((tf.tanh(hidden @ weights[1])[:, 0] - score) ** 2)
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(0.01 * gradient)

with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=512, epochs=None, workers=2) as loader:
    callback = loaderd_tf.TensorBoard(loader, log_dir)
    for step, (board, score) in enumerate(loaderd_tf.batches(loader, ("board", "score"))):
        if loop == "model":
            train(board, score)
        if writes and step % every == 0:
            callback.write(step)
"""
_WARMUP_S = 6
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
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the ``with``. ``options``: of ``subprocess.Popen``."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def top() -> Iterator[tuple[int, int]]:
    """``loaderd top``, when it shows something: its process, and the terminal that it is in."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _COMMAND, "top"]
    environment = {**os.environ, "TERM": "xterm"}
    try:
        with running(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)  # so that reading ends when it does
            shown = b""
            while b"q quit" not in shown:
                shown += os.read(ours, 1 << 16)
            yield process.pid, ours
    finally:
        os.close(ours)


def check(training: subprocess.Popen[bytes]) -> None:
    """Exits if the training has ended."""
    if training.poll() is not None:
        sys.exit(f"the training ended with status {training.returncode}")


def measure(shards: str, log_dir: str, loop: str, args: argparse.Namespace) -> None:
    """All rounds of one loop."""
    ratios, cores = [], []
    command = [sys.executable, "-c", _TRAINING, shards, log_dir, loop, str(args.every)]
    with running(command) as training, top() as (watcher, terminal):
        while not running_streams(frozenset([training.pid])):
            check(training)
            time.sleep(0.2)
        time.sleep(_WARMUP_S)
        for _ in range(args.rounds):
            found = {}
            for watched in random.sample([False, True], 2):
                os.kill(watcher, signal.SIGCONT if watched else signal.SIGSTOP)
                os.kill(training.pid, signal.SIGUSR1 if watched else signal.SIGUSR2)
                cpu_ns = processes.cpu_ns(watcher)
                check(training)
                found[watched] = steps_per_s(training.pid, terminal, args.seconds)
                check(training)
                cores += [(processes.cpu_ns(watcher) - cpu_ns) / 1e9 / args.seconds] if watched else []
            ratios.append(found[True] / found[False])
            pair = {"alone": found[False], "watched": found[True], "ratio": ratios[-1]}
            print(json.dumps({"loop": loop, **pair}), flush=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    busy = statistics.mean(cores)
    print(f"{loop}: watched / alone: {middle:.3f} ({low:.3f} to {high:.3f}); top keeps {busy:.4f} cores busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="+", choices=("bare", "model"), default=["bare", "model"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--every", type=int, default=1000, help="steps between two writes for TensorBoard")
    parser.add_argument("--records", type=int, default=1_000_000, help="of an epoch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder, args.records, num_shards=8)
        for loop in args.loops:
            measure(f"{folder}/*.tfrecord", f"{folder}/log-{loop}", loop, args)


if __name__ == "__main__":
    main()
