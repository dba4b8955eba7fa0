"""What does a filter cost that passes one record in ten?

::

    python bench/filter.py

Batches of the chess records whose stored score is a multiple of ten: by tf.data, which parses every record of every
epoch, ``unbatch().filter().batch()``, and unpacks what is left; by Grain, if it is there, which asks its filter of
each record; and by loaderd, whose index knows what passes. tf.data and loaderd without the filter, too. The index is
made before; "first pass" says how long that takes with and without the filter.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, question_of, shards_of

import loaderd


def cases(options: argparse.Namespace) -> list[Case]:
    every = Config(shards_of(options), workers=options.workers)
    tenth = replace(every, one_in=10)
    found = [Case("tf.data, 1 in 10", "tfdata_tuned", tenth), Case("loaderd, 1 in 10", "loaderd_tfdata", tenth)]
    if find_spec("grain"):
        found += [
            Case("Grain, 1 in 10", "grain_loader", tenth),
            Case("loaderd in Python, 1 in 10", "loaderd_python", tenth),
        ]
    if options.all:
        found += [Case("tf.data, all", "tfdata_tuned", every), Case("loaderd, all", "loaderd_tfdata", every)]
    return found


def first_pass_s(config: Config) -> float:
    """How long it takes until a loader is there that has no index yet."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        loaderd.Loader(**config.loader_options(), index_cache=folder).close()
        return time.monotonic() - began_s


def main() -> None:
    parser = question_of(__doc__)
    parser.add_argument("--all", action=argparse.BooleanOptionalAction, default=True, help="without the filter, too")
    options = parser.parse_args()
    found = cases(options)
    tenth = found[1].config
    every = replace(tenth, one_in=None)
    loaderd.Loader(**tenth.loader_options()).close()
    passes = [(first_pass_s(every), first_pass_s(tenth)) for _ in range(options.rounds)]
    runs = measure(found, options, console_of())
    without, with_filter = (median(column) for column in zip(*passes, strict=True))
    notes = [
        f"first pass over {options.records:,} records: {without:.2f} s, and {with_filter:.2f} s with the filter, "
        f"{with_filter / without:.2f} times as long"
    ]
    answer("filter", found, runs, notes, options)


if __name__ == "__main__":
    main()
