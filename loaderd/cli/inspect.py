"""``loaderd inspect``: the records of a shard, their features, and what a schema makes of one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderd.cli.fixed_shard import (
    WRAPPED,
    StoredFormat,
    kind_of,
    list_values,
    record_of,
    skipped_members,
    stored_in,
    stored_of,
)
from loaderd.cli.parallel_scan import count, say
from loaderd.cli.proposal import propose
from loaderd.cli.record_view import decode, listed_text, mismatch, plain, plain_array, show_fields, write_png
from loaderd.cli.sample import FeatureSummary, Sample, find_record, range_of, sample_shards, take_sample
from loaderd.decode.example import Listed, RecordFault, list_features
from loaderd.errors import LoaderdError, OptionError
from loaderd.formats.compression import OnRead
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.indexer import make_index
from loaderd.formats.shard_index import ShardIndex
from loaderd.options import DEFAULT_BLOCK_RECORDS, as_count
from loaderd.progress import ProgressDisplay
from loaderd.redaction import readable_line, redacted
from loaderd.schema import FixedRecords, Schema
from loaderd.schema.grids import Values
from loaderd.schemas.named import SCHEMA_HELP, load_schema
from loaderd.snapshots import Progress
from loaderd.storage.files import list_with_progress
from loaderd.storage.names import some_of
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Show what is in a shard: its compression, its records and their sizes, and the features of the first ones. With
--record, show the values of one; with --schema too, what a loader would deliver for it, with planes such as a board's
drawn as grids: ■ above 0, □ below 0. For records of a fixed size, --schema says what they are; npz and the files of
Leela Chess Zero and KataGo are recognized. The exit status is 0, or 2 if that cannot be shown.
"""
_EXAMPLE = "example: loaderd inspect shards/00000.tfrecord --schema chess_eval --record 7 --png board.png"


