"""The loader: batches of a data set, in a planned order, made by other processes."""

from __future__ import annotations

import os
from typing import Any, cast

from loaderd.client.base import BaseLoader, checked_start
from loaderd.client.reconnecting_stream import ReconnectingStream
from loaderd.client.sources import EmbeddedSource
from loaderd.dataset import AnyDataset, Concat, Dataset, Mix, StreamDescription, anchored, with_schema
from loaderd.errors import OptionError
from loaderd.options import (
    DEFAULT_STORAGE,
    OnCorrupt,
    Refresh,
    Remainder,
    Shuffle,
    Storage,
    StreamOptions,
    Unpack,
    as_shard,
    require,
    suggests_options,
)
from loaderd.plan.positions import Position
from loaderd.progress import ProgressDisplay
from loaderd.redaction import shown
from loaderd.schema import Schema, packed_schema

_OF_THE_SET = ("schema", "shuffle", "seed", "on_corrupt", "index_cache", "refresh", "storage")


class Loader(BaseLoader):
    """Batches of TFRecord shards, unpacked by worker processes into shared memory.

    Options:

    - ``shards``: a path, a glob, a URI, or any number of them (a list, a set, a generator …), whose files come in the
      order of their paths; or a :class:`~loaderd.Dataset`, :class:`~loaderd.Mix` or :class:`~loaderd.Concat` (then
      ``schema``, ``shuffle``, ``seed``, ``on_corrupt``, ``index_cache``, ``refresh`` and ``storage`` are the data
      set's).
    - ``epochs``: of one pass; None: for ever.
    - ``shuffle``: True, False (the files' own order), or a :class:`~loaderd.Shuffle`.
    - ``remainder``: what becomes of an epoch's last, partial batch: ``"drop"``, ``"short"``, or ``"carry"`` (it is
      completed from the next epoch).
    - ``seed``: the order, and all random fields, follow from it. None: one is drawn, which ``loader.seed`` says.
    - ``shard=(i, n)``: this is host i of n, and gets an n-th of each epoch. None: it gets all of it, with a
      UserWarning where torch.distributed or jax.distributed has several processes: they train on the same batches.
    - ``workers``: worker processes; None: chosen from the cores.
    - ``on_corrupt``: ``"raise"``, ``"skip_record"``, ``"skip_shard"`` or ``"skip_any"``. The two in the middle raise
      RecordMismatchError where more than one record in a hundred does not match the schema. What is left out is a
      SkippedDataWarning.
    - ``held_batches``: how many batches the consumer may hold at a time before it gets copies.
    - ``index_cache``: ``"user"`` (``$LOADERD_CACHE_DIR`` or ``~/.cache/loaderd``), ``"beside"`` (the shards),
      ``"none"``, or a folder.
    - ``progress``: what standard error shows while shards are listed and indexed: True, a bar; False, nothing; None:
      a bar if it is a terminal, else a line after 5 s, and then one a minute at most.
    - ``refresh``: ``"epoch"``: each epoch is made of the shards that there are when it begins (the first one, when
      the loader is made); else ``"never"``.
    - ``stall_timeout``: seconds without progress after which a process of loaderd is replaced; None: never.
    - ``report``: a file to which every damaged record is written, a JSON object a line; see
      "When something breaks" in the documentation (docs/failures.md).
    - ``storage``: a :class:`~loaderd.Storage`: for how long failed requests are tried again, how many requests are
      under way at a time, a cache on a local disk.
    - ``start``: a :class:`~loaderd.Position` to go on from.
    - ``unpack``: ``"device"``: batches hold stored features as far as possible. ``batches`` of the bindings makes the
      fields of them, on the device; :attr:`schema` says what the batches of the loader itself hold.

    Each ``iter(loader)`` is a **pass** of ``epochs`` epochs. It goes on counting epochs where the pass before would
    have ended, so that each is shuffled in its own way. Making a loader starts a daemon and its workers and indexes
    the shards; :meth:`close`, or leaving the ``with`` block, ends them. Raises exceptions of :mod:`loaderd.errors`.

    With ``start``, the first pass goes from there to where it would have ended. The position behind a pass is where
    the next one begins; so a training of ``epochs`` epochs is finished where ``start.epoch >= epochs``. A position of
    another number of hosts or another batch size will do: what was left of its epoch is then shared out anew, and
    nothing of it comes twice. A position of other data is refused with an OptionError that says what differs.
    """

    @suggests_options
    def __init__(
        self,
        shards: Any,
        schema: Schema | None = None,
        *,
        batch_size: int,
        epochs: int | None = 1,
        shuffle: bool | Shuffle = True,
        seed: int | None = 0,
        remainder: Remainder = "short",
        shard: tuple[int, int] | None = None,
        workers: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        held_batches: int = 4,
        index_cache: str = "user",
        progress: bool | None = None,
        refresh: Refresh = "never",
        stall_timeout: float | None = 120.0,
        report: str | os.PathLike[str] | None = None,
        storage: Storage = DEFAULT_STORAGE,
        start: Position | None = None,
        unpack: Unpack = "worker",
    ) -> None:
        dataset = anchored(
            as_dataset(shards, schema, shuffle, seed, on_corrupt, index_cache, refresh, storage, shard)
        )
        require(unpack in ("worker", "device"), "unpack", '"worker" or "device"', unpack)
        unpacked_schema = dataset.schema
        if unpack == "device":
            dataset = with_schema(dataset, packed_schema(unpacked_schema, for_device=True))
        options = StreamOptions(
            batch_size=batch_size,
            epochs=epochs,
            remainder=remainder,
            shard=(0, 1) if shard is None else shard,
            workers=workers,
            held_batches=held_batches,
            stall_timeout=stall_timeout,
            report=report,  # type: ignore[arg-type]  # is made a str there
            **dataset.leaves()[0].order_options(),
        )
        require(progress is None or isinstance(progress, bool), "progress", "True, False or None", progress)
        if dataset.grows:
            options.check_growing()
        first = checked_start(start)
        source = EmbeddedSource(StreamDescription(dataset, options))
        super().__init__(ReconnectingStream(source, first, ProgressDisplay(progress)), first, shard is not None)
        self.unpack, self.unpacked_schema = unpack, unpacked_schema


