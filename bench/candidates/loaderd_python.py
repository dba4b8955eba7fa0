"""loaderd, its batches taken in Python as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator

from interface import Config, Step
from reference import VALUE_A, VALUE_B, VALUE_K

import loaderd


def steps(config: Config) -> Iterator[Step]:
    schema = loaderd.schemas.chess_eval(value_a=VALUE_A, value_k=VALUE_K, value_b=VALUE_B)
    with loaderd.Loader(
        list(config.shards),
        schema,
        batch_size=config.batch_size,
        epochs=config.epochs,
        shuffle=config.shuffle,
        workers=config.workers,
    ) as loader:
        for batch in loader:
            yield Step(len(batch["score"]), (batch["board"], batch["flags"], batch["score"]))
