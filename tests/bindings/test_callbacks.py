"""fit that is interrupted and goes on: what test_resume.py does with processes, here in one, and what is refused."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from tests.bindings.training import Interrupt
from tests.helpers.numbered import Numbered

DEFAULT = tf.distribute.get_strategy()
VALIDATION = (np.eye(32, dtype=np.float32), np.arange(32))


class Logged(keras.Sequential):
    """Learns the number of each record by its bits; ``seen``: the sorted ids of every step, from 1."""

    def __init__(self) -> None:
        hidden = keras.layers.Dense(8, activation="relu")
        super().__init__([keras.Input((32,)), hidden, keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        self.seen: Any = {}

    def train_step(self, data: Any) -> Any:
        bits, ids = data

        def log(step: int, ids: np.ndarray) -> None:
            self.seen[int(step)] = sorted([*self.seen.get(int(step), []), *ids.tolist()])

        tf.numpy_function(log, [self.optimizer.iterations + 1, ids], [])
        return super().train_step((bits, tf.cast(ids, tf.float32) / 1000))


@functools.cache
def build(strategy: Any, together: int) -> tuple[Logged, list[tuple[Any, np.ndarray]]]:
    """A model, compiled once for many trainings, and the initial values of its variables."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Logged()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=together)
        model.optimizer.build(model.trainable_variables)
    return model, [(each, each.numpy()) for each in (*model.variables, *model.optimizer.variables)]


def fit(
    directory: Path,
    dataset: Any,
    *,
    strategy: Any = DEFAULT,
    together: int = 1,
    interrupt: float = math.inf,
    backup: dict[str, Any] | None = None,
    callbacks: tuple[Any, ...] = (),
    epochs: int = 2,
    derive: Callable[[Any], Any] = lambda dataset: dataset,
    sought: bool = True,
    **options: Any,
) -> Any:
    """Trains a model that knows nothing yet until step ``interrupt``, as if in a process of its own.

    ``derive``: makes what is trained on of the data set that is backed up. ``sought``: whether that begins anew.
    Returns the ids of every step, the logs of the epochs that came to their end, and the weights.
    """
    model, initial = build(strategy, together)
    for variable, value in initial:
        variable.assign(value)
    model.seen = {}
    if sought:
        dataset.loader.load_state_dict(loaderd.Position())
    ours = loaderd_tf.BackupAndRestore(directory, dataset, **(backup or {"save_freq": 4}))
    history: dict[str, list[float]] = {}
    with warnings.catch_warnings(), suppress(KeyboardInterrupt):
        warnings.simplefilter("error")  # Keras warns of data that ends too early
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="keras")  # its reading of a rate
        history = model.fit(
            derive(dataset),
            epochs=epochs,
            validation_data=VALIDATION,
            callbacks=[*callbacks, ours, Interrupt(interrupt)],
            shuffle=False,
            verbose=0,
            **options,
        ).history
    return model.seen, history, model.get_weights()


@pytest.fixture
def open_dataset(numbered: Numbered) -> Callable[..., Any]:
    """Makes data sets of 430 records in batches of 20."""
    shards = numbered.write([150, 180, 100])

    def make(**options: Any) -> Any:
        common = {"structure": ("bits", "id"), "workers": 1, "batch_size": 20, "shards": shards}
        return loaderd_tf.make_dataset(schema=numbered.schema, **{**common, **options})

    return make


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "endless, repeated and copied": (
        {"epochs": None},
        {
            "derive": lambda dataset: dataset.repeat().apply(tf.data.experimental.prefetch_to_device("/CPU:1")),
            "steps_per_epoch": 9,
        },
    ),
    "two epochs a pass": ({"epochs": 2, "remainder": "carry", "prefetch": 0}, {}),
    "endless, on a device, two steps a call": (
        {"epochs": None, "device": "/CPU:1"},
        {"steps_per_epoch": 9, "together": 2},
    ),
    "two steps a call": ({}, {"together": 2}),
    "what map and prefetch make of it": (
        {},
        {"derive": lambda dataset: dataset.map(lambda *parts: parts, num_parallel_calls=2).prefetch(4)},
    ),
    "at the ends of epochs": ({"device": "/CPU:0"}, {"backup": {"save_freq": "epoch"}}),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("case", CASES)
