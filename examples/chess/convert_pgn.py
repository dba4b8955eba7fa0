"""Writes TFRecord shards of the positions of games in PGN, in the layout of ``loaderd.schemas.chess_eval``.

    python convert_pgn.py 'lichess-*.pgn' --out shards

**Scores** (``--scores``) are one of

- ``eval``: what an engine said of the position, in a comment such as ``[%eval 0.17]`` (pawns) or ``[%eval #-3]``
  (moves to mate), from white's side, behind the move that led to it; as in Lichess's database. Positions without a
  score are left out, and counted.
- ``result``: how the game ended, for each of its positions. White's win is stored as "white mates in 1", which
  ``chess_eval`` delivers as 1.0; black's as -1.0; a draw as 0 centipawns, which is 0.0. Games without a result are
  left out, and their positions counted.

Several processes read games; this one writes the shards, in order, so the same arguments give the same bytes. A shard
has the games of one file, and no game is in two shards. The first ones are for validation.
"""

from __future__ import annotations

import argparse
import glob
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain
from pathlib import Path

from make_shards import positive, prepare_folder, write_shard
from pgn import Converted, read_games, split
from pgn_text import begins_as_pgn


def main() -> None:
    args = parse_arguments()
    files = list_files(args.games)
    prepare_folder(args.out, set())
    shards, positions, unscored, left_out = 0, 0, 0, 0
    for converted in convert(files, args.scores, args.games_per_shard, args.processes):
        if converted.faults and not args.skip_faulty:
            sys.exit(f"{converted.faults[0]}\nMend the game, or leave out all such games: --skip-faulty.")
        unscored += converted.unscored
        left_out += len(converted.faults)
        if converted.positions.scores:
            kind, number = "train", shards - args.validation_shards
            if number < 0:
                kind, number = "validation", shards
            path = args.out / f"{kind}-{number:05}.tfrecord"
            write_shard(path, [converted.positions])
            print(f"{path.name}: {len(converted.positions.scores):,} positions", flush=True)
            shards, positions = shards + 1, positions + len(converted.positions.scores)
    if not positions:
        sys.exit(f"none of {unscored:,} positions has a score: with --scores result, it is how the game ended")
    print(f"{shards:,} shards, {positions:,} positions: {args.out}/")
    print(f"left out: {unscored:,} positions without a score, {left_out:,} games that cannot be read")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write TFRecord shards of the positions of games in PGN.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("games", nargs="+", metavar="PGN", help="files, or globs in quotes; not compressed")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument(
        "--scores",
        choices=["eval", "result"],
        default="eval",
        help="an engine's, from comments such as [%%eval 0.17], or how the game ended",
    )
    parser.add_argument("--games-per-shard", type=positive, default=1000, help="at most")
    parser.add_argument("--validation-shards", type=positive, default=1, help="how many are for validation")
    parser.add_argument("--skip-faulty", action="store_true", help="leave out games that cannot be read")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="how many processes read games")
    return parser.parse_args()


def list_files(patterns: list[str]) -> list[Path]:
    """The files, in order. Exits at one that does not exist, or is no PGN; an empty one has no games."""
    paths = [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern]]
    for path in paths:
        try:
            with path.open("rb") as file:
                begins = file.read(4096)
        except OSError as error:
            sys.exit(f"{path}: {error.strerror}")
        if begins and not begins_as_pgn(begins):
            sys.exit(f'{path} does not begin as PGN does, with tags such as [Event "A"]. Decompress it first?')
    return paths


def convert(paths: list[Path], scores: str, games_per_shard: int, processes: int) -> Iterator[Converted]:
    """The shards, in order. Only some are made ahead, so that memory does not grow with the files."""
    # Not by fork: it would copy locks that other threads hold, such as those of TensorFlow.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        ahead = deque[Future[Converted]]()
        try:
            for games in chain.from_iterable(split(path, games_per_shard) for path in paths):
                ahead.append(pool.submit(read_games, games, scores))
                if len(ahead) > 2 * processes:
                    yield ahead.popleft().result()
            for future in ahead:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
