"""``loaderd verify``: every record is read and checked, and every damage named with its place."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from loaderd.cli.reading import add_shards, count, rate, read_all, say, stored_of
from loaderd.errors import Damage, LoaderdError, ShardFormatError
from loaderd.options import DEFAULT_BLOCK_RECORDS
from loaderd.redaction import redacted
from loaderd.shards.indexer import Indexer
from loaderd.shards.shard_index import ShardIndex

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Read all shards, check both CRCs of every record, and name every damage: shard, record, offset, what was expected and
what was found. Records of a fixed size have no CRCs of their own: of these, what wraps them is checked (gzip, zstd,
tar, npz), and that the last one is whole. The exit status is 0 if all is well, 1 if there is damage, 2 for wrong
arguments, no shards, or storage that does not answer.
"""
_EXAMPLE = "example: loaderd verify 'shards/*.tfrecord' --json | grep '\"damage\"'"


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "verify", help="check every record of shards, and name all damage", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    parser.set_defaults(run=run)
    add_shards(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line: for each damage, each shard, and the total"
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 1 if there is damage; 2 if nothing can be checked."""
    began_s = time.monotonic()
    checked, damages, damaged, records, num_bytes = 0, 0, 0, 0, 0
    try:
        indexer = Indexer("none", DEFAULT_BLOCK_RECORDS, stored_of(arguments.schema))
        for found in read_all(arguments, "checking shards", indexer):
            index = found.index
            _tell(index, arguments.json)
            checked += 1
            damages += len(index.damages)
            damaged += bool(index.damages)
            records += index.num_records
            num_bytes += index.file.size_bytes
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    seconds = time.monotonic() - began_s
    if arguments.json:
        total = {"shards": checked, "records": records, "bytes": num_bytes, "damages": damages, "seconds": seconds}
        say(json.dumps({"kind": "total", **total}))
    else:
        sum_up = f"{count(damages, 'damage')} in {damaged:,} of them" if damages else "all is well"
        say(f"{count(checked, 'shard')}, {count(records, 'healthy record')}, {num_bytes:,} bytes: {sum_up}")
        say(rate(records, num_bytes, seconds))
    return int(damages > 0)


def _tell(index: ShardIndex, as_json: bool) -> None:
    for damage in index.damages:
        say(json.dumps({"kind": "damage", **damage.to_wire()}) if as_json else _in_words(index, damage))
    if as_json:
        told = {
            "shard": redacted(index.file.uri),
            "compression": index.compression,
            "records": index.num_records,
            "bytes": index.file.size_bytes,
            "damages": len(index.damages),
        }
        say(json.dumps({"kind": "shard", **told}))


def _in_words(index: ShardIndex, damage: Damage) -> str:
    """A damage; of a file of another kind, what to do with it, too."""
    is_other = isinstance(index.error, ShardFormatError)
    return str(index.error).replace("\n", ". ") if is_other else str(damage)
