"""loaderd's batches as PyTorch's tensors, in its memory."""

from __future__ import annotations

from collections.abc import Iterator

import loaderd_torch

import loaderd
from loaderd.bench.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    with loaderd.Loader(**config.loader_options()) as loader:
        for batch in loaderd_torch.batches(loader):
            yield Step(len(next(iter(batch.values()))), batch)
