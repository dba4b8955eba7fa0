"""Trainings for test_resume.py, each in a process of its own, which may be killed at any moment; and Ctrl-C in one.

They append to ``log`` in their folder a line for every batch that they train on, the number of the step and the ids
of the records, and one that says "start" when they start. At their end they write ``result.json``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import numpy as np
import tensorflow as tf

import loaderd


def numbered_schema() -> loaderd.Schema:
    return loaderd.Schema(
        features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
        fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
    )


class Log:
    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self._file, b"start\n")

    def __call__(self, step: Any, ids: Any) -> None:
        os.write(self._file, f"{int(step)} {' '.join(map(str, ids))}\n".encode())


def make_deterministic() -> None:
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()


def layers() -> list[Any]:
    return [
        keras.Input((32,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]


def optimizer() -> Any:
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9))


def write_result(folder: Path, model: Any, **more: Any) -> None:
    weights = [weight.tolist() for weight in model.get_weights()]
    (folder / "result.json").write_text(json.dumps({"weights": weights, **more}))


def train_in_a_loop(shards: list[str], folder: Path) -> None:
    """Three epochs in one iteration, checkpointed every 5 steps."""
    make_deterministic()
    log = Log(folder)
    dataset = loaderd_tf.make_dataset(shards, numbered_schema(), batch_size=20, epochs=3, workers=1)
    model = keras.Sequential(layers())
    adam = optimizer()
    adam.build(model.trainable_variables)

    @tf.function
    def train_step(batch: dict[str, tf.Tensor]) -> None:
        with tf.GradientTape() as tape:
            error = model(batch["bits"], training=True)[:, 0] - tf.cast(batch["id"], tf.float32) / 1000
            loss = tf.reduce_mean(error**2)
        adam.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    iterator = iter(dataset)
    checkpoint = tf.train.Checkpoint(
        model=model,
        optimizer=adam,
        iterator=iterator,
        random=[variable.value for variable in model.non_trainable_variables],  # the states of Dropout
    )
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "checkpoints"), max_to_keep=2)
    manager.restore_or_initialize()
    for batch in iterator:
        train_step(batch)
        step = int(adam.iterations)
        log(step, batch["id"].numpy())
        if step % 5 == 0:
            manager.save()
    write_result(folder, model)


class Logged(keras.Sequential):  # type: ignore[misc]
    """Learns the number of each record by its bits."""

    log: Log

    def train_step(self, data: Any) -> Any:
        bits, ids = data
        tf.numpy_function(self.log, [self.optimizer.iterations + 1, ids], [])
        return super().train_step((bits, tf.cast(ids, tf.float32) / 1000))


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Ctrl-C behind a step, counted over all epochs from 1."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.value.numpy()) >= self._step:
            raise KeyboardInterrupt


def train_by_fit(shards: list[str], folder: Path) -> None:
    """Three epochs with a backup every 5 steps."""
    make_deterministic()
    dataset = loaderd_tf.make_dataset(shards, numbered_schema(), batch_size=20, structure=("bits", "id"), workers=1)
    model = Logged(layers())
    model.log = Log(folder)
    model.compile(optimizer(), "mse", metrics=["mae"])
    history = model.fit(
        dataset,
        epochs=3,
        validation_data=(np.eye(32, dtype=np.float32), np.arange(32)),
        callbacks=[loaderd_tf.BackupAndRestore(folder / "backup", dataset, save_freq=5)],
        shuffle=False,
        verbose=0,
    ).history
    assert not (folder / "backup").exists()
    write_result(folder, model, logs={name: values[-1] for name, values in history.items()})
