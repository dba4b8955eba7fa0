"""``loaderd inspect``: the records of a shard, their features, and what a schema makes of one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderd.cli.left_out import IF_NO_TFRECORD, notes_on
from loaderd.cli.parallel_scan import add_names, count, names_in, say
from loaderd.cli.proposal import propose
from loaderd.cli.record_view import decode, listed_text, mismatch, plain, plain_array, show_fields, write_png
from loaderd.cli.sample import Sample, range_of, sample_shards
from loaderd.cli.stored_records import (
    StoredFormat,
    count_kinds,
    joined,
    kind_of,
    list_values,
    read_record,
    stored_in,
    stored_of,
)
from loaderd.cli.verify import say_values, values_in
from loaderd.decode.example import RecordFault, list_features
from loaderd.errors import LoaderdError, OptionError
from loaderd.formats.compression import OnRead
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.indexer import make_indexes
from loaderd.formats.shard_index import ShardIndex
from loaderd.options import DEFAULT_BLOCK_RECORDS, as_count
from loaderd.progress import ProgressDisplay
from loaderd.redaction import readable_line, redacted
from loaderd.schema import FixedRecords, Schema
from loaderd.schema.record_values import RecordValues
from loaderd.schemas.named import SCHEMA_HELP, WHERE_HELP, load_schema, values_of
from loaderd.snapshots import Progress
from loaderd.storage.files import list_with_progress
from loaderd.storage.names import Columns
from loaderd.storage.shard_file import ShardFile
from loaderd.worker.value_pass import ValuePass

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Show what is in a shard: its compression, its records and their sizes, and the features of the first ones. With
--record, show the values of one; with --schema too, what a loader would deliver for it, with planes such as a board's
drawn as grids: ■ above 0, □ below 0. For records of a fixed size, --schema says what they are; npz, npy, Parquet,
Arrow, the files of Leela Chess Zero, KataGo and Ceres, and boards of NNUE trainers and of shogi are recognized. The
exit status is 0, or 2 if that cannot be shown.
"""
_EXAMPLE = "example: loaderd inspect shards/00000.tfrecord --schema chess_eval --record 7 --png board.png"


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("inspect", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    add_names(
        parser, "SHARD", "a path or a URI; of several, the first is shown, but --features looks into all of them"
    )
    parser.add_argument(
        "--record",
        type=int,
        metavar="N",
        help="the number of the record to show, from 0; default with --schema: the first healthy one",
    )
    parser.add_argument("--schema", metavar="MODULE:NAME", help=SCHEMA_HELP)
    parser.add_argument("--where", metavar="MODULE:NAME", help=f"say how many records pass it: {WHERE_HELP}")
    parser.add_argument(
        "--features", action="store_true", help="print a schema for the records of all SHARDs, as a Python module"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=1000,
        metavar="N",
        help="how many of the first records to look at, of all shards together; default: %(default)s",
    )
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw the planes of the record to this file, six in a row; needs --schema",
    )
    parser.add_argument("--json", action="store_true", help="all of it, as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 2 if what is asked for cannot be shown."""
    try:
        with closing(ProgressDisplay(None)) as display:
            _run(arguments, display)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _run(arguments: argparse.Namespace, display: ProgressDisplay) -> None:
    if arguments.features:
        if arguments.schema is not None:
            raise OptionError("--features proposes a schema, so it does not go with --schema")
        _propose(list_with_progress(names_in(arguments), display), arguments, display)
        return
    names = names_in(arguments)
    file, *others = list_with_progress(names if isinstance(names, Columns) else names[0], display)

    def on_read(offset: int) -> None:
        display(Progress("reading the shard", done_bytes=offset, num_bytes=file.size_bytes))

    schema = None if arguments.schema is None else load_schema(arguments.schema)
    stored = stored_in(file) if schema is None else stored_of(schema, arguments.schema)
    records = None if stored is None else stored.records
    values = None if arguments.where is None else values_of(schema, arguments.where)
    index = _index_of(file, records, values, on_read)
    about: dict[str, Any] = {
        "shard": redacted(file.uri),
        "bytes": file.size_bytes,
        "compression": index.compression,
        "records": index.num_records,
        "damages": [damage.to_wire() for damage in index.damages],
    }
    about.update(values_in(values, index.num_passing, index.total_weight))
    if not arguments.json:
        if others or (not isinstance(names, Columns) and len(names) > 1):
            say("Of several shards, the first:")
        _say_shard(about, index)
        if values is not None:
            say_values(values, index.num_passing, index.total_weight, count(index.num_records, "record"))
    if stored is not None:
        _show_format(about, file, index, stored, arguments)
        schema = stored.schema
    wants_record = (arguments.schema, arguments.record, arguments.png) != (None, None, None)
    if wants_record:
        _show_record(about, file, index, records, schema, arguments)
    elif stored is None:
        sample = Sample()
        sample.add(file, as_count(arguments.sample, "--sample"), on_read)
        _show_sample(about, sample, arguments)
    if arguments.json:
        say(json.dumps(about))


def _index_of(
    file: ShardFile, records: FixedRecords | None, values: RecordValues | None, on_read: OnRead
) -> ShardIndex:
    """The index of a shard, with values of its records if there are any. Raises ShardReadError."""
    if values is None and (kept := IndexCache("user", DEFAULT_BLOCK_RECORDS, records).load(file)):
        return kept[0]
    sink = None if values is None else ValuePass(values)
    (index,) = make_indexes([file], records, DEFAULT_BLOCK_RECORDS, on_read, values=sink)
    if index.error is not None:
        raise index.error
    return index


def _propose(files: Sequence[ShardFile], arguments: argparse.Namespace, display: ProgressDisplay) -> None:
    """Print a schema for the records of all shards; the first one that is not empty says of which kind they are."""
    num_records = as_count(arguments.sample, "--sample")
    files = [file for file in files if file.size_bytes] or files
    stored = stored_in(files[0])
    if stored is None:
        say(propose(sample_shards(files, num_records, display), len(files)).rstrip("\n"))
        return
    text = [f'"""A schema proposed by loaderd."""\n\n# From {files[0].name!a}.']
    for done, file in enumerate(files):
        display(Progress("looking into shards", done, len(files)))
        found = stored_in(file)
        both = None if found is None else joined(stored, found)
        if both is not None:
            stored = both
        else:
            kind = "TFRecord, or of a kind that is not recognized" if found is None else found.named
            text.append(f"# {file.name!a} is of another kind: {readable_line(kind)}.")
    say("\n".join([*text, stored.python]).rstrip("\n"))


# ---------------------------------------------------------------------------------------------- the shard


def _say_shard(about: dict[str, Any], index: ShardIndex) -> None:
    records, num_bytes = count(index.num_records, "healthy record"), about["bytes"]
    say(f"{readable_line(about['shard'])}: {records}, {num_bytes:,} bytes, compression {index.compression}")
    if index.damages:
        say(f"{count(len(index.damages), 'damage')}, the first: {index.damages[0]}")


def _show_format(
    about: dict[str, Any], file: ShardFile, index: ShardIndex, stored: StoredFormat, arguments: argparse.Namespace
) -> None:
    """What is known of records of a fixed size."""
    records = stored.records
    by_size, refused = {records.record_bytes: index.num_records}, dict[str, int]()
    if records.sizes is not None:
        by_size, refused = count_kinds(file, index, records)
    kinds = {name: kind_of(records, name) for name in records}
    about |= {
        "record_bytes": max(by_size, default=records.record_bytes),
        "schema": stored.named,
        "blocks": index.counts.tolist(),
        "features": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in kinds.items()},
        "left_out": dict(stored.left_out),
    }
    if records.sizes is not None:
        about["records_by_bytes"], about["refused"] = by_size, refused
    if arguments.json:
        return
    say(f"Schema: {stored.named}; {_in_words(by_size, records)}")
    part = "member" if index.compression == "tar" else "block"
    for why, number in refused.items():
        say(f"{count(number, 'record')} in {part}s that begin with one that it refuses: {why}")
    if index.num_records:
        sizes = range_of(about["blocks"])
        say(f"{count(len(index.counts), part)} of {sizes} records")
    rows = [
        (name, f"{dtype}, bits" if name in records.bits else dtype, f"{shape}")
        for name, (dtype, shape) in kinds.items()
    ]
    _show_table([("feature", "type", "shape"), *rows])
    for name, why in stored.left_out.items():
        say(f"{readable_line(name)} is left out: {readable_line(why)}")


