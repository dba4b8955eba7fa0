"""No CRC check, files' order: PyTorch's DataLoader, an IterableDataset of whole batches, files split by worker.

The data set makes the batches (``batch_size=None``), so that bits are unpacked for a whole batch at a time. Workers
hand tensors over in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from candidates._records import batches, unpack, workers_of
from harness.interface import Config, Step, only_chess
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NOTE = "no CRC check, files' order"

cannot = only_chess


class _Batches(IterableDataset[Any]):
    def __init__(self, config: Config):
        self.config = config

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        for rows in batches(self.config, worker.id, worker.num_workers):
            yield {name: torch.from_numpy(array) for name, array in unpack(rows, self.config.dtype).items()}


def steps(config: Config, pin_memory: bool = False) -> Iterator[Step]:
    loader = DataLoader(_Batches(config), batch_size=None, num_workers=workers_of(config), pin_memory=pin_memory)
    for batch in loader:
        yield Step(len(batch["score"]), batch)
