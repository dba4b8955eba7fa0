"""Trains a small residual network with a policy and a value head on Leela Chess Zero's own files, with ``model.fit``.

The value is that of the search (``targets="root"``), which says something else of each position. The game's result is
the same for all of them: a net that sees a few hundred games learns by heart which position belongs to which.

    python make_tars.py --out games
    python train.py --data games --out run

The hourly tars of Leela's server can be used, too: call them ``train-….tar`` and ``validation-….tar``. If a training
is killed, the same command goes on from its last backup with exactly the next batch, even in the middle of a tar.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
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

STRUCTURE = ("planes", ("policy", "wdl"))
NUM_MOVES = 1858


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)
    train = open_games(args.data / "train-*.tar", args.batch_size, remainder="drop")
    validation = open_games(args.data / "validation-*.tar", args.batch_size, shuffle=False)
    model = build_model(args.filters, args.blocks)
    before = model.evaluate(validation, verbose=0, return_dict=True)
    print(f"{int(train.cardinality())} steps an epoch; untrained: {in_words(before)}", flush=True)

    backup, history_file = args.out / "backup", args.out / "history.csv"
    resumes = tf.train.latest_checkpoint(str(backup)) is not None  # deleted when a training has come to its end
    began_s = time.perf_counter()
    history = model.fit(
        train,
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[
            keras.callbacks.CSVLogger(history_file, append=resumes),
            loaderd_tf.BackupAndRestore(backup, train, save_freq=100),
        ],
        shuffle=False,  # loaderd has shuffled
        verbose=2,
    ).history
    seconds = time.perf_counter() - began_s
    after = {name.removeprefix("val_"): values[-1] for name, values in history.items() if name.startswith("val_")}
    print(f"before: {in_words(before)}")
    print(f"after:  {in_words(after)}")
    found = train.statistics()
    print(
        f"{found.records_delivered / seconds:,.0f} positions/s, validation included; "
        f"{found.wait_s / seconds:.0%} of the time went into waiting for batches"
    )
    model.save(args.out / "model.keras")
    draw(args.out / "curve.png", history_file, before)
    print(f"model: {args.out}/model.keras, curve: {args.out}/curve.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on lc0's games.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="the folder with train-*.tar and validation-*.tar"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where model and curve are saved")
    parser.add_argument("--epochs", type=int, default=2, help="how often to train on each position")
    parser.add_argument("--batch-size", type=int, default=256, help="positions a step")
    parser.add_argument("--filters", type=int, default=32, help="channels of each residual block")
    parser.add_argument("--blocks", type=int, default=3, help="how many residual blocks")
    return parser.parse_args()


def open_games(tars: Path, batch_size: int, **options: Any) -> tf.data.Dataset:
    """Batches of (planes, (policy, wdl)): float32, (batch, 112, 8, 8), (batch, 1858) and (batch, 3)."""
    return loaderd_tf.make_dataset(
        str(tars), loaderd.schemas.lc0(targets="root"), batch_size=batch_size, structure=STRUCTURE, **options
    )


def build_model(filters: int, blocks: int) -> keras.Model:
    """From planes, (112, 8, 8), the logits of moves, (1858,), and of win, draw and loss, (3,)."""
    layers = keras.layers

    def convolve(x: Any, channels: int, size: int = 3) -> Any:
        x = layers.Conv2D(channels, size, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    planes = keras.Input((112, 8, 8), name="planes")
    x = layers.ReLU()(convolve(layers.Permute((2, 3, 1))(planes), filters))
    for _ in range(blocks):
        y = convolve(layers.ReLU()(convolve(x, filters)), filters)
        x = layers.ReLU()(layers.Add()([x, y]))
    of_moves = layers.Flatten()(layers.ReLU()(convolve(x, 8, size=1)))
    of_value = layers.Flatten()(layers.ReLU()(convolve(x, 4, size=1)))
    policy = layers.Dense(NUM_MOVES, name="policy")(of_moves)
    value = layers.Dense(3, name="value")(layers.Dense(32, activation="relu")(of_value))
    model = keras.Model(planes, [policy, value])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=[policy_loss, keras.losses.CategoricalCrossentropy(from_logits=True)],
        metrics=[[best_move], [keras.metrics.CategoricalAccuracy(name="side")]],
    )
    return model


def policy_loss(stored: Any, logits: Any) -> Any:
    """Cross-entropy among the legal moves, (batch,). ``stored`` is -1 for illegal moves."""
    logits = tf.where(stored >= 0, logits, -1e10)
    return tf.nn.softmax_cross_entropy_with_logits(tf.maximum(stored, 0.0), logits)


def best_move(stored: Any, logits: Any) -> Any:
    """1 if the likeliest legal move is the one that the search visited most, else 0; (batch,)."""
    likeliest = tf.argmax(tf.where(stored >= 0, logits, -1e10), axis=1)
    return tf.cast(likeliest == tf.argmax(stored, axis=1), tf.float32)


def in_words(found: dict[str, float]) -> str:
    loss_policy, loss_value = found["policy_loss"], found["value_loss"]
    return (
        f"loss of the policy {loss_policy:.3f}, of the value {loss_value:.3f}; "
        f"the best move {found['policy_best_move']:.1%}, the better side {found['value_side']:.1%}"
    )


def draw(path: Path, history_file: Path, before: dict[str, float]) -> None:
    """Draw both losses by epoch; for validation, the first one is from before the training."""
    with history_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for plot, name in zip(axes, ("policy_loss", "value_loss"), strict=True):
        plot.plot(range(1, len(rows) + 1), [float(row[name]) for row in rows], "o-", label="training")
        held_out = [before[name], *(float(row[f"val_{name}"]) for row in rows)]
        plot.plot(held_out, "o-", label="validation")
        plot.set(title=name.replace("_", ": "), xlabel="epoch")
    axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
