"""``loaderd inspect``: what is in a shard: its records, their features, and what a schema makes of one."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderd.cli.proposal import propose
from loaderd.cli.reading import count, say
from loaderd.cli.sample import FeatureSummary, Sample, find_record, take_sample
from loaderd.cli.schemas import load_schema
from loaderd.client.progress import IndexProgress
from loaderd.decode.batch_decoder import BatchDecoder
from loaderd.decode.example import Listed, RecordFault, list_features
from loaderd.decode.example_rows import RowParser
from loaderd.errors import LoaderdError, OptionError, RecordMismatchError
from loaderd.grids import Values, draw, picture, planes_of, png, stacked
from loaderd.options import DEFAULT_BLOCK_RECORDS, as_count
from loaderd.redaction import redacted
from loaderd.schema import Schema
from loaderd.shards.files import list_shards
from loaderd.shards.index_cache import IndexCache
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import ShardIndex, build_index

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
What is in a shard: compression, records, sizes, and the features of the first records; with --record, the values of
one; with --schema, what a loader would deliver for it, and planes such as those of a board drawn as grids: ■ above 0,
□ below 0. The exit status is 0, or 2 where that cannot be shown.
"""
_EXAMPLE = (
    "example: loaderd inspect shards/00000.tfrecord --schema loaderd.schemas:chess_eval --record 7 --png board.png"
)
_SHOWN_VALUES = 8
_SHOWN_BYTES = 24


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("inspect", help="what is in a shard", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    parser.add_argument("shards", metavar="SHARD", nargs="+", help="a path or a URI; of several, the first is shown")
    parser.add_argument(
        "--record", type=int, metavar="N", help="the record to show, from 0; default: 0, with --schema"
    )
    parser.add_argument("--schema", metavar="MODULE:NAME", help="a loaderd.Schema, or a function that returns one")
    parser.add_argument(
        "--features", action="store_true", help="print a schema for these records, as a Python module"
    )
    parser.add_argument(
        "--sample", type=int, default=1000, metavar="N", help="records to look at; default: %(default)s"
    )
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw the planes of the record there, six in a row; needs --schema",
    )
    parser.add_argument("--json", action="store_true", help="all of it, as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 2 where it cannot be shown."""
    try:
        if arguments.png is not None and arguments.schema is None:
            raise OptionError("--png needs --schema, which says what the planes are")
        file = list_shards(arguments.shards[0])[0]
        if arguments.features:
            sys.stdout.write(propose(take_sample(file, as_count(arguments.sample, "--sample"))))
        elif arguments.record is not None or arguments.schema is not None:
            _show_record(file, arguments)
        else:
            _show_shard(file, arguments)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


# ---------------------------------------------------------------------------------------------- the shard


def _show_shard(file: ShardFile, arguments: argparse.Namespace) -> None:
    sample = take_sample(file, as_count(arguments.sample, "--sample"))
    index = _index_of(file)
    about: dict[str, Any] = {
        "shard": redacted(file.uri),
        "bytes": file.size_bytes,
        "compression": index.compression,
        "records": index.num_records,
        "damages": [damage.to_wire() for damage in index.damages],
        "sample": {
            "records": len(sample.sizes),
            "record_bytes": [min(sample.sizes, default=0), max(sample.sizes, default=0)],
            "no_examples": [number for number, _ in sample.faults],
        },
        "features": {name: _summary(found) for name, found in sample.features.items()},
    }
    if arguments.json:
        say(json.dumps(about))
        return
    records = count(index.num_records, "healthy record")
    say(f"{about['shard']}: {records}, {file.size_bytes:,} bytes, compression {index.compression}")
    if index.damages:
        say(f"{count(len(index.damages), 'damage')}, the first: {index.damages[0]}")
    low, high = about["sample"]["record_bytes"]
    say(f"The first {count(len(sample.sizes), 'record')}: {_range(low, high)} bytes each")
    for number, fault in sample.faults[:1]:
        say(f"{len(sample.faults)} are no tf.train.Example, the first is record {number}: {fault.found}")
    _show_features(sample)


def _index_of(file: ShardFile) -> ShardIndex:
    """The kept index, or one that is made now."""
    progress = IndexProgress(None, "reading the shard")
    try:
        return IndexCache("user", DEFAULT_BLOCK_RECORDS).load(file) or build_index(
            file, DEFAULT_BLOCK_RECORDS, lambda offset: progress(offset, file.size_bytes)
        )
    finally:
        progress.close()


def _show_features(sample: Sample) -> None:
    rows = [("feature", "type", "values", "bytes of each", "in records")]
    for name, found in sample.features.items():
        sizes = _range(min(found.byte_lengths), max(found.byte_lengths)) if found.byte_lengths else ""
        values = _range(min(found.lengths), max(found.lengths))
        rows.append(
            (name, "/".join(sorted(found.kinds)), values, sizes, f"{found.records:,} of {len(sample.sizes):,}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _summary(found: FeatureSummary) -> dict[str, Any]:
    return {
        "types": sorted(found.kinds),
        "records": found.records,
        "values": [min(found.lengths), max(found.lengths)],
        "bytes": [min(found.byte_lengths), max(found.byte_lengths)] if found.byte_lengths else None,
    }


# ---------------------------------------------------------------------------------------------- a record


def _show_record(file: ShardFile, arguments: argparse.Namespace) -> None:
    number = as_count(arguments.record or 0, "--record", "an integer from 0 on", 0)
    record = find_record(file, number)
    features = list_features(record)
    if isinstance(features, RecordFault):
        raise _mismatch(file, number, features)
    fields = {} if arguments.schema is None else decode(file, number, record, load_schema(arguments.schema))
    if arguments.png is not None:
        _write_png(fields, arguments.png)
    if arguments.json:
        stored = {name: [_plain(value) for value in listed.values] for name, listed in features.items()}
        decoded = {name: _plain_array(value) for name, value in fields.items()}
        about = {"shard": redacted(file.uri), "record": number, "bytes": len(record)}
        say(json.dumps({**about, "features": stored, "fields": decoded}))
        return
    say(f"{redacted(file.uri)}: record {number}, {len(record):,} bytes")
    for name, listed in features.items():
        say(f"  {name}: {_listed(listed)}")
    for name, value in fields.items():
        say(f"\n{name}: {value.dtype} {value.shape}")
        found = planes_of(value)
        shown = np.array2string(value, threshold=100) if found is None else draw(found, _terminal_width())
        say(shown)


def _write_png(fields: Mapping[str, Values], path: Path) -> None:
    """A picture of the planes of all fields. Raises OptionError."""
    pictures = [picture(found) for value in fields.values() if (found := planes_of(value)) is not None]
    if not pictures:
        raise OptionError("--png needs a field with planes, of two or three axes, and the schema has none")
    try:
        path.write_bytes(png(stacked(pictures)))
    except OSError as error:
        raise OptionError(f"--png {path} cannot be written: {error}") from None


def decode(file: ShardFile, number: int, record: bytes, schema: Schema) -> dict[str, Values]:
    """What a loader delivers for a record, field by field; random fields draw from a fixed seed of their own.

    Raises RecordMismatchError where the record is not what the schema says, and WorkerError.
    """
    rows = np.zeros((1, schema.row_bytes), np.uint8)
    place = np.zeros(1, np.intp)
    buffer, starts, lengths = np.frombuffer(record, np.uint8), np.zeros(1, np.int64), np.array([len(record)])
    for fault in RowParser(schema).parse(buffer, starts, lengths, rows, place):
        raise _mismatch(file, number, fault)
    out = {name: np.empty((1, *spec.shape), spec.dtype) for name, spec in schema.specs.items()}
    BatchDecoder(schema).decode(rows, out)
    return {name: values[0, ...] for name, values in out.items()}


def _mismatch(file: ShardFile, number: int, fault: RecordFault) -> RecordMismatchError:
    text = f"{file.uri}: record {number}: expected {fault.expected}, found {fault.found}"
    return RecordMismatchError(
        text, hint="Without --record and --schema, loaderd inspect says what the features are."
    )


def _listed(listed: Listed) -> str:
    shown = [_text(value) for value in listed.values[:_SHOWN_VALUES]]
    more = f", … {len(listed.values):,} values" if len(listed.values) > _SHOWN_VALUES else ""
    return f"{listed.kind} {', '.join(shown)}{more}"


def _text(value: bytes | float | int) -> str:
    if not isinstance(value, bytes):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    more = f"… {len(value):,} bytes" if len(value) > _SHOWN_BYTES else ""
    return f"{value[:_SHOWN_BYTES].hex(' ')}{more}"


def _plain(value: bytes | float | int) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _plain_array(value: Values) -> Any:
    if value.dtype.kind == "S":
        return np.char.decode(value, errors="backslashreplace").tolist()
    return value.astype(np.float32).tolist() if value.dtype.kind == "V" else value.tolist()


def _terminal_width() -> int:
    return shutil.get_terminal_size((120, 24)).columns
