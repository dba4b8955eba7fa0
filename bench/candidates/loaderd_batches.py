"""loaderd's batches as eager tensors, without tf.data."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd_tf
from harness.interface import Config, Step

import loaderd


def steps(config: Config) -> Iterator[Step]:
    with loaderd.Loader(**config.loader_options()) as loader:
        for batch in loaderd_tf.batches(loader):
            yield Step(next(iter(batch.values())).shape[0], batch)
