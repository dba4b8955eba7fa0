"""What does the batch size do, in Python and through tf.data?

::

    python bench/batch_size.py

What a batch costs, whatever is in it, weighs most where batches are small; the largest ones leave every cache, and
their slots take memory (``peak PSS``): a batch of 16,384 chess records in float32 is 101 MB.
"""

from __future__ import annotations

import argparse

from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, question_of, shards_of

BATCH_SIZES = [64, 256, 1024, 4096, 16_384]
CONSUMERS = {"in Python": "loaderd_python", "in a tf.function": "loaderd_tfdata:graph"}


def cases(options: argparse.Namespace) -> list[Case]:
    shards = shards_of(options)
    return [
        Case(f"{size:,}, {consumer}", spec, Config(shards, batch_size=size, workers=options.workers))
        for consumer, spec in CONSUMERS.items()
        for size in options.sizes
    ]


def main() -> None:
    parser = question_of(__doc__, rounds=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=BATCH_SIZES)
    options = parser.parse_args()
    found = cases(options)
    answer("batch size, consumed", found, measure(found, options, console_of()), [], options)


if __name__ == "__main__":
    main()
