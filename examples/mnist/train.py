"""Trains a network on digits with several towers on one machine, as TensorFlow's old CIFAR-10 tutorial did.

    python make_shards.py --out shards
    python train.py --data shards --out run --towers 2

    loaderd ──► batch 0 ──► tower 0: the model on device 0 ──► gradients ─┐
            ──► batch 1 ──► tower 1: the model on device 1 ──► gradients ─┴─► mean ──► the variables, on the CPU

Each device gets a batch of its own, all work at the same time, and the variables take one step with the mean of their
gradients. The devices are the GPUs. Without a GPU, TensorFlow divides the CPU into logical devices: that shows how it
works, but is no faster than one. The loader's statistics are written for TensorBoard.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import loaderd_tf
import matplotlib
import tensorflow as tf

import loaderd

matplotlib.use("Agg")  # needs no screen
from matplotlib import pyplot

STRUCTURE = ("image", "label")


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)
    devices = find_devices(args.towers)
    with tf.device("/CPU:0"):
        model, optimizer = build_model(), keras.optimizers.Adam(args.learning_rate)
        optimizer.build(model.trainable_variables)

    train_step = train_step_of(model, optimizer, devices)
    train = loaderd.Loader(
        f"{args.data}/train-*.tfrecord",
        loaderd.schemas.mnist(),
        batch_size=args.batch_size,
        epochs=None,
        held_batches=2 * len(devices),  # those of a step, and those of the next one
    )
    with train:
        board = loaderd_tf.TensorBoard(train, args.out / "logs")
        batches = iter(loaderd_tf.batches(train, STRUCTURE))
        history: list[float] = []
        for step in range(args.steps):
            began_s = time.perf_counter()
            history.append(float(train_step(tuple(islice(batches, len(devices))))))
            seconds = time.perf_counter() - began_s
            if step % args.log_every == 0:
                # As in the tutorial, sec/batch is the time of a step divided by the number of towers.
                examples_per_s, s_per_batch = args.batch_size * len(devices) / seconds, seconds / len(devices)
                print(
                    f"{datetime.now()}: step {step}, loss = {history[-1]:.2f} "
                    f"({examples_per_s:.1f} examples/sec; {s_per_batch:.3f} sec/batch)",
                    flush=True,
                )
                board.write(step)
    print(f"{accuracy(model, args.data, args.batch_size):.1%} of the test pictures are recognized")
    model.save(args.out / "model.keras")
    draw(args.out / "curve.png", history)
    print(f"model: {args.out}/model.keras, curve: {args.out}/curve.png, TensorBoard: {args.out}/logs")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on digits with several towers.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder with the shards")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where model, curve and logs are saved"
    )
    parser.add_argument("--towers", type=int, help="how many; None: as many as there are GPUs, or 2 without one")
    parser.add_argument("--steps", type=int, default=300, help="how many; each takes one batch for each tower")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures a step, for each tower")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the optimizer Adam")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="how often to print and log")
    args = parser.parse_args()
    if min(args.steps, args.batch_size, args.log_every, args.towers or 1) < 1:
        parser.error("--towers, --steps, --batch-size and --log-every must be positive")
    return args


def find_devices(towers: int | None) -> list[str]:
    """For each tower, the name of a GPU; without a GPU, that of a logical CPU device."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if towers is not None and towers > len(gpus):
            raise SystemExit(f"--towers must be at most the number of GPUs, {len(gpus)}, got {towers}")
        return [f"/GPU:{number}" for number in range(towers or len(gpus))]
    (cpu,) = tf.config.list_physical_devices("CPU")
    towers = towers or 2
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * towers)
    return [f"/CPU:{number}" for number in range(towers)]


def build_model() -> keras.Model:
    """From pictures, (batch, 28, 28, 1), the logits of the ten digits, (batch, 10)."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def train_step_of(model: keras.Model, optimizer: Any, devices: list[str]) -> Callable[[Any], Any]:
    @tf.function
    def train_step(batches: Any) -> Any:
        """Take a step with one batch for each tower; returns the mean of their losses."""
        losses, gradients = [], []
        for device, (images, labels) in zip(devices, batches, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                loss = loss_of(model(images, training=True), labels)
                losses.append(loss)
                gradients.append(tape.gradient(loss, model.trainable_variables))
        with tf.device("/CPU:0"):
            means = [tf.add_n(of_towers) / len(devices) for of_towers in zip(*gradients, strict=True)]
            optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
            return tf.add_n(losses) / len(devices)

    return train_step


def loss_of(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def accuracy(model: keras.Model, data: Path, batch_size: int) -> float:
    """The share of the test pictures whose likeliest digit is the right one."""
    test = loaderd.Loader(f"{data}/test-*.tfrecord", loaderd.schemas.mnist(), batch_size=batch_size, shuffle=False)
    right = total = 0
    with test:
        for images, labels in loaderd_tf.batches(test, STRUCTURE):
            found = tf.argmax(model(images), axis=1, output_type=labels.dtype)
            right, total = right + int(tf.reduce_sum(tf.cast(found == labels, tf.int32))), total + len(labels)
    return right / total


def draw(path: Path, history: list[float]) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(history)
    axes.set(title="loss, mean of the towers", xlabel="step", yscale="log")
    figure.savefig(path)


if __name__ == "__main__":
    main()
