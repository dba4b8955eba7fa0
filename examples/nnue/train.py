"""Trains an NNUE in PyTorch on boards in bulletformat: (768 → 256)×2 → 1, as bullet's simple example has it.

    python make_shards.py --out boards
    python train.py --data boards --out run

Boards of your own can be used, too, if they are called ``train….bin`` and ``validation….bin``. It prints the loss of
the validation before and after, how many positions a second the loader alone delivers and how many the training
takes, and which share of a step goes into waiting for a batch. On a GPU, boards travel packed, and become indices
there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import loaderd_torch
import torch
from torch import nn

import loaderd

NUM_INPUTS, SCALE = 768, 400
STRUCTURE = (("stm", "ntm"), ("score", "result"))


class Nnue(nn.Module):
    """Both sides go through the same first layer; the side to move comes first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.features = nn.EmbeddingBag(NUM_INPUTS + 1, hidden, mode="sum", padding_idx=NUM_INPUTS)
        nn.init.normal_(self.features.weight, std=0.05)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.output = nn.Linear(2 * hidden, 1)

    def forward(self, stm: torch.Tensor, ntm: torch.Tensor) -> torch.Tensor:
        """Logits of winning, (n,). ``stm``, ``ntm``: indices, (n, 32); -1 is none."""
        sides = torch.cat([stm, ntm])
        accumulated = self.features(sides.masked_fill(sides < 0, NUM_INPUTS)) + self.bias
        active = accumulated.clamp(0, 1).square()  # SCReLU
        return self.output(torch.cat(active.chunk(2), dim=1))[:, 0]


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    net = Nnue(args.hidden).to(args.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def loader_of(kind: str, **options: Any) -> loaderd.Loader:
        unpack = "worker" if args.device.type == "cpu" else "device"
        options |= {"batch_size": args.batch_size, "unpack": unpack, "workers": args.workers}
        return loaderd.Loader(f"{args.data}/{kind}*.bin", loaderd.schemas.bullet(), **options)

    def batches(loader: loaderd.Loader) -> Iterator[Any]:
        return iter(loaderd_torch.batches(loader, STRUCTURE, device=args.device))

    def loss_of(batch: Any) -> torch.Tensor:
        (stm, ntm), (score, result) = batch
        target = 0.25 * result + 0.75 * torch.sigmoid(score / SCALE)
        return nn.functional.mse_loss(torch.sigmoid(net(stm, ntm)), target)

    @torch.no_grad()
    def validate() -> float:
        with loader_of("validation", shuffle=False) as loader:
            return fmean(float(loss_of(batch)) for batch in batches(loader))

    with loader_of("train") as loader:
        alone = positions_per_s(loader)
    before = validate()
    with loader_of("train", epochs=args.epochs) as loader:
        num_positions, began_s, waited_s = 0, time.perf_counter(), 0.0
        for step, batch in enumerate(batches(loader)):
            if step == 0:  # for which the processes had to start
                began_s, waited_s = time.perf_counter(), loader.statistics().wait_s
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            num_positions += len(batch[1][0])
            if step % 20 == 0:
                print(f"step {step + 1}: loss {float(loss):.5f}", flush=True)
        seconds = time.perf_counter() - began_s
        waited = (loader.statistics().wait_s - waited_s) / seconds
    print(f"loss of the validation before: {before:.5f}, after: {validate():.5f}")
    print(f"the loader alone: {alone:,.0f} positions/s; training: {num_positions / seconds:,.0f} positions/s")
    print(f"{waited:.1%} of a step went into waiting for a batch")
    torch.save(net.state_dict(), args.out / "net.pt")
    print(f"net: {args.out}/net.pt")


def positions_per_s(loader: loaderd.Loader) -> float:
    """Of an epoch, from its first batch on: for that one, the processes had to start."""
    batches = iter(loader)
    next(batches)
    began_s = time.perf_counter()
    num_positions = sum(batch.num_records for batch in batches)
    return num_positions / (time.perf_counter() - began_s)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an NNUE on boards in bulletformat.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="the folder with train*.bin and validation*.bin"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the network is saved")
    parser.add_argument("--epochs", type=int, default=2, help="how often to train on each position")
    parser.add_argument("--batch-size", type=int, default=16_384, help="positions a step")
    parser.add_argument("--hidden", type=int, default=256, help="width of the first layer, of each side")
    parser.add_argument("--workers", type=int, help="worker processes; default: chosen from the cores")
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=default, help="where to train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
