"""What does shuffling cost that reads Parquet, next to pyarrow's own scanner in the files' order?

::

    python bench/parquet.py

The same columns as numpy arrays, in batches of 512, from files with row groups of two sizes: by pyarrow's scanner,
which reads ahead in threads, and by loaderd in the files' order and shuffled.
"""

from __future__ import annotations

import argparse

from harness.columns import COLUMNS, cached_parquet
from harness.comparison import warm_page_cache
from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, question_of

import loaderd


def cases(options: argparse.Namespace) -> list[Case]:
    found = []
    for size in options.sizes:
        shards = tuple(map(str, cached_parquet(options.work_dir, options.records, size)))
        warm_page_cache(shards)
        shuffled = Config(shards, workers=options.workers, schema=COLUMNS)
        in_order = Config(shards, workers=options.workers, schema=COLUMNS, shuffle=False)
        loaderd.Loader(**shuffled.loader_options()).close()
        found += [
            Case(f"pyarrow's scanner, {size:,}", "pyarrow_scanner", in_order),
            Case(f"loaderd in order, {size:,}", "loaderd_python", in_order),
            Case(f"loaderd shuffled, {size:,}", "loaderd_python", shuffled),
        ]
    return found


def main() -> None:
    parser = question_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 16_384], help="records of a row group")
    options = parser.parse_args()
    found = cases(options)
    runs = measure(found, options, console_of())
    answer("reader, records in a row group", found, runs, [], options)


if __name__ == "__main__":
    main()