def _in_words(by_size: dict[int, int], records: FixedRecords) -> str:
    if records.sizes is None or not by_size:
        return f"{' or '.join(f'{size:,}' for size in records.all_sizes)} bytes a record"
    name, sizes = records.sizes
    values = {size: value for value, size in sizes.items()}
    return ", ".join(
        f"{count(number, 'record')} of {name} {values[size]} ({size:,} bytes)" for size, number in by_size.items()
    )


def _show_sample(about: dict[str, Any], sample: Sample, arguments: argparse.Namespace) -> None:
    """What the first records of a TFRecord shard are like."""
    num_records, sizes = len(sample.sizes), sample.sizes or [0]
    about["sample"] = {
        "records": num_records,
        "record_bytes": [min(sizes), max(sizes)],
        "no_examples": [number for number, _ in sample.faults],
    }
    about["features"] = {
        name: {
            "types": sorted(found.kinds),
            "records": found.records,
            "values": [min(found.lengths), max(found.lengths)],
            "bytes": [min(found.byte_lengths), max(found.byte_lengths)] if found.byte_lengths else None,
        }
        for name, found in sample.features.items()
    }
    if arguments.json:
        return
    if not num_records:
        say(IF_NO_TFRECORD)
        return
    say(f"The first {count(num_records, 'record')}: {range_of(sizes)} bytes each")
    rows = [("feature", "type", "values", "bytes of each", "in records")]
    for name, found in sample.features.items():
        num_bytes = range_of(found.byte_lengths) if found.byte_lengths else ""
        in_records = f"{found.records:,} of {num_records:,}"
        rows.append((name, "/".join(sorted(found.kinds)), range_of(found.lengths), num_bytes, in_records))
    _show_table(rows)
    for note in notes_on(sample):
        say(note)
    if sample.features:
        say("For a schema of these records: loaderd inspect SHARDS --features > records.py")


