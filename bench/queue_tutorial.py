"""The experiment of the queue tutorial, on today's TensorFlow: one network, fed in several ways.

::

    python bench/queue_tutorial.py [--steps 640] [--rounds 5] [--hidden 1024] [--workers 2]

In 2017 a tutorial on TensorFlow's queues trained two layers on batches of 128 × 1024 floats: 18 s fed by
``feed_dict``, 11.5 s fed by a ``FIFOQueue`` (on a GPU). Here everything is the same but the feeding: the network, its
first weights, gradient descent, and the numbers, which all but ``in_memory`` read from the same shards, a row from
each ``Example``.

``feed_dict``
    TF 1: the loop reads the records in Python (``tf_record_iterator``, ``Example.FromString``, ``np.frombuffer``),
    stacks 128 of them, and feeds the array to ``session.run``.
``queue``
    TF 1: a ``FIFOQueue``, which ``--workers`` threads of a ``QueueRunner`` fill, watched by a ``Coordinator``. Each
    thread reads shards of its own, in Python as above. The batches are the same, their order is up to the threads.
``loaderd_session``
    TF 1: an initializable iterator over ``loaderd_tf.make_dataset``, in the same graph and session: only the feeding
    differs. Batches in the order of ``feed_dict``.
``loaderd_function``
    TF 2: the same data set, and the same step as a ``tf.function``.
``in_memory``
    TF 1: one batch, in a variable, again and again: nothing is read. No feeding can be faster.

A step **waits** from when the loop turns to it until the network has its input: reading and the copy to TensorFlow
included, and the way into ``session.run``, which is all that ``in_memory`` has. Each run is one epoch, in a process
of its own; its first 20 steps are not timed. By then the queue is up to 16 batches ahead, and loaderd has up to two
windows of 16,384 rows read (but not decoded): its CPU time is 2 % too low for that. All must have seen the same
numbers, and those in the same order must end with the same loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import loaderd_tf
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from harness.measured import versions
from harness.process_tree import CpuMeter
from harness.questions import console_of, parser_of, publish, run_again
from harness.report import Spread
from harness.rounds import turns

import loaderd

BATCH, NUMBERS = 128, 1024
NUM_SHARDS = 8
QUEUE_BATCHES = 16
WARMUP_STEPS = 20
LEARNING_RATE = 0.02
HELD_OUT_SEED = 1 << 32
SAME_LOSS = 1e-4
SCHEMA = loaderd.Schema({"x": loaderd.Raw("float32", (NUMBERS,))}, {"x": loaderd.Array("x")})

v1 = tf.compat.v1
Batch = npt.NDArray[np.float32]
Shards = list[str]


class Training(NamedTuple):
    """A network in training: ``step`` does one and returns (time at which its input was there, checksum, loss)."""

    step: Callable[[], tuple[Any, Any, Any]]
    weights: Callable[[], list[npt.NDArray[np.float32]]]


# ---------------------------------------------------------------------------------------- the numbers


def make_batch(number: int) -> Batch:
    """float32, (128, 1024): normally distributed; the same ``number`` gives the same."""
    return np.random.default_rng(number).standard_normal((BATCH, NUMBERS), np.float32)


def checksum_of(x: Batch) -> int:
    """The sum of the numbers' bits, modulo 2³²: it does not depend on their order."""
    return int(x.view(np.uint32).sum(dtype=np.uint32))


def make_shards(work_dir: Path, steps: int) -> Shards:
    """Shards of ``steps`` batches, written once and used again afterwards: the same number of batches in each."""
    folder = work_dir / f"queue_tutorial-{steps}"
    if not folder.is_dir():
        work_dir.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=work_dir))
        try:
            for shard, numbers in enumerate(np.split(np.arange(steps), NUM_SHARDS)):
                with tf.io.TFRecordWriter(str(unfinished / f"{shard}.tfrecord")) as writer:
                    for x in itertools.chain.from_iterable(map(make_batch, numbers)):
                        value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.tobytes()]))
                        example = tf.train.Example(features=tf.train.Features(feature={"x": value}))
                        writer.write(example.SerializeToString())
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(map(str, folder.glob("*.tfrecord")))


def read_batches(shards: Shards) -> Iterator[Batch]:
    """float32, (128, 1024) each: the records as one reads them in Python."""
    records = itertools.chain.from_iterable(map(v1.io.tf_record_iterator, shards))
    while taken := list(itertools.islice(records, BATCH)):
        examples = map(tf.train.Example.FromString, taken)
        yield np.stack([np.frombuffer(e.features.feature["x"].bytes_list.value[0], np.float32) for e in examples])


# ---------------------------------------------------------------------------------------- the network


