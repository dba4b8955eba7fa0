"""Trains a small convolutional network to judge chess positions, fed by loaderd.

    python make_shards.py --out shards
    python train.py --data shards --out run
    python train.py --data others --out next --from run/model.keras --freeze 'conv*' 'norm*'

The third command begins with the network that the second one saved, and trains all of it but the convolutions and
their normalizations. The data come from :func:`open_training` and :func:`open_validation`. If a training is killed,
the same command goes on from its last backup, with exactly the next batch: see :func:`callbacks_that_save`. The rest
is ordinary Keras. ``validate.py`` can validate the checkpoints at the same time.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import sys
import time
from fnmatch import fnmatch
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

SEED = 0
STRUCTURE = (("board", "flags"), "score")
CHECKPOINTS = "checkpoints"  # a folder in --out: weights, for validate.py
HISTORY = "history.csv"  # a file in --out: the losses of each epoch
DONE = "done"  # an empty file in the folder CHECKPOINTS, written after the last checkpoint


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(SEED)
    device = choose_device(args.device)
    train = open_training(args.data, args.batch_size, device)
    validation = open_validation(args.data, args.batch_size, device)
    steps = int(train.cardinality())
    if steps < 2:
        sys.exit(f"{args.data} holds fewer training positions than two batches of {args.batch_size}")

    model = build_model() if args.trained is None else keras.models.load_model(args.trained, compile=False)
    freeze(model, args.freeze)
    compile_model(model)
    loss_before = model.evaluate(validation, verbose=0)
    begins = "untrained" if args.trained is None else f"as {args.trained} is"
    print(f"{steps} steps of {args.batch_size} positions an epoch; {begins}: val_loss {loss_before:.4f}", flush=True)

    timer = StepTimer()
    history = model.fit(
        train,
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[timer, *callbacks_that_save(args.out, train, args.save_every)],
        shuffle=False,  # loaderd has shuffled
        verbose=2,
    ).history
    model_file, history_file, curve_file = (args.out / name for name in ("model.keras", HISTORY, "curve.png"))
    model.save(model_file)
    loss_after = history["val_loss"][-1]
    print(f"val_loss was {loss_before:.4f} and is {loss_after:.4f}")
    if not math.isnan(timer.step_s):  # it is NaN if only one step was left to train
        report_speed(args.batch_size, timer.step_s, time_step_without_data(model, train, device))
    draw(curve_file, history_file, loss_before)
    print(f"model: {model_file}, history: {history_file}, curve: {curve_file}")
    if args.trained is None and not loss_after < loss_before:
        sys.exit("The loss did not fall: the network has learned nothing.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network on the shards that make_shards.py wrote.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder with the shards")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where model, losses, checkpoints and backup are saved"
    )
    parser.add_argument("--epochs", type=int, default=3, help="how often to train on each position")
    parser.add_argument("--batch-size", type=int, default=512, help="positions a step")
    parser.add_argument(
        "--save-every", type=int, default=20, metavar="STEPS", help="how often to save a backup and a checkpoint"
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "gpu"], default="auto", help="where to train; auto: on a GPU, if any"
    )
    parser.add_argument(
        "--from", dest="trained", type=Path, metavar="MODEL", help="a saved model to begin with; None: a new one"
    )
    parser.add_argument(
        "--freeze", nargs="+", default=[], metavar="LAYERS", help="layers not to train, such as 'conv*' 'norm*'"
    )
    args = parser.parse_args()
    if args.trained is not None and not args.trained.is_file():
        parser.error(f"--from must be a saved model, found no file {args.trained}")
    if args.epochs < 1 or args.batch_size < 1 or args.save_every < 1:
        parser.error("--epochs, --batch-size and --save-every must be positive")
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


def open_training(folder: Path, batch_size: int, device: str | None) -> tf.data.Dataset:
    """Batches of ((board, flags), score), in a new order each epoch.

    ``board``: float32, (batch, 8, 8, 24); ``flags``: float32, (batch, 10); ``score``: float32, (batch,), from
    -1 (black wins) to 1 (white wins).
    """
    return loaderd_tf.make_dataset(
        str(folder / "train-*.tfrecord"),
        loaderd.schemas.chess_eval(),
        batch_size=batch_size,
        structure=STRUCTURE,
        seed=SEED,
        remainder="drop",
        device=device,
    )


def open_validation(folder: Path, batch_size: int, device: str | None) -> tf.data.Dataset:
    """Batches as :func:`open_training` gives them, but in the files' order, with the remainder as the last batch."""
    return loaderd_tf.make_dataset(
        str(folder / "validation-*.tfrecord"),
        loaderd.schemas.chess_eval(),
        batch_size=batch_size,
        structure=STRUCTURE,
        shuffle=False,
        device=device,
    )


