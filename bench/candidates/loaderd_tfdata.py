"""loaderd as a tf.data.Dataset, consumed eagerly or inside a tf.function."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd_tf
from candidates._tfdata import consume
from harness.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    return consume(loaderd_tf.make_dataset(**config.loader_options()), config)
