"""Trains a small network on games of Go in KataGo's layout, in a training loop without ``fit``.

    python make_npz.py --out games
    python train.py --data games --out run

The network says where to play, who wins, and who will own each point, as KataGo's does. It can be trained on files of
KataGo's own self-play and shuffle.py: call them ``train-….npz`` and ``validation-….npz``, and give ``--size 19``.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import loaderd_tf
import matplotlib
import tensorflow as tf

import loaderd

matplotlib.use("Agg")  # needs no screen
from matplotlib import pyplot

STRUCTURE = ("planes", "global", "policy", "targets", "value_targets")
LOSSES = ("policy", "value", "ownership")


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)
    schema = loaderd.schemas.katago(board_size=args.size)
    model, optimizer = build_model(args.size), keras.optimizers.Adam(1e-3)

    @tf.function
    def train_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = losses(model, batch)
            total = tf.add_n(parts)
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return parts

    validate_step = tf.function(lambda batch: losses(model, batch))

    train = loaderd.Loader(
        f"{args.data}/train-*.npz", schema, batch_size=args.batch_size, epochs=args.epochs, remainder="drop"
    )
    validation = loaderd.Loader(f"{args.data}/validation-*.npz", schema, batch_size=args.batch_size, shuffle=False)
    with train, validation:
        history: list[list[float]] = []
        before = validate(validate_step, validation)
        began_s = time.perf_counter()
        for number, batch in enumerate(loaderd_tf.batches(train, STRUCTURE), 1):
            history.append([float(part) for part in train_step(batch)])
            if number % 50 == 0:
                print(f"step {number} of {len(train)}: {in_words(history[-1])}", flush=True)
        seconds = time.perf_counter() - began_s
        waiting_share = train.statistics().wait_s / seconds
        after = validate(validate_step, validation)
    print(f"validation before: {in_words(before)}")
    print(f"validation after:  {in_words(after)}")
    positions_per_s = len(history) * args.batch_size / seconds
    print(f"{positions_per_s:,.0f} positions/s; {waiting_share:.0%} of the time went into waiting for batches")
    model.save(args.out / "model.keras")
    draw(args.out / "curve.png", history, after)
    print(f"model: {args.out}/model.keras, curve: {args.out}/curve.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on games of Go.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="the folder with train-*.npz and validation-*.npz"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where model and curve are saved")
    parser.add_argument("--size", type=int, default=9, help="rows and columns of the board")
    parser.add_argument("--epochs", type=int, default=2, help="how often to train on each position")
    parser.add_argument("--batch-size", type=int, default=128, help="positions a step")
    return parser.parse_args()


def build_model(size: int, filters: int = 48, blocks: int = 3) -> keras.Model:
    """The network. All shapes are those of one position.

    From planes, (22, size, size), and global inputs, (19,), it makes logits: of the moves, (size² + 1,), of a win,
    (), and of owning each point, (size²,).
    """
    layers = keras.layers
    planes, facts = keras.Input((22, size, size), name="planes"), keras.Input((19,), name="global")
    x = layers.Conv2D(filters, 3, padding="same")(layers.Permute((2, 3, 1))(planes))
    x = layers.Add()([x, layers.Reshape((1, 1, filters))(layers.Dense(filters)(facts))])
    for _ in range(blocks):
        y = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.ReLU()(layers.Add()([x, layers.Conv2D(filters, 3, padding="same")(y)]))
    pooled = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), layers.GlobalMaxPooling2D()(x)])
    moves = layers.Flatten()(layers.Conv2D(1, 1)(x))
    policy = layers.Concatenate(name="policy")([moves, layers.Dense(1)(pooled)])
    value = layers.Reshape((), name="value")(layers.Dense(1)(layers.Dense(32, activation="relu")(pooled)))
    ownership = layers.Flatten(name="ownership")(layers.Conv2D(1, 1)(x))
    return keras.Model([planes, facts], [policy, value, ownership])


def losses(model: keras.Model, batch: Any) -> list[Any]:
    """The losses of policy, value and ownership: means over the batch, in which each row counts by its weights."""
    planes, facts, visits, targets, value_targets = batch
    policy, value, ownership = model([planes, facts])
    entropy = tf.nn.sigmoid_cross_entropy_with_logits
    owned = (tf.reshape(value_targets[:, 0], tf.shape(ownership)) + 1) / 2  # -1 … 1 -> 0 … 1
    row = targets[:, 25]  # the columns of targets are listed in KataGo's trainingwrite.h
    chances = visits / tf.reduce_sum(visits, axis=1, keepdims=True)
    of_moves = tf.nn.softmax_cross_entropy_with_logits(chances, policy) * targets[:, 26]
    of_points = tf.reduce_mean(entropy(owned, ownership), axis=1) * targets[:, 27]
    return [tf.reduce_mean(row * each) for each in (of_moves, entropy(targets[:, 0], value), of_points)]


def validate(step: Any, validation: loaderd.Loader) -> list[float]:
    """The mean of each loss over the batches of ``validation``."""
    found = [[float(part) for part in step(batch)] for batch in loaderd_tf.batches(validation, STRUCTURE)]
    return [fmean(column) for column in zip(*found, strict=True)]


def in_words(parts: list[float]) -> str:
    return ", ".join(f"{name} {part:.3f}" for name, part in zip(LOSSES, parts, strict=True))


def draw(path: Path, history: list[list[float]], after: list[float]) -> None:
    """Draw the losses of the training by step, and those of the validation after the last step."""
    figure, axes = pyplot.subplots(1, len(LOSSES), figsize=(12, 3.5), layout="constrained")
    for plot, name, curve, end in zip(axes, LOSSES, zip(*history, strict=True), after, strict=True):
        plot.plot(curve, label="training")
        plot.plot(len(history), end, "o", label="validation, at the end")
        plot.set(title=f"loss of the {name}", xlabel="step")
    axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
