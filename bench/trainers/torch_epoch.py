"""PyTorch's DataLoader over ``TFRecordDataset`` of the package tfrecord, files split among the workers, seeded.

The options are the DataLoader's defaults: ``timeout=0``, ``persistent_workers=False``. PyTorch itself reads no
TFRecords; tfrecord is what its users take, and it checks no CRC. Neither has an option to skip damage. Resumes with
``StatefulDataLoader`` of the package torchdata, which is the DataLoader with ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tfrecord.torch.dataset import TFRecordDataset
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainers import WORKERS, Batch, Task, stack


class Records(IterableDataset[Any]):
    def __init__(self, shards: list[str]) -> None:
        self._shards = [shards[place] for place in np.random.default_rng(0).permutation(len(shards))]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        for path in self._shards[worker.id :: worker.num_workers]:
            yield from TFRecordDataset(path, None, {"d": "byte", "s": "int"})


def collate(records: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    d, s = stack(records)
    return torch.from_numpy(d), torch.from_numpy(s)


class Epoch:
    def __init__(self, task: Task, saved: Path | None, **options: Any) -> None:
        kind: Any = DataLoader
        if task.save_steps:
            from torchdata.stateful_dataloader import StatefulDataLoader as kind
        self._loader = kind(
            Records(task.shards), batch_size=task.batch_size, num_workers=WORKERS, collate_fn=collate, **options
        )
        if saved:
            self._loader.load_state_dict(torch.load(saved))
        self._iterator = iter(self._loader)

    def __next__(self) -> Batch:
        d, s = next(self._iterator)
        return d.numpy(), s.numpy()

    def save(self, path: Path) -> None:
        torch.save(self._loader.state_dict(), path)

    def close(self) -> str:
        return ""
