"""``loaderd convert``: shards of any kind to shards of another kind."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderd.cli.parallel_scan import count, read_all, say
from loaderd.convert.conversion import convert
from loaderd.convert.journal import FinishedShard
from loaderd.convert.shard_job import ShardJob
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
from loaderd.schema import FixedRecords, Schema
from loaderd.schemas.named import SCHEMA_HELP, load_schema
from loaderd.snapshots import Progress
from loaderd.storage.files import list_with_progress
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Convert shards that loaderd reads (TFRecord, records of a fixed size, tars of these, npz) to TFRecord shards of
tf.train.Examples with the schema's stored features, to npz, or to records of a fixed size. Each shard is written
under a temporary name, read back, compared, and renamed. The same command, run again after it was killed, goes on
where it was. The exit status is 0; 1 if records are damaged or do not fit the schema; 2 for wrong arguments, a source
that is a file of another kind, no records, or storage that does not answer or is full.
"""
_EXAMPLE = "example: loaderd convert 'games/*.tar' --to shards --compression gzip"
_SHARD_BYTES = 128 << 20
_MOST_NAMED = 10


@dataclass(frozen=True)
class _Plan:
    """What to convert: the sources and their units. ``damages``: of the sources; these records are left out."""

    files: list[ShardFile]
    indexes: list[ShardIndex]
    features: Any
    units: list[WorkUnit]
    damages: list[Damage]

    @property
    def unreadable(self) -> list[LoaderdError]:
        """Why sources are left out whole; each is one of ``damages``."""
        return [index.error for index in self.indexes if index.error is not None]


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "convert",
        help="convert shards to another format",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    parser.set_defaults(run=run)
    parser.add_argument("shards", nargs="+", metavar="SOURCES", help="paths, globs in quotes, or URIs")
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
    began_s = time.monotonic()
    try:
        found, plan = _convert(arguments)
    except (NoShardsError, ShardFormatError, StorageError, OptionError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ShardError as error:
        _tell_damages(error.damages, arguments.json)
        sys.stderr.write(f"{error}\n")
        return 1
    except (LoaderdError, OSError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename:
            why = f"{error.filename} cannot be written: {error.strerror}"
        sys.stderr.write(f"{why}\nFinished shards stay: the same command goes on with the others.\n")
        return 2
    if not any(written.records for written, _ in found):
        sys.stderr.write("No record is left: all are damaged, or do not fit the schema.\n")
        return 2
    _tell_total(found, plan, time.monotonic() - began_s, arguments)
    return 0


def _convert(arguments: argparse.Namespace) -> tuple[list[tuple[FinishedShard, bool]], _Plan]:
    """The shards, each with whether it was there before; and what they were made of."""
    processes = as_count(usable_cores() if arguments.threads is None else arguments.threads, "--processes")
    if arguments.compression not in COMPRESSIONS[arguments.format]:
        known = ", ".join(COMPRESSIONS[arguments.format])
        raise OptionError(f"--compression of {arguments.format} must be one of {known}, got {arguments.compression}")
    folder = _folder(arguments.to)
    display = ProgressDisplay(None)
    with closing(display):
        plan = _plan(arguments, display)
    _tell_damages(plan.damages, arguments.json)
    if plan.unreadable:
        named = "".join(f"\n  {error.message}" for error in plan.unreadable[:_MOST_NAMED])
        left_out = f"{len(plan.unreadable)} of {count(len(plan.files), 'source')}"
        sys.stderr.write(f"{left_out} cannot be read, and left out:{named}\n")
    task = ShardJob(
        tuple(plan.files),
        tuple(index.compression for index in plan.indexes),
        plan.features,
        folder,
        sum(len(unit.sizes) for unit in plan.units),
        arguments.format,
        arguments.compression,
        arguments.on_corrupt != "raise",
    )
    found: list[tuple[FinishedShard, bool]] = []

    def show(done_bytes: int, num_bytes: int) -> None:
        display(Progress("converting shards", len(found), len(plan.units), done_bytes, num_bytes))

    with closing(display):
        for written, was_there in convert(task, plan.units, processes, show):
            found.append((written, was_there))
            if arguments.json:
                say(json.dumps({"kind": "shard", **asdict(written), "was_there": was_there}))
    return found, plan


def _folder(to: Path) -> Path:
    try:
        return to.expanduser().resolve()
    except RuntimeError as error:  # a user whom nobody knows, or links in a circle
        raise OptionError(f"--to {to} is no folder: {error}") from None


# ---------------------------------------------------------------------------------------------- the plan


def _plan(arguments: argparse.Namespace, display: ProgressDisplay) -> _Plan:
    files = list_with_progress(arguments.shards, display)
    schema = None if arguments.schema is None else load_schema(arguments.schema)
    first = next((file for file in files if file.size_bytes), files[0])  # an empty one does not tell what it is
    features = _told(first) if schema is None else schema.features
    records = features if isinstance(features, FixedRecords) else None
    find = partial(find_indexes, "user", DEFAULT_BLOCK_RECORDS, records)
    indexes = []
    for one in read_all(arguments, "reading the sources", find, display):
        if isinstance(one.index.error, ShardFormatError):
            raise one.index.error
        indexes.append(one.index)
    damages = [damage for index in indexes for damage in index.damages]
    if damages and arguments.on_corrupt == "raise":
        raise _damaged(damages, len(indexes))
    default = max(1, _SHARD_BYTES // Schema.of_stored(features).row_bytes)
    wanted = arguments.records_per_shard
    units = list(plan_units(indexes, default if wanted is None else as_count(wanted, "--records-per-shard")))
    if not units:
        raise NoShardsError(
            f"no healthy record in {count(len(files), 'source')}", hint="loaderd verify names the damage."
        )
    return _Plan(
        [index.file for index in indexes], indexes, dict(features) if records is None else features, units, damages
    )


def _told(file: ShardFile) -> FixedRecords:
    records = detect_records(file)
    if records is None:
        raise OptionError(
            f"--schema is needed, as the content of {file.name} does not show what its records are",
            hint="For TFRecord shards, `loaderd inspect SHARD --features` proposes one.",
        )
    return records


def _damaged(damages: Sequence[Damage], num_files: int) -> ShardError:
    named = "".join(f"\n  {damage}" for damage in damages[:_MOST_NAMED])
    return ShardError(
        f"{count(len(damages), 'damage')} in {count(num_files, 'source')}, so nothing is written:{named}",
        hint="Restore the files, or pass --on-corrupt skip_record to leave out what is damaged.",
        damages=tuple(damages),
    )


# ---------------------------------------------------------------------------------------------- the report


def _tell_damages(damages: Sequence[Damage], as_json: bool) -> None:
    for damage in damages if as_json else ():
        say(json.dumps({"kind": "damage", **damage.to_wire()}))


def _tell_total(
    found: list[tuple[FinishedShard, bool]], plan: _Plan, seconds: float, arguments: argparse.Namespace
) -> None:
    every = [written for written, _ in found]
    total = {
        "shards": sum(written.records > 0 for written in every),
        "were_there": sum(was_there for _, was_there in found),
        "records": sum(written.records for written in every),
        "bytes": sum(written.num_bytes for written in every),
        "left_out": len(plan.damages) - len(plan.unreadable) + sum(written.left_out for written in every),
        "sources_left_out": len(plan.unreadable),
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
