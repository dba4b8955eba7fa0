"""Trains a small convolutional network to judge chess positions, fed by loaderd.

    python make_shards.py --out shards
    python train.py --data shards --out run

The data's side is :func:`open_datasets`; all the rest is Keras as anywhere else.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import loaderd_tf
import tensorflow as tf

import loaderd

SEED = 0


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(SEED)
    device = choose_device(args.device)
    train, validation = open_datasets(args.data, args.batch_size, device)
    steps = int(train.cardinality())
    if steps < 2:
        sys.exit(f"{args.data} holds fewer training positions than two batches of {args.batch_size}")

    model = build_model()
    loss_before = model.evaluate(validation, verbose=0)
    print(f"{steps} steps of {args.batch_size} positions an epoch; untrained: val_loss {loss_before:.4f}", flush=True)

    timer = StepTimer()
    history_file, model_file = args.out / "history.csv", args.out / "model.keras"
    history = model.fit(
        train,
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[timer, keras.callbacks.CSVLogger(history_file)],
        shuffle=False,  # by Keras: loaderd has shuffled
        verbose=2,
    ).history
    model.save(model_file)

    loss_after = history["val_loss"][-1]
    fed_s = timer.step_s
    held_s = time_step_without_data(model, train, device)
    print(f"val_loss was {loss_before:.4f} and is {loss_after:.4f}")
    data_share = max(0.0, 1 - held_s / fed_s)
    print(f"{args.batch_size / fed_s:,.0f} examples/s; {data_share:.0%} of a step was spent on data:", end=" ")
    print(f"{fed_s * 1e3:.1f} ms, against {held_s * 1e3:.1f} ms with one batch held ready")
    print(f"model: {model_file}, history: {history_file}")
    if not loss_after < loss_before:
        sys.exit("The loss did not fall: the network has learned nothing.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network on the shards that make_shards.py wrote.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder with the shards")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the model is saved")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training shards")
    parser.add_argument("--batch-size", type=int, default=512, help="positions a step")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="where to train")
    args = parser.parse_args()
    if args.epochs < 1 or args.batch_size < 1:
        parser.error("--epochs and --batch-size must be positive")
    return args


def choose_device(wanted: str) -> str | None:
    """The GPU to train on, or None for the CPU."""
    if wanted == "cpu":
        tf.config.set_visible_devices([], "GPU")
        return None
    if tf.config.list_physical_devices("GPU"):
        return "/GPU:0"
    if wanted == "gpu":
        sys.exit("--device gpu: TensorFlow sees no GPU here")
    return None


def open_datasets(folder: Path, batch_size: int, device: str | None) -> tuple[Any, Any]:
    """(training, validation), two tf.data.Dataset of ((board, flags), score).

    ``board``: float32, (batch, 8, 8, 24); ``flags``: float32, (batch, 10); ``score``: float32, (batch,), from
    -1 (black wins) to 1 (white wins). The first is shuffled, each epoch in another order; the second comes in
    the files' order.
    """
    schema = loaderd.schemas.chess_eval()
    structure = (("board", "flags"), "score")
    train = loaderd_tf.make_dataset(
        str(folder / "train-*.tfrecord"),
        schema,
        batch_size=batch_size,
        structure=structure,
        seed=SEED,
        remainder="drop",
        device=device,
    )
    validation = loaderd_tf.make_dataset(
        str(folder / "validation-*.tfrecord"),
        schema,
        batch_size=batch_size,
        structure=structure,
        shuffle=False,
        device=device,
    )
    return train, validation


def build_model() -> keras.Model:
    """Three convolutions over the board; the flags join before the dense layers; tanh spans the scores' range."""
    board, flags = keras.Input((8, 8, 24), name="board"), keras.Input((10,), name="flags")
    x = board
    for filters in (48, 48, 16):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(x), flags])
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dense(1, activation="tanh")(x)
    model = keras.Model([board, flags], keras.layers.Reshape((), name="score")(x))
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    return model


class StepTimer(keras.callbacks.Callback):
    """``step_s``: the mean seconds of a training step in the last epoch, from the end of one to the end of the next.

    The first step of an epoch is left out: it compiles the network, and starts the workers, once. So is the
    validation.
    """

    step_s = float("nan")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now_s = time.perf_counter()
        if batch == 0:
            self._first_ended_s = now_s
        else:
            self.step_s = (now_s - self._first_ended_s) / batch


def time_step_without_data(model: keras.Model, train: Any, device: str | None) -> float:
    """Seconds of the same step where its data costs nothing: fed again and again one batch that lies ready.

    A timer inside ``fit`` cannot see the wait, for TensorFlow reads ahead in threads of its own. The difference
    between the two steps is what the user pays for data: waiting for a batch, and also the cores that decoding
    takes away from a network that trains on the CPU. Call it last: it trains the model on that one batch.
    """
    held = tf.data.Dataset.from_tensors(next(iter(train))).repeat(int(train.cardinality()))
    held = held.apply(tf.data.experimental.prefetch_to_device(device)) if device else held.prefetch(2)
    timer = StepTimer()
    model.fit(held, callbacks=[timer], shuffle=False, verbose=0)
    return timer.step_s


if __name__ == "__main__":
    main()
