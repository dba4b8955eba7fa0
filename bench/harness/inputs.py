"""The shards of a comparison: the user's, or synthetic ones; and the few of their records that are checked.

::

    timed     every record of the shards (of the user's: the first shards, up to ``--max-gib``)
    checked   the first records of the first shards, at most 20,011 of them, as shards of their own
"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from harness.interface import Config
from harness.reference import read
from harness.synthetic import cached_shards, compressed
from loaderd.errors import OptionError
from loaderd.formats.compression import detect_compression
from loaderd.kernels.crc import framed
from loaderd.storage.files import list_shards, open_shard
from loaderd.storage.shard_file import ShardFile

CHECK_RECORDS, CHECK_SHARDS = 20_011, 3  # no multiple of a batch, nor of each other
_CHECK_BYTES = 1 << 27  # of the fields of all records that are checked
_SYNTHETIC_RECORDS, _SYNTHETIC_BYTES = 1_500_000, 1 << 29

_COMPRESSIONS = {"none": "", "gzip": "GZIP", "zlib": "ZLIB"}


@dataclass(frozen=True)
class Inputs:
    """``timed`` and ``checked`` differ in shards and epochs only. ``about`` says in words what the shards are."""

    timed: Config
    checked: Config
    about: str


def synthetic(base: Config, work_dir: Path, scratch: Path, num_records: int | None, num_shards: int) -> Inputs:
    """Synthetic shards below ``work_dir``, compressed as ``base`` says. They are written once, and used again later.

    ``num_records``: of all shards together; None: 1,500,000, fewer if they are large. The records that are checked go
    to ``scratch``. Raises OptionError where nothing can be written to ``work_dir``, and ValueError for records that
    there cannot be.
    """
    size = base.record_size
    records = num_records or max(num_shards, min(_SYNTHETIC_RECORDS, _SYNTHETIC_BYTES // (size or 1)))
    try:
        shards = cached_shards(
            work_dir, records, num_shards=num_shards, compression=base.compression, record_size=size
        )
    except OSError as error:
        raise OptionError(
            f"synthetic shards cannot be written to {work_dir}: {error.strerror}",
            hint="Give another folder: --work-dir.",
        ) from None
    kind = "chess records" if size is None else f"records of {size:,} bytes of bits"
    about = f"{records:,} synthetic {kind} in {_count(len(shards))}, compression {base.compression or 'none'}"
    return _with_sample(base, list_shards([str(shard) for shard in shards]), scratch, about)


def from_user(base: Config, shards: list[str], scratch: Path, max_bytes: int) -> Inputs:
    """The user's local shards: the first ones, as many as have ``max_bytes`` together, but at least one.

    The records that are checked go to ``scratch``. Raises loaderd's ShardError where a shard cannot be read, and
    ValueError for shards that are remote, damaged, without records, or not compressed alike.
    """
    files = list_shards(shards)
    remote = [file.uri for file in files if "://" in file.uri]
    if remote:
        raise ValueError(f"shards must be local files, got {remote[0]}")
    sizes = itertools.accumulate(file.size_bytes for file in files)
    taken = [file for file, total in zip(files, sizes, strict=True) if total <= max_bytes] or files[:1]
    kinds = {_compression_of(file) for file in taken}
    if len(kinds) > 1:
        raise ValueError(f"shards must be compressed alike, got {sorted(kind or 'none' for kind in kinds)}")
    (compression,) = kinds
    megabytes = sum(file.size_bytes for file in taken) / 1e6
    about = f"{_count(len(taken))} of {len(files):,}, {megabytes:,.1f} MB, compression {compression or 'none'}"
    return _with_sample(replace(base, compression=compression), taken, scratch, about)


def _count(shards: int) -> str:
    return "1 shard" if shards == 1 else f"{shards:,} shards"


def _compression_of(file: ShardFile) -> str:
    with closing(open_shard(file)) as opened:
        return _COMPRESSIONS[detect_compression(file.uri, opened.read_at, file.size_bytes)]


def _with_sample(base: Config, files: list[ShardFile], scratch: Path, about: str) -> Inputs:
    some, num_records = files[:CHECK_SHARDS], 0
    each = max(1, min(CHECK_RECORDS, _CHECK_BYTES // base.delivered().record_bytes) // len(some))
    checked = []
    for number, file in enumerate(some):
        checked.append(scratch / f"{number}.tfrecord")
        with checked[-1].open("wb") as out:
            records = list(itertools.islice(read(file), each + number))
            num_records += len(records)
            out.writelines(compressed(base.compression, (memoryview(framed(record)) for record in records)))
    if not num_records:
        names = ", ".join(file.name for file in some)
        raise ValueError(f"the first shards must hold records, to check what candidates deliver; none is in {names}")
    return Inputs(
        timed=replace(base, shards=tuple(file.uri for file in files)),
        checked=replace(base, shards=tuple(map(str, checked)), epochs=1),
        about=about,
    )
