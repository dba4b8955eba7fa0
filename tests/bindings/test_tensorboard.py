"""What is written for TensorBoard, read back from the event files, and compared with what the loader says."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

from loaderd.errors import OptionError
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import newest_daemon

COUNTS = ("workers_restarted", "daemon_restarts", "records_skipped")


def read(log_dir: Path) -> dict[str, dict[int, np.ndarray]]:
    """By tag and step, what was written to the run of loaderd."""
    found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for path in sorted((log_dir / "loaderd").glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                assert event.step not in found[value.tag], "each is written once"
                found[value.tag][event.step] = tf.make_ndarray(value.tensor)
    return found


@pytest.fixture
def open_loader(numbered: Numbered) -> Callable[..., Any]:
    """Makes loaders of 430 records in batches of 20: 22 of them."""
    shards = numbered.write([150, 180, 100])
    return lambda **options: numbered.loader(shards, batch_size=20, **options)


def steps_of(figures: dict[str, dict[int, np.ndarray]]) -> set[tuple[int, ...]]:
    """The steps that each scalar was written for."""
    return {tuple(values) for values in figures.values()}


# ------------------------------------------------------------------------------------- a loop of one's own


def test_figures_are_those_of_the_statistics(open_loader: Callable[..., Any], tmp_path: Path):
    """Each is a difference, between what the loader said before and after the writes."""
    with open_loader() as loader:
        first, began_s = loader.statistics(), time.monotonic()
        board = loaderd_tf.TensorBoard(loader, tmp_path)
        said, took_s = [(first, first)], []
        for number, _ in enumerate(loader, start=1):
            if number in (10, 22):
                time.sleep(0.02)  # the rate is not what it would be without
                before, before_s = loader.statistics(), time.monotonic()
                board.write(number)
                said.append((before, loader.statistics()))
                took_s.append(time.monotonic() - began_s)
                began_s = before_s
        fields = {"bits", "id"}
    figures = read(tmp_path)
    assert steps_of(figures) == {(10, 22)}
    assert {tag.split("/")[1] for tag in figures if tag.startswith("loaderd_field_s/")} == fields
    assert {tag.split("/")[1] for tag in figures if tag.startswith("loaderd_stage_s/")} == set(first.stage_s)
    for (old_low, old_high), (low, high), step, elapsed_s in zip(said, said[1:], (10, 22), took_s, strict=False):
        records = high.records_delivered - old_high.records_delivered
        rate = float(figures["loaderd/examples_per_s"][step])
        assert records / elapsed_s * 0.99 <= rate <= records / 0.02
        waiting = (high.wait_s - old_high.wait_s) * rate / records  # nothing is waited for while it is written
        assert float(figures["loaderd/waiting_share"][step]) == pytest.approx(waiting, rel=1e-5)
        for name in ("stage_s", "field_s"):  # the workers go on meanwhile
            for part, seconds in getattr(high, name).items():
                written = float(figures[f"loaderd_{name}/{part}"][step])
                least = getattr(low, name)[part] - getattr(old_high, name)[part]
                assert least - 1e-6 <= written <= seconds - getattr(old_low, name)[part] + 1e-6
        for name in COUNTS:
            assert figures[f"loaderd/{name}"][step] == getattr(high, name)


def test_another_daemon_counts_from_0(open_loader: Callable[..., Any], tmp_path: Path):
    with open_loader(epochs=4) as loader:
        board = loaderd_tf.TensorBoard(loader, tmp_path)
        for number, _ in enumerate(loader):
            if number == 30:
                board.write(1)
                os.kill(newest_daemon(), signal.SIGKILL)
        board.write(2)
        said = loader.statistics()
    figures = read(tmp_path)
    assert figures["loaderd/daemon_restarts"] == {1: 0, 2: 1}
    for part, seconds in said.field_s.items():
        assert 0 <= float(figures[f"loaderd_field_s/{part}"][2]) <= seconds * 1.001


def test_nothing_is_written_of_a_closed_loader(open_loader: Callable[..., Any], tmp_path: Path):
    with open_loader() as loader:
        board = loaderd_tf.TensorBoard(loader, tmp_path / "later")
        assert not loader.closed
    assert loader.closed
    board.write(1)
    loaderd_tf.TensorBoard(loader, tmp_path / "at once").write(1)
    assert not (tmp_path / "later").exists() and not (tmp_path / "at once").exists()


def test_what_others_record_is_their_affair(open_loader: Callable[..., Any], tmp_path: Path):
    """Keras' own callback has its writer be the default one, and says which steps are not to be recorded."""
    theirs = tf.summary.create_file_writer(str(tmp_path / "train"))
    with open_loader() as loader, theirs.as_default(7), tf.summary.record_if(False):
        board = loaderd_tf.TensorBoard(loader, tmp_path)
        next(iter(loader))
        board.write(3)
        tf.summary.write("mine", 1.0)
    theirs.close()
    assert steps_of(read(tmp_path)) == {(3,)}
    (path,) = (tmp_path / "train").iterdir()
    assert len(list(tf.data.TFRecordDataset(str(path)))) == 1, "the one that each file begins with"