def build_model() -> keras.Model:
    """Three convolutions over the board, then dense layers that also see the flags. A tanh, as scores are -1 to 1."""
    board, flags = keras.Input((8, 8, 24), name="board"), keras.Input((10,), name="flags")
    x = board
    for number, filters in enumerate((48, 48, 16), 1):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}")(x)
        x = keras.layers.BatchNormalization(momentum=0.9, name=f"norm{number}")(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(x), flags])
    x = keras.layers.Dense(64, activation="relu", name="dense1")(x)
    x = keras.layers.Dense(1, activation="tanh", name="dense2")(x)
    return keras.Model([board, flags], keras.layers.Reshape((), name="score")(x))


def freeze(model: keras.Model, patterns: list[str]) -> None:
    """Do not train the layers whose names match a pattern. A frozen normalization keeps its statistics, too."""
    with_weights = [layer for layer in model.layers if layer.weights]
    names = [layer.name for layer in with_weights]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            sys.exit(f"--freeze: no layer is called {pattern}; there are {', '.join(names)}")
    for layer in with_weights:
        layer.trainable = not any(fnmatch(layer.name, pattern) for pattern in patterns)
    if not model.trainable_variables:
        sys.exit("--freeze leaves nothing to train")
    if patterns:
        frozen = [layer.name for layer in with_weights if not layer.trainable]
        print(f"frozen: {', '.join(frozen)}", flush=True)


def callbacks_that_save(out: Path, train: tf.data.Dataset, save_every: int) -> list[keras.callbacks.Callback]:
    """Callbacks that save losses, checkpoints for ``validate.py``, and a backup to go on from after a crash."""
    backup, checkpoints = out / "backup", out / CHECKPOINTS
    resumes = tf.train.latest_checkpoint(str(backup)) is not None  # deleted when a training has come to its end
    if resumes:
        print(f"going on from {backup}", flush=True)
    else:  # remove what an earlier training left
        shutil.rmtree(checkpoints, ignore_errors=True)
        (out / "validation.csv").unlink(missing_ok=True)
    return [
        keras.callbacks.CSVLogger(out / HISTORY, append=resumes),
        SaveWeights(checkpoints, save_every),
        loaderd_tf.BackupAndRestore(backup, train, save_freq=save_every),
    ]


def report_speed(batch_size: int, step_s: float, step_without_data_s: float) -> None:
    data_share = max(0.0, 1 - step_without_data_s / step_s)
    print(f"{batch_size / step_s:,.0f} examples/s; {data_share:.0%} of a step was spent on data:", end=" ")
    print(f"{step_s * 1e3:.1f} ms, against {step_without_data_s * 1e3:.1f} ms with one batch held ready")


def compile_model(model: keras.Model) -> None:
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")


def draw(path: Path, history_file: Path, loss_before: float) -> None:
    """Draw the losses by epoch; for validation, the first one is from before the training."""
    with history_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(rows) + 1), [float(row["loss"]) for row in rows], "o-", label="training")
    axes.plot([loss_before, *(float(row["val_loss"]) for row in rows)], "o-", label="validation")
    axes.set(title="loss", xlabel="epoch")
    axes.legend()
    figure.savefig(path)


class SaveWeights(keras.callbacks.Callback):
    """Writes ``step-00000020.weights.h5`` every ``save_every`` steps of the optimizer, and at the end.

    A file with such a name is complete, even if the process is killed.
    """

    def __init__(self, folder: Path, save_every: int) -> None:
        super().__init__()
        self._folder, self._save_every = folder, save_every

    def on_train_begin(self, logs: Any = None) -> None:
        self._folder.mkdir(exist_ok=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) % self._save_every == 0:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        self._save()
        (self._folder / DONE).touch()

    def _save(self) -> None:
        unfinished = self._folder / "unfinished.weights.h5"
        self.model.save_weights(unfinished)
        unfinished.replace(self._folder / f"step-{int(self.model.optimizer.iterations):08}.weights.h5")


class StepTimer(keras.callbacks.Callback):
    """``step_s``: the mean seconds of a training step in the last epoch, including the wait for its batch.

    It leaves out an epoch's first step, which may compile the network or wait for the workers to begin, and what
    happens between steps, such as saving.
    """

    step_s = float("nan")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._steps_s: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps_s.append(time.perf_counter() - self._began_s)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if len(self._steps_s) > 1:
            self.step_s = fmean(self._steps_s[1:])


def time_step_without_data(model: keras.Model, train: Any, device: str | None) -> float:
    """Seconds of a training step if its data cost nothing: it gets the same batch, held in memory, again and again.

    What a normal step takes beyond that is the whole cost of the data: the wait for a batch and, on a CPU, the time
    in which the workers use cores that the network could use. (The loader's own ``wait_s`` does not tell: it misses
    the cores, and with a GPU, it is how long TensorFlow's threads waited, which take batches ahead.) Call this last:
    it trains the model on that one batch.
    """
    held = tf.data.Dataset.from_tensors(next(iter(train))).repeat(int(train.cardinality()))
    held = held.apply(tf.data.experimental.prefetch_to_device(device)) if device else held.prefetch(2)
    timer = StepTimer()
    model.fit(held, callbacks=[timer], shuffle=False, verbose=0)
    return timer.step_s


if __name__ == "__main__":
    main()