_PNG_NEEDS_SCHEMA = "--png needs --schema, which says what the planes are"
_SHOWN_NAMES = 5


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("inspect", help="show what is in a shard", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    parser.add_argument(
        "shards",
        metavar="SHARD",
        nargs="+",
        help="a path or a URI; of several, the first is shown, but --features looks into all of them",
    )
    parser.add_argument(
        "--record",
        type=int,
        metavar="N",
        help="the number of the record to show, from 0; default with --schema: the first healthy one",
    )
    parser.add_argument("--schema", metavar="MODULE:NAME", help=SCHEMA_HELP)
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
    with closing(ProgressDisplay(None)) as display:
        return _run(arguments, display)


def _run(arguments: argparse.Namespace, display: ProgressDisplay) -> int:
    try:
        if arguments.features and arguments.schema is None:
            _propose(list_with_progress(arguments.shards, display), arguments, display)
            return 0
        file = list_with_progress(arguments.shards[0], display)[0]

        def on_read(offset: int) -> None:
            display(Progress("reading the shard", done_bytes=offset, num_bytes=file.size_bytes))

        schema = None if arguments.schema is None else load_schema(arguments.schema)
        stored = stored_in(file) if schema is None else stored_of(schema, arguments.schema)
        if stored is not None:
            _show_fixed(file, arguments, stored, on_read)
        elif arguments.record is not None or schema is not None:
            _show_record(file, arguments, schema, on_read)
        elif arguments.png is not None:
            raise OptionError(_PNG_NEEDS_SCHEMA)
        else:
            _show_shard(file, arguments, on_read)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _propose(files: Sequence[ShardFile], arguments: argparse.Namespace, display: ProgressDisplay) -> None:
    """Print a schema for the records of all shards; the first one that is not empty says of which kind they are."""
    num_records = as_count(arguments.sample, "--sample")
    first = next((file for file in files if file.size_bytes), files[0])
    stored = stored_in(first)
    if stored is None:
        say(propose(sample_shards(files, num_records, display)).rstrip("\n"))
        return
    others = []
    for done, file in enumerate(files):
        display(Progress("looking into shards", done, len(files)))
        if file.size_bytes and (found := stored_in(file)) != stored:
            what = "TFRecord, or of a kind that is not recognized" if found is None else found.named
            others.append(f"# {file.name!a} is of another kind: {readable_line(what)}.")
    text = [f'"""A schema proposed by loaderd."""\n\n# From {first.name!a}.', *others, stored.python]
    say("\n".join(text).rstrip("\n"))


# ---------------------------------------------------------------------------------------------- the shard


def _show_shard(file: ShardFile, arguments: argparse.Namespace, on_read: OnRead) -> None:
    sample = take_sample(file, as_count(arguments.sample, "--sample"), on_read)
    index = _index_of(file, None, on_read)
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
    say(f"{readable_line(file.uri)}: {records}, {file.size_bytes:,} bytes, compression {index.compression}")
    if index.damages:
        say(f"{count(len(index.damages), 'damage')}, the first: {index.damages[0]}")
    if not index.num_records and not sample.sizes:
        say("If this is no TFRecord file: --schema says what records of a fixed size are.")
        return
    low, high = about["sample"]["record_bytes"]
    say(f"The first {count(len(sample.sizes), 'record')}: {range_of((low, high))} bytes each")
    for number, fault in sample.faults[:1]:
        found = readable_line(fault.found)
        say(f"{len(sample.faults)} of them are no tf.train.Example; the first is record {number}: {found}")
    _show_features(sample)


def _index_of(file: ShardFile, records: FixedRecords | None, on_read: OnRead) -> ShardIndex:
    """The index that was kept, or one that is made now."""
    if kept := IndexCache("user", DEFAULT_BLOCK_RECORDS, records).load(file):
        return kept[0]
    return make_index(file, records, DEFAULT_BLOCK_RECORDS, on_read)


def _show_features(sample: Sample) -> None:
    rows = [("feature", "type", "values", "bytes of each", "in records")]
    for name, found in sample.features.items():
        sizes = range_of(found.byte_lengths) if found.byte_lengths else ""
        values = range_of(found.lengths)
        rows.append(
            (name, "/".join(sorted(found.kinds)), values, sizes, f"{found.records:,} of {len(sample.sizes):,}")
        )
    _show_table(rows)


def _show_table(rows: Sequence[tuple[str, ...]]) -> None:
    rows = [tuple(map(readable_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _summary(found: FeatureSummary) -> dict[str, Any]:
    return {
        "types": sorted(found.kinds),
        "records": found.records,
        "values": [min(found.lengths), max(found.lengths)],
        "bytes": [min(found.byte_lengths), max(found.byte_lengths)] if found.byte_lengths else None,
    }


# ------------------------------------------------------------------------------------ records of a fixed size


def _show_fixed(file: ShardFile, arguments: argparse.Namespace, stored: StoredFormat, on_read: OnRead) -> None:
    if arguments.features:
        raise OptionError("--features proposes a schema, so it does not go with --schema")
    records = stored.records
    index = _index_of(file, records, on_read)
    about: dict[str, Any] = {
        "shard": redacted(file.uri),
        "bytes": file.size_bytes,
        "compression": index.compression,
        "records": index.num_records,
        "record_bytes": records.record_bytes,
        "schema": stored.named,
        "blocks": [int(count) for count in index.counts],
        "skipped": skipped_members(file, index),
        "damages": [damage.to_wire() for damage in index.damages],
        "features": {name: dict(zip(("dtype", "shape"), kind_of(records, name), strict=True)) for name in records},
        "record": None,
        "values": {},
        "fields": {},
    }
    number, values, fields = 0, dict[str, Listed](), dict[str, Values]()
    if index.num_records or arguments.record is not None or arguments.png is not None:
        number, record = record_of(file, index, records, _number(arguments))
        values = list_values(records, record)
        if stored.schema is not None and (arguments.schema, arguments.record, arguments.png) != (None, None, None):
            fields = decode(file, number, record, stored.schema)
        if arguments.png is not None:
            if stored.schema is None:
                raise OptionError(_PNG_NEEDS_SCHEMA)
            write_png(fields, arguments.png)
    if arguments.json:
        if values:
            about["record"] = number
        about["values"] = {name: [plain(value) for value in listed.values] for name, listed in values.items()}
        about["fields"] = {name: plain_array(value) for name, value in fields.items()}
        say(json.dumps(about))
        return
    _say_fixed(about, index)
    if values:
        _show_table([("feature", "type", "shape", f"record {number}"), *_feature_rows(records, values)])
    show_fields(fields)


def _say_fixed(about: dict[str, Any], index: ShardIndex) -> None:
    """Print what is in the shard, without its records."""
    records = count(index.num_records, "healthy record")
    wrapped = f"{WRAPPED[index.compression]} of {about['bytes']:,} bytes"
    say(f"{readable_line(about['shard'])}: {records} of {about['record_bytes']:,} bytes, {wrapped}")
    say(f"Schema: {about['schema']}")
    blocks = count(len(about["blocks"]), "member" if index.compression == "tar" else "block")
    low, high = min(about["blocks"], default=0), max(about["blocks"], default=0)
    sizes = count(high, "record") if low == high else f"{range_of((low, high))} records"
    skipped = some_of([readable_line(name) for name in about["skipped"]], _SHOWN_NAMES)
    say(f"{blocks} of {sizes}" + (f"; skipped: {skipped}" if skipped else ""))
    if index.damages:
        say(f"{count(len(index.damages), 'damage')}, the first: {index.damages[0]}")


def _feature_rows(records: FixedRecords, values: dict[str, Listed]) -> Iterator[tuple[str, ...]]:
    for name, listed in values.items():
        dtype, shape = kind_of(records, name)
        text = listed_text(listed).removeprefix(f"{listed.kind} ")
        yield name, f"{dtype}, bits" if name in records.bits else dtype, str(shape), text


# ---------------------------------------------------------------------------------------------- a record


def _number(arguments: argparse.Namespace) -> int | None:
    return None if arguments.record is None else as_count(arguments.record, "--record", "an integer from 0 on", 0)


def _show_record(file: ShardFile, arguments: argparse.Namespace, schema: Schema | None, on_read: OnRead) -> None:
    number, record = find_record(file, _number(arguments), on_read)
    features = list_features(record)
    if isinstance(features, RecordFault):
        raise mismatch(file, number, features)
    fields = {} if schema is None else decode(file, number, record, schema)
    if arguments.png is not None:
        write_png(fields, arguments.png)
    if arguments.json:
        stored = {name: [plain(value) for value in listed.values] for name, listed in features.items()}
        decoded = {name: plain_array(value) for name, value in fields.items()}
        about = {"shard": redacted(file.uri), "record": number, "bytes": len(record)}
        say(json.dumps({**about, "features": stored, "fields": decoded}))
        return
    say(f"{readable_line(file.uri)}: record {number}, {len(record):,} bytes")
    for name, listed in features.items():
        say(f"  {readable_line(name)}: {listed_text(listed)}")
    show_fields(fields)
