"""What does it cost that shards are compressed?

::

    python bench/compressed.py

The same records in plain, GZIP and ZLIB shards, few large ones and many small ones, consumed in Python. A compressed
shard is inflated once an epoch, from one restart point of its index to the next. "Inflating" is the CPU of reading a
shard from front to back through each library that is installed, and nothing else.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, question_of, shards_of

NUM_SHARDS = [16, 256]
COMPRESSIONS = {"plain": "", "GZIP": "GZIP", "ZLIB": "ZLIB"}


def cases(options: argparse.Namespace) -> list[Case]:
    found = []
    for num_shards, name in product(options.num_shards, options.compressions):
        compression, spec = COMPRESSIONS[name], "loaderd_python:packed" if options.packed else "loaderd_python"
        config = Config(shards_of(options, num_shards, compression), compression, workers=options.workers)
        found.append(Case(f"{name}, {num_shards} shards", spec, config))
    return found


def inflating(case: Case, records: int) -> Iterator[str]:
    """CPU of inflating the shards of a case once, in words, by each library."""
    for library in ("zlib", "isal.isal_zlib"):
        if not case.config.compression or find_spec(library.partition(".")[0]) is None:
            continue
        made: Any = import_module(library)
        began_s = time.process_time()
        for shard in case.config.shards:
            with Path(shard).open("rb") as file:
                inflater = made.decompressobj(wbits=zlib.MAX_WBITS | 32)
                while data := file.read(1 << 18):
                    inflater.decompress(data)
        us = (time.process_time() - began_s) / records * 1e6
        yield f"{case.label}: inflating by {library.rpartition('.')[2]} {us:.3f} µs of CPU a record"


def main() -> None:
    parser = question_of(__doc__)
    parser.add_argument("--num-shards", type=int, nargs="+", default=NUM_SHARDS)
    parser.add_argument("--compressions", choices=COMPRESSIONS, nargs="+", default=[*COMPRESSIONS])
    parser.add_argument("--packed", action="store_true", help="deliver records as they are stored")
    options = parser.parse_args()
    found = cases(options)
    sizes = [sum(Path(shard).stat().st_size for shard in case.config.shards) / options.records for case in found]
    notes = [line for case in found for line in inflating(case, options.records)]
    notes += [f"{case.label}: {size:.0f} bytes a record on disk" for case, size in zip(found, sizes, strict=True)]
    answer("shards", found, measure(found, options, console_of()), notes, options)


if __name__ == "__main__":
    main()
