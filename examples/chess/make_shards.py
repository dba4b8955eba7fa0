"""Writes TFRecord shards of chess positions with scores, in the layout of ``loaderd.schemas.chess_eval``.

    python make_shards.py --out shards --positions 20000

Several processes play the games (:mod:`games`). This process writes the positions in order, so the same arguments
give the same bytes. Each record is a ``tf.train.Example`` with two features: ``d``, 194 bytes
(:mod:`chess_boards`), and ``s``, an int64: the score from white's side, in centipawns or, if bit 1546 of
``d`` is set, in moves to mate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from games import STOPPED, Positions, Task, play
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

POSITIONS_PER_TASK = 250  # few, for a smooth progress bar; enough to make up for starting an engine


@dataclass(frozen=True)
class Shard:
    """A file to write: its path, and the tasks that make its positions, in order."""

    path: Path
    tasks: list[Task]


def main() -> None:
    args = parse_arguments()
    stockfish = find_stockfish(args.stockfish)
    scored_by = f"Stockfish ({stockfish}), depth {args.depth}" if stockfish else "material, mobility and mate in one"
    shards = plan_shards(args, stockfish)
    prepare_folder(args.out, {shard.path for shard in shards})

    started = time.perf_counter()
    results, scores = Counter[str](), Counter[str]()
    with show_progress(args.positions) as (advance, say):
        for shard, parts in zip(shards, play_all(shards, args.processes, advance), strict=True):
            write_shard(shard.path, parts)
            say(f"{shard.path.name}: {sum(len(part.scores) for part in parts):,} positions")
            for part in parts:
                results.update(part.results)
                scores.update("mate" if score.mate else "centipawns" for score in part.scores)
    seconds = time.perf_counter() - started

    size_mb = sum(shard.path.stat().st_size for shard in shards) / 1e6
    decisive, drawn = results["1-0"] + results["0-1"], results["1/2-1/2"]
    print(f"{len(shards)} shards, {args.positions:,} positions, {size_mb:.1f} MB, in {seconds:.0f} s: {args.out}/")
    print(f"{results.total():,} games: {decisive:,} decisive, {drawn:,} drawn, {results[STOPPED]:,} {STOPPED}")
    print(f"scored by {scored_by}: {scores['centipawns']:,} in centipawns, {scores['mate']:,} in moves to mate")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write TFRecord shards of chess positions with scores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--positions", type=positive, default=20_000, help="how many, in all shards together")
    parser.add_argument("--shards", type=positive, default=8, help="how many, for training")
    parser.add_argument("--validation-shards", type=positive, default=2, help="how many more, for validation")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same shards")
    parser.add_argument(
        "--stockfish",
        default="auto",
        metavar="PATH|auto|off",
        help="the engine that scores positions; auto: Stockfish, if it is installed; off: score without an engine",
    )
    parser.add_argument("--depth", type=positive, default=6, help="how many plies the engine searches")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="how many processes play")
    args = parser.parse_args()
    if args.positions < args.shards + args.validation_shards:
        parser.error("--positions must be at least one a shard")
    return args


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def find_stockfish(wanted: str) -> str | None:
    """The path of the engine; None with "off", or if "auto" finds none. Exits if there is no program ``wanted``."""
    if wanted == "off":
        return None
    # Debian installs it in /usr/games, which is not on every PATH.
    found = shutil.which("stockfish", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/games")
    found = found if wanted == "auto" else shutil.which(wanted)
    if found is None and wanted != "auto":
        sys.exit(f"--stockfish: found no program {wanted}")
    return found


def plan_shards(args: argparse.Namespace, stockfish: str | None) -> list[Shard]:
    """The shards, those for training first, of nearly equal size. No game is in two of them."""
    kinds = {"train": args.shards, "validation": args.validation_shards}
    names = [f"{kind}-{i:05d}-of-{n:05d}.tfrecord" for kind, n in kinds.items() for i in range(n)]
    base, larger = divmod(args.positions, len(names))
    shards = []
    for i, name in enumerate(names):
        left = base + (i < larger)
        tasks: list[Task] = []
        while left > 0:
            num_positions = min(left, POSITIONS_PER_TASK)
            tasks.append(Task(f"{args.seed}/{i}/{len(tasks)}", num_positions, stockfish, args.depth))
            left -= num_positions
        shards.append(Shard(args.out / name, tasks))
    return shards


def prepare_folder(folder: Path, to_write: set[Path]) -> None:
    """Make the folder. Exits if it holds other shards: a training would read them, too."""
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in set(folder.glob("*.tfrecord")) - to_write)
    if others:
        sys.exit(f"{folder} holds other shards ({others[0]}, …): remove them, or choose another --out")


def play_all(shards: list[Shard], processes: int, advance: Callable[[int], None]) -> Iterator[list[Positions]]:
    """For each shard, in order, what its tasks made."""
    # Not by fork: it would copy locks that other threads hold, such as those of the progress bar and of TensorFlow.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = pool.map(play, [task for shard in shards for task in shard.tasks])
        for shard in shards:
            parts = []
            for task in shard.tasks:
                parts.append(next(made))
                advance(task.num_positions)
            yield parts


def write_shard(path: Path, parts: list[Positions]) -> None:
    """Write the parts to one TFRecord file."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf  # not at the top: the processes that play import this file, too

    with tf.io.TFRecordWriter(str(path)) as writer:
        for part in parts:
            for packed, score in zip(part.packed, part.scores, strict=True):
                record = {
                    "d": tf.train.Feature(bytes_list=tf.train.BytesList(value=[packed.tobytes()])),
                    "s": tf.train.Feature(int64_list=tf.train.Int64List(value=[score.value])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=record))
                # Otherwise, the order of the two features could change from run to run.
                writer.write(example.SerializeToString(deterministic=True))


@contextmanager
def show_progress(total: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """Two functions: one advances a progress bar by n positions, the other prints a line.

    On a terminal, only the first one does anything; elsewhere, only the second one.
    """
    console = Console()
    if not console.is_terminal:
        yield (lambda n: None), (lambda line: print(line, flush=True))
        return
    columns = (
        TextColumn("playing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("positions"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("playing", total=total)
        yield (lambda n: progress.advance(bar, n)), (lambda line: None)


if __name__ == "__main__":
    main()
