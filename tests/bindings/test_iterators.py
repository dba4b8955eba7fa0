"""Iterators in a ``tf.function``: the thread that takes an element calls Python, whoever else waits."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf
from loaderd_tf import map_python
from loaderd_tf.iterators import _uninterrupted

from tests.helpers.numbered import Numbered
from tests.helpers.slots import lies_in_a_slot


@pytest.fixture
def ids(numbered: Numbered) -> Any:
    """A data set of 10 batches."""
    ds = loaderd_tf.make_dataset(numbered.write([100]), numbered.schema, batch_size=10, structure="id", workers=1)
    yield ds
    ds.close()


def first_of(iterator: Any) -> tf.Tensor:
    return next(iterator)[0]


def kinds(function: Any, *arguments: Any) -> set[str]:
    """The operations that take an element in ``function``."""
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return {operation.type for operation in graph.get_operations() if operation.type.startswith("IteratorGet")}


def test_an_element_is_taken_by_the_thread_that_needs_it(ids: Any):
    iterator = iter(ids)

    def outer() -> tf.Tensor:
        return first_of(iterator)

    def inside() -> tf.Tensor:
        return first_of(iter(ids))

    assert kinds(first_of, iterator) == kinds(outer) == kinds(inside) == {"IteratorGetNextSync"}
    assert kinds(lambda given: given.get_next(), iterator) == {"IteratorGetNextSync"}


def test_whoever_may_need_a_thread_meanwhile_has_one(ids: Any):
    """What is made of a data set is TensorFlow's alone, and copies to a device are made by its threads."""
    assert kinds(first_of, iter(ids.map(lambda numbers: numbers))) == {"IteratorGetNext"}
    _, device = tf.config.list_logical_devices("CPU")
    copied = loaderd_tf.from_loader(ids.loader, "id", device=device.name)
    assert kinds(first_of, iter(copied)) == {"IteratorGetNext"}


def test_a_loop_that_would_be_traced_for_ever_is_an_error(ids: Any):
    iterator = iter(ids)
    with pytest.raises(ValueError, match="AutoGraph"):
        tf.function(lambda: list(iterator), autograph=False)()


@pytest.mark.parametrize("direct", [True, False])
def test_arrays_are_aliased_whichever_way_python_is_called(
    numbered: Numbered, monkeypatch: pytest.MonkeyPatch, direct: bool
):
    assert map_python._has_direct_calls(), "TensorFlow has changed: look at loaderd_tf.map_python"
    if not direct:
        monkeypatch.setattr(map_python, "_has_direct_calls", lambda: False)
    ds = loaderd_tf.make_dataset(numbered.write([100]), numbered.schema, batch_size=10, workers=1, held_batches=4)
    seen = []
    for batch in ds:
        assert lies_in_a_slot(np.asarray(batch["bits"]).ctypes.data)
        seen += batch["id"].numpy().tolist()
    assert sorted(seen) == list(range(100)) and ds.statistics().batches_copied == 0


@pytest.mark.slow
def test_functions_of_several_threads_share_an_iterator(ids: Any):
    iterator, taken = iter(ids), []

    @tf.function
    def take() -> tf.Tensor:
        return next(iterator)

    def loop() -> None:
        try:
            while True:
                taken.extend(take().numpy())
        except tf.errors.OutOfRangeError:
            pass

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == list(range(100))


def test_a_signal_while_an_element_is_taken_is_heard_once():
    """By its handler, and by the descriptor from which asyncio learns of it."""
    heard: list[int] = []
    out, into = os.pipe()
    os.set_blocking(into, False)
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number)), signal.set_wakeup_fd(into)
    try:
        _uninterrupted(lambda _: signal.raise_signal(signal.SIGUSR1), SimpleNamespace())
        assert heard == [signal.SIGUSR1] and os.read(out, 10) == bytes(heard)
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGUSR1, before[0])
        os.close(out)
        os.close(into)
