"""What the tf.data candidates share: reading, parsing, the score, and the two ways to consume a dataset.

Reading is laid out for speed: as many streams as there are cores, each through its own share of the files,
batched while they are still strings. Shuffled, each stream draws the order of its files anew every epoch and
keeps a shuffle buffer of 10,000 records of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from loaderd.bench.interface import Config, Step
from loaderd.bench.reference import VALUE_A, VALUE_B, VALUE_K

SHUFFLE_RECORDS = 10_000
READ_BYTES = 4 << 20
BATCHES_PER_CALL = 32  # of the tf.function that consumes

_FEATURES = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}


def serialized_batches(config: Config) -> tf.data.Dataset:
    """Batches of serialized Examples: string, (n,). ``TFRecordDataset`` checks both CRCs of every record."""
    streams = min(len(os.sched_getaffinity(0)), len(config.shards))

    def stream(index: tf.Tensor) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(list(config.shards)).shard(streams, index)
        if config.shuffle:
            files = files.shuffle(len(config.shards))
        # Repeated here and not at the end: the streams and their buffers do not run dry between epochs.
        records = tf.data.TFRecordDataset(files.repeat(config.epochs), config.compression, READ_BYTES)
        if config.shuffle:
            records = records.shuffle(SHUFFLE_RECORDS)
        return records.batch(config.batch_size)

    return tf.data.Dataset.range(streams).interleave(
        stream, cycle_length=streams, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    )


def decoded(config: Config, decode: Callable[[tf.Tensor, tf.Tensor], Any]) -> tf.data.Dataset:
    """``decode`` mapped over parsed batches: it is given ``d`` uint8, (n, 194), and ``s`` int64, (n,)."""

    def parse_and_decode(serialized: tf.Tensor) -> Any:
        parsed = tf.io.parse_example(serialized, _FEATURES)
        stored = tf.ensure_shape(tf.io.decode_raw(parsed["d"], tf.uint8), [None, 194])
        return decode(stored, parsed["s"])

    batches = serialized_batches(config)
    return batches.map(parse_and_decode, tf.data.AUTOTUNE, deterministic=False).prefetch(tf.data.AUTOTUNE)


def flags_and_score(stored: tf.Tensor, scores: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Flags float32, (n, 10), and score float32, (n,), of ``d`` uint8, (n, 194), and ``s`` int64, (n,)."""
    last_bytes = tf.cast(stored[:, 192:], tf.int32)[:, :, tf.newaxis]
    bits = tf.reshape(tf.bitwise.bitwise_and(tf.bitwise.right_shift(last_bytes, tf.range(7, -1, -1)), 1), [-1, 16])
    # In float64, rounded once: float32's tanh differs from machine to machine, and n values cost nothing.
    score = tf.cast(scores, tf.float64)
    moves_left = tf.maximum(tf.constant(0.0, tf.float64), VALUE_B - tf.abs(score))
    decided = tf.sign(score) * (VALUE_A + (1.0 - VALUE_A) / (VALUE_B - 1.0) * moves_left)
    target = tf.where(bits[:, 10] == 1, decided, VALUE_A * tf.tanh(score / VALUE_K))
    return tf.cast(bits[:, :10], tf.float32), tf.cast(target, tf.float32)


def consume(dataset: tf.data.Dataset, config: Config) -> Iterator[Step]:
    """The steps of a dataset of dicts, field -> tensor: eager, or inside a tf.function (``config.graph``)."""
    if config.graph:
        yield from _consume_in_graph(dataset)
        return
    for batch in dataset:
        yield Step(next(iter(batch.values())).shape[0], batch)


def _consume_in_graph(dataset: tf.data.Dataset) -> Iterator[Step]:
    @tf.function
    def take(iterator: Any) -> tuple[tf.Tensor, tf.Tensor]:
        examples, touched = tf.constant(0), tf.constant(0.0)
        for _ in tf.range(BATCHES_PER_CALL):
            batch = next(iterator)
            examples += tf.shape(next(iter(batch.values())))[0]
            for tensor in batch.values():
                touched += tf.cast(tf.reshape(tensor, [-1])[0], tf.float32)
        return examples, touched

    iterator = iter(dataset)
    while True:
        examples, _ = take(iterator)
        yield Step(int(examples), None)
