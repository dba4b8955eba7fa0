"""Writes shards of made-up chess records, as many as a GPU reads in seconds.

    python make_shards.py --out shards --records 4000000

They are stored as ``loaderd.schemas.chess_eval`` says. The planes are random bits, and the score counts them as
material, so that a network can learn it. For real games: ``examples/chess/make_shards.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import loaderd

RECORDS_PER_SHARD = 50_000
PIECE_VALUES = np.array([10, 30, 30, 50, 90, 0])  # of a pawn, knight, bishop, rook, queen and king


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write shards of made-up chess records.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is made")
    parser.add_argument("--records", type=int, default=4_000_000, help="how many, in all shards together")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many processes write")
    args = parser.parse_args()
    if args.records < 1 or args.processes < 1:
        parser.error("--records and --processes must be positive")
    if any(args.out.glob("*/*.tfrecord")):
        sys.exit(f"{args.out} holds shards already: give another folder, or delete it")
    began_s = time.perf_counter()
    with ProcessPoolExecutor(args.processes) as processes:
        sizes_bytes = list(processes.map(partial(write_shard, args.out), *zip(*shards_of(args.records), strict=True)))
    seconds = time.perf_counter() - began_s
    print(
        f"{len(sizes_bytes)} shards, {args.records:,} records, {sum(sizes_bytes) / 1e6:,.0f} MB, "
        f"in {seconds:.1f} s: {args.out}/"
    )


def shards_of(num_records: int) -> Iterator[tuple[int, int]]:
    """The number of each shard, and of its records."""
    for number, first in enumerate(range(0, num_records, RECORDS_PER_SHARD)):
        yield number, min(RECORDS_PER_SHARD, num_records - first)


def write_shard(folder: Path, number: int, num_records: int) -> int:
    """Write shard ``number``, into a folder of its own; returns its bytes."""
    rng = np.random.default_rng(number)
    a, b, c = (rng.integers(0, 256, (num_records, 194), np.uint8) for _ in range(3))
    packed = a & b & c  # one bit in eight is set
    packed[:, 193] &= 0b1100_0000  # two flags; no mate, no padding
    pieces = np.unpackbits(packed[:, :192], axis=1).reshape(-1, 64, 6, 4).sum(axis=1, dtype=np.int64)
    scores = (pieces[:, :, 0] - pieces[:, :, 1]) @ PIECE_VALUES  # white's and black's
    (path,) = loaderd.testing.write_shards(folder / f"{number:05}", {"d": packed, "s": scores})
    return path.stat().st_size


if __name__ == "__main__":
    main()
