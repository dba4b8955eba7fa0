"""tf.data as one first writes it: records parsed one by one, bits by division and remainder in float64."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from candidates._tfdata import SHUFFLE_RECORDS, Tensors, consume
from harness.interface import Config, Step, only_chess
from harness.reference import CHANNEL_ORDER, CHANNEL_SIGN, VALUE_A, VALUE_B, VALUE_K

NOTE = ""

cannot = only_chess

CHESS_FEATURES = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}


def fields(example: Tensors, batch_shape: list[int], dtype: str) -> Tensors:
    """The fields of a parsed Example (``batch_shape`` []) or of a batch of them ([-1])."""
    data = tf.cast(tf.io.decode_raw(example["d"], tf.uint8), tf.float64)
    powers = tf.constant([128, 64, 32, 16, 8, 4, 2, 1], tf.float64)
    bits = tf.reshape(tf.math.mod(data[..., tf.newaxis] // powers, 2), [*batch_shape, 1552])
    board = tf.gather(tf.reshape(bits[..., :1536], [*batch_shape, 8, 8, 24]), CHANNEL_ORDER, axis=-1) * CHANNEL_SIGN

    score = tf.cast(example["s"], tf.float64)
    moves_left = tf.maximum(tf.constant(0, tf.float64), VALUE_B - tf.abs(score))
    decided = tf.sign(score) * (VALUE_A + (1 - VALUE_A) / (VALUE_B - 1) * moves_left)
    target = tf.where(bits[..., 1546] == 1, decided, VALUE_A * tf.tanh(score / VALUE_K))
    return {
        "board": tf.cast(board, dtype),
        "flags": tf.cast(bits[..., 1536:1546], dtype),
        "score": tf.cast(target, tf.float32),
    }


def steps(config: Config) -> Iterator[Step]:
    def parse(record: tf.Tensor) -> Tensors:
        return fields(tf.io.parse_single_example(record, CHESS_FEATURES), [], config.dtype)

    dataset = tf.data.TFRecordDataset(list(config.shards), config.compression)
    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    if config.shuffle:
        dataset = dataset.shuffle(SHUFFLE_RECORDS)
    return consume(dataset.repeat(config.epochs).batch(config.batch_size).prefetch(tf.data.AUTOTUNE), config)