def _show_table(rows: Sequence[tuple[str, ...]]) -> None:
    rows = [tuple(map(readable_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


# ---------------------------------------------------------------------------------------------- a record


def _show_record(
    about: dict[str, Any],
    file: ShardFile,
    index: ShardIndex,
    records: FixedRecords | None,
    schema: Schema | None,
    arguments: argparse.Namespace,
) -> None:
    """The values of a record as they are stored, and what is delivered for it."""
    if arguments.png is not None and schema is None:
        raise OptionError("--png needs --schema, which says what the planes are")
    wanted = arguments.record
    if wanted is not None:
        wanted = as_count(wanted, "--record", "an integer from 0 on", 0)
    number, record = read_record(file, index, records, wanted)
    values = list_features(record) if records is None else list_values(records, record)
    if isinstance(values, RecordFault):
        raise mismatch(file, number, values)
    decoded = {} if schema is None else next(decode([(file, number, record)], schema, 1))
    fields = {name: values[0, ...] for name, values in decoded.items()}
    if arguments.png is not None:
        write_png(fields, arguments.png)
    about |= {
        "record": number,
        "values": {name: [plain(value) for value in listed.values] for name, listed in values.items()},
        "fields": {name: plain_array(value) for name, value in fields.items()},
    }
    if not arguments.json:
        say(f"Record {number}, {len(record):,} bytes")
        for name, listed in values.items():
            say(f"  {readable_line(name)}: {listed_text(listed)}")
        show_fields(fields)
