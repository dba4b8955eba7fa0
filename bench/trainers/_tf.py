"""What tf.data and tf.data service share: the records of shards, shuffled, in batches; the iterator of a data set."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from trainers import RECORD_BYTES, SHUFFLE_RECORDS, Batch, Task

FEATURES = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}


def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    found = tf.io.parse_example(serialized, FEATURES)
    return tf.reshape(tf.io.decode_raw(found["d"], tf.uint8), [-1, RECORD_BYTES]), found["s"]


def batches(task: Task, cycle_length: int) -> tf.data.Dataset:
    """Files in a seeded order, ``cycle_length`` of them read at a time; ``ignore_errors`` at each file's reader."""

    def records(file: tf.Tensor) -> tf.data.Dataset:
        read = tf.data.TFRecordDataset(file)
        return read.ignore_errors(log_warning=True) if task.skip else read

    files = tf.data.Dataset.from_tensor_slices(task.shards).shuffle(len(task.shards), seed=0)
    return (
        files.interleave(records, cycle_length=cycle_length, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        .shuffle(SHUFFLE_RECORDS, seed=0)
        .batch(task.batch_size)
        .map(parse, tf.data.AUTOTUNE)
    )


class Epoch:
    """Of any data set; resumes with ``tf.train.Checkpoint(iterator=…)``."""

    def __init__(self, dataset: tf.data.Dataset, saved: Path | None) -> None:
        self._iterator = iter(dataset)
        self._checkpoint = tf.train.Checkpoint(iterator=self._iterator)
        if saved:
            self._checkpoint.read(str(saved)).assert_consumed()

    def __next__(self) -> Batch:
        d, s = next(self._iterator)
        return d.numpy(), s.numpy()

    def save(self, path: Path) -> None:
        self._checkpoint.write(str(path))

    def close(self) -> str:
        return ""
