"""How many examples a second come to a GPU, by the library that takes them and by the way it copies.

::

    python bench/gpu_copies.py [--batch-size 1024] [--seconds 3] [--rounds 3] [--workers 8]

The GPU adds up each batch's boards, and the loop waits for the sum of the batch before: so nothing but the way of the
batches takes time. Ways of the libraries that are installed are measured, each run in a process of its own:

``torch_to``, ``torch_pin``, ``torch_device``
    PyTorch: ``.to("cuda", non_blocking=True)`` in the loop; ``.pin_memory()`` in front of it, as ``DataLoader`` does;
    ``loaderd_torch.batches(loader, device="cuda")``.
``jax_put``, ``jax_device``
    JAX: ``jax.device_put`` of the loader's arrays; ``loaderd_jax.batches(loader, device=…)``.
``tf_expert``, ``tf_xla``, ``tf_data``, ``tf_data_device``, ``tf_device``
    TensorFlow: the expert's tf.data pipeline, copied ahead with ``prefetch_to_device``; the same, compiled by XLA and
    without shuffling; ``loaderd_tf.from_loader`` without and with ``device="/GPU:0"``; ``loaderd_tf.batches(loader,
    device="/GPU:0")``.

All of loaderd's ways must have had the same first batch, to its sum.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

from harness.interface import Config
from harness.measured import versions
from harness.process_tree import CpuMeter
from harness.questions import parser_of, publish, run_in_turns, shards_of
from harness.report import Spread

import loaderd

SCHEMA = loaderd.schemas.chess_eval()
WARMUP_STEPS = 30
COLUMNS = ("way", "examples/s", "GB/s", "consumer's CPU µs/batch")

Batch = Mapping[str, Any]  # name -> array on the GPU


@dataclass(frozen=True)
class Way:
    """``batches``: of a loader, on the GPU; ``add_up``: has the GPU add up one's boards; ``float`` waits for that."""

    batches: Callable[[loaderd.Loader], Iterable[Batch]]
    add_up: Callable[[Batch], Any]
    gpu: str


def torch_way(name: str, shards: Sequence[str]) -> Way:
    import loaderd_torch
    import torch

    def copied(loader: loaderd.Loader) -> Iterator[Batch]:
        for batch in loaderd_torch.batches(loader):
            host = {name: tensor.pin_memory() for name, tensor in batch.items()} if name == "torch_pin" else batch
            yield {name: tensor.to("cuda", non_blocking=True) for name, tensor in host.items()}

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU")
    batches = partial(loaderd_torch.batches, device="cuda") if name == "torch_device" else copied
    return Way(batches, lambda batch: batch["board"].sum(), torch.cuda.get_device_name())


def jax_way(name: str, shards: Sequence[str]) -> Way:
    import jax
    import loaderd_jax

    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if not gpus:
        sys.exit("JAX finds no GPU")

    def copied(loader: loaderd.Loader) -> Iterator[Batch]:
        for batch in loader:
            yield {name: jax.device_put(array, gpus[0]) for name, array in batch.items()}

    total = jax.jit(lambda board: board.sum())
    batches = partial(loaderd_jax.batches, device=gpus[0]) if name == "jax_device" else copied
    return Way(batches, lambda batch: total(batch["board"]), gpus[0].device_kind)


