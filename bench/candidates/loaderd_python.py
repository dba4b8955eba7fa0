"""loaderd, its batches taken in Python as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator

from harness.interface import Config, Step

import loaderd


def steps(config: Config) -> Iterator[Step]:
    with loaderd.Loader(**config.loader_options()) as loader:
        for batch in loader:
            yield Step(next(iter(batch.values())).shape[0], batch)
