"""What the tf.data candidates share: reading, parsing, making fields of features, two ways to consume a dataset.

Reading is laid out for speed: there are as many streams as cores, each reads its own share of the files, and records
are batched while they are still strings. With shuffling, each stream draws the order of its files anew every epoch
and shuffles 10,000 records of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from harness.interface import CHESS, Config, Step
from harness.reference import VALUE_A, VALUE_B, VALUE_K

from loaderd import Array, Bits, Derived, Fill, Float, Int64, Packed, PackedBits, Planes, Raw, Schema, Spread

SHUFFLE_RECORDS = 10_000
READ_BYTES = 4 << 20
BATCHES_PER_CALL = 32  # of the tf.function that consumes

Tensors = dict[str, tf.Tensor]


def serialized_batches(config: Config) -> tf.data.Dataset:
    """Batches of serialized Examples: string, (n,). ``TFRecordDataset`` checks both CRCs of every record."""
    streams = min(len(os.sched_getaffinity(0)), len(config.shards))

    def stream(index: tf.Tensor) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(list(config.shards)).shard(streams, index)
        if config.shuffle:
            files = files.shuffle(len(config.shards))
        # Repeated here and not at the end: the streams and their buffers do not run dry between epochs.
        records = tf.data.TFRecordDataset(files.repeat(config.epochs), config.compression, READ_BYTES)
        if config.shuffle:
            records = records.shuffle(SHUFFLE_RECORDS)
        return records.batch(config.batch_size)

    return tf.data.Dataset.range(streams).interleave(
        stream, cycle_length=streams, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    )


def decoded(config: Config, decode: Callable[[Tensors], Tensors]) -> tf.data.Dataset:
    """``decode`` mapped over parsed batches: it is given the stored features, as :func:`parser` says."""
    parse = parser(config.delivered())
    if config.one_in is not None:
        passing = (
            serialized_batches(config)
            .map(parse, tf.data.AUTOTUNE, deterministic=False)
            .unbatch()
            .filter(lambda stored: stored["s"] % config.one_in == 0)
            .batch(config.batch_size)
        )
        return passing.map(decode, tf.data.AUTOTUNE, deterministic=False).prefetch(tf.data.AUTOTUNE)
    return (
        serialized_batches(config)
        .map(lambda serialized: decode(parse(serialized)), tf.data.AUTOTUNE, deterministic=False)
        .prefetch(tf.data.AUTOTUNE)
    )


def parser(schema: Schema) -> Callable[[tf.Tensor], Tensors]:
    """A function of serialized Examples, (n,), to the stored features of ``schema``: packed bits as uint8 bytes."""
    features = {}
    for name, feature in schema.features.items():
        default: Any = feature.default_bytes
        if isinstance(feature, Int64 | Float):
            if default is not None:
                default = np.frombuffer(default, feature.value_dtype).reshape(feature.shape)
            features[name] = tf.io.FixedLenFeature(feature.shape, feature.value_dtype, default)
        else:
            features[name] = tf.io.FixedLenFeature([], tf.string, default)

    def parse(serialized: tf.Tensor) -> Tensors:
        stored: Tensors = tf.io.parse_example(serialized, features)
        for name, feature in schema.features.items():
            if isinstance(feature, PackedBits):
                stored[name] = tf.ensure_shape(tf.io.decode_raw(stored[name], tf.uint8), [None, feature.num_bytes])
            elif isinstance(feature, Raw):
                values = tf.io.decode_raw(stored[name], feature.dtype.newbyteorder("="), feature.dtype.str[0] != ">")
                stored[name] = tf.reshape(values, [-1, *feature.shape])
        return stored

    return parse


# What tf.io.decode_raw makes of bytes, and structures, text, bool, uint32 and uint64 are not among it.
_OF_DECODE_RAW = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "c8", "c16"]


def cannot_parse(schema: Schema) -> str | None:
    """Why :func:`parser` is not for the records of ``schema``; None: it is."""
    if any(not isinstance(feature, PackedBits) and feature.pad is not None for feature in schema.features.values()):
        return "it does not parse features with pad"
    dtypes = [feature.dtype for feature in schema.features.values() if isinstance(feature, Raw)]
    named = ", ".join(f"Raw of {dtype}" for dtype in dtypes if dtype.str[1:] not in _OF_DECODE_RAW)
    return f"it does not parse {named}" if named else None


def cannot_decode(config: Config) -> str | None:
    """``cannot`` of a candidate that decodes with :func:`decoder`."""
    schema = config.delivered()
    kinds = dict.fromkeys(_not_decoded(schema.definition_of(name)) for name in schema.evaluation_order)
    named = ", ".join(filter(None, kinds))
    return f"it does not decode {named}" if named else cannot_parse(schema)


def _not_decoded(field: object) -> str:
    if isinstance(field, Bits) and field.plane_bytes is not None:
        return "Bits with plane_bytes"
    if isinstance(field, Array) and field.first is not None:
        return "Array with first"
    return type(field).__name__ if isinstance(field, Planes | Fill | Spread) else ""


def decoder(config: Config, unpack: Callable[[tf.Tensor, Bits], tf.Tensor]) -> Callable[[Tensors], Tensors]:
    """A function that makes the delivered fields of stored features; ``unpack(stored bytes, field)`` makes Bits.

    A derived field is a call of its numpy function, except the score of chess, which is computed in the graph.
    """
    schema = config.delivered()

    def decode(stored: Tensors) -> Tensors:
        found: Tensors = {}
        for name in schema.evaluation_order:
            field, spec = schema.definition_of(name), schema.spec_of(name)
            if isinstance(field, Bits):
                found[name] = unpack(stored[field.feature], field)
            elif isinstance(field, Derived):
                inputs = [found[source] for source in field.inputs]
                found[name] = chess_score(*inputs) if config.schema == CHESS else _derive(field, inputs)
            else:
                assert isinstance(field, Array | Packed), "see cannot_decode"
                values = tf.cast(stored[field.feature], spec.dtype)
                if isinstance(field, Array) and field.scale is not None:
                    values = values * tf.cast(field.scale, spec.dtype)
                if isinstance(field, Array) and field.offset is not None:
                    values = values + tf.cast(field.offset, spec.dtype)
                found[name] = tf.reshape(values, [-1, *spec.shape])
        return {name: found[name] for name in schema.fields}

    return decode


def _derive(field: Derived, inputs: list[tf.Tensor]) -> tf.Tensor:
    def compute(*arrays: Any) -> Any:
        return np.asarray(field.function(*arrays)).astype(field.dtype)

    return tf.ensure_shape(
        tf.numpy_function(compute, inputs, field.dtype, stateful=False), [None, *(field.shape or ())]
    )


def chess_score(stored: tf.Tensor, mate: tf.Tensor) -> tf.Tensor:
    """The score float32, (n,), of ``s`` int64, (n,), and the bit that says that it counts moves to mate, bool, (n,).

    Computed in float64 and rounded once: float32's tanh differs from machine to machine, and n values cost nothing.
    """
    score = tf.cast(stored, tf.float64)
    moves_left = tf.maximum(tf.constant(0.0, tf.float64), VALUE_B - tf.abs(score))
    decided = tf.sign(score) * (VALUE_A + (1.0 - VALUE_A) / (VALUE_B - 1.0) * moves_left)
    return tf.cast(tf.where(mate, decided, VALUE_A * tf.tanh(score / VALUE_K)), tf.float32)


def consume(dataset: tf.data.Dataset, config: Config) -> Iterator[Step]:
    """The steps of a dataset of dicts, field -> tensor: eager, or inside a tf.function (``config.graph``)."""
    if config.graph:
        yield from _consume_in_graph(dataset)
        return
    for batch in dataset:
        yield Step(next(iter(batch.values())).shape[0], batch)


def _consume_in_graph(dataset: tf.data.Dataset) -> Iterator[Step]:
    def take(iterator: Any) -> tuple[tf.Tensor, tf.Tensor]:
        examples, touched = tf.constant(0), tf.constant(0.0)
        for _ in tf.range(BATCHES_PER_CALL):
            batch = next(iterator)
            examples += tf.shape(next(iter(batch.values())))[0]
            for tensor in batch.values():
                touched += tf.cast(tf.reshape(tensor, [-1])[0], tf.float32)
        return examples, touched

    take_in_graph = tf.function(take)
    iterator = iter(dataset)
    while True:
        examples, _ = take_in_graph(iterator)
        yield Step(int(examples), None)