def tf_way(name: str, shards: Sequence[str]) -> Way:
    import loaderd_tf
    import tensorflow as tf
    from candidates import tfdata_xla
    from candidates._tfdata import decoded, decoder
    from candidates.tfdata_expert import decode, expansion_of

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        sys.exit("TensorFlow finds no GPU")

    def expert(loader: loaderd.Loader) -> Iterable[Batch]:
        expansion = expansion_of("float32")
        return ahead(decoded(config_of(loader), lambda stored: decode(stored, expansion)))

    def xla(loader: loaderd.Loader) -> Iterable[Batch]:
        config = replace(config_of(loader), shuffle=False)
        return ahead(decoded(config, decoder(config, tfdata_xla.unpack)))

    def config_of(loader: loaderd.Loader) -> Config:
        return Config(tuple(shards), batch_size=loader.batch_size)

    def ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.apply(tf.data.experimental.prefetch_to_device("/GPU:0", buffer_size=2))

    @tf.function
    def total(board: tf.Tensor) -> tf.Tensor:
        with tf.device("/GPU:0"):
            return tf.reduce_sum(board)

    batches = {
        "tf_expert": expert,
        "tf_xla": xla,
        "tf_data": loaderd_tf.from_loader,
        "tf_data_device": partial(loaderd_tf.from_loader, device="/GPU:0"),
        "tf_device": partial(loaderd_tf.batches, device="/GPU:0"),
    }
    details = tf.config.experimental.get_device_details(gpus[0])
    return Way(batches[name], lambda batch: total(batch["board"]), details.get("device_name", "GPU"))


WAYS = {
    "torch_to": torch_way,
    "torch_pin": torch_way,
    "torch_device": torch_way,
    "jax_put": jax_way,
    "jax_device": jax_way,
    "tf_expert": tf_way,
    "tf_xla": tf_way,
    "tf_data": tf_way,
    "tf_data_device": tf_way,
    "tf_device": tf_way,
}
LIBRARIES = {"torch": "torch", "jax": "jax", "tf": "tensorflow"}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Take batches by one way, in this process."""
    shards = shards_of(options)
    way = WAYS[name](name, shards)
    settings = {"batch_size": options.batch_size, "workers": options.workers}
    with loaderd.Loader(list(shards), SCHEMA, epochs=None, remainder="carry", **settings) as loader:
        elements = iter(way.batches(loader))
        before = way.add_up(next(elements))
        first_sum = float(before)
        for _ in range(WARMUP_STEPS):
            before = way.add_up(next(elements))
        float(before)
        meter, began_s, began_cpu_s, num_batches = CpuMeter(), time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began_s < options.seconds:
            total = way.add_up(next(elements))
            float(before)
            before, num_batches = total, num_batches + 1
        float(before)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        _, other_cores = meter.read()
        del elements
    return {
        "way": name,
        "gpu": way.gpu,
        "examples_per_s": num_batches * options.batch_size / took_s,
        "consumer_cpu_us_per_batch": cpu_s / num_batches * 1e6,
        "first_sum": first_sum,
        "other_cores": other_cores,
        "versions": versions(),
    }


def row_of(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """A line of the table: all runs of one way."""
    record_bytes = sum(spec.record_bytes for spec in SCHEMA.specs.values())
    rate = Spread.of([run["examples_per_s"] for run in runs])
    return (
        runs[0]["way"],
        rate.shown(",.0f"),
        f"{median(run['examples_per_s'] for run in runs) * record_bytes / 1e9:.1f}",
        f"{median(run['consumer_cpu_us_per_batch'] for run in runs):,.0f}",
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--records", type=int, default=1_500_000, help="of the shards that are made")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way in each round")
    parser.add_argument("--workers", type=int, default=8, help="of loaderd")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help="default: of all that is installed")
    parser.add_argument("--measure", choices=WAYS, help="run once, in this process, and print one JSON line")
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure, options)) + "\n")
        return

    ways = options.ways or [way for way in WAYS if find_spec(LIBRARIES[way.partition("_")[0]])]
    shards_of(options)
    runs = run_in_turns(ways, options, lambda run: f"{run['examples_per_s']:12,.0f} examples/s")
    sums = {run["way"]: run["first_sum"] for run in runs if run["way"] not in ("tf_expert", "tf_xla")}
    is_same = len(set(sums.values())) <= 1
    notes = [f"GPU: {runs[0]['gpu']}", f"batches of {options.batch_size}, {options.workers} workers"]
    rows = [row_of([run for run in runs if run["way"] == way]) for way in ways]
    publish(COLUMNS, rows, notes if is_same else [f"the first batches differ: {sums}"], runs, options)
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
