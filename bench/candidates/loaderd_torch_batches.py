"""loaderd's batches as PyTorch's tensors, in its memory."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd_torch
from harness.interface import Config, Step

import loaderd


def steps(config: Config) -> Iterator[Step]:
    with loaderd.Loader(**config.loader_options()) as loader:
        for batch in loaderd_torch.batches(loader):
            yield Step(len(next(iter(batch.values()))), batch)
