"""Trains a small network with a policy and a value head in PyTorch on dlshogi's hcpe.

    python make_shards.py --out positions
    python train.py --data positions --out run

Positions of your own can be used, too, if they are called ``train….hcpe`` and ``validation….hcpe``. It prints the
losses of the validation before and after, how many positions a second the loader alone delivers and how many the
training takes, and which share of a step goes into waiting for a batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import loaderd_torch
import torch
from torch import nn

import loaderd

STRUCTURE = (("pieces", "hands"), ("move", "result"))
NUM_PLANES, NUM_HANDS, NUM_DIRECTIONS = 28, 56, 27


class Net(nn.Module):
    """Residual blocks on 9 × 9 squares. What is in hand is the same on all of them, so a linear layer adds it."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.pieces = nn.Conv2d(NUM_PLANES, channels, 3, padding=1)
        self.hands = nn.Linear(NUM_HANDS, channels)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)),
                *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)),
            )
            for _ in range(blocks)
        )
        self.policy = nn.Conv2d(channels, NUM_DIRECTIONS, 1)
        self.value = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, 1))

    def forward(self, pieces: torch.Tensor, hands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of moves, (n, 2187), and of winning, (n,)."""
        x = self.pieces(pieces) + self.hands(hands)[:, :, None, None]
        for block in self.blocks:
            x = x + block(x)
        x = torch.relu(x)
        return self.policy(x).flatten(1), self.value(x.mean((2, 3)))[:, 0]


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    net = Net(args.channels, args.blocks).to(args.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)

    def loader_of(kind: str, **options: Any) -> loaderd.Loader:
        options |= {"batch_size": args.batch_size, "workers": args.workers}
        return loaderd.Loader(f"{args.data}/{kind}*.hcpe", loaderd.schemas.hcpe(), **options)

    def losses_of(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the policy and the value, and how many moves are the stored ones."""
        inputs, (move, result) = batch
        policy, value = net(*inputs)
        of_policy = nn.functional.cross_entropy(policy, move.long(), ignore_index=-1)
        of_value = nn.functional.binary_cross_entropy_with_logits(value, result)
        return of_policy, of_value, (policy.argmax(1) == move).float().mean()

    @torch.no_grad()
    def validate() -> str:
        net.eval()
        with loader_of("validation", shuffle=False, remainder="drop") as loader:
            found = [torch.stack(losses_of(batch)) for batch in batches(loader)]
        net.train()
        policy, value, best = torch.stack(found).mean(0).tolist()
        return f"policy {policy:.4f}, value {value:.4f}; the stored move {best:.1%}"

    def batches(loader: loaderd.Loader) -> Any:
        return iter(loaderd_torch.batches(loader, STRUCTURE, device=args.device))

    with loader_of("train") as loader:
        alone = positions_per_s(loader)
    before = validate()
    with loader_of("train", epochs=args.epochs) as loader:
        num_positions, began_s, waited_s = 0, time.perf_counter(), 0.0
        for step, batch in enumerate(batches(loader)):
            if step == 0:  # for which the processes had to start
                began_s, waited_s = time.perf_counter(), loader.statistics().wait_s
            of_policy, of_value, _ = losses_of(batch)
            optimizer.zero_grad()
            (of_policy + of_value).backward()
            optimizer.step()
            num_positions += len(batch[1][0])
            if step % 20 == 0:
                print(f"step {step + 1}: policy {of_policy.item():.4f}, value {of_value.item():.4f}", flush=True)
        seconds = time.perf_counter() - began_s
        waited = (loader.statistics().wait_s - waited_s) / seconds
    print(f"validation before: {before}")
    print(f"validation after:  {validate()}")
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
        description="Train a small network on hcpe.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="the folder with train*.hcpe and validation*.hcpe"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the network is saved")
    parser.add_argument("--epochs", type=int, default=1, help="how often to train on each position")
    parser.add_argument("--batch-size", type=int, default=256, help="positions a step")
    parser.add_argument("--channels", type=int, default=32, help="of each residual block")
    parser.add_argument("--blocks", type=int, default=1, help="how many residual blocks")
    parser.add_argument("--workers", type=int, help="worker processes; default: chosen from the cores")
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=default, help="where to train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
