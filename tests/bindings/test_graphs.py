"""Batches out of a graph: each in its turn, and so are errors; iterators are saved and restored."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from tests.helpers.numbered import Numbered
from tests.helpers.serving import wait_until


def test_an_iterator_is_restored_at_every_step(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([60, 40])
    ds = loaderd_tf.make_dataset(paths, numbered.schema, batch_size=10, structure="id", workers=1)
    for stored in range(1, 11):  # before the first, an iterator belongs to no pass yet
        iterator = iter(ds)
        for _ in range(stored):
            next(iterator)
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
        assert sum(file.stat().st_size for file in tmp_path.glob("checkpoint*")) < 20_000, "numbers, and no batches"
        expected = [ids.numpy().tolist() for ids in iterator]
        assert len(expected) == 10 - stored
        other = iter(ds)
        next(other)
        tf.train.Checkpoint(iterator=other).read(path).assert_consumed()
        assert [ids.numpy().tolist() for ids in other] == expected


@pytest.mark.slow
def test_an_iterator_of_other_data_is_refused(numbered: Numbered, tmp_path: Path):
    def made(shards: Sequence[Path], **options: Any) -> tf.data.Dataset:
        return loaderd_tf.make_dataset(shards, numbered.schema, structure="id", workers=1, **options)

    shards = numbered.write([60, 40])
    iterator = iter(made(shards, batch_size=10))
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    for message, options in (
        ("seed: 0 when the position was taken, 3 now", {"seed": 3, "batch_size": 10}),
        ("batch_size: 10 when the position was taken, 20 now", {"batch_size": 20}),
        ("hosts: 1 when the position was taken, 2 now", {"shard": (1, 2), "batch_size": 10}),
    ):
        other = iter(made(shards, **options))
        tf.train.Checkpoint(iterator=other).read(path)
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            for _ in other:
                pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("derive", "taken"),
    [
        (lambda ds: ds.repeat().prefetch(2), 8),  # the rest of the pass lies in the checkpoint
        (lambda ds: ds.repeat().prefetch(0), 10),
    ],
)
def test_an_iterator_that_has_fetched_all_of_a_pass_is_followed_by_the_next_epoch(
    numbered: Numbered, tmp_path: Path, derive: Callable[[tf.data.Dataset], tf.data.Dataset], taken: int
):
    shards = numbered.write([60, 40])
    first, second = (
        loaderd_tf.make_dataset(shards, numbered.schema, structure="id", workers=1, batch_size=10) for _ in range(2)
    )
    iterator = iter(derive(first))
    for _ in range(taken):
        next(iterator)
    wait_until(lambda: first.statistics().batches_delivered == 10)  # what is taken ahead, too
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    expected = [next(iterator).numpy().tolist() for _ in range(20 - taken)]
    other = iter(derive(second))
    tf.train.Checkpoint(iterator=other).read(path).assert_consumed()
    assert [next(other).numpy().tolist() for _ in range(20 - taken)] == expected


def test_data_that_grow(numbered: Numbered, tmp_path: Path):
    shards = numbered.write([40, 60, 20])
    waiting = shards[2].rename(tmp_path / "waiting")
    ds = loaderd_tf.make_dataset(
        str(shards[0].parent / "*.tfrecord"),
        numbered.schema,
        batch_size=20,
        epochs=3,
        refresh="epoch",
        structure="id",
        workers=1,
        prefetch=0,
    )
    assert ds.cardinality() == tf.data.UNKNOWN_CARDINALITY
    iterator = iter(ds)
    found = [next(iterator).numpy().tolist() for _ in range(4)]
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    waiting.rename(shards[2])
    found += [ids.numpy().tolist() for ids in iterator]
    epochs = [sorted(chain(*found[first:stop])) for first, stop in ((0, 5), (5, 11), (11, 17))]
    assert epochs == [list(range(100)), list(range(120)), list(range(120))] and len(found) == 17
    other = iter(ds)
    tf.train.Checkpoint(iterator=other).read(path).assert_consumed()
    again = [ids.numpy().tolist() for ids in other]
    assert again[0] == found[4], "of the shards that there were"


@pytest.mark.slow
def test_each_iteration_over_data_that_grow_has_the_epochs_of_its_own(numbered: Numbered, tmp_path: Path):
    """The first ends where it would have ended; so do those behind it, and what load_state_dict() sends elsewhere."""
    options: dict[str, Any] = {"batch_size": 20, "epochs": 3, "refresh": "epoch", "workers": 1, "structure": "id"}
    ds = loaderd_tf.make_dataset(numbered.write([40]), numbered.schema, start=loaderd.Position(1), **options)
    assert [sum(1 for _ in ds) for _ in range(2)] == [2 * 2, 2 * 3]
    ds.loader.load_state_dict(loaderd.Position(1))
    iterator = iter(ds)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    assert sum(1 for _ in iterator) == 2 * 2 - 1
    tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()
    assert sum(1 for _ in iterator) == 2 * 2 - 1, "those that were left"


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3, 4])
def test_an_error_comes_in_its_turn_and_costs_no_other_batch(numbered: Numbered, first: int):
    def refuse(ids: np.ndarray) -> np.ndarray:
        if ids[0] // 10 in (first, first + 5):
            raise ValueError(f"no batch {ids[0] // 10}")
        return ids

    schema = loaderd.Schema(
        numbered.schema.features,
        {"id": loaderd.Derived(refuse, "stored", (), "int64")},
        {"stored": loaderd.Array("id")},
    )
    paths = numbered.write([100])
    ds = loaderd_tf.make_dataset(paths, schema, batch_size=10, structure="id", workers=1, shuffle=False)
    found: list[list[int] | str] = []
    iterator = iter(ds)
    while len(found) < 20:
        try:
            found.append(next(iterator).numpy().tolist())
        except StopIteration:
            break
        except tf.errors.UnknownError as error:
            assert f"no batch {len(found)}" in str(error)
            found.append("error")
    expected: list[list[int] | str] = [list(range(10 * step, 10 * step + 10)) for step in range(10)]
    expected[first] = expected[first + 5] = "error"
    assert found == expected


def test_nothing_is_taken_ahead(numbered: Numbered):
    ds = loaderd_tf.make_dataset(numbered.write([100]), numbered.schema, batch_size=10, workers=1)
    iterator = iter(ds)
    for taken in range(1, 11):
        next(iterator)
        assert ds.statistics().batches_delivered == taken


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_comes_as_what_its_handler_raises(numbered: Numbered, number: signal.Signals):
    """Not as an error of TensorFlow's, wherever in a step it comes; and no daemon or batch is lost for it."""
    ds = loaderd_tf.make_dataset(numbered.write([100_000]), numbered.schema, batch_size=10, workers=1)
    iterator = iter(ds)
    handler = signal.signal(number, signal.default_int_handler)
    try:
        for _ in range(20):
            timer = threading.Timer(random.uniform(0.001, 0.01), os.kill, (os.getpid(), number))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    next(iterator)
    finally:
        signal.signal(number, handler)
    assert ds.statistics().starts == 1 and ds.statistics().daemon_restarts == 0