def as_dataset(
    shards: Any,
    schema: Schema | None,
    shuffle: bool | Shuffle,
    seed: int | None,
    on_corrupt: OnCorrupt,
    index_cache: str,
    refresh: Refresh,
    storage: Storage,
    shard: tuple[int, int] | None,
) -> AnyDataset:
    """The data set that the arguments of a Loader describe. Raises OptionError."""
    require(
        seed is not None or shard is None or as_shard(shard)[1] == 1,
        "seed",
        f"a number where there are several hosts, shard={shard}",
        seed,
        "Each host would draw another seed: records would be missing, and others would come twice. Draw one seed, "
        "and give it to all.",
    )
    if not isinstance(shards, (Dataset, Concat, Mix)):
        return Dataset(
            shards, cast(Schema, schema), shuffle, cast(int, seed), on_corrupt, index_cache, refresh, storage=storage
        )
    given = (schema, shuffle, seed, on_corrupt, index_cache, refresh, storage)
    defaults = (None, True, 0, "raise", "user", "never", DEFAULT_STORAGE)
    own = {name: value for name, value, default in zip(_OF_THE_SET, given, defaults, strict=True) if value != default}
    if own:
        what = type(shards).__name__
        texts = {name: "…" if name == "schema" else shown(value, 100) for name, value in own.items()}
        words = ", ".join(f"{name}={text}" for name, text in texts.items())
        where = "the data set" if what == "Dataset" else f"each data set of the {what}"
        raise OptionError(
            f"{' and '.join(own)} must be left out beside a {what}, which has its own; got {words}",
            hint=f"Give {where} what is wanted: Dataset(…, {words}).",
        )
    return shards
