"""Batches for all replicas of a ``tf.distribute`` strategy.

::

    host 0: shard=(0, hosts) ──► batches ──┬─► replica 0's device: batches 0, 2, 4, …
                                           └─► replica 1's device: batches 1, 3, 5, …
    host 1: shard=(1, hosts) ──► …

TensorFlow deals a host's batches to its replicas in turn (a ``MultiDeviceIterator``), and copies them ahead: while
the model works on a batch, the replica's next one lies on its device, and the one after that is on its way there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from loaderd.options import Remainder, as_count, require
from loaderd_tf.dataset_attributes import attach
from loaderd_tf.graphs import unconverted
from loaderd_tf.keras_calls import check_one_host
from loaderd_tf.tf_dataset import make_dataset

# For each replica: the batch that it works on, the one that it gets next, one copied ahead, and three on their way.
_HELD_BY_REPLICA = 6
_HELD_BY_HOST = 2  # for whatever the user makes of the data set


def distribute(
    strategy: tf.distribute.Strategy,
    shards: Any,
    schema: loaderd.Schema | None = None,
    *,
    global_batch_size: int,
    remainder: Remainder = "short",
    held_batches: int | None = None,
    **options: Any,
) -> tf.distribute.DistributedDataset:
    """Batches of TFRecord shards for the replicas of ``strategy``: each gets records of its own, on its own device.

    ``strategy``: a MirroredStrategy, a MultiWorkerMirroredStrategy (then this is called in each of its processes), or
    another one whose replicas are fed by their own process. A step takes ``global_batch_size`` records, the same
    number for each replica; every host reads its share of each epoch (``shard`` and ``device`` follow from the
    strategy), and over all replicas each record comes once an epoch. ``options`` are those of :func:`make_dataset`.
    The result has ``loader``, ``close()``, ``statistics()`` and ``diagnose()`` of this host.

    The ends of epochs: with ``remainder="drop"``, all replicas take the same number of batches of the same, static
    size, and the records left over do not come in this epoch. Else nothing is lost: in an epoch's last step a replica
    may get a smaller batch, or one of 0 records, and no replica waits for another. A mean over 0 records is not a
    number, so let the loss of a step of your own be a sum over the records divided by ``global_batch_size``
    (``tf.nn.compute_average_loss``); Keras does so by itself.

    The ``cardinality`` of what is returned is the number of steps, as Keras expects. ``fit`` first looks at a batch,
    and that uses up a pass. TensorFlow cannot checkpoint its iterators: to go on after some steps of an epoch, in a
    loop of your own, make it with ``start=Position(epoch, steps * replicas of a host)`` (:func:`make_dataset` says
    why not in ``fit``, and what to do there). Raises exceptions of :mod:`loaderd.errors`.
    """
    size = _check(strategy, global_batch_size)
    for name in ("batch_size", "shard", "device", "prefetch"):
        if name in options:
            raise TypeError(f"distribute has no option {name!r}: it follows from the strategy and global_batch_size")
    opened: list[tuple[loaderd.Loader, int, int]] = []  # and how many of its batches a step takes; how many hosts

    def open_pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = context.num_replicas_in_sync // context.num_input_pipelines
        dataset = make_dataset(
            shards,
            schema,
            batch_size=context.get_per_replica_batch_size(size),
            shard=(context.input_pipeline_id, context.num_input_pipelines),
            remainder=remainder,
            held_batches=_HELD_BY_HOST + _HELD_BY_REPLICA * replicas if held_batches is None else held_batches,
            **options,
        )
        opened.append((dataset.loader, replicas, context.num_input_pipelines))
        return _in_steps(dataset, replicas, remainder == "drop")

    distributed = strategy.distribute_datasets_from_function(open_pipeline)
    ((loader, replicas, num_hosts),) = opened
    if num_hosts > 1:
        distributed.__class__ = _for_own_loops(distributed.__class__)
    return attach(distributed, loader, replicas)


@cache
def _for_own_loops(kind: Any) -> type:
    """``kind``, a class of data sets, which Keras may not iterate over."""

    def iterate(self: Any) -> Any:
        check_one_host()
        return kind.__iter__(self)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": iterate})


def _in_steps(dataset: tf.data.Dataset, replicas: int, drop: bool) -> tf.data.Dataset:
    """``dataset``, its cardinality in steps of ``replicas`` batches; ``drop``: without a last, partial step."""
    if replicas == 1:
        return dataset
    steps = dataset
    if drop:  # with several hosts, TensorFlow would fill that step with batches of 0 records
        tuples = type(dataset.element_spec) is tuple  # else, as for a named tuple, TensorFlow passes a single part
        steps = dataset.window(replicas, drop_remainder=True).flat_map(
            # Without autograph: see ``unconverted``.
            unconverted(lambda *parts: tf.data.Dataset.zip(parts if tuples else parts[0]))
        )
        attach(steps, dataset.loader)  # the loader lives as long as a data set holds it
    batches = int(dataset.cardinality())
    if batches > 0:
        batches = batches // replicas if drop else -(-batches // replicas)
    steps.cardinality = lambda: tf.constant(batches, tf.int64)
    return steps


def _check(strategy: Any, global_batch_size: Any) -> int:
    """``global_batch_size`` as an int. Raises OptionError for a strategy or a size that cannot be used."""
    is_strategy = isinstance(strategy, tf.distribute.Strategy)
    require(is_strategy, "strategy", "a tf.distribute.Strategy", strategy)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise OptionError(
            "strategy must feed its replicas from their own process, got a ParameterServerStrategy",
            hint="Use a MultiWorkerMirroredStrategy.",
        )
    replicas = strategy.num_replicas_in_sync
    must = f"a positive multiple of the strategy's {replicas} replicas"
    size = as_count(global_batch_size, "global_batch_size", must)
    require(size % replicas == 0, "global_batch_size", must, global_batch_size)
    return size
