"""The facts that a page holds of its stream, besides the numbers that change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loaderd.daemon.indexing.local_data import LocalData
from loaderd.dataset import StreamDescription
from loaderd.machine import filesystem_kind, usable_cores
from loaderd.schema import Bits
from loaderd.schema.fields import derived_in, parts_of
from loaderd.snapshots import Facts
from loaderd.storage.shard_file import ShardFile

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemoteData


def facts_of(
    description: StreamDescription, data: LocalData | RemoteData, steps_per_epoch: int, num_windows: int
) -> Facts:
    """The facts of a stream that is about to be opened."""
    schema, options = description.schema, description.options
    made = {name: schema.definition_of(name) for name in schema.made_fields}
    return Facts(
        fields=tuple(made),
        derived=tuple(name for name, definition in made.items() if derived_in(definition)),
        workers=options.num_workers,
        cores=usable_cores(),
        batch_size=options.batch_size,
        held_batches=options.held_batches,
        slots=options.num_slots,
        steps_per_epoch=steps_per_epoch,
        windows=num_windows,
        shards=data.num_shards,
        compressed=sum(compression != "none" for compression in data.compressions),
        storage=_storage_of(data.files) or ("servers",),
        has_bits=any(isinstance(part, Bits) for definition in made.values() for part in parts_of(definition)),
        batch_bytes=options.batch_size * schema.record_bytes,
        packed_bytes=options.batch_size * schema.row_bytes,
        of_server=description.of_server,
    )


def _storage_of(files: Sequence[ShardFile]) -> tuple[str, ...]:
    schemes = {urlsplit(file.uri).scheme for file in files if "://" in file.uri}
    folders = {os.path.dirname(file.uri) for file in files if "://" not in file.uri}
    return tuple(sorted(schemes | {filesystem_kind(folder) for folder in folders}))