def test_fit_goes_on_where_it_was(open_dataset: Callable[..., Any], tmp_path: Path, case: str):
    of_dataset, of_fit = CASES[case]
    dataset = open_dataset(**of_dataset)
    seen, history, weights = fit(tmp_path / "whole", dataset, **of_fit)
    seen_before, _, _ = fit(tmp_path / "parts", dataset, interrupt=len(seen) - 3, **of_fit)
    seen_after, history_after, weights_after = fit(tmp_path / "parts", dataset, **of_fit)
    begin = min(seen_after)
    assert 1 < begin <= max(seen_before) + 1, "it goes on, and leaves nothing out"
    assert begin % (len(seen) // 2) != 1 or "epochs" in case, "in the middle of an epoch"
    assert seen_before | seen_after == seen
    assert {name: values[-1:] for name, values in history.items()} == history_after
    assert all(map(np.array_equal, weights, weights_after))
    assert not (tmp_path / "parts").exists(), "deleted at the end"


@pytest.mark.parametrize("steps", [47, 66], ids=["in the middle of an epoch", "at the end of one"])
def test_callbacks_remember_the_best_value(open_dataset: Callable[..., Any], tmp_path: Path, steps: int):
    """The loss falls, so to callbacks that want it to rise no epoch is better than the first one."""

    def train(name: str, interrupt: float = math.inf) -> Any:
        kept = tmp_path / f"{name}.weights.h5"
        rising = {"monitor": "loss", "mode": "max"}
        callbacks = (
            keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True, **rising),
            keras.callbacks.ReduceLROnPlateau(patience=2, factor=0.5, **rising),
            keras.callbacks.ModelCheckpoint(kept, save_best_only=True, save_weights_only=True, **rising),
        )
        model, _ = build(DEFAULT, 1)
        model.optimizer.learning_rate.assign(0.01)
        seen, history, weights = fit(
            tmp_path / name, dataset, interrupt=interrupt, callbacks=callbacks, epochs=8, backup={"save_freq": 11}
        )
        rate = float(model.optimizer.learning_rate.numpy())
        model.load_weights(kept)
        return max(seen), history.get("loss", [0])[-1], rate, weights, model.get_weights()

    dataset = open_dataset()
    steps_whole, *whole, weights_whole, kept_whole = train("whole")
    assert steps_whole == 5 * 22, "it stops four epochs after the best one, which is the first"
    train("parts", interrupt=steps)
    steps_parts, *parts, weights_parts, kept_parts = train("parts")
    assert steps_parts == steps_whole and parts == whole
    assert all(map(np.array_equal, weights_parts, weights_whole)), "the best weights are restored"
    assert all(map(np.array_equal, kept_parts, kept_whole)), "those of the first epoch are not overwritten"


@pytest.mark.slow
def test_fit_on_two_replicas(mirrored: tf.distribute.Strategy, numbered: Numbered, tmp_path: Path):
    """In the last step of an epoch, only one of them has records."""
    dataset = loaderd_tf.distribute(
        mirrored, numbered.write([410]), numbered.schema, global_batch_size=40, structure=("bits", "id"), workers=1
    )
    seen, history, weights = fit(tmp_path / "whole", dataset, strategy=mirrored)
    seen_before, _, _ = fit(tmp_path / "parts", dataset, strategy=mirrored, interrupt=17)
    seen_after, history_after, weights_after = fit(tmp_path / "parts", dataset, strategy=mirrored)
    assert min(seen_after) == 16 and seen_before | seen_after == seen
    for name, values in history_after.items():
        np.testing.assert_allclose(values, history[name][-1:], rtol=1e-6)
    assert all(map(np.array_equal, weights, weights_after))


