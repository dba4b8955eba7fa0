"""tf.data as in ``tfdata_seed``, but batched before it parses: the first thing that the performance guide advises."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from candidates._tfdata import SHUFFLE_RECORDS, Tensors, consume
from candidates.tfdata_seed import CHESS_FEATURES, fields
from harness.interface import Config, Step, only_chess

NOTE = ""

cannot = only_chess


def steps(config: Config) -> Iterator[Step]:
    def parse(records: tf.Tensor) -> Tensors:
        return fields(tf.io.parse_example(records, CHESS_FEATURES), [-1], config.dtype)

    dataset = tf.data.TFRecordDataset(list(config.shards), config.compression)
    if config.shuffle:
        dataset = dataset.shuffle(SHUFFLE_RECORDS)
    dataset = dataset.repeat(config.epochs).batch(config.batch_size)
    return consume(dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE), config)
