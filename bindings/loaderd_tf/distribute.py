"""Batches for all replicas of a ``tf.distribute`` strategy.

::

    host 0: shard=(0, hosts) ──► batches ──┬─► replica 0's device: batches 0, 2, 4, …
                                           └─► replica 1's device: batches 1, 3, 5, …
    host 1: shard=(1, hosts) ──► …

TensorFlow deals a host's batches to its replicas in turn (a ``MultiDeviceIterator``), and copies them ahead: while
the model works on a batch, the replica's next one lies on its device, and the one after that is on its way there.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from loaderd_tf.dataset import Structure, make_dataset
from loaderd_tf.hops import MAX_HOP_BATCHES

# Of each replica: the batch that it works on, the one that it gets next, one copied ahead, and three on their way.
_HELD_BY_REPLICA = 6


def distribute(
    strategy: tf.distribute.Strategy,
    shards: Any,
    schema: loaderd.Schema | None = None,
    *,
    global_batch_size: int,
    structure: Structure = None,
    prefetch: int = 2,
    unpack: Literal["worker", "device"] = "worker",
    **options: Any,
) -> tf.distribute.DistributedDataset:
    """Batches of TFRecord shards for the replicas of ``strategy``: each gets rows of its own, onto its own device.

    ``strategy``: a MirroredStrategy, a MultiWorkerMirroredStrategy (then this is called in each of its processes), or
    another one whose replicas are fed by their own process. A step takes ``global_batch_size`` records, the same
    number for each replica; every host reads its share of each epoch (``shard`` is the strategy's to say), and over
    all replicas each record comes once an epoch. The rest is as in :func:`make_dataset`; ``prefetch`` counts batches
    that a host has ready for all its replicas, beside one on each device and those on their way.

    The ends of epochs: with ``remainder="drop"``, all replicas take the same number of batches of the same, static
    size, and what is left over waits for another epoch's order. Else nothing is lost: in an epoch's last step a
    replica may get a smaller batch, or one of 0 records, and none waits for another. A mean over 0 records is not a
    number, so let the loss of a step of your own be a sum over the records divided by ``global_batch_size``
    (``tf.nn.compute_average_loss``); Keras sees to it by itself.

    Its ``cardinality`` is the number of steps, as Keras wants it; ``fit`` first looks at a batch, and that is a pass.
    TensorFlow cannot checkpoint iterators of it: after so many steps of an epoch, go on with ``start=Position(epoch,
    steps * replicas of a host)``. Raises exceptions of :mod:`loaderd.errors`.
    """
    _check(strategy, global_batch_size, options)
    opened: list[tuple[loaderd.Loader, int]] = []  # and the batches that a step takes of it

    def open_pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = context.num_replicas_in_sync // context.num_input_pipelines
        dataset = make_dataset(
            shards,
            schema,
            batch_size=context.get_per_replica_batch_size(global_batch_size),
            shard=(context.input_pipeline_id, context.num_input_pipelines),
            structure=structure,
            prefetch=prefetch,
            unpack=unpack,
            **{"held_batches": MAX_HOP_BATCHES + prefetch + _HELD_BY_REPLICA * replicas, **options},
        )
        opened.append((dataset._loaderd_loader, replicas))
        return _in_steps(dataset, replicas, options.get("remainder") == "drop")

    distributed = strategy.distribute_datasets_from_function(open_pipeline)
    ((distributed._loaderd_loader, distributed._loaderd_batches_per_step),) = opened
    return distributed


def _in_steps(dataset: tf.data.Dataset, replicas: int, drop: bool) -> tf.data.Dataset:
    """``dataset``, its cardinality counted in steps of so many batches; ``drop``: without a last, partial step."""
    if replicas == 1:
        return dataset
    steps = dataset
    if drop:  # of several hosts, TensorFlow would fill it with batches of 0 records
        tuples = isinstance(dataset.element_spec, tuple)
        steps = dataset.window(replicas, drop_remainder=True).flat_map(
            # Without autograph, as in from_loader.
            tf.autograph.experimental.do_not_convert(
                lambda *parts: tf.data.Dataset.zip(parts if tuples else parts[0])
            )
        )
        steps._loaderd_loader = dataset._loaderd_loader  # which lives as long as a data set holds it
    batches = int(dataset.cardinality())
    if batches > 0:
        batches = batches // replicas if drop else -(-batches // replicas)
    steps.cardinality = lambda: tf.constant(batches, tf.int64)
    return steps


def _check(strategy: Any, global_batch_size: Any, options: dict[str, Any]) -> None:
    if not isinstance(strategy, tf.distribute.Strategy):
        raise OptionError(f"strategy must be a tf.distribute.Strategy, got {strategy!r}")
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise OptionError(
            "strategy must feed its replicas from their own process, got a ParameterServerStrategy",
            hint="Use a MultiWorkerMirroredStrategy.",
        )
    for name, instead in {"batch_size": "global_batch_size", "shard": "strategy", "device": "strategy"}.items():
        if name in options:
            raise OptionError(f"{name} follows from {instead} and must be left out, got {options[name]!r}")
    replicas = strategy.num_replicas_in_sync
    if type(global_batch_size) is not int or global_batch_size < 1 or global_batch_size % replicas:
        raise OptionError(
            f"global_batch_size must be a positive multiple of the strategy's {replicas} replicas, "
            f"got {global_batch_size!r}"
        )