class Network:
    """Two layers that learn whether a row's numbers sum to more than 0; the same first weights each time."""

    def __init__(self, hidden: int) -> None:
        rng = np.random.default_rng(0)
        shapes = [(NUMBERS, hidden), (hidden,), (hidden, 1), (1,)]
        firsts = [rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes]
        self.weights = [tf.Variable(first) for first in firsts]

    def train(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """One step of gradient descent: when ``x`` was there (s since 1970), its checksum, the loss before."""
        with tf.control_dependencies([x]):
            ready_s = tf.timestamp()
        wanted = tf.cast(tf.reduce_sum(x, axis=1, keepdims=True) > 0, tf.float32)
        w, b, w2, b2 = self.weights
        logits = tf.matmul(tf.nn.relu(tf.matmul(x, w) + b), w2) + b2
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(wanted, logits))
        descent = v1.train.GradientDescentOptimizer(LEARNING_RATE).minimize(loss, var_list=self.weights)
        with tf.control_dependencies([descent]):
            return ready_s, tf.reduce_sum(tf.bitcast(x, tf.uint32)), tf.identity(loss)


def held_out_loss(weights: list[npt.NDArray[np.float32]]) -> float:
    """The loss over 16 batches that nobody trained on."""
    w, b, w2, b2 = (weight.astype(np.float64) for weight in weights)
    x = np.concatenate([make_batch(HELD_OUT_SEED + number) for number in range(16)])
    logits = (np.maximum(x @ w + b, 0) @ w2 + b2)[:, 0]
    return float(np.mean(np.logaddexp(0, np.where(x.sum(axis=1) > 0, -logits, logits))))


# ---------------------------------------------------------------------------------------- the feeding


def _dataset(shards: Shards, workers: int) -> tf.data.Dataset:
    return loaderd_tf.make_dataset(
        shards, SCHEMA, batch_size=BATCH, structure="x", shuffle=False, remainder="drop", workers=workers
    )


def _placeholder(shards: Shards, workers: int) -> tuple[tf.Tensor, Iterator[dict[Any, Any]]]:
    x = v1.placeholder(tf.float32, (BATCH, NUMBERS))
    return x, ({x: batch} for batch in read_batches(shards))


def _queue(shards: Shards, workers: int) -> tuple[tf.Tensor, Iterator[dict[Any, Any]]]:
    queue = v1.FIFOQueue(QUEUE_BATCHES, [tf.float32], [(BATCH, NUMBERS)])
    readers = [read_batches(shards[first::workers]) for first in range(workers)]
    # A reader that is through raises StopIteration, which is OutOfRangeError to TensorFlow: its thread ends.
    enqueues = [queue.enqueue([v1.py_func(reader.__next__, [], tf.float32)]) for reader in readers]
    v1.train.add_queue_runner(v1.train.QueueRunner(queue, enqueues))
    return queue.dequeue(), itertools.repeat({})


def _iterator(shards: Shards, workers: int) -> tuple[tf.Tensor, Iterator[dict[Any, Any]]]:
    dataset = _dataset(shards, workers)
    v1.add_to_collection("datasets", dataset)  # its workers end with it, and an iterator of TF 1 does not keep it
    iterator = v1.data.make_initializable_iterator(dataset)
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next(), itertools.repeat({})


def _variable(shards: Shards, workers: int) -> tuple[tf.Tensor, Iterator[dict[Any, Any]]]:
    return tf.Variable(make_batch(0), trainable=False).read_value(), itertools.repeat({})


Input = Callable[[Shards, int], tuple[tf.Tensor, Iterator[dict[Any, Any]]]]


@contextmanager
def in_session(make_input: Input, shards: Shards, hidden: int, workers: int) -> Iterator[Training]:
    """Training as TF 1 has it. ``make_input`` gives the input and what to feed at each step."""
    with tf.Graph().as_default():
        network = Network(hidden)
        x, feeds = make_input(shards, workers)
        fetches = network.train(x)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            coordinator = v1.train.Coordinator()
            threads = v1.train.start_queue_runners(session, coordinator)
            yield Training(lambda: session.run(fetches, next(feeds)), lambda: session.run(network.weights))
            coordinator.request_stop()
            coordinator.join(threads)


@contextmanager
def in_function(shards: Shards, hidden: int, workers: int) -> Iterator[Training]:
    """Training as TF 2 has it."""
    network, batches = Network(hidden), iter(_dataset(shards, workers))
    step = tf.function(lambda: network.train(next(batches)))
    yield Training(step, lambda: [weight.numpy() for weight in network.weights])


def training_by(feeder: str, shards: Shards, hidden: int, workers: int) -> AbstractContextManager[Training]:
    """The training that one of ``FEEDERS`` feeds."""
    if feeder == "loaderd_function":
        return in_function(shards, hidden, workers)
    return in_session(SESSION_INPUTS[feeder], shards, hidden, workers)


SESSION_INPUTS: dict[str, Input] = {
    "in_memory": _variable,
    "feed_dict": _placeholder,
    "queue": _queue,
    "loaderd_session": _iterator,
}
FEEDERS = (*SESSION_INPUTS, "loaderd_function")
IN_ORDER = ("feed_dict", "loaderd_session", "loaderd_function")