@pytest.fixture
def ordered(numbered: Numbered, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set of 10 batches, whose first records are 0, 10, …; while the fourth is taken, Ctrl-C comes, once."""
    ds = loaderd_tf.make_dataset(
        numbered.write([100]), numbered.schema, batch_size=10, structure="id", shuffle=False, workers=1
    )
    fetch, pressed = ds.loader._fetch, []

    def fetch_with_a_signal(pass_: Any, step: int, *rest: Any) -> Any:
        if step == 3 and not pressed:
            pressed.append(step)
            signal.raise_signal(signal.SIGINT)
        return fetch(pass_, step, *rest)

    monkeypatch.setattr(ds.loader, "_fetch", fetch_with_a_signal)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield ds
    signal.signal(signal.SIGINT, handler)
    ds.close()


def taken_until_interrupted(iterator: Any) -> list[int]:
    """The first records of its batches."""
    taken = []
    with pytest.raises(KeyboardInterrupt):
        for ids in iterator:
            taken.append(int(ids[0]))
    return taken


WAYS: dict[str, Callable[[Any], tf.Tensor]] = {
    "next": next,
    "get_next": lambda iterator: iterator.get_next(),
    "optional": lambda iterator: iterator.get_next_as_optional().get_value(),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("way", WAYS)
def test_the_batch_that_a_signal_interrupts_is_the_next_one(ordered: Any, way: str):
    iterator = iter(ordered)
    assert taken_until_interrupted(iterator) == [0, 10, 20]
    assert int(WAYS[way](iterator)[0]) == 30
    assert [int(ids[0]) for ids in iterator] == list(range(40, 100, 10))


def test_an_interrupted_batch_does_not_come_behind_a_restored_position(ordered: Any, tmp_path: Path):
    iterator = iter(ordered)
    assert int(next(iterator)[0]) == 0
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    assert taken_until_interrupted(iterator) == [10, 20]
    tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()
    assert [int(ids[0]) for ids in iterator] == list(range(10, 100, 10))


def test_the_handler_of_each_signal_is_called_whatever_one_raises(ordered: Any, monkeypatch: pytest.MonkeyPatch):
    heard: list[int] = []
    fetch = ordered.loader._fetch

    def fetch_with_another(pass_: Any, step: int, *rest: Any) -> Any:
        batch = fetch(pass_, step, *rest)
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return batch

    monkeypatch.setattr(ordered.loader, "_fetch", fetch_with_another)
    handler = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        iterator = iter(ordered)
        assert taken_until_interrupted(iterator) == [0, 10, 20]
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert heard == [signal.SIGTERM]
    assert [int(ids[0]) for ids in iterator] == list(range(30, 100, 10))
