"""Copies to a GPU: out of the slots themselves, and no slot is filled again before its copy is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from tests.helpers.lent_batches import Write

pytestmark = pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="there is no GPU here")

RECORDS, BATCH_SIZE, GPU = 20_000, 500, "/GPU:0"
SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)
BATCHES: dict[str, Any] = {
    "batches, copied ahead": lambda loader: loaderd_tf.batches(loader, ("bits", "id"), device=GPU),
    "batches, copied when they are used": lambda loader: loaderd_tf.batches(loader, ("bits", "id")),
    "data set, copied ahead": lambda loader: loaderd_tf.from_loader(loader, ("bits", "id"), device=GPU),
    "data set, copied when it is used": lambda loader: loaderd_tf.from_loader(loader, ("bits", "id")),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Write) -> list[Path]:
    return write_numbered_to(tmp_path_factory.mktemp("shards"), [RECORDS // 2] * 2)


def check(bits: tf.Tensor, ids: tf.Tensor) -> list[int]:
    """That all rows are whole; returns their numbers."""
    assert bits.device.endswith("GPU:0")
    numbers = ids.numpy()
    assert np.array_equal(bits.numpy() @ 2.0 ** np.arange(31, -1, -1), numbers)
    return [int(number) for number in numbers]


@pytest.mark.parametrize("way", BATCHES)
def test_no_batch_is_overwritten_while_it_is_copied(shards: list[Path], way: str):
    """A copy waits for all that the GPU has to do, and the loop drops its batches at once."""
    with tf.device(GPU):
        seen, busy = [], tf.ones([4000, 4000])
        with loaderd.Loader(shards, SCHEMA, batch_size=BATCH_SIZE, workers=2) as loader:
            for _ in range(3):
                for bits, ids in BATCHES[way](loader):
                    busy = busy @ busy / 4000
                    seen.append((tf.identity(bits) * 1, tf.identity(ids) * 1))
            assert next(iter(loader))._is_pinned
        assert sorted(n for element in seen for n in check(*element)) == sorted([*range(RECORDS)] * 3)


@pytest.mark.parametrize("way", BATCHES)
def test_a_function_of_a_graph_reads_whole_batches(shards: list[Path], way: str):
    """Compiled by XLA, which takes the batches as they come."""

    @tf.function(jit_compile=True)
    def numbers(bits: tf.Tensor) -> tf.Tensor:
        weights = tf.constant(2.0 ** np.arange(31, -1, -1), tf.float64)
        return tf.linalg.matvec(tf.cast(bits, tf.float64), weights)

    def read(loader: loaderd.Loader) -> Iterator[float]:
        with tf.device(GPU):
            found = [numbers(bits) for bits, _ in BATCHES[way](loader)]
        return (number for one in found for number in one.numpy())

    with loaderd.Loader(shards, SCHEMA, batch_size=BATCH_SIZE, workers=2) as loader:
        assert sorted(read(loader)) == list(range(RECORDS))


def test_fit_learns_the_same_with_and_without_a_device(shards: list[Path]):
    import keras

    def weights(device: str | None) -> list[Any]:
        keras.utils.set_random_seed(1)
        options: dict[str, Any] = {"structure": ("bits", "id"), "batch_size": BATCH_SIZE, "workers": 2}
        dataset = loaderd_tf.make_dataset(shards, SCHEMA, device=device, **options)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-12), "mse")
        model.fit(dataset, epochs=2, verbose=0)
        dataset.close()
        return [array.tolist() for array in model.get_weights()]

    assert np.allclose(weights(GPU)[0], weights(None)[0], rtol=1e-4)
