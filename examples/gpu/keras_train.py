"""Trains two networks in Keras on chess records, fed in three ways, and says how busy each keeps the GPU.

    python make_shards.py --out shards
    python keras_train.py --data 'shards/*/*.tfrecord'

The feeds: ``framework`` is tf.data, with everything in parallel and bits unpacked by a function that XLA compiles;
``floats`` is loaderd, its workers unpack; ``packed`` is loaderd with ``unpack="device"``, and the model begins with
the layer ``loaderd_tf.Unpack``. Steps are compiled by XLA, and compute in bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import loaderd_tf
import measure
import numpy as np
import records
import tensorflow as tf

import loaderd

OPTIONS = measure.options_of("Train networks in Keras, fed in three ways.")
measure.check_gpu(OPTIONS, bool(tf.config.list_physical_devices("GPU")), "tensorflow")
CHESS = loaderd.schemas.chess_eval()
DEVICE = "/GPU:0" if OPTIONS.gpu else None
STEPS_PER_CALL = 32 if OPTIONS.gpu else 1  # of Keras' Python
layers = keras.layers


# ------------------------------------------------------------------------------------------------ the networks


def residual(board: Any, flags: Any) -> Any:
    x = layers.Conv2D(OPTIONS.filters, 3, padding="same", activation="relu")(board)
    for _ in range(OPTIONS.blocks):
        y = layers.Conv2D(OPTIONS.filters, 3, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.Conv2D(OPTIONS.filters, 3, padding="same", use_bias=False)(y)
        x = layers.ReLU()(layers.Add()([x, layers.BatchNormalization()(y)]))
    x = layers.Flatten()(layers.Conv2D(8, 1)(x))
    x = layers.Dense(64, activation="relu")(layers.Concatenate()([x, flags]))
    return layers.Dense(1, activation="tanh", dtype="float32")(x)


def nnue(board: Any, flags: Any) -> Any:
    x = layers.Concatenate()([layers.Flatten()(board), flags])
    for units in (OPTIONS.hidden, 32, 32):
        x = layers.ReLU(max_value=1)(layers.Dense(units)(x))
    return layers.Dense(1, activation="tanh", dtype="float32")(x)


class Trainee:
    """A network with two ways in: ``fields`` takes boards and flags, ``packed`` the bytes of both."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        keras.utils.set_random_seed(0)
        board, flags = keras.Input((8, 8, 24)), keras.Input((10,))
        self.fields = keras.Model([board, flags], layers.Reshape(())(apply(board, flags)))
        d = keras.Input((194,), dtype="uint8")
        unpacked = loaderd_tf.Unpack(CHESS)({"d": d})
        self.packed = keras.Model(d, self.fields([unpacked["board"], unpacked["flags"]]))
        for model in (self.fields, self.packed):
            model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=True, steps_per_execution=STEPS_PER_CALL)


# --------------------------------------------------------------------------------------------------- the feeds


@contextmanager
def by_framework() -> Iterator[tf.data.Dataset]:
    def stream(number: Any) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(OPTIONS.shards).shard(OPTIONS.framework_workers, number)
        stored = tf.data.TFRecordDataset(files.shuffle(len(OPTIONS.shards)).repeat(), buffer_size=4 << 20)
        return stored.shuffle(10_000).batch(OPTIONS.batch_size, drop_remainder=True)

    dataset = tf.data.Dataset.range(OPTIONS.framework_workers).interleave(
        stream, cycle_length=OPTIONS.framework_workers, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    )
    dataset = dataset.map(fields_of, tf.data.AUTOTUNE, deterministic=False)
    if DEVICE is None:
        yield dataset.prefetch(tf.data.AUTOTUNE)
    else:
        yield dataset.apply(tf.data.experimental.prefetch_to_device(DEVICE, buffer_size=2))


def fields_of(serialized: tf.Tensor) -> Any:
    """``(board, flags), score`` of serialized Examples, a batch of them."""
    stored = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}
    examples = tf.io.parse_example(serialized, stored)
    packed = tf.ensure_shape(tf.io.decode_raw(examples["d"], tf.uint8), [OPTIONS.batch_size, 194])
    return unpack(packed, examples["s"])


@tf.function(jit_compile=True)
def unpack(packed: tf.Tensor, stored: tf.Tensor) -> Any:
    masks = (128 >> np.arange(8)).astype(np.uint8)
    bits = tf.cast(tf.bitwise.bitwise_and(packed[:, :, tf.newaxis], masks), tf.bool)
    bits = tf.reshape(bits, [OPTIONS.batch_size, 1552])
    channels = tf.gather(tf.reshape(bits[:, :1536], [-1, 8, 8, 24]), records.CHANNEL_ORDER, axis=-1)
    board = tf.cast(channels, tf.float32) * records.CHANNEL_SIGN.astype(np.float32)
    score, mate = tf.cast(stored, tf.float32), bits[:, 1546]
    decided = tf.sign(score) * (0.8 + 0.2 / 49 * tf.maximum(0.0, 50 - tf.abs(score)))
    return (board, tf.cast(bits[:, 1536:1546], tf.float32)), tf.where(mate, decided, 0.8 * tf.tanh(score / 600))


@contextmanager
def by_loaderd(unpack: str) -> Iterator[tf.data.Dataset]:
    dataset = loaderd_tf.make_dataset(
        OPTIONS.shards,
        CHESS,
        batch_size=OPTIONS.batch_size,
        structure=("d", "score") if unpack == "device" else (("board", "flags"), "score"),
        workers=OPTIONS.workers,
        epochs=None,
        remainder="carry",
        unpack=unpack,
        device=DEVICE,
    )
    try:
        yield dataset
    finally:
        dataset.close()


# ------------------------------------------------------------------------------------------------ the training


class Stop(keras.callbacks.Callback):
    """Ends ``fit`` when the clock says so."""

    def __init__(self, clock: measure.Clock) -> None:
        super().__init__()
        self._clock = clock
        self._before: Any = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._before is not None:
            float(self._before)  # or Python would be far ahead of the GPU, and the clock wrong
        self._before = logs["loss"]
        if self._clock.tick(STEPS_PER_CALL):
            self.model.stop_training = True


def train(trainee: Trainee, dataset: tf.data.Dataset, clock: measure.Clock) -> float:
    model = trainee.packed if isinstance(dataset.element_spec[0], tf.TensorSpec) else trainee.fields
    history = model.fit(dataset, callbacks=[Stop(clock)], shuffle=False, verbose=0)
    return history.history["loss"][-1]


def take(dataset: tf.data.Dataset, clock: measure.Clock) -> None:
    iterator, next_of = iter(dataset), tf.function(lambda iterator: next(iterator))  # in a graph, as fit does
    while not clock.tick():
        next_of(iterator)


def hold(dataset: tf.data.Dataset) -> tf.data.Dataset:
    held = tf.data.Dataset.from_tensors(next(iter(dataset))).repeat()
    if DEVICE is None:
        return held
    return held.apply(tf.data.experimental.prefetch_to_device(DEVICE, buffer_size=2))


if __name__ == "__main__":
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    measure.run(
        f"Keras {keras.__version__} with TensorFlow {tf.__version__}",
        OPTIONS,
        nets={"residual": lambda: Trainee(residual), "nnue": lambda: Trainee(nnue)},
        feeds={
            "framework": by_framework,
            "floats": lambda: by_loaderd("worker"),
            "packed": lambda: by_loaderd("device"),
        },
        train=train,
        take=take,
        hold=hold,
    )
