"""``loaderd verify``: every record is read and checked, and every damage named with its place."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderd.cli.parallel_scan import add_shards, count, rate, read_all, say
from loaderd.errors import Damage, LoaderdError, RecordMismatchError, ShardFormatError, ShardReadError
from loaderd.formats.compression import OnRead
from loaderd.formats.indexer import RecordFormat, Values, find_indexes
from loaderd.formats.reader import Reading
from loaderd.formats.shard_index import ShardIndex
from loaderd.options import DEFAULT_BLOCK_RECORDS
from loaderd.progress import ProgressDisplay
from loaderd.redaction import redacted
from loaderd.schema import Schema
from loaderd.schema.record_values import RecordValues
from loaderd.schemas.named import WHERE_HELP, load_schema, values_of
from loaderd.storage.access import Access
from loaderd.storage.shard_file import TABLES, Block, ShardFile
from loaderd.worker.value_pass import ValuePass
from loaderd.worker.window_loader import BlockPlacement, WindowLoader

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Read all shards, check both CRCs of every record, and name every damage: shard, record, offset, what was expected and
what was found. Records of a fixed size have no CRCs of their own: of these, what wraps them is checked (gzip, zstd,
tar, npz, Parquet, Arrow), and that the last one is whole. Of how many shards the values could not be checked is said
at the end. With --schema, each record is also read as the schema says; those that do not match are counted for each
shard, and the first of them is named. The exit status is 0 if all is well, 1 if there is damage or a record does not
match, 2 for wrong arguments, no shards, or storage that does not answer.
"""
_EXAMPLE = "example: loaderd verify 'shards/*.tfrecord' --schema chess_eval"


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("verify", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    add_shards(parser)
    parser.add_argument(
        "--where", metavar="MODULE:NAME", help=f"call it with each record, and count those that pass: {WHERE_HELP}"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line: for each damage, each shard, and the total"
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 1 if there is damage, or a record that does not match; 2 if nothing can be checked."""
    began_s = time.monotonic()
    totals: Counter[str] = Counter()
    weight = 0.0
    try:
        schema = None if arguments.schema is None else load_schema(arguments.schema)
        values = None if arguments.where is None else values_of(schema, arguments.where)
        check = partial(_check, schema, values)
        for index, mismatches in read_all(arguments, "checking shards", check, ProgressDisplay(None)):
            _tell(index, mismatches, arguments.json, values)
            totals["shards"] += 1
            totals["records"] += index.num_records
            totals["bytes"] += index.file.size_bytes
            totals["damages"] += len(index.damages)
            totals["damaged"] += bool(index.damages)
            totals["passing"] += index.num_passing
            weight += index.total_weight
            totals["mismatches"] += mismatches.num_records
            totals["mismatched"] += mismatches.num_records > 0
            totals["empty_shards"] += not index.num_records and not index.damages
            totals["may_lack_checksums"] += index.num_records > 0 and _may_lack_checksums(index)
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _tell_total(totals, weight, time.monotonic() - began_s, arguments.json, values)
    return int(totals["damages"] > 0 or totals["mismatches"] > 0)


def _tell_total(
    totals: Counter[str], weight: float, seconds: float, as_json: bool, values: RecordValues | None
) -> None:
    if as_json:
        names = ["shards", "records", "bytes", "damages", "empty_shards", "mismatches", "may_lack_checksums"]
        about = {name: totals[name] for name in names} | values_in(values, totals["passing"], weight)
        say(json.dumps({"kind": "total", **about, "seconds": seconds}))
        return
    faults = []
    if totals["damages"]:
        faults.append(f"{count(totals['damages'], 'damage')} in {totals['damaged']:,} of them")
    if totals["mismatches"]:
        records = count(totals["mismatches"], "record")
        faults.append(f"{records} in {totals['mismatched']:,} of them not as the schema says")
    shards = count(totals["shards"], "shard")
    if totals["empty_shards"]:
        shards += f" ({totals['empty_shards']:,} of them empty)"
    records, unsummed = count(totals["records"], "healthy record"), totals["may_lack_checksums"]
    sum_up = ", ".join(faults) or ("no damage found" if unsummed else "all is well")
    say(f"{shards}, {records}, {totals['bytes']:,} bytes: {sum_up}")
    if unsummed:
        which = f"{count(unsummed, 'shard')} of a kind that need not have checksums"
        say(f"{which}: only sizes and structure were checked, so a changed value may go unnoticed")
    if values is not None:
        say_values(values, totals["passing"], weight, records)
    say(rate(totals["records"], totals["bytes"], seconds))


def _may_lack_checksums(index: ShardIndex) -> bool:
    """Whether it is of a kind that need not have them. Plain records of a fixed size have no ``runs``."""
    is_plain = index.compression == "none" and not len(index.runs)
    return is_plain or index.compression in ("npy", "parquet", "arrow", "columns")


class _Mismatches(NamedTuple):
    """How many records of a shard do not match the schema, and the first of them."""

    num_records: int = 0
    first: Damage | None = None


def _check(
    schema: Schema | None, values: RecordValues | None, group: Sequence[ShardFile], on_read: OnRead, access: Access
) -> list[tuple[ShardIndex, _Mismatches]]:
    """The index of each shard of a group, and where there is a schema, how many records do not match it."""
    stored: RecordFormat = "detect" if schema is None else schema.records
    computed = None if values is None else Values(values, partial(ValuePass, values))
    results = find_indexes("none", DEFAULT_BLOCK_RECORDS, stored, group, on_read, access, computed)
    indexes = [result.index for result in results]
    num_bytes = sum(file.size_bytes for file in group)
    found = []
    for index in indexes:
        if schema is None or index.error is not None:
            found.append((index, _Mismatches()))
        else:
            found.append(_read_again(schema, index, lambda: on_read(num_bytes), access))
    return found


def _read_again(
    schema: Schema, index: ShardIndex, on_block: Callable[[], None], access: Access
) -> tuple[ShardIndex, _Mismatches]:
    """Compare all records with the schema. Raises ShardReadError where the shard cannot be read any more.

    Parquet and Arrow were indexed by what they say of themselves: their damage shows here, a block at a time.
    """
    counts = index.counts.copy()
    row = np.empty((1, schema.row_bytes), dtype=np.uint8)  # nobody wants the rows
    first: LoaderdError | None = None
    damages: list[Damage] = []
    num_mismatches = 0
    with closing(WindowLoader(schema, [index.file], [index.compression], Reading(access=access))) as loader:
        for number, num_records in enumerate(index.counts.tolist()):
            on_block()
            part = BlockPlacement(Block(0, *index.block(number)), np.zeros(num_records, dtype=np.intp))
            for places, error in loader.load([part], row):
                if isinstance(error, ShardReadError):
                    if index.compression not in TABLES or error.damage is None:
                        raise error
                    damages += [error.damage] * bool(counts[number])
                    counts[number] = 0
                if isinstance(error, RecordMismatchError):
                    num_mismatches += len(places)
                    first = first or error
    seen = replace(index, counts=counts, damages=(*index.damages, *damages)) if damages else index
    return seen, _Mismatches(num_mismatches, first.damage if first else None)


def _tell(index: ShardIndex, mismatches: _Mismatches, as_json: bool, values: RecordValues | None) -> None:
    for damage in index.damages:
        say(json.dumps({"kind": "damage", **damage.to_wire()}) if as_json else _in_words(index, damage))
    if mismatches.first is not None:
        share = f"{mismatches.num_records:,} of {count(index.num_records, 'record')} of {index.file.uri}"
        text = f"{redacted(share)} do not match the schema; the first: {mismatches.first}"
        say(json.dumps({"kind": "mismatch", **mismatches.first.to_wire()}) if as_json else text)
    if as_json:
        about = {
            "kind": "shard",
            "shard": redacted(index.file.uri),
            "compression": index.compression,
            "records": index.num_records,
            "bytes": index.file.size_bytes,
            "damages": len(index.damages),
            "mismatches": mismatches.num_records,
            **values_in(values, index.num_passing, index.total_weight),
        }
        say(json.dumps(about))


def values_in(values: RecordValues | None, passing: int, weight: float) -> dict[str, float]:
    """What a JSON object says of the values of records."""
    about: dict[str, float] = {}
    if values is not None and values.where is not None:
        about["passing"] = passing
    if values is not None and values.weight is not None:
        about["weight"] = weight
    return about


def say_values(values: RecordValues, passing: int, weight: float, records: str) -> None:
    """Print how many of so many records pass, and what they weigh."""
    if values.where is not None:
        say(f"{passing:,} of {records} pass where={values.where_name}")
    if values.weight is not None:
        which = "they" if values.where is None else "these"
        say(f"sample={values.weight_name}: {which} weigh {weight:,.6g} together")


def _in_words(index: ShardIndex, damage: Damage) -> str:
    is_other = isinstance(index.error, ShardFormatError)
    return str(index.error).replace("\n", ". ") if is_other else str(damage)
