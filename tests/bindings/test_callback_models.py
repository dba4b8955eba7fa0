"""fit that goes on with a model that is not built yet, as in a process of its own."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import pytest
import tensorflow as tf

from tests.bindings.training import Interrupt
from tests.helpers.numbered import Numbered


@pytest.mark.slow
def test_what_a_model_makes_with_its_first_batch_is_of_the_elements_of_fit(numbered: Numbered, tmp_path: Path):
    """As in a process of its own: of the labels' shape, Keras tells which accuracy is meant."""

    shards = numbered.write([150, 180, 100])

    def train(directory: Path, interrupt: float = math.inf) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(5)])
        model.compile("adam", "mse", metrics=["accuracy"])
        dataset = loaderd_tf.make_dataset(shards, numbered.schema, workers=1, batch_size=20)
        elements = dataset.map(lambda batch: (batch["bits"], tf.one_hot(batch["id"] % 5, 5)))
        ours = loaderd_tf.BackupAndRestore(directory, dataset, save_freq=4)
        with suppress(KeyboardInterrupt):
            return model.fit(elements, epochs=2, callbacks=[ours, Interrupt(interrupt)], verbose=0).history

    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", interrupt=30)
    again = train(tmp_path / "parts")
    assert again == {name: values[1:] for name, values in whole.items()}
