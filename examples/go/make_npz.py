"""Writes games of Go as KataGo's self-play does: npz files with one row for each position.

    python make_npz.py --out games

KataGo is not needed: ``self_play.py`` plays the games. Shapes, dtypes, bit order and columns are those of KataGo's
cpp/dataio/trainingwrite.h. What a player without a search does not know (values along the way, the lead, future
boards) has weight 0, as unknown values have in KataGo's files. The rows of all games are shuffled, as KataGo's
shuffle.py does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from self_play import EMPTY, KOMI, WHITE, Game, Turn, play

from loaderd.schemas.kata import rows

NUM_PLANES = 22
Rows = npt.NDArray[Any]
Plane = npt.NDArray[np.int8]


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in args.out.glob("*.npz"))
    if others:
        sys.exit(f"{args.out} holds npz files already ({others[0]}, …): remove them, or choose another --out")
    for kind, games in (("train", args.games), ("validation", max(1, args.games // 10))):
        positions = np.concatenate([*play_all(kind, games, args.size, args.processes)])
        np.random.default_rng(0).shuffle(positions)
        files = np.array_split(positions, max(1, len(positions) // args.rows))
        for number, part in enumerate(files):
            write_npz(args.out / f"{kind}-{number:03}.npz", part)
        print(f"{kind}: {len(positions):,} positions of {games} games in {len(files)} files: {args.out}/", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write games of Go in KataGo's layout.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument(
        "--games", type=int, default=400, help="how many, for training; a tenth as many are played for validation"
    )
    parser.add_argument("--size", type=int, default=9, help="rows and columns of the board")
    parser.add_argument("--rows", type=int, default=10_000, help="how many positions to write to a file, about")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many processes play")
    return parser.parse_args()


def play_all(kind: str, games: int, size: int, processes: int) -> Iterator[Rows]:
    """The rows of each game."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(
            partial(play_rows, size=size), [f"{kind}/{number}" for number in range(games)], chunksize=4
        )


def play_rows(seed: str, size: int) -> Rows:
    return rows_of(play(seed, size), size)


def rows_of(game: Game, size: int) -> Rows:
    """One row for each turn, as its player sees it: (turns,), of the dtype :func:`loaderd.schemas.kata.rows`."""
    found = np.zeros(len(game.turns), rows(size))
    owners = np.array(game.owners)
    for number, turn in enumerate(game.turns):
        row = found[number]
        sign = 1 if turn.player != WHITE else -1
        planes, row["globalInputNC"][:5] = inputs(turn, game.turns[:number], size)
        row["binaryInputNCHWPacked"] = np.packbits(planes, axis=1)
        row["globalInputNC"][5] = -sign * KOMI / 20
        for channel, of in enumerate(game.turns[number : number + 2]):
            row["policyTargetsNCMove"][channel, [*of.visits]] = [*of.visits.values()]
        score = sign * game.score
        targets = row["globalTargetsNC"]
        for first in range(0, 20, 4):
            targets[first : first + 4] = score > 0, score < 0, 0, score
        targets[20] = score
        targets[24] = 1  # 1 minus the weight of the values along the way: they have none
        targets[[25, 26, 27]] = 1  # the weights of the row, of the policy, and of ownership and score
        targets[28] = number + 1 < len(game.turns)  # the weight of the next move's policy
        targets[36:41] = np.arange(5) < number  # whether each of the last five moves may be used as history
        targets[47], targets[51] = -sign * KOMI, number
        targets[[62, 63]] = 1, 3  # the game was finished; the version of the data
        row["scoreDistrN"][size * size + 60 + int(np.floor(score))] = 100
        row["valueTargetsNCHW"][0] = as_seen_by(turn.player, owners).reshape(size, size)
    return found


def inputs(turn: Turn, before: list[Turn], size: int) -> tuple[Plane, list[bool]]:
    """The planes, (22, size * size), and whether each of the last five moves was a pass, the latest move first.

    Planes: 0 is the board; 1 and 2 the player's own stones and the other's; 3 to 5 groups with 1, 2 and 3 liberties;
    6 a ko; 9 to 13 the last five moves. Ladders and areas, 14 to 19, are left empty.
    """
    planes = np.zeros((NUM_PLANES, size * size), np.int8)
    colors, liberties = np.array(turn.colors), np.array(turn.liberties)
    planes[0] = 1
    planes[1], planes[2] = colors == turn.player, (colors != turn.player) & (colors != EMPTY)
    for count in (1, 2, 3):
        planes[2 + count] = liberties == count
    if turn.ko >= 0:
        planes[6, turn.ko] = 1
    passes = [False] * 5
    for ago, earlier in enumerate(before[:-6:-1]):
        if earlier.move < size * size:
            planes[9 + ago, earlier.move] = 1
        else:
            passes[ago] = True
    return planes, passes


def as_seen_by(player: int, owners: npt.NDArray[Any]) -> Plane:
    """int8, (size * size,): 1 for the player's own points, -1 for the other's, 0 for nobody's."""
    return (owners == player).astype(np.int8) - ((owners != player) & (owners != EMPTY)).astype(np.int8)


def write_npz(path: Path, found: Rows) -> None:
    """Write each field as an array. The file gets its name when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **{name: found[name] for name in found.dtype.names or ()})
    unfinished.replace(path)


if __name__ == "__main__":
    main()
