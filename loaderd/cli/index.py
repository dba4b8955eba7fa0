"""``loaderd index``: the indexes of shards, made before a training needs them."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from loaderd.cli.parallel_scan import add_shards, count, rate, read_all, record_format_of, say
from loaderd.errors import LoaderdError
from loaderd.formats.indexer import find_indexes
from loaderd.options import DEFAULT_BLOCK_RECORDS, as_count
from loaderd.progress import ProgressDisplay
from loaderd.redaction import readable_line

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Read and check every record of shards that have no index yet, and keep the indexes, so that a training begins at once.
The exit status is 0; 1 if there is damage (loaderd verify names it); 2 for wrong arguments, no shards, storage that
does not answer, or an index that cannot be kept.
"""
_EXAMPLE = "example: loaderd index 'shards/*.tfrecord' --index-cache beside"


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser("index", description=_DESCRIPTION, epilog=_EXAMPLE)
    parser.set_defaults(run=run)
    add_shards(parser)
    parser.add_argument(
        "--index-cache",
        default="user",
        metavar="WHERE",
        help="where to keep them, as the loader's index_cache: user, beside, or a folder; default: %(default)s",
    )
    parser.add_argument(
        "--block-records",
        type=int,
        default=DEFAULT_BLOCK_RECORDS,
        metavar="N",
        help="as in the loader's Shuffle: an index serves loaders with the same number only; default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0; 1 if there is damage; 2 if indexes cannot be made or kept."""
    began_s = time.monotonic()
    try:
        block_records = as_count(arguments.block_records, "--block-records")
        find = partial(find_indexes, arguments.index_cache, block_records, record_format_of(arguments.schema))
        found = list(read_all(arguments, "indexing shards", find, ProgressDisplay(None)))
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    seconds = time.monotonic() - began_s
    made = [one.index for one in found if not one.is_known and one.index.error is None]
    known = sum(one.is_known for one in found)
    num_bytes = sum(one.index.file.size_bytes for one in found)
    records = sum(one.index.num_records for one in found)
    say(f"{count(len(found), 'shard')}, {count(records, 'healthy record')}, {num_bytes:,} bytes")
    made_records = sum(index.num_records for index in made)
    made_rate = rate(made_records, sum(index.file.size_bytes for index in made), seconds)
    say(f"{len(made):,} indexed in {made_rate}; {known:,} known before")
    damages = sum(len(one.index.damages) for one in found)
    if damages:
        sys.stderr.write(f"{count(damages, 'damage')}: loaderd verify names each\n")
    unkept = [(one.index.file.name, one.unkept) for one in found if one.unkept is not None]
    if unkept:
        name, reason = unkept[0]
        sys.stderr.write(
            f"{len(unkept):,} of {len(made):,} indexes cannot be kept. {readable_line(name)}: "
            f"{readable_line(reason)}\n"
        )
        sys.stderr.write("Choose another --index-cache, or make room there.\n")
    return 2 if unkept else int(damages > 0)
