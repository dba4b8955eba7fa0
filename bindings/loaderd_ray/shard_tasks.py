"""Passes over many shards as tasks of a Ray cluster: to index them before trainings do, or to check all of them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from loaderd import Schema
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, anchored
from loaderd.errors import Damage, LoaderdError, OptionError
from loaderd.formats.index_cache import groups_of
from loaderd.formats.indexer import FindIndexes, RecordFormat, find_indexes
from loaderd.options import DEFAULT_BLOCK_RECORDS, DEFAULT_STORAGE, Shuffle, as_count, pickled_storage, require
from loaderd.progress import ProgressDisplay
from loaderd.snapshots import Progress
from loaderd.storage.access import Access
from loaderd.storage.files import list_with_progress, path_order
from loaderd.storage.shard_file import ShardFile

_SHOW_EVERY_S = 1.0
_TASK = {"num_cpus": 1, "max_retries": 3, "scheduling_strategy": "SPREAD"}


@dataclass(frozen=True)
class Findings:
    """What a pass found. ``num_cached``: shards whose index was kept already; ``damages``: in the order of shards."""

    num_shards: int
    num_cached: int
    num_records: int
    damages: tuple[Damage, ...]


def index(
    shards: Any,
    *,
    schema: Schema | None = None,
    index_cache: str | os.PathLike[str] | None = None,
    block_records: int = DEFAULT_BLOCK_RECORDS,
    progress: bool | None = None,
) -> Findings:
    """Index all shards into a folder that all nodes share, so that no training has to.

    - ``shards``: as for :class:`loaderd.Loader`; or a ``Dataset``, ``Mix`` or ``Concat``.
    - ``schema``: of the records. None: the data set's; without a data set, each shard's content tells whether it
      is TFRecord, or of Leela Chess Zero or KataGo.
    - ``index_cache``: that folder, or ``"beside"`` the shards. None: the data set's, which must not be ``"user"``.
    - ``block_records``: that of the ``Shuffle`` that will be used; for a data set, its own is used instead.
    - ``progress``: True, a bar; False, nothing; None: a bar on a terminal, else a line in the log after 5 s.

    Damage is no error here, but part of the findings. Raises OptionError, and NoShardsError where there are no
    shards.
    """
    where: Any = index_cache
    if isinstance(shards, (Dataset, Concat, Mix)):
        where, block_records = _order_of(shards, index_cache)
    must = 'a folder that all nodes share, or "beside"'
    is_shared = where not in (None, "none") and (where != "user" or index_cache == "user")
    hint = 'Indexes are kept there. If all nodes have the same home folders, pass index_cache="user".'
    require(is_shared, "index_cache", must, where, hint)
    block_records = as_count(block_records, "block_records")
    find = partial(find_indexes, _absolute(where), block_records, _stored_of(shards, schema))
    return _run(shards, find, progress, "indexing shards")


def verify(shards: Any, *, schema: Schema | None = None, progress: bool | None = None) -> Findings:
    """Read all shards from front to back, and check both CRCs of each record. The arguments: as for :func:`index`.

    Records of fixed size have no CRCs; the archive or compression around them is checked. A shard that cannot be read
    at all counts as one damage, which says why. Raises what :func:`index` raises.
    """
    find = partial(find_indexes, "none", DEFAULT_BLOCK_RECORDS, _stored_of(shards, schema))
    return _run(shards, find, progress, "checking shards")


def _stored_of(shards: Any, schema: Schema | None) -> RecordFormat:
    if isinstance(shards, (Dataset, Concat, Mix)):
        return (schema or shards.schema).records
    return "detect" if schema is None else schema.records


def _order_of(dataset: AnyDataset, index_cache: Any) -> tuple[Any, int]:
    leaf = dataset.leaves()[0]
    block_records = leaf.shuffle.block_records if isinstance(leaf.shuffle, Shuffle) else DEFAULT_BLOCK_RECORDS
    return index_cache or leaf.index_cache, block_records


def _absolute(where: Any) -> str:
    """``where``, with a folder made absolute: a task has another working directory."""
    return str(where) if where in ("user", "beside") else os.path.abspath(os.path.expanduser(where))


def _run(shards: Any, find: FindIndexes, progress: bool | None, what: str) -> Findings:
    names, storage = [shards], DEFAULT_STORAGE
    if isinstance(shards, (Dataset, Concat, Mix)):
        leaves = anchored(shards).leaves()
        names, storage = [leaf.shards for leaf in leaves], leaves[0].storage
    display = ProgressDisplay(progress)
    access = Access(storage)
    with closing(display):
        files = sorted({file for each in names for file in list_with_progress(each, display, access)}, key=path_order)
    if not ray.is_initialized():
        ray.init()
    findings: dict[ShardFile, Findings] = {}
    total_bytes, done_bytes = sum(file.size_bytes for file in files), 0

    def show() -> None:
        display(Progress(what, len(findings), len(files), done_bytes, total_bytes))

    with closing(display):
        for group, of_group in _results(groups_of(files), find, pickled_storage(storage), show):
            findings.update(zip(group, of_group, strict=True))
            done_bytes += sum(file.size_bytes for file in group)
            show()
    return Findings(
        len(files),
        sum(one.num_cached for one in findings.values()),
        sum(one.num_records for one in findings.values()),
        tuple(damage for file in files for damage in findings[file].damages),
    )


def _results(
    groups: Sequence[Sequence[ShardFile]], find: FindIndexes, storage: bytes, show: Callable[[], None]
) -> Iterator[tuple[Sequence[ShardFile], list[Findings]]]:
    """Each group of shards and what was found in them, in the order in which the tasks end.

    ``show`` is called every second while none ends.
    """
    task = ray.remote(_read).options(**_TASK)
    running = {task.remote(group, find, storage): group for group in groups}
    try:
        while running:
            over, _ = ray.wait(list(running), num_returns=1, timeout=_SHOW_EVERY_S)
            show()
            for done in over:
                yield running.pop(done), _result(done)
    finally:
        for each in running:
            ray.cancel(each)


def _result(done: Any) -> list[Findings]:
    try:
        findings: list[Findings] = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, LoaderdError):
            raise error.cause from None
        raise
    return findings


def _read(group: Sequence[ShardFile], find: FindIndexes, storage: bytes) -> list[Findings]:
    """A task: index shards, unless their indexes are kept already. ``storage``: as ``pickled_storage`` gives it."""
    indexed = find(group, access=Access(pickle.loads(storage)))
    for one in indexed:
        if one.unkept is not None:
            raise OptionError(
                f"the index of {one.index.file.uri} cannot be kept: {one.unkept}",
                hint="index_cache must be a folder that every node can write.",
            )
    return [Findings(1, int(one.is_known), one.index.num_records, one.index.damages) for one in indexed]
