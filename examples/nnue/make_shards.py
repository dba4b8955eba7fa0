"""Writes chess boards as bullet's trainer reads them: bulletformat, 32 bytes a board.

    python make_shards.py --out boards

No engine is needed: the pieces stand at random, a board's score is the worth of its pieces and of where they stand,
and its result is drawn by the chance that such a score gives. So there is something for a network to learn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.schemas.nnue import BULLET

Boards = npt.NDArray[Any]
WORTH = np.array([100, 300, 320, 500, 900, 0])  # centipawns: pawn, knight, bishop, rook, queen, king
AT_ONCE = 100_000


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if others := sorted(path.name for path in args.out.glob("*.bin")):
        sys.exit(f"{args.out} holds boards already ({others[0]}, …): remove them, or choose another --out")
    for seed, (kind, count) in enumerate((("train", args.boards), ("validation", max(1, args.boards // 50)))):
        rng = np.random.default_rng(seed)
        with (args.out / f"{kind}.bin").open("wb") as file:
            for start in range(0, count, AT_ONCE):
                file.write(boards(rng, min(AT_ONCE, count - start)).tobytes())
        print(f"{kind}: {count:,} boards, {count * BULLET.itemsize:,} bytes: {args.out}/{kind}.bin", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write chess boards in bulletformat.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--boards", type=int, default=500_000, help="boards to train on; a fiftieth for validation")
    return parser.parse_args()


def boards(rng: np.random.Generator, count: int) -> Boards:
    """BULLET, (count,): each of 2 to 32 pieces, with both kings, as the side to move sees them."""
    squares = rng.random((count, 64)).argsort(axis=1)[:, :32]  # those of 32 pieces, in the order of their codes
    codes = rng.choice([0, 0, 0, 1, 2, 3, 4], (count, 32)) + 8 * rng.integers(0, 2, (count, 32))
    codes[:, 0], codes[:, 1] = 5, 13
    is_there = np.arange(32) < rng.integers(2, 33, (count, 1))
    found = np.zeros(count, BULLET)
    found["king"], found["opponent_king"] = squares[:, 0], squares[:, 1] ^ 56
    score = (worth(codes, squares) * is_there).sum(axis=1)
    found["score"] = np.clip(score, -3000, 3000)
    wins = rng.random((count, 2)) < 1 / (1 + np.exp(-score / 400))[:, None]  # of two games
    found["result"] = wins.sum(axis=1)
    by_square = np.full((count, 64), -1)
    np.put_along_axis(by_square, squares, np.where(is_there, codes, -1), axis=1)
    found["occupied"] = np.packbits(by_square >= 0, axis=1, bitorder="little")
    order = np.argsort(by_square < 0, axis=1, kind="stable")[:, :32]  # occupied squares first
    in_order = np.maximum(np.take_along_axis(by_square, order, axis=1), 0)
    found["pieces"] = in_order[:, ::2] | in_order[:, 1::2] << 4
    return found


def worth(codes: npt.NDArray[np.int64], squares: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Centipawns of each piece, negative for the opponent's: what it is, and 10 for each step towards the middle."""
    rank, file = np.divmod(squares, 8)
    steps = np.minimum(rank, 7 - rank) + np.minimum(file, 7 - file)
    return (WORTH[codes & 7] + 10 * steps) * np.where(codes < 8, 1, -1)


if __name__ == "__main__":
    main()
