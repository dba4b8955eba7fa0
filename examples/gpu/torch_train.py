"""Trains two networks in PyTorch on chess records, fed in three ways, and says how busy each keeps the GPU.

    python make_shards.py --out shards
    python torch_train.py --data 'shards/*/*.tfrecord'

The feeds: ``framework`` is PyTorch's DataLoader, its workers unpack to floats in numpy; ``floats`` is loaderd, its
workers unpack; ``packed`` is loaderd with ``unpack="device"``. On a GPU, the networks are compiled. They compute in
bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise, repeat
from typing import Any

import loaderd_torch
import measure
import records
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import loaderd

OPTIONS = measure.options_of("Train networks in PyTorch, fed in three ways.")
measure.check_gpu(OPTIONS, torch.cuda.is_available(), "torch")
DEVICE = torch.device("cuda" if OPTIONS.gpu else "cpu")
STRUCTURE = (("board", "flags"), "score")


# ------------------------------------------------------------------------------------------------ the networks


class Block(nn.Module):
    def __init__(self, filters: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(filters, filters, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (x + self.norm2(self.conv2(y))).relu()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        filters = OPTIONS.filters
        self.tower = nn.Sequential(
            nn.Conv2d(24, filters, 3, padding=1), nn.ReLU(), *(Block(filters) for _ in range(OPTIONS.blocks))
        )
        self.squeeze = nn.Conv2d(filters, 8, 1)
        self.head = nn.Sequential(nn.Linear(8 * 64 + 10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, board: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        x = self.squeeze(self.tower(board.permute(0, 3, 1, 2)))  # (batch, 24, 8, 8), the channels last in memory
        return self.head(torch.cat([x.flatten(1), flags], dim=1))[:, 0].tanh()


class Nnue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [1536 + 10, OPTIONS.hidden, 32, 32]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.last = nn.Linear(32, 1)

    def forward(self, board: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        x = torch.cat([board.flatten(1), flags], dim=1)
        for layer in self.layers:
            x = layer(x).clamp(0, 1)
        return self.last(x)[:, 0].tanh()


class Trainee:
    """A network and its optimizer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        net = kind().to(DEVICE, memory_format=torch.channels_last)
        self.optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)

        def loss_of(board: torch.Tensor, flags: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                found = net(board, flags)
            return nn.functional.mse_loss(found.float(), score)

        # For a CPU, compiling takes longer than this whole program.
        self.loss_of = torch.compile(loss_of) if OPTIONS.gpu else loss_of

    def step(self, batch: Any) -> torch.Tensor:
        (board, flags), score = batch
        self.optimizer.zero_grad()
        loss = self.loss_of(board, flags, score)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# --------------------------------------------------------------------------------------------------- the feeds


class Records(IterableDataset[Any]):
    """Whole batches, so that bits are unpacked for a batch at a time."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        shards = OPTIONS.shards[worker.id :: worker.num_workers]
        for rows in records.packed_batches(shards, OPTIONS.batch_size, seed=worker.id):
            (board, flags), score = records.unpack(rows)
            yield (torch.from_numpy(board), torch.from_numpy(flags)), torch.from_numpy(score)


@contextmanager
def by_framework() -> Iterator[Iterator[Any]]:
    loader = DataLoader(
        Records(),
        batch_size=None,
        num_workers=OPTIONS.framework_workers,
        pin_memory=OPTIONS.gpu is not None,
        prefetch_factor=4,
    )
    with closing(to_device(batch) for batch in loader) as batches:  # and so its workers end
        yield batches


def to_device(batch: Any) -> Any:
    (board, flags), score = batch
    board, flags, score = (tensor.to(DEVICE, non_blocking=True) for tensor in (board, flags, score))
    return (board, flags), score


@contextmanager
def by_loaderd(unpack: str) -> Iterator[Iterator[Any]]:
    with loaderd.Loader(
        OPTIONS.shards,
        loaderd.schemas.chess_eval(),
        batch_size=OPTIONS.batch_size,
        workers=OPTIONS.workers,
        epochs=None,
        remainder="carry",
        unpack=unpack,
    ) as loader:
        yield iter(loaderd_torch.batches(loader, STRUCTURE, device=DEVICE))


# ------------------------------------------------------------------------------------------------ the training


def train(trainee: Trainee, batches: Iterator[Any], clock: measure.Clock) -> float:
    loss, wait_for_step = trainee.step(next(batches)), waiter()
    for batch in batches:
        loss, wait_for_one_before = trainee.step(batch), wait_for_step
        wait_for_step = waiter()
        wait_for_one_before()  # so that the GPU always has a step to go on with
        if clock.tick():
            break
    return loss.item()


def waiter() -> Callable[[], None]:
    """A function that waits for what the GPU has been given until now. ``item()`` would wait for all that it has."""
    return torch.cuda.current_stream().record_event().synchronize if OPTIONS.gpu else lambda: None


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    if OPTIONS.gpu is None:  # what feeds needs the other cores: PyTorch's threads would spin where they cannot run
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - OPTIONS.workers))
    measure.run(
        f"PyTorch {torch.__version__}",
        OPTIONS,
        nets={"residual": lambda: Trainee(Residual), "nnue": lambda: Trainee(Nnue)},
        feeds={
            "framework": by_framework,
            "floats": lambda: by_loaderd("worker"),
            "packed": lambda: by_loaderd("device"),
        },
        train=train,
        take=measure.take,
        hold=lambda batches: repeat(next(batches)),
    )
