"""What the programs of these tests have: data, and a way to say that their last line is reached.

``SOURCE`` in the environment says who makes the batches: ``loader`` (a daemon of the program's own), the address of a
server (``unix:…``, ``http://…``), or ``plain``: nobody, and what the same program does without loaderd is seen.
loaderd is imported only when it is used: programs may have things to do before that.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

SOURCE = os.environ.get("SOURCE", "loader")
NUM_RECORDS = 500
BATCH_SIZE = 10
NUM_BATCHES = NUM_RECORDS // BATCH_SIZE


def last_line() -> None:
    """To be called where the program itself has nothing left to do; the last call counts."""
    with open(os.environ["LAST_LINE"], "w") as file:
        file.write(str(time.monotonic()))


def loader(epochs: int | None = None, records: Any = None, **options: Any) -> Any:
    """Iterable over batches of 10 of 500 records; without an end unless ``epochs`` says otherwise.

    ``records``: another data set than that of ``datasets``.
    """
    if SOURCE == "plain":
        return _Plain(epochs)
    import loaderd

    if SOURCE != "loader":
        return loaderd.connect(SOURCE, dataset="train", batch_size=BATCH_SIZE, epochs=epochs, **options)
    import datasets

    options = {"workers": 1, **options}
    return loaderd.Loader(records or datasets.train, batch_size=BATCH_SIZE, epochs=epochs, **options)


def data_set(epochs: int | None = None, records: Any = None, **options: Any) -> Any:
    """The same as a ``tf.data.Dataset`` of the field ``id``."""
    import tensorflow as tf

    if SOURCE == "plain":
        return tf.data.Dataset.range(NUM_RECORDS).batch(BATCH_SIZE).repeat(epochs).prefetch(2)
    import loaderd_tf

    if SOURCE != "loader":
        return loaderd_tf.from_loader(loader(epochs, **options), structure="id")
    import datasets

    return loaderd_tf.make_dataset(
        records or datasets.train,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        structure="id",
        **{"workers": 1, **options},
    )


def batches(**options: Any) -> Any:
    """The same as eager tensors of that field, without an end."""
    import tensorflow as tf

    if SOURCE == "plain":
        return (tf.constant(batch["id"], tf.int64) for batch in loader())
    import loaderd_tf

    return loaderd_tf.batches(loader(), "id", **options)


def net() -> Any:
    """A small Keras model of what :func:`pairs` gives."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def pairs(epochs: int | None = None, **options: Any) -> Any:
    """The data set as inputs and targets, for ``fit``."""
    import tensorflow as tf

    def pair(ids: Any) -> Any:
        x = tf.cast(ids, tf.float32)[:, None] / NUM_RECORDS
        return x, x * 2 + 1

    return data_set(epochs, **options).map(pair)


class _Plain:
    """What a loader is to a program, without one."""

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs

    def __iter__(self) -> Any:
        epoch = [{"id": list(range(first, first + BATCH_SIZE))} for first in range(0, NUM_RECORDS, BATCH_SIZE)]
        rounds = itertools.repeat(epoch) if self._epochs is None else itertools.repeat(epoch, self._epochs)
        return itertools.chain.from_iterable(rounds)

    def close(self) -> None: ...

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *exception: object) -> None: ...
