"""What a training step waits for its batch, by what is sent to the device: floats or packed bytes.

::

    python bench/device_cost.py [--batch-size 1024] [--steps 200] [--rounds 5] [--filters 48] [--workers 2]

A small convolutional network judges chess positions, in one function that XLA compiles, fed in several ways:

``float``
    loaderd: the workers unpack to floats, which TensorFlow copies to the device when a step begins.
``packed``
    loaderd with ``unpack="device"``: packed bytes are copied, and unpacked by the compiled step.
``tfdata``
    The expert's tf.data pipeline.
``float_device``, ``packed_device``, ``tfdata_device``
    The same, copied ahead while the device works on another batch: with ``device=``, or ``prefetch_to_device``.

The device is the first GPU. Without one it is the CPU, the output says so, and the last three are left out (unless
``--pipelines`` names them): there is nowhere to copy to. A step's **waiting** is what it takes longer than the same
step on a batch that lies on the device already: waiting for the batch, its copy, and the cores that feeding takes
from a network on the CPU. Each run is a process of its own; every pipeline of loaderd must have had the same first
batch, to the loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import keras
import loaderd_tf
import numpy as np
import tensorflow as tf
from candidates._tfdata import decoded
from candidates.tfdata_expert import decode, expansion_of
from harness.interface import Config
from harness.measured import versions
from harness.process_tree import CpuMeter
from harness.questions import parser_of, publish, run_in_turns, shards_of
from harness.report import Spread

import loaderd

SCHEMA = loaderd.schemas.chess_eval()
WARMUP_STEPS = 10  # the first compiles
SAME_LOSS = 1e-4
NO_GPU = (
    "NO GPU HERE: the network ran on the CPU, beside what feeds it. Nothing was sent to a device (the MB are what "
    "would have been), and a CPU pays for unpacking with time that a GPU would not miss"
)
COLUMNS = ("fed by", "step ms", "waiting %", "step ms with a batch at hand", "MB to the device/step", "CPU ms/step")

PIPELINES = ("float", "float_device", "packed", "packed_device", "tfdata", "tfdata_device")

Element = Mapping[str, Any]  # name -> tensor


def dataset_of(pipeline: str, device: str, options: argparse.Namespace) -> tf.data.Dataset:
    """Elements that hold fields or, for "packed", what ``loaderd_tf.unpack`` makes fields of; without end."""
    shards = list(shards_of(options))
    kind, _, ahead = pipeline.partition("_")
    if kind == "tfdata":
        expansion = expansion_of("float32")
        config = Config(tuple(shards), batch_size=options.batch_size)
        dataset = decoded(config, lambda stored: decode(stored, expansion))
        to_device = tf.data.experimental.prefetch_to_device(device, buffer_size=2)
        return dataset.apply(to_device) if ahead else dataset
    return loaderd_tf.make_dataset(
        shards,
        SCHEMA,
        batch_size=options.batch_size,
        epochs=None,
        remainder="carry",
        workers=options.workers,
        unpack="device" if kind == "packed" else "worker",
        device=device if ahead else None,
    )


def training_step(filters: int) -> Callable[[Element], Any]:
    """A compiled step of a new network: an element in, the loss out. Fields that lie packed in it are unpacked."""
    keras.utils.set_random_seed(0)
    board, flags = keras.Input((8, 8, 24)), keras.Input((10,))
    x = board
    for _ in range(3):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(x), flags])
    x = keras.layers.Dense(64, activation="relu")(x)
    network = keras.Model([board, flags], keras.layers.Dense(1, activation="tanh")(x))
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(network.trainable_variables)

    def step(element: Element) -> Any:
        fields = loaderd_tf.unpack(element, SCHEMA)
        with tf.GradientTape() as tape:
            score = network([fields["board"], fields["flags"]], training=True)[:, 0]
            loss = tf.reduce_mean(tf.square(score - fields["score"]))
        optimizer.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
        return loss

    return tf.function(step, jit_compile=True)  # type: ignore[no-any-return]


def time_steps(step: Callable[[Element], Any], elements: Iterator[Element], num_steps: int) -> float:
    """Seconds of a step. Each is begun before the one before it has ended, so that the device is not left idle."""
    before = step(next(elements))
    before.numpy()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        loss = step(next(elements))
        before.numpy()
        before = loss
    before.numpy()
    return (time.perf_counter() - began_s) / num_steps


def measure(pipeline: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train on one pipeline, in this process."""
    gpus = tf.config.list_physical_devices("GPU")
    device = "/GPU:0" if gpus else "/CPU:0"
    dataset = dataset_of(pipeline, device, options)
    with tf.device(device):
        step = training_step(options.filters)
        elements = iter(dataset)
        first_loss = float(step(next(elements)))
        for _ in range(WARMUP_STEPS):
            step(next(elements)).numpy()
        meter = CpuMeter()
        step_s = time_steps(step, elements, options.steps)
        tree_cpu, other_cores = meter.read()
        element = next(elements)
        held = {name: tf.identity(tensor) for name, tensor in element.items()}
        del elements, dataset  # what feeds ends here: it would take cores from the step without it
        time_steps(step, iter([held] * (WARMUP_STEPS + 1)), WARMUP_STEPS)
        held_step_s = time_steps(step, iter([held] * (options.steps + 1)), options.steps)
    return {
        "pipeline": pipeline,
        "device": tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU") if gpus else "CPU",
        "step_ms": step_s * 1e3,
        "held_step_ms": held_step_s * 1e3,
        "waiting_share": max(0.0, 1 - held_step_s / step_s),
        "bytes_per_step": sum(tensor.numpy().nbytes for tensor in held.values()),
        "total_cpu_ms_per_step": tree_cpu / options.steps * 1e3,
        "other_cores": other_cores,
        "first_loss": first_loss,
        "versions": versions(),
    }


