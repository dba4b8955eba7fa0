"""loaderd as a tf.data.Dataset, consumed eagerly or inside a tf.function."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd_tf
from interface import Config, Step
from reference import VALUE_A, VALUE_B, VALUE_K

import loaderd
from candidates._tfdata import consume


def steps(config: Config) -> Iterator[Step]:
    dataset = loaderd_tf.make_dataset(
        list(config.shards),
        loaderd.schemas.chess_eval(value_a=VALUE_A, value_k=VALUE_K, value_b=VALUE_B),
        batch_size=config.batch_size,
        structure=(("board", "flags"), "score"),
        epochs=config.epochs,
        shuffle=config.shuffle,
        workers=config.workers,
    )
    return consume(dataset, config)
