"""A loader as a ``tf.data.Dataset``, without a copy between the worker's memory and the tensor.

::

    range(1) ──new_pass──► which pass, its steps ──flat_map──► range of steps ──fetch──► tensors

``Loader._fetch`` gives any step of any pass, so the graph has no state of its own: an iterator, and a checkpoint of
it, holds two integers and the pass as text, which says what it belongs to. ``fetch`` is called in the thread that
takes the element (``map_python``, ``iterators``). In a graph, TensorFlow takes over the memory of an array that a
Python function returns, if it starts at a multiple of 64 bytes, and lets go of it when the tensor is gone. Then the
batch's lease ends, and its slot is filled anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import loaderd
from loaderd.client.elements import Structure, check_loader, field_names, packer
from loaderd.client.loader import Loader, as_dataset
from loaderd.client.shutdown import program_has_ended
from loaderd.dataset import delivered_schema
from loaderd.errors import OptionError
from loaderd.options import DEFAULT_STORAGE, OnCorrupt, Refresh, Remainder, Unpack, as_count, suggests_options
from loaderd_tf.dataset_attributes import attach
from loaderd_tf.graph_loader import GraphLoader, cardinality
from loaderd_tf.graphs import check_process, keep_with_graph, unconverted
from loaderd_tf.iterators import with_own_iterators
from loaderd_tf.map_python import call_for_each, while_true
from loaderd_tf.structure import check_element, has_gpu, is_host

# Beside what is prefetched: one batch held by the step, the one that it takes next, the one that comes in, and some
# for whatever the user makes of the data set. A slot that is never filled takes no memory.
_HELD_BY_CONSUMER = 6


@unconverted
@suggests_options
def make_dataset(
    shards: Any,
    schema: loaderd.Schema | None = None,
    *,
    batch_size: int,
    structure: Structure = None,
    prefetch: int | None = None,
    device: str | None = None,
    unpack: Unpack = "worker",
    epochs: int | None = 1,
    shuffle: bool | loaderd.Shuffle = True,
    seed: int | None = 0,
    remainder: Remainder = "short",
    shard: tuple[int, int] | None = None,
    workers: int | None = None,
    on_corrupt: OnCorrupt = "raise",
    held_batches: int | None = None,
    index_cache: str = "user",
    progress: bool | None = None,
    refresh: Refresh = "never",
    stall_timeout: float | None = 120.0,
    report: str | os.PathLike[str] | None = None,
    storage: loaderd.Storage = DEFAULT_STORAGE,
    where: loaderd.Derived | None = None,
    sample: float | loaderd.Sample | None = None,
    start: Mapping[str, Any] | loaderd.Position | None = None,
) -> tf.data.Dataset:
    """Batches of TFRecord shards as a ``tf.data.Dataset`` of known cardinality.

    ``shards``, ``schema``, ``batch_size`` and the options from ``epochs`` on are those of :class:`loaderd.Loader`,
    but for ``held_batches``: None is as many as TensorFlow holds. ``structure``, ``prefetch`` and ``device`` are
    those of :func:`from_loader`, and so are ``loader``, ``close()``, ``statistics()`` and ``diagnose()`` of what is
    returned. Each iteration of the data set is a pass of its own (the next ``epochs`` epochs), so
    ``model.fit(ds, epochs=3)`` sees three different orders. The daemon and its workers end with the data set. Raises
    exceptions of :mod:`loaderd.errors`; wrong options raise before any process is started.

    In each epoch, ``fit`` takes at most one step more than in its first one, and drops the rest. So where the first
    is shorter, because of ``start`` or ``refresh="epoch"``, use ``epochs=None`` and give ``fit`` ``steps_per_epoch``;
    or, to resume ``fit``, :class:`BackupAndRestore` without ``start``.

    ``unpack="device"``: an element holds the fields of ``packed_schema(schema)``, stored features as far as
    possible, and the model makes the fields of ``schema`` of them, by :func:`loaderd_tf.unpack` or the layer
    :class:`loaderd_tf.Unpack`. ``structure`` then names fields of ``packed_schema(schema)``.
    """
    if isinstance(shards, tf.data.Dataset):
        hint = "In place of list_files(…) and the like, give the glob itself: the files are listed in a fixed order."
        raise OptionError(f"shards must be a path, a glob, a URI or a list of them, got {shards!r}", hint=hint)
    dataset = as_dataset(
        shards,
        shard,
        schema=schema,
        shuffle=shuffle,
        seed=seed,
        on_corrupt=on_corrupt,
        index_cache=index_cache,
        refresh=refresh,
        storage=storage,
        where=where,
        sample=sample,
    )
    structure, ahead = check_element(structure, prefetch, device, delivered_schema(dataset.schema, unpack))
    batch_size = as_count(batch_size, "batch_size")
    if held_batches is None:
        held_batches = ahead + _HELD_BY_CONSUMER
    loader = loaderd.Loader(
        dataset,
        batch_size=batch_size,
        epochs=epochs,
        remainder=remainder,
        shard=shard,
        workers=workers,
        held_batches=held_batches,
        progress=progress,
        stall_timeout=stall_timeout,
        report=report,
        start=start,
        unpack=unpack,
    )
    return from_loader(loader, structure=structure, prefetch=prefetch, device=device)


@unconverted
@suggests_options
def from_loader(
    loader: Loader,
    structure: Structure = None,
    *,
    prefetch: int | None = None,
    device: str | None = None,
) -> tf.data.Dataset:
    """The batches of ``loader`` as a ``tf.data.Dataset``; the caller still closes the loader.

    ``structure``: nested tuples, lists and dicts of field names; an element has their tensors in the same structure.
    None: a dict, name -> tensor, in the schema's order. ``device``: such as ``"/GPU:0"``: batches are copied there
    ahead, so that ``prefetch`` (2) of them lie there while the model works on another. On the host, TensorFlow takes
    nothing ahead, as the workers are ahead: ``prefetch`` without a ``device`` is an OptionError. ``make_dataset`` has
    slots for a ``.prefetch(2)`` of your own; for more of them, give ``held_batches``. If the loader has
    ``unpack="device"``, elements are packed, as :func:`make_dataset` says. Raises OptionError for a
    field or device that does not exist.

    The data set has the attribute ``loader``, and its methods ``close()``, ``statistics()`` and ``diagnose()``. What
    is made of it by ``map()`` or the like is another object, which has none of them: keep this one.
    """
    check_loader(loader)
    structure, ahead = check_element(structure, prefetch, device, loader.schema)
    device = None if device is None or is_host(device) else device
    names = field_names(structure)
    specs = [
        tf.TensorSpec([loader._static_batch_size, *spec.shape], tf.as_dtype(spec.dtype))
        for spec in (loader.schema.specs[name] for name in names)
    ]
    graph_loader = GraphLoader(loader, names, has_gpu())
    pack = packer(structure)
    keep_with_graph(loader)

    def element(tensors: Sequence[tf.Tensor]) -> Any:
        return pack(dict(zip(names, tensors, strict=True)))

    dataset = _of_passes(graph_loader, loader._grows, loader._options.on_corrupt != "raise", specs, element)
    size = cardinality(loader)
    if size != tf.data.UNKNOWN_CARDINALITY and (size < 0 or loader._next_is_whole):
        dataset = _of_cardinality(dataset, size, graph_loader.is_gone)
    dataset = _ahead(dataset, ahead, device)
    if device is not None or not loader._next_is_whole:
        # For TensorFlow, what copies to a device is a generator: its cardinality is unknown and cannot be asserted.
        # And where the first pass is shorter than the next ones, no fixed cardinality is right for all passes.
        dataset.cardinality = graph_loader.cardinality
    own = with_own_iterators(
        dataset,
        in_thread=device is None and loader._sharing == "independent",
        shuffled=bool(loader._options.shuffle),
        has_target=not isinstance(structure, dict),
    )
    return attach(own, loader)


def _of_passes(
    graph_loader: GraphLoader, grows: bool, skips: bool, specs: Sequence[tf.TensorSpec], element: Callable[..., Any]
) -> tf.data.Dataset:
    """The elements of an iteration's passes, each of which begins when the one before is over.

    There is one pass; where data grow, there are as many as the loader says when the iteration begins. ``skips``:
    whether batches may be left without records.
    """
    passes = tf.data.Dataset.range(1)
    if grows:

        @unconverted
        def num_passes(number: tf.Tensor) -> tf.Tensor:
            # The check in ``while_true`` would come too late: that takes the number of a pass first.
            with tf.control_dependencies([check_process()]):
                passes_left = tf.numpy_function(graph_loader.num_passes, [number], tf.int64, stateful=False)
            return tf.ensure_shape(passes_left, [])

        passes = passes.map(num_passes, synchronous=True).flat_map(unconverted(tf.data.Dataset.range))

    @unconverted
    def new_pass(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
        dtypes = [tf.string, tf.int64, tf.int64]
        new = tf.numpy_function(graph_loader.new_pass, [number], dtypes, stateful=False)
        return tuple(tf.ensure_shape(tensor, []) for tensor in new)

    @unconverted
    def batches(pass_text: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        pass_text = tf.ensure_shape(tf.numpy_function(graph_loader.begin, [pass_text], tf.string, stateful=False), [])
        steps = tf.data.Dataset.range(begin, end)
        if skips:
            return _without_empty(graph_loader, steps, pass_text, specs, element)
        return call_for_each(steps, graph_loader.fetch, [pass_text], specs, element)

    # Synchronous: else TensorFlow would begin passes ahead, but data that grow are listed when an epoch begins.
    begun = while_true(passes, lambda: not program_has_ended()).map(new_pass, synchronous=True)
    return begun.flat_map(batches)


def _without_empty(
    graph_loader: GraphLoader,
    steps: tf.data.Dataset,
    pass_text: tf.Tensor,
    specs: Sequence[tf.TensorSpec],
    element: Callable[..., Any],
) -> tf.data.Dataset:
    """The elements of ``steps``, without those of batches that have no records.

    TensorFlow runs no function that only returns some of its inputs: so the call says of each batch whether it has
    records. (To look at the shape of a tensor costs 200 µs an element.)
    """
    flagged = call_for_each(
        steps,
        graph_loader.fetch_flagged,
        [pass_text],
        [*specs, tf.TensorSpec([], tf.bool)],
        lambda parts: (parts[-1], element(parts[:-1])),
    )
    with_records = flagged.filter(unconverted(lambda flag, _: flag))
    return with_records.map(unconverted(lambda _, fields: fields), synchronous=True)


def _of_cardinality(dataset: tf.data.Dataset, cardinality: int, is_gone: Callable[[], bool]) -> tf.data.Dataset:
    """``dataset`` with a cardinality that TensorFlow knows: so many elements of one that it takes for infinite.

    For that, a part follows ``dataset`` that seems infinite, but has no elements. To assert the cardinality would
    make an error of an early end, when the program ends or behind a broken batch. Only where the loader is gone, that
    part raises an error, so that nobody takes this for the end of the data: one that is printed only if somebody asks
    for the element. (An iterator that is destroyed loses its data set first, and goes on for a moment.)
    """
    too_few = unconverted(lambda _: dataset.take(0).apply(tf.data.experimental.assert_cardinality(1)))
    behind = while_true(tf.data.Dataset.range(1), is_gone).flat_map(too_few).repeat()
    return dataset.concatenate(behind).take(cardinality)  # -1, as of an infinite one, is all


def _ahead(dataset: tf.data.Dataset, prefetch: int, device: str | None) -> tf.data.Dataset:
    """``dataset``, with ``prefetch`` elements copied ahead to a device; without one, nothing is taken ahead.

    A thread of TensorFlow's that takes batches ahead costs as much as taking them, and the workers are ahead already.
    """
    if device is not None:
        to_device = tf.data.experimental.prefetch_to_device(device, buffer_size=max(1, prefetch))
        return dataset.prefetch(1).apply(to_device)
    return dataset.prefetch(0)  # without it, TensorFlow adds a prefetch that does take ahead
