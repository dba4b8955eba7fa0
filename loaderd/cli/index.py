"""``loaderd index``: the indexes of shards, made before a training needs them."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from loaderd.cli.reading import add_shards, count, rate, read_all, say
from loaderd.errors import LoaderdError
from loaderd.options import DEFAULT_BLOCK_RECORDS, as_count
from loaderd.shards.access import Access
from loaderd.shards.compression import OnRead
from loaderd.shards.index_cache import IndexCache
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import ShardIndex, build_index

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Read all shards whose index is not kept yet, check every record, and keep the indexes, so that a training begins at
once. The exit status is 0; 1 where there is damage (loaderd verify names it); 2 for wrong arguments, no shards,
storage that does not answer, or an index that cannot be kept.
"""
_EXAMPLE = "example: loaderd index 'shards/*.tfrecord' --index-cache beside"


class _Indexer:
    """Loads or makes, and keeps, the index of a shard; called in several threads."""

    def __init__(self, where: str, block_records: int) -> None:
        self._cache = IndexCache(where, block_records)
        self._block_records = block_records
        self.made: set[ShardFile] = set()
        self.unkept: list[tuple[ShardFile, OSError]] = []

    def __call__(self, file: ShardFile, on_read: OnRead, access: Access) -> ShardIndex:
        index = self._cache.load(file)
        if index is None:
            index = build_index(file, self._block_records, on_read, access)
            self.made.add(file)
            error = self._cache.store(index)
            if error is not None:
                self.unkept.append((file, error))
        return index


def add_to(commands: Commands) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "index", help="index shards before a training needs it", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    parser.set_defaults(run=run)
    add_shards(parser)
    parser.add_argument(
        "--index-cache",
        default="user",
        metavar="WHERE",
        help="as the loader's index_cache: user, beside, or a folder; default: %(default)s",
    )
    parser.add_argument(
        "--block-records",
        type=int,
        default=DEFAULT_BLOCK_RECORDS,
        metavar="N",
        help="as that of the loader's Shuffle, which needs an index of the same; default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where there is damage; 2 where indexes cannot be made or kept."""
    began_s = time.monotonic()
    try:
        indexer = _Indexer(arguments.index_cache, as_count(arguments.block_records, "--block-records"))
        indexes = list(read_all(arguments, "indexing shards", indexer))
    except LoaderdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    seconds = time.monotonic() - began_s
    made = {file: index for index in indexes if (file := index.file) in indexer.made}
    num_bytes = sum(index.file.size_bytes for index in indexes)
    records = sum(index.num_records for index in indexes)
    say(f"{count(len(indexes), 'shard')}, {count(records, 'healthy record')}, {num_bytes:,} bytes")
    made_records = sum(index.num_records for index in made.values())
    known = sum(index.file not in made and index.error is None for index in indexes)
    made_rate = rate(made_records, sum(file.size_bytes for file in made), seconds)
    say(f"{len(made):,} indexed in {made_rate}; {known:,} known before")
    damages = sum(len(index.damages) for index in indexes)
    if damages:
        sys.stderr.write(f"{count(damages, 'damage')}: loaderd verify names each\n")
    if indexer.unkept:
        file, why = indexer.unkept[0]
        sys.stderr.write(f"{len(indexer.unkept):,} of {len(made):,} indexes cannot be kept. {file.name}: {why}\n")
        sys.stderr.write("Choose another --index-cache, or make room there.\n")
    return 2 if indexer.unkept else int(damages > 0)