def test_what_is_refused(open_loader: Callable[..., Any], tmp_path: Path):
    with open_loader() as loader:
        for update_freq in ("epochs", "batch", 0, 1.5, True, None):
            with pytest.raises(OptionError, match=f'update_freq must be "epoch" or a .* steps, got {update_freq!r}'):
                loaderd_tf.TensorBoard(loader, tmp_path, update_freq=update_freq)
        with pytest.raises(OptionError, match="log_dir must be the path of a folder, got 3"):
            loaderd_tf.TensorBoard(loader, 3)
        derived = loaderd_tf.from_loader(loader).map(lambda batch: batch)
        with pytest.raises(OptionError, match=r"must be a loader, or come from make_dataset, .*, got <_Map"):
            loaderd_tf.TensorBoard(derived, tmp_path)
        board = loaderd_tf.TensorBoard(loaderd_tf.batches(loader), tmp_path)
        for step in (-1, 1.0, None):
            with pytest.raises(OptionError, match=f"step must be an integer, 0 or more, got {step!r}"):
                board.write(step)
        with pytest.raises(OptionError, match="that is being traced"):
            tf.function(lambda: board.write(1), autograph=False)()
    assert not (tmp_path / "loaderd").exists()


# --------------------------------------------------------------------------------------------------- fit


def model_of(library: str, together: int = 1) -> Any:
    keras = importlib.import_module(library)
    inputs = keras.Input((32,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", steps_per_execution=together)
    return model


@pytest.mark.one_variant
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_fit(open_loader: Callable[..., Any], tmp_path: Path, library: str):
    """By epochs; and by steps, of which two are made at a time."""
    with open_loader() as loader:
        dataset = loaderd_tf.from_loader(loader, ("bits", "id"))
        epochs = loaderd_tf.TensorBoard(dataset, tmp_path / "epochs")
        model_of(library).fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=[epochs])
        model = model_of(library, together=2)
        steps = loaderd_tf.TensorBoard(loader, tmp_path / "steps", update_freq=5)
        for _ in range(2):  # the second goes on with the optimizer's step
            model.fit(dataset, epochs=1, shuffle=False, verbose=0, callbacks=[steps])
    of_epochs, of_steps = read(tmp_path / "epochs"), read(tmp_path / "steps")
    assert steps_of(of_epochs) == {(0, 1)} and steps_of(of_steps) == {(6, 12, 18, 28, 34, 40)}
    assert len(of_epochs) >= 5 + 2 + 9
    for figures in (of_epochs, of_steps):
        assert all(rate > 0 for rate in figures["loaderd/examples_per_s"].values())
        assert all(0 <= share <= 1 for share in figures["loaderd/waiting_share"].values())


@pytest.mark.slow
def test_validation_takes_no_time(open_loader: Callable[..., Any], tmp_path: Path):
    """430 records in the time that is left of an epoch when validation is not counted."""

    keras = importlib.import_module("keras")

    class Slow(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(1)

    validation = (np.zeros((2, 32), np.float32), np.zeros(2))
    model = model_of("keras")
    with open_loader() as loader:
        dataset = loaderd_tf.from_loader(loader, ("bits", "id"))
        board = loaderd_tf.TensorBoard(dataset, tmp_path)
        common = {"validation_data": validation, "validation_batch_size": 1, "shuffle": False, "verbose": 0}
        model.fit(dataset, epochs=1, **common)  # traces its functions
        began_s = time.monotonic()
        model.fit(dataset, epochs=1, callbacks=[board, Slow()], **common)
        took_s = time.monotonic() - began_s
    (rate,) = read(tmp_path)["loaderd/examples_per_s"].values()
    assert took_s > 2 and 430 / float(rate) < took_s - 1.9
