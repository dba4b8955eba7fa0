"""The same batches of chess positions by three pipelines: two of tf.data, and loaderd's.

Each gives ``board`` float32 (n, 8, 8, 24), ``flags`` float32 (n, 10) and ``score`` float32 (n,), as
``loaderd.schemas.chess_eval`` describes them, for ``epochs`` epochs, None: without end.
"""

from __future__ import annotations

import os
from pathlib import Path

import loaderd_tf
import numpy as np
import tensorflow as tf

import loaderd

BATCH_SIZE = 512
SHUFFLE_RECORDS = 10_000
FEATURES = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}
FIELDS = ("board", "flags", "score")

# Stored are six groups of four channels: white's pieces, black's, white's attacks, black's. Delivered are four groups
# of six, black's with a minus.
CHANNEL_ORDER = [channel for member in range(4) for channel in range(member, 24, 4)]
CHANNEL_SIGN = np.repeat([1.0, -1.0, 1.0, -1.0], 6)


def first(shards: list[Path], shuffle: bool = True, epochs: int | None = None) -> tf.data.Dataset:
    """As one first writes it: each record is parsed by itself, its bits by division and remainder."""

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, ...]:
        stored = tf.io.parse_single_example(record, FEATURES)
        data = tf.cast(tf.io.decode_raw(stored["d"], tf.uint8), tf.float64)
        powers = tf.constant([128, 64, 32, 16, 8, 4, 2, 1], tf.float64)
        bits = tf.reshape(tf.math.mod(data[:, tf.newaxis] // powers, 2), [1552])
        board = tf.gather(tf.reshape(bits[:1536], [8, 8, 24]), CHANNEL_ORDER, axis=-1) * CHANNEL_SIGN
        score = score_of(stored["s"], bits[1546] == 1)
        return tf.cast(board, tf.float32), tf.cast(bits[1536:1546], tf.float32), score

    records = tf.data.TFRecordDataset([str(path) for path in shards]).map(parse, tf.data.AUTOTUNE)
    if shuffle:
        records = records.shuffle(SHUFFLE_RECORDS)
    return records.batch(BATCH_SIZE).repeat(epochs).prefetch(tf.data.AUTOTUNE)


def expert(shards: list[Path], shuffle: bool = True, epochs: int | None = None) -> tf.data.Dataset:
    """As an expert writes it: files side by side, whole batches parsed, and bits looked up in two tables.

    The three bytes of a square become its 24 bits in the order that is delivered, and each half of these twelve
    signed floats.
    """
    order = np.zeros((3, 256), np.int32)
    for place, channel in enumerate(CHANNEL_ORDER):
        byte, bit = divmod(channel, 8)
        order[byte] |= (np.arange(256, dtype=np.int32) >> (7 - bit) & 1) << (23 - place)
    half = np.arange(4096)[:, np.newaxis] >> np.arange(11, -1, -1) & 1
    floats = np.concatenate([half * CHANNEL_SIGN[:12], half * CHANNEL_SIGN[12:]]).astype(np.float32)

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, ...]:
        stored = tf.io.parse_example(records, FEATURES)
        data = tf.cast(tf.ensure_shape(tf.io.decode_raw(stored["d"], tf.uint8), [None, 194]), tf.int32)
        squares = tf.reshape(data[:, :192], [-1, 3])
        words = [tf.gather(order[byte], squares[:, byte]) for byte in range(3)]
        word = tf.bitwise.bitwise_or(tf.bitwise.bitwise_or(words[0], words[1]), words[2])
        halves = tf.stack([tf.bitwise.right_shift(word, 12), tf.bitwise.bitwise_and(word, 4095) + 4096], axis=-1)
        last = tf.bitwise.bitwise_and(tf.bitwise.right_shift(data[:, 192:, tf.newaxis], tf.range(7, -1, -1)), 1)
        bits = tf.reshape(last, [-1, 16])
        board = tf.reshape(tf.gather(floats, halves), [-1, 8, 8, 24])
        return board, tf.cast(bits[:, :10], tf.float32), score_of(stored["s"], bits[:, 10] == 1)

    streams = min(len(os.sched_getaffinity(0)), len(shards))

    def stream(index: tf.Tensor) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices([str(path) for path in shards]).shard(streams, index)
        records = tf.data.TFRecordDataset(files.shuffle(len(shards)) if shuffle else files, buffer_size=4 << 20)
        return (records.shuffle(SHUFFLE_RECORDS) if shuffle else records).batch(BATCH_SIZE)

    batches = tf.data.Dataset.range(streams).interleave(
        stream, cycle_length=streams, num_parallel_calls=tf.data.AUTOTUNE, deterministic=not shuffle
    )
    parsed = batches.repeat(epochs).map(parse, tf.data.AUTOTUNE, deterministic=not shuffle)
    return parsed.prefetch(tf.data.AUTOTUNE)


def score_of(stored: tf.Tensor, mate: tf.Tensor) -> tf.Tensor:
    """The target of a stored score, as ``loaderd.schemas.chess.chess_score`` computes it."""
    score = tf.cast(stored, tf.float64)
    decided = tf.sign(score) * (0.8 + 0.2 / 49.0 * tf.maximum(tf.constant(0.0, tf.float64), 50.0 - tf.abs(score)))
    return tf.cast(tf.where(mate, decided, 0.8 * tf.tanh(score / 600.0)), tf.float32)


def ours(shards: list[Path], shuffle: bool = True, epochs: int | None = None) -> tf.data.Dataset:
    """loaderd's, as a ``tf.data.Dataset``."""
    return loaderd_tf.make_dataset(
        shards,
        loaderd.schemas.chess_eval(),
        batch_size=BATCH_SIZE,
        structure=FIELDS,
        shuffle=shuffle,
        epochs=epochs,
    )
