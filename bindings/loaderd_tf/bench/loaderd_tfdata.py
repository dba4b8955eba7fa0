"""loaderd as a tf.data.Dataset, consumed eagerly or inside a tf.function."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd_tf
from loaderd import Shuffle
from loaderd.bench.interface import Config, Step
from loaderd_tf.bench._tfdata import consume


def steps(config: Config) -> Iterator[Step]:
    dataset = loaderd_tf.make_dataset(
        list(config.shards),
        config.delivered(),
        batch_size=config.batch_size,
        epochs=config.epochs,
        shuffle=config.shuffle and (Shuffle(window_records=config.window_records) if config.window_records else True),
        workers=config.workers,
    )
    return consume(dataset, config)
