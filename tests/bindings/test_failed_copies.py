"""Copies of ``loaderd_tf.batches`` to a device that fail, as when a GPU's memory is full: no batch is lost."""

from __future__ import annotations

import gc
import time

import loaderd_tf
import pytest
import tensorflow as tf

import loaderd
from tests.helpers.lent_batches import BATCH_SIZE, RECORDS, loader_fixtures
from tests.helpers.serving import wait_until


def settle() -> None:
    """Errors that pytest keeps, and the thread that copies, may hold some."""
    gc.collect()
    time.sleep(0.01)


shards, shared_loader, loader = loader_fixtures(loaderd.Schema.of_stored({"id": loaderd.Int64()}), settle)


def test_what_cannot_be_copied_is_an_error_for_who_takes_it(loader: loaderd.Loader, monkeypatch: pytest.MonkeyPatch):
    """The batch is not lost, nor are those behind it."""
    iterator = iter(loaderd_tf.batches(loader, "id", device="/CPU:1", prefetch=1))
    with monkeypatch.context() as patch:
        patch.setattr(tf, "identity", lambda tensor: tf.constant(1).no_such_thing)
        for _ in range(2):
            with pytest.raises(AttributeError, match="no_such_thing"):
                next(iterator)
        assert loader.position.batch == 0
    numbers: list[int] = []
    with pytest.raises(AttributeError, match="no_such_thing"):  # of the copy ahead, which was tried then
        for ids in iterator:
            numbers += ids.numpy().tolist()
    assert (len(numbers), loader.position.batch) == (BATCH_SIZE, 1)
    numbers += [number for ids in iterator for number in ids.numpy().tolist()]
    assert sorted(numbers) == list(range(RECORDS))


def test_a_copy_that_failed_is_tried_again_each_time(loader: loaderd.Loader, monkeypatch: pytest.MonkeyPatch):
    """And when it is made at last, nothing keeps the slot."""
    iterator = iter(loaderd_tf.batches(loader, "id", device="/CPU:1", prefetch=0))
    identity, tried = tf.identity, []

    def fail_twice(tensor: tf.Tensor) -> tf.Tensor:
        tried.append(int(tensor[0]))
        if len(tried) < 3:
            raise tf.errors.ResourceExhaustedError(None, None, f"no memory, {len(tried)}")
        return identity(tensor)

    monkeypatch.setattr(tf, "identity", fail_twice)
    for number in (1, 2):
        with pytest.raises(tf.errors.ResourceExhaustedError, match=f"no memory, {number}"):
            next(iterator)
    ids = next(iterator)
    assert tried == [int(ids[0])] * 3
    del ids, number
    gc.collect()  # the errors, which pytest has
    wait_until(lambda: loader.statistics().slots_lent == 0)