# ---------------------------------------------------------------------------------------- the experiment


def train(feeder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train for one epoch, fed by ``feeder``, in this process; all but the first ``WARMUP_STEPS`` are timed."""
    checksum, waits = 0, []
    with training_by(
        feeder, make_shards(options.work_dir, options.steps), options.hidden, options.workers
    ) as training:
        first_loss = held_out_loss(training.weights())
        for number in range(options.steps):
            if number == WARMUP_STEPS:
                meter, began_s = CpuMeter(), time.perf_counter()
            turned_s = time.time()
            ready_s, of_step, _ = training.step()
            waits.append(float(ready_s) - turned_s)
            checksum = (checksum + int(of_step)) % (1 << 32)
        seconds = time.perf_counter() - began_s
        tree_cpu, other_cores = meter.read()
        loss = held_out_loss(training.weights())
    timed = options.steps - WARMUP_STEPS
    return {
        "feeder": feeder,
        "steps": options.steps,
        "step_ms": seconds / timed * 1e3,
        "waiting_share": sum(waits[WARMUP_STEPS:]) / seconds,
        "total_cpu_ms_per_step": tree_cpu / timed * 1e3,
        "other_cores": other_cores,
        "first_loss": first_loss,
        "loss": loss,
        "checksum": checksum,
        "versions": versions(),
    }


def what_differs(runs: list[dict[str, Any]], expected: int) -> list[str]:
    """What of the runs shows that they did not train on the same numbers, in words."""
    wrong = [
        f"{run['feeder']}: the numbers have checksum {run['checksum']:#x}, {expected:#x} was written"
        for run in runs
        if run["feeder"] != "in_memory" and run["checksum"] != expected
    ]
    losses = [run["loss"] for run in runs if run["feeder"] in IN_ORDER]
    if max(losses) - min(losses) > SAME_LOSS:
        wrong.append(f"the same batches in the same order ended with losses from {min(losses)} to {max(losses)}")
    return wrong


def row_of(feeder: str, rounds: list[dict[str, dict[str, Any]]]) -> tuple[str, ...]:
    """A line of the table."""
    runs = [by_feeder[feeder] for by_feeder in rounds]
    faster = Spread.of([by_feeder["feed_dict"]["step_ms"] / by_feeder[feeder]["step_ms"] for by_feeder in rounds])
    return (
        feeder,
        Spread.of([run["step_ms"] for run in runs]).shown(".2f"),
        faster.shown(".2f"),
        Spread.of([run["waiting_share"] * 100 for run in runs]).shown(".1f"),
        f"{median(run['total_cpu_ms_per_step'] for run in runs):.1f}",
        Spread.of([run["loss"] for run in runs]).shown(".5f"),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=640, help=f"batches of the epoch: a multiple of {NUM_SHARDS}")
    parser.add_argument("--hidden", type=int, default=1024, help="units of the hidden layer")
    parser.add_argument("--workers", type=int, default=2, help="processes of loaderd, threads that fill the queue")
    parser.add_argument("--feeder", choices=FEEDERS, help="train once, in this process, and print one JSON line")
    options = parser.parse_args()
    if options.steps % NUM_SHARDS or options.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be a multiple of {NUM_SHARDS} above {WARMUP_STEPS}, got {options.steps}")
    if options.feeder:
        v1.logging.set_verbosity(v1.logging.ERROR)
        sys.stdout.write(json.dumps(train(options.feeder, options)) + "\n")
        return

    make_shards(options.work_dir, options.steps)
    console = console_of()
    rounds: list[dict[str, dict[str, Any]]] = [{} for _ in range(options.rounds)]
    for number, feeder in turns(FEEDERS, options.rounds):
        found = rounds[number][feeder] = {"round": number, **run_again("--feeder", feeder)}
        console.print(f"round {number + 1}/{options.rounds}  {feeder:18} {found['step_ms']:8.2f} ms a step")
    runs = [by_feeder[feeder] for by_feeder in rounds for feeder in by_feeder]
    expected = sum(map(checksum_of, map(make_batch, range(options.steps)))) % (1 << 32)
    wrong = what_differs(runs, expected)
    notes = wrong or [
        f"all but in_memory trained on the same {options.steps * BATCH:,} rows of {NUMBERS} (checksum {expected:#x});"
        f" feed_dict and loaderd had the same batches in the same order, and ended with the same loss"
        f" (within {SAME_LOSS}); before training it was {runs[0]['first_loss']:.5f}",
        f"hidden units: {options.hidden}; workers: {options.workers}; timed steps: {options.steps - WARMUP_STEPS}",
    ]
    columns = ("fed by", "step ms", "× feed_dict", "waiting %", "CPU ms/step", "loss after")
    publish(columns, [row_of(feeder, rounds) for feeder in FEEDERS], notes, runs, options)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
