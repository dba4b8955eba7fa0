"""What one process of a conversion does: read the records of a unit, write its shards, and read these again.

::

    rows ──► .shard-00003….tmp ──► read by the loader's own reader: count, CRCs, digest ──► renamed ──► reported

The digest is that of the rows: the stored features of each record in the schema's layout. So the digest of the rows
that are written and that of the rows that are read again are equal only if nothing was lost, added or changed on the
way, the format's own encoding and decoding included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from loaderd.convert.journal import FinishedShard, shard_name, temporary_of
from loaderd.convert.row_source import RowsOrFault, RowSource
from loaderd.convert.shard_writers import (
    Format,
    OutCompression,
    ShardWriter,
    ending_of,
    open_writer,
    schema_of_format,
)
from loaderd.convert.work_units import WorkUnit, spans_of
from loaderd.decode.example_writer import Rows
from loaderd.errors import LoaderdError, ShardError, ShardReadError
from loaderd.formats.indexer import make_index
from loaderd.options import DEFAULT_BLOCK_RECORDS
from loaderd.schema import Feature, Schema
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import Compression, ShardFile

Claims = Mapping[str, FinishedShard]
"""By name: shards of which the journal says that they are whole."""
News = int | tuple[FinishedShard, bool]
"""So many more bytes are done; or a shard is whole, and True if it was before."""

_CHUNK_BYTES = 1 << 20


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
    def row_bytes(self) -> int:
        """What a record counts in the progress, in bytes."""
        return Schema.of_stored(self.features).row_bytes

    @property
    def ending(self) -> str:
        return ending_of(self.format, self.compression)

    def name_of(self, number: int) -> str:
        return shard_name(number, self.num_shards, self.ending)


def run_unit(task: ShardJob, unit: WorkUnit, claims: Claims) -> Iterator[News]:
    """Write the shards of a unit, but for those that are what ``claims`` says of them.

    Raises LoaderdError and OSError; then no shard is left half written.
    """
    whole = {claim.shard: claim for claim in _claims_of(task, unit, claims) if _is_whole(task, claim)}
    yield from ((claim, True) for claim in whole.values())
    if len(whole) == len(unit.sizes):
        yield unit.num_records * task.row_bytes
        return
    output = _UnitWriter(task, unit, whole)
    try:
        for rows in _read_unit(task, unit):
            if isinstance(rows, int):
                yield rows
            elif isinstance(rows, LoaderdError):
                if not task.skips:
                    raise rows
                output.leave_out()
            else:
                output.add(rows)
            yield from output.take_written()
    except OSError as error:
        if error.filename is None and not isinstance(error, LoaderdError):  # as of a full disk
            error.filename = str(task.folder / output.name)
        raise
    finally:
        output.abort()


def _read_unit(task: ShardJob, unit: WorkUnit) -> Iterator[RowsOrFault | int]:
    """The rows of a unit, and what is wrong with others; behind them, how many bytes of progress they are."""
    schema = Schema.of_stored(task.features)
    with closing(RowSource(schema, list(task.files), list(task.compressions))) as source:
        for rows in source.read(list(unit.parts)):
            yield rows
            if not isinstance(rows, LoaderdError):
                yield rows.nbytes


def _claims_of(task: ShardJob, unit: WorkUnit, claims: Claims) -> Iterator[FinishedShard]:
    """The claims that can be looked at: a shard without a record has no file. It is made again."""
    for number, size in enumerate(unit.sizes, unit.first_shard):
        claim = claims.get(task.name_of(number))
        if claim is not None and claim.records and size == claim.records + claim.left_out:
            yield claim


def _is_whole(task: ShardJob, claim: FinishedShard) -> bool:
    path = task.folder / claim.shard
    try:
        is_so = path.stat().st_size == claim.num_bytes and _read_back(path, task) == (claim.records, claim.digest)
    except (OSError, ShardError):
        return False
    return is_so


class _UnitWriter:
    """The shards of a unit, one after the other; ``sizes`` of the unit say where one ends."""

    def __init__(self, task: ShardJob, unit: WorkUnit, whole: Claims) -> None:
        self._task = task
        self._whole = whole
        self._left = list(unit.sizes)
        self._number = unit.first_shard
        self._written: list[FinishedShard] = []
        self._begin()

    def _begin(self) -> None:
        self._room = self._left.pop(0) if self._left else 0
        self.name = self._task.name_of(self._number)
        self._writer: ShardWriter | None = None
        self._records = self._left_out = 0
        self._digest = hashlib.sha256()
        self._is_wanted = self.name not in self._whole

    def add(self, rows: Rows) -> None:
        """Write rows to this shard, and to the next ones where it is full."""
        while len(rows):
            take = min(self._room, len(rows))
            if self._is_wanted:
                self._write(rows[:take])
            rows = rows[take:]
            self._use(take)

    def leave_out(self) -> None:
        """Leave out a record that was planned: the shard in which it would be has one record less."""
        self._left_out += 1
        self._use(1)

    def _use(self, count: int) -> None:
        self._room -= count
        if self._room == 0:
            self._finish()

    def _write(self, rows: Rows) -> None:
        if self._writer is None:
            path = temporary_of(self._task.folder / self.name)
            path.unlink(missing_ok=True)
            self._writer = open_writer(path, self._task.features, self._task.format, self._task.compression)
        step = max(1, _CHUNK_BYTES // rows.dtype.itemsize)
        for begin in range(0, len(rows), step):
            chunk = rows[begin : begin + step]
            self._writer.write(chunk)
            self._digest.update(chunk.tobytes())
        self._records += len(rows)

    def _finish(self) -> None:
        if self._is_wanted:
            self._keep()
        self._number += 1
        self._begin()

    def _keep(self) -> None:
        path, num_bytes, digest = self._task.folder / self.name, 0, self._digest.hexdigest()
        if self._writer is not None:
            temporary = temporary_of(path)
            self._writer.close()
            self._writer = None
            check_shard(temporary, self._task, self._records, digest)
            num_bytes = temporary.stat().st_size
            temporary.rename(path)
        self._written.append(FinishedShard(self.name, self._records, num_bytes, digest, self._left_out))

    def take_written(self) -> Iterator[News]:
        """The shards that have been written since the last call."""
        written, self._written = self._written, []
        yield from ((one, False) for one in written)

    def abort(self) -> None:
        """Leave nothing half written."""
        if self._writer is not None:
            self._writer.abort()
        temporary_of(self._task.folder / self.name).unlink(missing_ok=True)


def check_shard(path: Path, task: ShardJob, num_records: int, digest: str) -> None:
    """Read a shard that was written. Raises ShardReadError where it does not hold these records."""
    try:
        read_back = _read_back(path, task)
    except ShardReadError as error:
        read_back = str(error)
    if read_back != (num_records, digest):
        raise ShardReadError(
            f"{path}: expected {num_records} records of digest {digest}, as were written, found {read_back}",
            hint="The disk, or the memory, of this machine changes what is written to it. Start again elsewhere.",
        )


def _read_back(path: Path, task: ShardJob) -> tuple[int, str] | str:
    """(records, digest) of a shard; or what is wrong with it."""
    schema = schema_of_format(task.features, task.format)
    (file,) = list_shards(path)
    index = make_index(file, schema.records, DEFAULT_BLOCK_RECORDS)
    if index.damages:
        return str(index.damages[0])
    digest = hashlib.sha256()
    with closing(RowSource(schema, [file], [index.compression])) as source:
        for rows in source.read(list(spans_of(0, index))):
            if isinstance(rows, LoaderdError):
                return str(rows)
            digest.update(rows.tobytes())
    return index.num_records, digest.hexdigest()