def test_another_callback_may_end_the_training(open_dataset: Callable[..., Any], tmp_path: Path):
    """At the end of the epoch that was gone on with, though it is asked before the callback of ours."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    dataset = open_dataset()
    fit(tmp_path, dataset, interrupt=10)
    seen, history, _ = fit(tmp_path, dataset, callbacks=(Stop(),))
    assert (min(seen), max(seen), len(history["loss"])) == (9, 22, 1)


@pytest.mark.slow
def test_a_backup_that_is_kept_goes_on_with_more_epochs(open_dataset: Callable[..., Any], tmp_path: Path):
    dataset = open_dataset()
    kept = {"save_freq": 4, "delete_checkpoint": False}
    whole, _, _ = fit(tmp_path / "whole", dataset)
    first, _, _ = fit(tmp_path / "kept", dataset, epochs=1, backup=kept)
    second, _, _ = fit(tmp_path / "kept", dataset, epochs=2, backup=kept)
    assert first | second == whole and (len(first), len(second)) == (22, 22)
    none, history, _ = fit(tmp_path / "kept", dataset, epochs=2, backup=kept)
    assert not none and not history


class InterruptBeforeTheFirstStep(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("case", ["refused", "interrupted"])
def test_a_fit_that_ended_before_its_first_step_can_be_tried_again(
    open_dataset: Callable[..., Any], tmp_path: Path, case: str
):
    """With the same data set, as in a notebook. That fit has sought the data already."""
    dataset = open_dataset()
    fit(tmp_path, dataset, interrupt=10)
    if case == "refused":
        with pytest.raises(OptionError, match="got ShuffleDataset between"):
            fit(tmp_path, dataset, derive=lambda dataset: dataset.shuffle(3))
    else:
        assert fit(tmp_path, dataset, callbacks=(InterruptBeforeTheFirstStep(),))[0] == {}
    seen, history, _ = fit(tmp_path, dataset, sought=False)
    assert (min(seen), max(seen), len(history["loss"])) == (9, 44, 2)


@pytest.mark.slow
def test_data_that_begin_in_the_middle_cannot_go_on(open_dataset: Callable[..., Any], tmp_path: Path):
    """Keras would make all epochs as short as the first; or as long as those of fit, where the backup is of such."""
    fit(tmp_path / "a", open_dataset(), interrupt=10)
    start = loaderd.Position(0, 3)
    with pytest.raises(OptionError, match=r"must take epochs of 22 steps, as the backup .* says, got 19 steps"):
        dataset = open_dataset(start=start)
        fit(tmp_path / "a", dataset, sought=False)
    assert (dataset.loader.next_position().batch, build(DEFAULT, 1)[0].seen) == (3, {}), "as it was"
    fit(tmp_path / "b", open_dataset(epochs=None), steps_per_epoch=16, interrupt=21)
    with pytest.raises(OptionError, match=r"must take epochs of 6 steps, as the backup .* says, got 22 steps"):
        fit(tmp_path / "b", open_dataset())


@pytest.mark.slow
def test_what_cannot_go_on(open_dataset: Callable[..., Any], tmp_path: Path):
    fit(tmp_path, open_dataset(), interrupt=10)
    with pytest.raises(OptionError, match="seed: 0 when the position was taken, 1 now"):
        fit(tmp_path, open_dataset(seed=1))
    with pytest.raises(OptionError, match=r"a part of epoch 0 was taken in other batches.* batches of 20 on 1"):
        fit(tmp_path, open_dataset(batch_size=10))
    dataset = open_dataset()
    other = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    other.compile("adam", "mse")
    backup = loaderd_tf.BackupAndRestore(tmp_path, dataset)
    with pytest.raises(OptionError, match=r"is of another model or optimizer: .*\[32, 8\].* these have .*\[32, 1\]"):
        other.fit(dataset, callbacks=[backup], shuffle=False, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, None])
def test_data_that_grow_cannot_be_backed_up(open_dataset: Callable[..., Any], tmp_path: Path, epochs: int | None):
    """Where a backup of the second epoch stands is not known before that has been listed."""
    with pytest.raises(OptionError, match="dataset must not be of data that grow"):
        loaderd_tf.BackupAndRestore(tmp_path, open_dataset(refresh="epoch", epochs=epochs))


def test_a_backup_is_not_written_over_the_one_that_was_found(open_dataset: Callable[..., Any], tmp_path: Path):
    """A process that dies while it writes would leave none."""
    dataset = open_dataset()
    fit(tmp_path, dataset, interrupt=5)
    first = tf.train.latest_checkpoint(tmp_path)
    fit(tmp_path, dataset, interrupt=9)
    second = tf.train.latest_checkpoint(tmp_path)
    assert first is not None and second not in (None, first)
    assert set(tf.io.gfile.glob(f"{tmp_path}/backup-*.index")) == {f"{second}.index"}, "one at a time"


@pytest.mark.slow
@pytest.mark.parametrize("own_fit", [False, True])
def test_the_steps_of_data_with_an_end_are_not_for_fit_to_say(
    open_dataset: Callable[..., Any], tmp_path: Path, own_fit: bool
):
    """Keras keeps its iterator over epochs then: the epoch after a resume had no steps, and a loss of 0."""

    class Own(Logged):
        def fit(self, *args: Any, **options: Any) -> Any:
            return super().fit(*args, **options)

    model = Own() if own_fit else Logged()
    model.compile("adam", "mse")
    dataset = open_dataset()
    backup = loaderd_tf.BackupAndRestore(tmp_path / "backup", dataset)
    with pytest.raises(OptionError, match=r"must not be given steps_per_epoch .*, got 22\n.*takes the 22 steps"):
        model.fit(dataset, epochs=2, steps_per_epoch=22, callbacks=[backup], shuffle=False, verbose=0)
    assert model.seen == {} and dataset.loader._next_is_whole


@pytest.mark.slow
def test_what_cannot_be_backed_up(open_dataset: Callable[..., Any], tmp_path: Path):
    dataset = open_dataset()
    with pytest.raises(OptionError, match=r"must not be given steps_per_epoch .*, got 7"):
        fit(tmp_path, dataset, steps_per_epoch=7)
    with pytest.raises(OptionError, match="steps_per_execution must divide the 22 steps of an epoch, got 4"):
        fit(tmp_path, dataset, together=4)
    dataset.loader.load_state_dict(loaderd.Position(0, 3))
    with pytest.raises(OptionError, match="the data set begins in the middle of an epoch"):
        build(DEFAULT, 1)[0].fit(dataset, callbacks=[loaderd_tf.BackupAndRestore(tmp_path, dataset)], shuffle=False)
    with pytest.raises(
        OptionError, match=r"dataset must come from make_dataset, from_loader or distribute, got <_Map"
    ):
        loaderd_tf.BackupAndRestore(tmp_path, dataset.map(lambda bits, ids: bits))
    for save_freq in (0, 1.5, "step", True):
        with pytest.raises(OptionError, match=f'must be "epoch" or a positive number of steps, got {save_freq!r}'):
            loaderd_tf.BackupAndRestore(tmp_path, dataset, save_freq=save_freq)
    for name in ("a=[1, 2]", "run*", "what?", "a\\b"):
        with pytest.raises(OptionError, match="directory must be a path without any of"):
            loaderd_tf.BackupAndRestore(tmp_path / name, dataset)


NOT_COUNTED: dict[str, Callable[[Any], Any]] = {
    "CacheDataset": lambda dataset: dataset.cache(),
    "ShuffleDataset": lambda dataset: dataset.map(lambda *parts: parts).shuffle(5).prefetch(2),
    "BatchDataset": lambda dataset: dataset.unbatch().batch(20).apply(tf.data.experimental.assert_cardinality(22)),
    "RepeatDataset": lambda dataset: dataset.repeat(2).take(22),
    "ZipDataset": lambda dataset: dataset.enumerate().map(lambda number, parts: parts),
    "ParallelMapDataset": lambda dataset: dataset.map(
        lambda *parts: parts, num_parallel_calls=2, deterministic=False
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_COUNTED)
def test_steps_that_do_not_count_the_batches_are_refused(open_dataset: Callable[..., Any], tmp_path: Path, name: str):
    message = f"take its batches one for one and in their order, got {name} between"
    with pytest.raises(OptionError, match=message):
        fit(tmp_path, open_dataset(), derive=NOT_COUNTED[name])
    assert build(DEFAULT, 1)[0].seen == {}, "before the first step"
    fit(tmp_path, open_dataset(), epochs=1)  # of the same model: it keeps nothing of that


def test_a_part_of_an_endless_data_set_is_refused(open_dataset: Callable[..., Any], tmp_path: Path):
    with pytest.raises(OptionError, match="one for one and in their order, got TakeDataset between"):
        fit(tmp_path, open_dataset(epochs=None), derive=lambda dataset: dataset.take(22), steps_per_epoch=22)


def test_a_training_on_other_data_is_refused(open_dataset: Callable[..., Any], tmp_path: Path):
    dataset, other = open_dataset(), open_dataset()
    with pytest.raises(OptionError, match=r"must train on the data set .*, got ConcatenateDataset between"):
        fit(tmp_path, dataset, derive=lambda _: other)
    same_loader = loaderd_tf.from_loader(dataset.loader, ("bits", "id"))
    assert len(fit(tmp_path, dataset, derive=lambda _: same_loader)[0]) == 44


@pytest.mark.slow
def test_a_data_set_that_keras_shares_out_between_replicas(
    mirrored: tf.distribute.Strategy, open_dataset: Callable[..., Any], tmp_path: Path
):
    dataset = open_dataset()
    seen, _, weights = fit(tmp_path / "whole", dataset, strategy=mirrored)
    seen_before, _, _ = fit(tmp_path / "parts", dataset, strategy=mirrored, interrupt=31)
    seen_after, _, weights_after = fit(tmp_path / "parts", dataset, strategy=mirrored)
    assert min(seen_after) == 31 and seen_before | seen_after == seen
    assert all(map(np.array_equal, weights, weights_after))


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
