"""``loaderd convert``: shards of any kind to shards of another kind."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loaderd.cli.parallel_scan import add_names, count, names_in, read_all, say
from loaderd.convert.conversion import convert
from loaderd.convert.shard_job import FinishedShard, ShardJob
from loaderd.convert.shard_writers import COMPRESSIONS
from loaderd.convert.work_units import WorkUnit, plan_units
from loaderd.errors import (
    Damage,
    LoaderdError,
    NoShardsError,
    OptionError,
    ShardError,
    ShardFormatError,
    StorageError,
)
from loaderd.formats.detect import detect_records
from loaderd.formats.indexer import find_indexes
from loaderd.formats.shard_index import ShardIndex
from loaderd.machine import usable_cores
from loaderd.options import DEFAULT_BLOCK_RECORDS, as_count
from loaderd.progress import ProgressDisplay
from loaderd.redaction import readable_line
from loaderd.schema import Feature, FixedRecords, Schema
from loaderd.schema.schema import with_lengths
from loaderd.schemas.named import SCHEMA_HELP, load_schema
from loaderd.snapshots import Progress
from loaderd.storage.files import list_with_progress
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Convert shards that loaderd reads (TFRecord, records of a fixed size, tars of these, npz, npy, Parquet, Arrow) to
TFRecord shards of tf.train.Examples with the schema's stored features, to npz, or to records of a fixed size. Each
shard is written under a temporary name, read back, compared, and renamed. The same command, run again after it was
killed, goes on where it was. The exit status is 0; 1 if records are damaged or do not fit the schema; 2 for wrong
arguments, a source that is a file of another kind, no records, or storage that does not answer or is full.
"""
_EXAMPLE = "example: loaderd convert 'shards/*.tfrecord' --schema chess_eval --to compressed --compression gzip"
_SHARD_BYTES = 128 << 20
_MOST_NAMED = 10


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("convert", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    add_names(parser, "SOURCES", "paths, globs in quotes, or URIs")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder for the new shards")
    parser.add_argument(
        "--schema",
        metavar="MODULE:NAME",
        help=f"its stored features are written: {SCHEMA_HELP}; not needed for the files of Leela Chess Zero and "
        "KataGo, which are recognized",
    )
    parser.add_argument(
        "--on-corrupt",
        choices=["raise", "skip_record"],
        default="raise",
        help="at a record that is damaged or does not fit the schema: end with an error, or leave it out; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--processes", dest="threads", type=int, metavar="N", help="default: as many as there are cores"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line: for each damage, each shard, and the total"
    )
    new = parser.add_argument_group("new shards")
    new.add_argument("--format", choices=list(COMPRESSIONS), default="tfrecord", help="default: %(default)s")
    new.add_argument("--compression", choices=["none", "gzip", "zlib"], default="none", help="default: %(default)s")
    new.add_argument(
        "--records-per-shard", type=int, metavar="N", help="default: as many as take 128 MiB uncompressed"
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 1 if records are damaged or do not fit; 2 if the conversion cannot be done."""
    try:
        return _convert(arguments)
    except (NoShardsError, ShardFormatError, StorageError, OptionError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ShardError as error:
        _say_damages(error.damages, arguments.json)
        sys.stderr.write(f"{error}\n")
        return 1
    except (LoaderdError, OSError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename:
            why = f"{readable_line(str(error.filename))} cannot be written: {error.strerror}"
        sys.stderr.write(f"{why}\nFinished shards stay: the same command goes on with the others.\n")
        return 2


def _convert(arguments: argparse.Namespace) -> int:
    began_s = time.monotonic()
    processes = as_count(usable_cores() if arguments.threads is None else arguments.threads, "--processes")
    if arguments.compression not in COMPRESSIONS[arguments.format]:
        known = ", ".join(COMPRESSIONS[arguments.format])
        raise OptionError(f"--compression of {arguments.format} must be one of {known}, got {arguments.compression}")
    folder = _folder(arguments.to)
    with closing(ProgressDisplay(None)) as display:
        files = list_with_progress(names_in(arguments), display)
        features = _features(arguments.schema, files)
        indexes = _indexes(arguments, features, display)
    damages = [damage for index in indexes for damage in index.damages]
    if damages and arguments.on_corrupt == "raise":
        raise _damaged(damages, len(indexes))
    _say_damages(damages, arguments.json)
    unreadable = [index.error for index in indexes if index.error is not None]
    _say_unreadable(unreadable, len(indexes))
    units = _plan(indexes, features, arguments.records_per_shard)
    job = ShardJob(
        tuple(index.file for index in indexes),
        tuple(index.compression for index in indexes),
        features,
        folder,
        sum(len(unit.sizes) for unit in units),
        arguments.format,
        arguments.compression,
        arguments.on_corrupt != "raise",
    )
    shards = _write(job, units, processes, arguments.json)
    if not any(shard.records for shard in shards):
        sys.stderr.write("No record is left: all are damaged, or do not fit the schema.\n")
        return 2
    _say_total(shards, len(damages) - len(unreadable), len(unreadable), time.monotonic() - began_s, arguments)
    return 0


def _plan(indexes: Sequence[ShardIndex], features: Mapping[str, Feature], wanted: int | None) -> list[WorkUnit]:
    """``wanted``: how many records a shard gets, if the user says so."""
    if wanted is None:
        wanted = max(1, _SHARD_BYTES // Schema.of_stored(features).row_bytes)
    units = list(plan_units(indexes, as_count(wanted, "--records-per-shard")))
    if not units:
        raise NoShardsError(
            f"no healthy record in {count(len(indexes), 'source')}", hint="loaderd verify names the damage."
        )
    return units


def _write(job: ShardJob, units: Sequence[WorkUnit], processes: int, as_json: bool) -> list[FinishedShard]:
    finished: list[FinishedShard] = []
    row_bytes = Schema.of_stored(job.features).row_bytes
    num_bytes = sum(unit.num_records for unit in units) * row_bytes

    def progress() -> Progress:
        done_bytes = sum(shard.records + shard.left_out for shard in finished) * row_bytes
        return Progress("converting shards", len(finished), job.num_shards, done_bytes, num_bytes)

    with closing(ProgressDisplay(None)) as display, display.repeating(progress):
        for shard in convert(job, units, processes):
            finished.append(shard)
            if as_json:
                say(json.dumps({"kind": "shard", **asdict(shard)}))
    return finished


def _folder(to: Path) -> Path:
    try:
        return to.expanduser().resolve()
    except RuntimeError as error:  # a user whom nobody knows, or links in a circle
        raise OptionError(f"--to {to} is no folder: {error}") from None


def _features(schema: str | None, files: Sequence[ShardFile]) -> Mapping[str, Feature]:
    """The stored features of the sources: FixedRecords; or, of TFRecord, a dict, with the lengths of lists."""
    if schema is not None:
        features = load_schema(schema).features
        return features if isinstance(features, FixedRecords) else with_lengths(features)
    first = next((file for file in files if file.size_bytes), files[0])  # an empty one does not tell what it is
    records = detect_records(first)
    if records is None:
        raise OptionError(
            f"--schema is needed, as the content of {first.name} does not show what its records are",
            hint="`loaderd inspect SHARD --features` proposes one.",
        )
    return records


def _indexes(
    arguments: argparse.Namespace, features: Mapping[str, Feature], display: ProgressDisplay
) -> list[ShardIndex]:
    records = features if isinstance(features, FixedRecords) else None
    find = partial(find_indexes, "user", DEFAULT_BLOCK_RECORDS, records)
    indexes = []
    for found in read_all(arguments, "reading the sources", find, display):
        if isinstance(found.index.error, ShardFormatError):
            raise found.index.error
        indexes.append(found.index)
    return indexes


def _damaged(damages: Sequence[Damage], num_files: int) -> ShardError:
    named = "".join(f"\n  {damage}" for damage in damages[:_MOST_NAMED])
    return ShardError(
        f"{count(len(damages), 'damage')} in {count(num_files, 'source')}, so nothing is written:{named}",
        hint="Restore the files, or pass --on-corrupt skip_record to leave out what is damaged.",
        damages=tuple(damages),
    )


# ---------------------------------------------------------------------------------------------- the report


def _say_damages(damages: Sequence[Damage], as_json: bool) -> None:
    for damage in damages if as_json else ():
        say(json.dumps({"kind": "damage", **damage.to_wire()}))


def _say_unreadable(errors: Sequence[LoaderdError], num_files: int) -> None:
    if errors:
        named = "".join(f"\n  {error.message}" for error in errors[:_MOST_NAMED])
        sys.stderr.write(f"{len(errors)} of {count(num_files, 'source')} cannot be read, and left out:{named}\n")


def _say_total(
    shards: list[FinishedShard], damages: int, unreadable: int, seconds: float, arguments: argparse.Namespace
) -> None:
    total = {
        "shards": sum(shard.records > 0 for shard in shards),
        "were_there": sum(shard.was_there for shard in shards),
        "records": sum(shard.records for shard in shards),
        "bytes": sum(shard.num_bytes for shard in shards),
        "left_out": damages + sum(shard.left_out for shard in shards),
        "sources_left_out": unreadable,
    }
    if arguments.json:
        say(json.dumps({"kind": "total", **total, "seconds": seconds}))
        return
    say(f"{count(total['shards'], 'shard')}, {count(total['records'], 'record')}, {total['bytes']:,} bytes: verified")
    if total["were_there"]:
        say(f"{total['were_there']:,} of these shards were there already")
    if total["left_out"]:
        say(f"{count(total['left_out'], 'record')} left out: damaged, or do not fit the schema")
    say(f"{seconds:.1f} s, {arguments.to}/")
