"""loaderd, its batches taken in Python as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd
from loaderd.bench.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    shuffle = loaderd.Shuffle(window_records=config.window_records) if config.window_records else True
    with loaderd.Loader(
        list(config.shards),
        config.delivered(),
        batch_size=config.batch_size,
        epochs=config.epochs,
        shuffle=config.shuffle and shuffle,
        workers=config.workers,
    ) as loader:
        for batch in loader:
            yield Step(next(iter(batch.values())).shape[0], batch)
