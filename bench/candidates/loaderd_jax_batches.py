"""loaderd's batches as JAX arrays, in its memory."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import loaderd_jax
from harness.interface import Config, Step

import loaderd

jax.config.update("jax_enable_x64", True)  # packed, a chess record has an int64


def steps(config: Config) -> Iterator[Step]:
    with loaderd.Loader(**config.loader_options()) as loader:
        for batch in loaderd_jax.batches(loader):
            yield Step(len(next(iter(batch.values()))), batch)