def row_of(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """A line of the table: all runs of one pipeline."""
    return (
        runs[0]["pipeline"],
        Spread.of([run["step_ms"] for run in runs]).shown(".2f"),
        Spread.of([run["waiting_share"] * 100 for run in runs]).shown(".0f"),
        Spread.of([run["held_step_ms"] for run in runs]).shown(".2f"),
        f"{runs[0]['bytes_per_step'] / 1e6:.2f}",
        f"{median(run['total_cpu_ms_per_step'] for run in runs):.1f}",
    )


def what_differs(runs: list[dict[str, Any]]) -> list[str]:
    """What shows that loaderd's pipelines did not begin with the same batch, in words."""
    losses = {run["pipeline"]: run["first_loss"] for run in runs if not run["pipeline"].startswith("tfdata")}
    if np.ptp(list(losses.values()) or [0]) <= SAME_LOSS:
        return []
    return [f"the same network on the same first batch had different losses: {losses}"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--records", type=int, default=1_500_000, help="of the shards that are made")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200, help="to time, of each pipeline in each round")
    parser.add_argument("--filters", type=int, default=48, help="of each of the three convolutions")
    parser.add_argument("--workers", type=int, default=2, help="of loaderd")
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, metavar="PIPELINE", help="default: all above")
    parser.add_argument("--measure", choices=PIPELINES, help="run once, in this process, and print one JSON line")
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure, options)) + "\n")
        return

    shards_of(options)
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    pipelines = options.pipelines or [name for name in PIPELINES if has_gpu or not name.endswith("_device")]
    runs = run_in_turns(pipelines, options, lambda run: f"{run['step_ms']:8.2f} ms a step")
    wrong = what_differs(runs)
    notes = wrong or [
        f"device: {runs[0]['device']}" if has_gpu else NO_GPU,
        f"batches of {options.batch_size}, {options.filters} filters, {options.workers} workers; "
        f"timed steps: {options.steps}",
    ]
    rows = [row_of([run for run in runs if run["pipeline"] == pipeline]) for pipeline in pipelines]
    publish(COLUMNS, rows, notes, runs, options)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
