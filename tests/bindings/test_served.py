"""tf.data and model.fit on a server's data set, while the server, or the training, is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted

STRUCTURE = ("bits", "id")


@pytest.fixture
def server(tmp_path: Path, numbered: Numbered) -> Iterator[Restarted]:
    numbered.write([100, 50])
    started = Restarted(tmp_path)
    yield started
    started.kill()


class Logged(keras.Sequential):
    """Learns the number of each record by its bits; ``seen``: the ids of each step."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        super().__init__([keras.Input((32,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        self.seen: list[list[int]] = []
        self.compile("adam", "mse")

    def train_step(self, data: Any) -> Any:
        bits, ids = data
        tf.numpy_function(lambda ids: self.seen.append(ids.tolist()), [ids], [])
        return super().train_step((bits, tf.cast(ids, tf.float32) / 1000))


def at_step(step: int, what: Callable[[], Any]) -> keras.callbacks.Callback:
    """Calls ``what`` after that many steps."""
    steps = count(1)
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: what() if next(steps) == step else None
    )


def interrupt() -> None:
    raise KeyboardInterrupt


def fit(server: Restarted, folder: Path, *callbacks: Any, epochs: int = 2) -> Logged:
    """With a backup every 2 steps; a data set of its own, as in a process of its own."""
    with server.connect(10) as loader:
        dataset = loaderd_tf.from_loader(loader, STRUCTURE)
        assert int(dataset.cardinality()) == 15
        model = Logged()
        backup = loaderd_tf.BackupAndRestore(folder, dataset, save_freq=2)
        with suppress(KeyboardInterrupt):
            model.fit(dataset, epochs=epochs, callbacks=[backup, *callbacks], shuffle=False, verbose=0)
        return model


@pytest.mark.slow
def test_fit_while_the_server_and_the_training_are_killed(server: Restarted, tmp_path: Path):
    """Each step gets exactly the batch that it would have got, and the weights are those of who was left alone."""
    undisturbed = fit(server, tmp_path / "a")
    assert len(undisturbed.seen) == 30
    disturbed = fit(server, tmp_path / "b", at_step(4, server.restart), at_step(17, server.kill_daemon))
    killed = fit(server, tmp_path / "c", at_step(19, interrupt))
    server.restart()
    resumed = fit(server, tmp_path / "c")
    assert disturbed.seen == killed.seen + resumed.seen == undisturbed.seen
    for trained in (disturbed, resumed):
        assert all(map(np.array_equal, trained.get_weights(), undisturbed.get_weights()))
