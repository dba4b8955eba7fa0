"""What does the shuffle window cost: speed, memory, and the wait for the first batch?

::

    python bench/window.py

A window of packed rows must be whole before its first batch can be, and two are held at a time. How well each size
shuffles is told in docs/shuffle.md. Consumed in Python; the index of the shards is in its cache.
"""

from __future__ import annotations

import argparse

from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, question_of, shards_of

WINDOWS = [4096, 16_384, 65_536, 262_144, 1_048_576]


def cases(options: argparse.Namespace) -> list[Case]:
    shards = shards_of(options)
    return [
        Case(f"{size:,}", "loaderd_python", Config(shards, workers=options.workers, window_records=size))
        for size in options.sizes
    ]


def main() -> None:
    # Windows of an epoch are of nearly equal size: in fewer records the largest ones would be smaller than they say.
    parser = question_of(__doc__, records=2 * max(WINDOWS))
    parser.add_argument("--sizes", type=int, nargs="+", default=WINDOWS)
    options = parser.parse_args()
    found = cases(options)
    answer("window_records", found, measure(found, options, console_of()), [], options)


if __name__ == "__main__":
    main()
