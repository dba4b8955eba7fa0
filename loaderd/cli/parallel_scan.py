"""Reading all of many shards, several at a time, for ``loaderd index`` and ``loaderd verify``; and what they print.

Shards are read in threads: inflating and waiting for storage release the GIL, and the rest is so little work that
starting a process would take longer than reading gigabytes.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from loaderd.errors import OptionError
from loaderd.formats.compression import OnRead
from loaderd.formats.index_cache import groups_of
from loaderd.formats.indexer import RecordFormat
from loaderd.machine import usable_cores
from loaderd.options import as_count
from loaderd.progress import ProgressDisplay
from loaderd.redaction import printable
from loaderd.schemas.named import SCHEMA_HELP, load_schema
from loaderd.snapshots import Progress
from loaderd.storage.access import Access
from loaderd.storage.files import list_with_progress
from loaderd.storage.names import Columns
from loaderd.storage.shard_file import ShardFile

_Seen = TypeVar("_Seen")
Look = Callable[[Sequence[ShardFile], OnRead, Access], list[_Seen]]
_SHOW_EVERY_S = 0.1


class _Stopped(Exception):
    """Nobody waits for this shard any more."""


def add_shards(parser: argparse.ArgumentParser) -> None:
    """Add the options: which shards, what is in them, and how many to read at a time."""
    add_names(parser, "SHARDS", "paths, globs in quotes, or URIs")
    parser.add_argument(
        "--schema",
        metavar="MODULE:NAME",
        help=f"what the records are: {SCHEMA_HELP}; not needed for TFRecord and the files of Leela Chess Zero and "
        "KataGo, which are recognized",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="how many shards to read at a time; default: the number of cores"
    )


def add_names(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    """Add the shards as arguments; or files that belong together."""
    parser.add_argument("shards", nargs="*", metavar=metavar, help=help)
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME=GLOB",
        help=f"in place of {metavar}: files that belong together row by row (loaderd.Columns)",
    )


def names_in(arguments: argparse.Namespace) -> list[str] | Columns:
    """What the user names: shards, or columns. Raises OptionError where it is neither, or both."""
    if bool(arguments.shards) == bool(arguments.columns):
        raise OptionError("give shards, or --columns NAME=GLOB …", hint="One of them, with at least one name.")
    if not arguments.columns:
        names: list[str] = arguments.shards
        return names
    pairs = [each.partition("=") for each in arguments.columns]
    wrong = [name for name, _, pattern in pairs if not name or not pattern]
    if wrong or len({name for name, _, _ in pairs}) < len(pairs):
        raise OptionError(f"--columns must be NAME=GLOB …, each name once, got {arguments.columns}")
    return Columns(**{name: pattern for name, _, pattern in pairs})


def record_format_of(schema: str | None) -> RecordFormat:
    """The records of the schema of that name; without a name, each shard's content tells. Raises OptionError."""
    return "detect" if schema is None else load_schema(schema).records


def read_all(
    arguments: argparse.Namespace, doing: str, look: Look[_Seen], display: ProgressDisplay
) -> Iterator[_Seen]:
    """What ``look`` (such as ``find_indexes``, called in threads) finds for each shard, in the order of their paths.

    ``display`` shows how far it is with what it is ``doing``. Closing the iterator stops the threads. Raises
    OptionError, NoShardsError and StorageError.
    """
    threads = as_count(usable_cores() if arguments.threads is None else arguments.threads, "--threads")
    stop = threading.Event()

    def go_on() -> None:
        if stop.is_set():
            raise _Stopped

    access = Access(on_wait=go_on)
    groups = groups_of(list_with_progress(names_in(arguments), display, access))
    sizes = [sum(file.size_bytes for file in group) for group in groups]
    done_bytes = [0] * len(groups)

    def note(number: int, offset: int) -> None:
        go_on()
        done_bytes[number] = offset

    def read(number: int) -> list[_Seen]:
        try:
            return look(groups[number], partial(note, number), access)
        finally:
            done_bytes[number] = sizes[number]

    def show() -> None:
        done_shards = sum(len(group) for group, future in zip(groups, waiting, strict=True) if future.done())
        display(Progress(doing, done_shards, num_shards, sum(done_bytes), total_bytes))

    total_bytes, num_shards = sum(sizes), sum(map(len, groups))
    with ThreadPoolExecutor(threads) as pool:
        try:
            waiting = [pool.submit(read, number) for number in range(len(groups))]
            for future in waiting:
                yield from _result(future, show)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            display.close()


def _result(future: Future[list[_Seen]], show: Callable[[], None]) -> list[_Seen]:
    while not wait([future], _SHOW_EVERY_S).done:
        show()
    return future.result()


def say(text: str) -> None:
    """Print a line, or several, at once. What a terminal would obey is escaped: names come from anywhere."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def count(number: int, unit: str) -> str:
    """A number and its unit, such as "1 shard", "8 shards"."""
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def rate(num_records: int, num_bytes: int, seconds: float) -> str:
    """The time and the rates, such as "2.1 s, 1,600,000 records/s, 388 MB/s"."""
    seconds = max(seconds, 1e-9)
    return f"{seconds:.1f} s, {num_records / seconds:,.0f} records/s, {num_bytes / seconds / 1e6:,.0f} MB/s"
