"""Writes shogi positions as dlshogi's trainer reads them: hcpe, 38 bytes a position.

    python make_shards.py --out positions

No engine is needed: the pieces stand at random, on the board and in hand. A position's score is the worth of its
pieces, its result is drawn by the chance that such a score gives, and its move takes the most that stands straight
ahead of a piece. So there is something for a network to learn.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from random import Random

import numpy as np

from loaderd.schemas.shogi import HCP_BOARD, HCPE, NUM_KINDS

# In the order of the kinds: pawn, lance, knight, silver, bishop, rook, gold, king, and the first six promoted.
COUNTS = (18, 4, 4, 4, 2, 2, 4)
WORTH = (90, 315, 405, 495, 855, 990, 540, 0, 540, 540, 540, 540, 945, 1395)  # centipawns
KING, STEP_AHEAD = 7, (0, 1, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13)
IN_HAND = (("00", 0), ("1000", 1), ("1100", 2), ("1010", 3), ("1110", 6), ("111110", 4), ("111111", 5))


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if others := sorted(path.name for path in args.out.glob("*.hcpe")):
        sys.exit(f"{args.out} holds positions already ({others[0]}, …): remove them, or choose another --out")
    for seed, (kind, count) in enumerate((("train", args.positions), ("validation", max(1, args.positions // 20)))):
        rng = Random(seed)
        records = np.array([record(rng) for _ in range(count)], HCPE)
        records.tofile(args.out / f"{kind}.hcpe")
        print(f"{kind}: {count:,} positions, {records.nbytes:,} bytes: {args.out}/{kind}.hcpe", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write shogi positions as hcpe.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument(
        "--positions", type=int, default=50_000, help="how many to train on; a twentieth for validation"
    )
    return parser.parse_args()


def record(rng: Random) -> tuple[np.ndarray, int, int, int, int]:
    """The values of a HCPE: all 40 pieces, three quarters of them on the board."""
    squares = rng.sample(range(81), 40)
    board = {squares.pop(): (0, KING), squares.pop(): (1, KING)}
    hands = [[0] * 7, [0] * 7]
    for kind, count in enumerate(COUNTS):
        for _ in range(count):
            colour = rng.randrange(2)
            if rng.random() < 0.75:
                promotes = kind < 6 and rng.random() < 0.2
                board[squares.pop()] = (colour, kind + 8 * promotes)
            else:
                hands[colour][kind] += 1
    turn = rng.randrange(2)
    worths = [0, 0]
    for colour, kind in board.values():
        worths[colour] += WORTH[kind]
    for colour, hand in enumerate(hands):
        worths[colour] += sum(WORTH[kind] * count for kind, count in enumerate(hand))
    score = worths[turn] - worths[1 - turn]
    wins = rng.random() < 1 / (1 + math.exp(-score / 600))
    result = 1 + (turn if wins else 1 - turn)
    packed = np.frombuffer(pack(board, hands, turn), np.uint8)
    return packed, max(-30_000, min(30_000, score)), move_of(board, turn), result, 0


def move_of(board: dict[int, tuple[int, int]], turn: int) -> int:
    """A step straight ahead that takes the most; with nothing to take, to an empty square; 0 if there is none."""
    best = (-1, 0)
    for square, (colour, kind) in board.items():
        ahead = square + (1 if turn else -1)  # within a file, the ranks go down from Black's side of view
        if colour != turn or kind not in STEP_AHEAD or square // 9 != ahead // 9 or ahead < 0:
            continue
        there = board.get(ahead)
        if there is None or there[0] != turn:
            best = max(best, (0 if there is None else 1 + WORTH[there[1]], square << 7 | ahead))
    return best[1]


def pack(board: dict[int, tuple[int, int]], hands: list[list[int]], turn: int) -> bytes:
    """32 bytes, the first bit of each the least significant one."""
    kings = {colour: square for square, (colour, kind) in board.items() if kind == KING}
    bits = [str(turn), *(f"{kings[colour]:07b}"[::-1] for colour in (0, 1))]
    for square in range(81):
        colour, kind = board.get(square, (0, -1))
        if kind != KING:
            bits.append("0" if kind < 0 else str(HCP_BOARD.codes[1 + NUM_KINDS * colour + kind]))
    for colour, hand in enumerate(hands):
        bits += [f"{stem}{colour}" * hand[kind] for stem, kind in IN_HAND]
    return int("".join(bits)[::-1], 2).to_bytes(32, "little")


if __name__ == "__main__":
    main()
