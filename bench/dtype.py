"""What does the dtype of the fields do?

::

    python bench/dtype.py

Batches of the chess records, consumed in Python: the bits as float32, float16, bfloat16, int8 and bool, and packed as
they are stored (the model unpacks them). bool has no sign, so there no channel turns its own.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from harness.interface import Config
from harness.questions import Case, answer, console_of, measure, middle, question_of, shards_of
from harness.reference import chess

from loaderd import Bits, Schema

DTYPES = ["float32", "float16", "bfloat16", "int8", "bool", "packed"]


def without_signs(dtype: str) -> Schema:
    """The chess schema, but no channel turns its sign."""
    signed = chess("float32")
    fields = {
        name: replace(field, scale=None, dtype=dtype) if isinstance(field, Bits) else field
        for name, field in signed.fields.items()
    }
    return Schema(signed.features, fields, signed.intermediates)


def cases(options: argparse.Namespace) -> list[Case]:
    base = Config(shards_of(options), workers=options.workers)
    configs = {
        "bool": replace(base, dtype="bool", schema="dtype:without_signs"),
        "packed": replace(base, packed=True),
    }
    return [Case(dtype, "loaderd_python", configs.get(dtype, replace(base, dtype=dtype))) for dtype in options.dtypes]


def main() -> None:
    parser = question_of(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    options = parser.parse_args()
    found = cases(options)
    runs = measure(found, options, console_of())
    notes = []
    for case in found:
        record_bytes = case.config.delivered().record_bytes
        rate = middle(runs, case.label, "examples_per_s")
        notes.append(f"{case.label}: {record_bytes:,} bytes an example, {record_bytes * rate / 1e9:.2f} GB/s")
    answer("dtype", found, runs, notes, options)


if __name__ == "__main__":
    main()
