"""What one process of a conversion does: read the records of a unit, write its shards, and read these again.

::

    rows ──► .shard-00003….tmp ──► read by the loader's own reader: count, CRCs, digest ──► renamed ──► reported

The digest is that of the rows: the stored features of each record in the schema's layout. It is the same for the rows
that are written and those that are read again only if nothing was lost, added or changed on the way, the format's
encoding and decoding included. A shard that is there already is not written, but compared in the same way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from loaderd.convert.row_source import RowsOrFault, RowSource
from loaderd.convert.shard_writers import (
    Format,
    OutCompression,
    ending_of,
    open_writer,
    schema_of_format,
)
from loaderd.convert.work_units import WorkUnit, spans_of
from loaderd.decode.example_writer import Rows
from loaderd.errors import LoaderdError, OptionError, ShardError, ShardReadError
from loaderd.formats.indexer import make_index
from loaderd.options import DEFAULT_BLOCK_RECORDS
from loaderd.schema import Feature, Schema
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import Compression, ShardFile

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is whole. ``num_bytes``: of the file; 0 where it has no record, and so no file.

    ``digest``: SHA-256 of its records' stored features, the same in each format. ``left_out``: records that are
    damaged, or are not what the schema says. ``was_there``: whether an earlier run of the conversion wrote it.
    """

    shard: str
    records: int
    digest: str
    num_bytes: int
    left_out: int
    was_there: bool


@dataclass(frozen=True)
class ShardJob:
    """What the processes of a conversion have in common.

    ``features`` and ``compressions``: those of the sources. ``skips``: whether records that are
    damaged or do not fit are left out, not an error.
    """

    files: tuple[ShardFile, ...]
    compressions: tuple[Compression, ...]
    features: Mapping[str, Feature]
    folder: Path
    num_shards: int
    format: Format
    compression: OutCompression
    skips: bool

    @property
    def ending(self) -> str:
        return ending_of(self.format, self.compression)

    def name_of(self, number: int) -> str:
        """The file name of a shard, such as "shard-00000-of-00012.tfrecord"."""
        return f"shard-{number:05}-of-{self.num_shards:05}{self.ending}"


Task = tuple[WorkUnit, frozenset[int]]
"""A unit, and the numbers of those of its shards that are to be compared or written."""


def tasks_of(job: ShardJob, units: Sequence[WorkUnit]) -> tuple[list[Task], list[Task]]:
    """The tasks over the shards that are there, and those over the others.

    The first have all to be done before one of the second begins: a folder of another conversion stays as it is.
    """
    names = set(os.listdir(job.folder))
    there, missing = list[Task](), list[Task]()
    for unit in units:
        numbers = frozenset(range(unit.first_shard, unit.first_shard + len(unit.sizes)))
        found = frozenset(number for number in numbers if job.name_of(number) in names)
        if found:
            there.append((unit, found))
        if found != numbers:
            missing.append((unit, numbers - found))
    return there, missing


def do_task(job: ShardJob, task: Task) -> Iterator[FinishedShard]:
    """Compare or write shards. Raises LoaderdError and OSError; then no shard is left half written."""
    unit, numbers = task
    schema = Schema.of_stored(job.features)
    with closing(RowSource(schema, list(job.files), list(job.compressions))) as source:
        rows = _RowQueue(source.read(unit.parts))
        for number, size in enumerate(unit.sizes[: max(numbers) - unit.first_shard + 1], unit.first_shard):
            if number not in numbers:
                rows.skip(size)
                continue
            path = job.folder / job.name_of(number)
            try:
                yield _make_shard(job, path, rows.take(size))
            except OSError as error:
                if error.filename is None and not isinstance(error, LoaderdError):  # as of a full disk
                    error.filename = str(path)
                raise


class _RowQueue:
    """Rows, and errors in place of faulty records, of which some are taken at a time."""

    def __init__(self, pieces: Iterator[RowsOrFault]) -> None:
        self._pieces = pieces
        self._rest: Rows | None = None

    def take(self, count: int) -> Iterator[RowsOrFault]:
        """The next ``count`` records."""
        while count:
            piece = next(self._pieces) if self._rest is None else self._rest
            self._rest = None
            if isinstance(piece, LoaderdError):
                count -= 1
                yield piece
                continue
            if len(piece) > count:
                piece, self._rest = piece[:count], piece[count:]
            count -= len(piece)
            step = max(1, _CHUNK_BYTES // piece.dtype.itemsize)
            yield from (piece[begin : begin + step] for begin in range(0, len(piece), step))

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` records, faulty ones too."""
        for _ in self.take(count):
            pass


def _make_shard(job: ShardJob, path: Path, pieces: Iterator[RowsOrFault]) -> FinishedShard:
    """Write a shard, or read its records only, if it is there, and compare."""
    was_there = os.path.lexists(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # no glob over the shards finds it
    writer = None if was_there else open_writer(temporary, job.features, job.format, job.compression)
    records, left_out, digest = 0, 0, hashlib.sha256()
    try:
        for piece in pieces:
            if isinstance(piece, LoaderdError):
                if not job.skips:
                    raise piece
                left_out += 1
                continue
            records += len(piece)
            digest.update(piece.tobytes())
            if writer is not None:
                writer.write(piece)
        expected = (records, digest.hexdigest())
        if was_there:
            _check_there(job, path, expected)
        elif writer is not None and records:
            writer.close()
            _check_written(job, temporary, expected)
            temporary.rename(path)
    finally:
        if writer is not None:
            writer.abort()
        temporary.unlink(missing_ok=True)
    num_bytes = path.stat().st_size if records else 0
    return FinishedShard(path.name, *expected, num_bytes, left_out, was_there)


def _check_there(job: ShardJob, path: Path, expected: tuple[int, str]) -> None:
    found = _read_back(path, job)
    if found != expected:
        raise OptionError(
            f"--to {job.folder} holds another conversion: {path.name} should hold {expected[0]} records of digest "
            f"{expected[1]}, found {found}",
            hint="Give the same arguments to go on with it; or choose another folder, or remove that file.",
        )


def _check_written(job: ShardJob, path: Path, expected: tuple[int, str]) -> None:
    found = _read_back(path, job)
    if found != expected:
        raise ShardReadError(
            f"{path}: expected {expected[0]} records of digest {expected[1]}, as were written, found {found}",
            hint="The disk, or the memory, of this machine changes what is written to it. Start again elsewhere.",
        )


def _read_back(path: Path, job: ShardJob) -> tuple[int, str] | str:
    """(records, digest) of a shard; or what is wrong with it."""
    if path.is_symlink() or not path.is_file():
        return "no regular file"
    schema = schema_of_format(job.features, job.format)
    digest = hashlib.sha256()
    try:
        (file,) = list_shards(path)
        index = make_index(file, schema.records, DEFAULT_BLOCK_RECORDS)
        if index.damages:
            return str(index.damages[0])
        with closing(RowSource(schema, [file], [index.compression])) as source:
            for rows in source.read(list(spans_of(0, index))):
                if isinstance(rows, LoaderdError):
                    return str(rows)
                digest.update(rows.tobytes())
    except ShardError as error:
        return str(error)
    return index.num_records, digest.hexdigest()
