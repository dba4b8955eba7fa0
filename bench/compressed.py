"""What does it cost that shards are compressed?

::

    python bench/compressed.py

The same records in plain, GZIP and ZLIB shards, few large ones and many small ones, consumed in Python. A compressed
shard is inflated once an epoch, from one restart point of its index to the next.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, question_of, shards_of

NUM_SHARDS = [16, 256]
COMPRESSIONS = {"plain": "", "GZIP": "GZIP", "ZLIB": "ZLIB"}


def cases(options: argparse.Namespace) -> list[Case]:
    found = []
    for num_shards, (name, compression) in product(options.num_shards, COMPRESSIONS.items()):
        config = Config(shards_of(options, num_shards, compression), compression, workers=options.workers)
        found.append(Case(f"{name}, {num_shards} shards", "loaderd_python", config))
    return found


def main() -> None:
    parser = question_of(__doc__)
    parser.add_argument("--num-shards", type=int, nargs="+", default=NUM_SHARDS)
    options = parser.parse_args()
    found = cases(options)
    sizes = [sum(Path(shard).stat().st_size for shard in case.config.shards) / options.records for case in found]
    notes = [f"{case.label}: {size:.0f} bytes a record on disk" for case, size in zip(found, sizes, strict=True)]
    answer("shards", found, measure(found, options, console_of()), notes, options)


if __name__ == "__main__":
    main()
