"""What a program imports: ``make``, which makes its data set, and ``report``, which tells what it saw.

Whether the batches come from loaderd or lie in memory, the environment says; a program cannot tell.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import tensorflow as tf
from usage_schema import CHESS, CHESS_RECORDS, FOLDER, NUMBERED, RECORDS, chess_schema, fields_of, numbered, schema

import loaderd

# "loaderd", "memory", or the way that a consumer of a server shares its data set.
SOURCE = os.environ["USAGE_SOURCE"]
_held: list[Any] = []  # loaders of a server live until the program ends


def make(
    structure: Any = ("bits", "target"),
    *,
    batch_size: int = 16,
    epochs: int | None = 1,
    shuffle: bool = False,
    remainder: str = "drop",
    via: str = "make_dataset",
    chess: bool = False,
    **options: Any,
) -> tf.data.Dataset:
    """The data set of the program: 8 batches of 16 numbered records, or 6 of chess records."""
    if SOURCE == "memory":
        records = CHESS_RECORDS if chess else RECORDS
        orders = np.load(FOLDER / "orders.npy") if shuffle else np.arange(records)[None]
        fields = dict(np.load(FOLDER / "chess.npz")) if chess else fields_of(np.arange(records))
        dataset = _in_memory(fields, orders, structure, batch_size, epochs, remainder)
        device = options.get("device")
        return dataset.apply(tf.data.experimental.prefetch_to_device(device)) if device else dataset
    described: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "remainder": remainder}
    if SOURCE != "loaderd":
        if SOURCE == "split":
            described["shard"] = (0, 1)
        dataset = "chess" if chess else "shuffled" if shuffle else "numbered"
        loader = loaderd.connect("unix:" + os.environ["USAGE_SERVER"], dataset=dataset, sharing=SOURCE, **described)
        _held.append(loader)
        return loaderd_tf.from_loader(loader, structure, **options)
    read = (CHESS, chess_schema) if chess else (NUMBERED, schema)
    if via == "from_loader":
        loader = loaderd.Loader(*read, shuffle=shuffle, workers=1, **described)
        return loaderd_tf.from_loader(loader, structure, **options)
    if via == "dataset":
        return loaderd_tf.make_dataset(numbered, structure=structure, workers=1, **described, **options)
    return loaderd_tf.make_dataset(*read, structure=structure, shuffle=shuffle, workers=1, **described, **options)


def loader(**options: Any) -> Any:
    """The same 8 batches without TensorFlow: mappings of numpy arrays."""
    if SOURCE == "loaderd":
        return loaderd.Loader(NUMBERED, schema, batch_size=16, shuffle=False, workers=1, **options)
    return [fields_of(numbers) for numbers in np.arange(RECORDS).reshape(-1, 16)]


def distribute(strategy: tf.distribute.Strategy, structure: Any = ("bits", "target"), **options: Any) -> Any:
    """32 records a step, each replica of two with 16 of them."""
    if SOURCE == "loaderd":
        return loaderd_tf.distribute(
            strategy,
            NUMBERED,
            schema,
            global_batch_size=32,
            structure=structure,
            shuffle=False,
            workers=1,
            remainder="drop",
            **options,
        )
    return strategy.experimental_distribute_dataset(make(structure, batch_size=32))


def _in_memory(
    fields: dict[str, np.ndarray],
    orders: np.ndarray,
    structure: Any,
    batch_size: int,
    epochs: int | None,
    remainder: str,
) -> tf.data.Dataset:
    names = {name: name for name in fields} if structure is None else _without_lists(structure)
    count = orders.shape[1] // batch_size * batch_size
    full, rest = orders[:, :count].reshape(len(orders), -1, batch_size), orders[:, count:]

    def of(rows: Any) -> Any:
        return tf.nest.map_structure(lambda name: tf.constant(fields[name][rows]), names)

    if len(orders) == 1:  # every epoch alike
        dataset = tf.data.Dataset.from_tensor_slices(of(full[0]))
        if remainder == "short" and rest.size:
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(of(rest[0])))
        return dataset if epochs == 1 else dataset.repeat(epochs)
    assert epochs is not None and not (rest.size and remainder == "short")
    passes = full.reshape(len(orders) // epochs, -1, batch_size)
    begun = iter(range(len(passes)))
    everything = of(passes)

    def slices(number: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda all_: all_[number], everything))

    def which(number: tf.Tensor) -> tf.Tensor:
        # Of an input, else TensorFlow takes it for a constant.
        found = tf.numpy_function(lambda _: np.int64(next(begun)), [number], tf.int64, stateful=False)
        return tf.ensure_shape(found, [])

    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(number).map(which).flat_map(slices)

    dataset = tf.data.Dataset.range(1).flat_map(one_pass)  # not map(which) at once: TensorFlow would run that ahead
    return dataset.apply(tf.data.experimental.assert_cardinality(passes.shape[1]))


def _without_lists(structure: Any) -> Any:
    """tf.data takes a list for a tensor; what it hands on in its place is a tuple."""
    if isinstance(structure, dict):
        return {key: _without_lists(part) for key, part in structure.items()}
    return tuple(map(_without_lists, structure)) if isinstance(structure, (list, tuple)) else structure


def close_loaders() -> None:
    """For the next program in this process, which may connect to the same data set."""
    while _held:
        _held.pop().close()


def report(*values: Any) -> None:
    """Say what was seen. Of a data set: its specification, its cardinality and all its elements."""
    with Path(os.environ["USAGE_REPORT"]).open("ab") as file:
        for value in values:
            pickle.dump(_plain(value), file)


def _plain(value: Any) -> Any:
    if isinstance(value, tf.data.Dataset):
        spec = repr(value.element_spec)
        known = int(value.cardinality())
        assert known != tf.data.INFINITE_CARDINALITY, "take() some of an endless data set"
        return ["data set", spec, known, [_plain(element) for element in value]]
    if isinstance(value, tf.RaggedTensor):
        return ["ragged", _plain(value.flat_values), [_plain(splits) for splits in value.nested_row_splits]]
    if isinstance(value, tf.SparseTensor):
        return ["sparse", *map(_plain, (value.indices, value.values, value.dense_shape))]
    if isinstance(value, tf.distribute.DistributedValues):
        return ["per replica", [_plain(part) for part in value.values]]
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (str, int, bool, type(None))):
        return value
    array = np.asarray(value)
    if array.dtype == object:
        return [_plain(part) for part in array.tolist()]
    return (str(array.dtype), array.shape, array.tobytes())
