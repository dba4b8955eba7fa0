"""Batches as eager tensors: what they hold, how long, where; and how an iteration of them goes on and ends."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import WorkerError
from tests.helpers import slots
from tests.helpers.binding_contract import BatchesContract, Binding
from tests.helpers.lent_batches import BATCH_SIZE, HELD, NUM_BATCHES, RECORDS, Write, loader_fixtures
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import newest_daemon
from tests.helpers.restarted import Restarted
from tests.helpers.serving import wait_until

ALIASED = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
]
COPIED = ["float8_e4m3fn", "float8_e5m2", "int4"]
SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={
        "bits": loaderd.Bits("bits", shape=(32,)),
        "id": loaderd.Array("id"),
        **{dtype: loaderd.Array("id", dtype=dtype, wrap=True) for dtype in (*ALIASED, *COPIED)},
        "text": loaderd.Derived(lambda ids: np.array([b"no. %d" % i for i in ids], "S8"), "id", dtype="S8"),
    },
)


def settle() -> None:
    """Garbage may hold some, such as the frames of a traced function; or the thread that copies."""
    gc.collect()
    time.sleep(0.01)


shards, shared_loader, loader = loader_fixtures(SCHEMA, settle)


@pytest.fixture
def binding() -> Binding:
    return Binding(
        loaderd_tf.batches,
        address=address,
        to_numpy=lambda tensor: tensor.numpy(),
        dtype_of=tf.as_dtype,
        aliased={"bits", "id", *ALIASED},
        host="/CPU:0",
        device="/CPU:1",
        has_values=True,
        wrong_devices=[("/GPU:7", "GPU:7")],
        settle=settle,
    )


class TestContract(BatchesContract):
    """What the bindings for all libraries promise."""


def check(element: dict[str, tf.Tensor]) -> list[int]:
    """That all rows are whole; returns their numbers."""
    numbers = element["id"].numpy()
    assert np.array_equal(element["bits"].numpy() @ 2.0 ** np.arange(31, -1, -1), numbers)
    assert element["text"].numpy().tolist() == [b"no. %d" % number for number in numbers]
    return [int(number) for number in numbers]


def address(tensor: tf.Tensor) -> int:
    return int(np.asarray(tensor).ctypes.data)


def lies_in_a_slot(tensor: tf.Tensor) -> bool:
    return slots.lies_in_a_slot(address(tensor))


# ------------------------------------------------------------------------------------ what there is


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("structure", ["id", Pair((("bits", "id"), "text"), {"a": ("id",), "b": ["id", "bits"]})])
def test_structures_are_those_of_a_data_set(loader: loaderd.Loader, structure: Any):
    from_data_set = next(iter(loaderd_tf.from_loader(loader, structure)))
    loader.load_state_dict(loaderd.Position())
    element = next(iter(loaderd_tf.batches(loader, structure)))
    tf.nest.assert_same_structure(element, from_data_set)
    assert isinstance(from_data_set, Pair) == isinstance(structure, Pair)
    assert type(element) is type(from_data_set)
    for one, other in zip(tf.nest.flatten(element), tf.nest.flatten(from_data_set), strict=True):
        assert np.array_equal(one, other)


def test_a_function_that_is_traced_says_what_to_use(loader: loaderd.Loader):
    batches = loaderd_tf.batches(loader, "id")
    iterator = iter(batches)
    next(iterator)

    @tf.function
    def loop() -> Any:
        for ids in batches:
            tf.print(ids)

    for function in (loop, tf.function(lambda: next(iterator)), tf.function(lambda: iter(batches))):
        with pytest.raises(Exception, match=r"loaderd_tf.make_dataset, loaderd_tf.from_loader"):
            function()
    assert loader.position.batch == 1
    assert len(next(iterator)) == BATCH_SIZE and loader.position.batch == 2


def test_a_batch_may_be_empty(shards: list[Path], numbered: Numbered):
    """The last one of a host, which has a record less than another."""
    with numbered.loader(shards, batch_size=1, shard=(3, 4)) as loader:
        *_, last = loaderd_tf.batches(loader)
        assert last["bits"].shape == (0, 32) and last["id"].dtype == tf.int64


# -------------------------------------------------------------------------------------- how long


def test_a_slot_comes_back_with_the_last_tensor(loader: loaderd.Loader):
    iterator = iter(loaderd_tf.batches(loader, ("bits", "id")))
    bits, ids = next(iterator)
    assert loader.statistics().slots_lent == 1
    flat = tf.reshape(bits, [-1])
    view = np.asarray(ids)
    del bits, ids
    assert loader.statistics().slots_lent == 1
    del flat
    assert loader.statistics().slots_lent == 1
    del view
    assert loader.statistics().slots_lent == 0


def test_nobody_writes_where_a_tensor_looks(loader: loaderd.Loader):
    """TensorFlow writes in place into what it believes to be its own (``from_loader``: tests/usage)."""

    @tf.function
    def step(bits: tf.Tensor, ids: tf.Tensor) -> Any:
        front, back = tf.split(bits, 2, axis=0)
        return bits[:8] * 2 + 1, tf.nn.relu(front - back), ids[:4] + 1, tf.cast(bits, tf.float64) * 3

    for bits, ids in itertools.islice(loaderd_tf.batches(loader, ("bits", "id")), 3):
        before = bits.numpy(), ids.numpy()
        first, second, third, fourth = step(bits, ids)
        assert np.array_equal(first, before[0][:8] * 2 + 1) and np.array_equal(third, before[1][:4] + 1)
        assert np.array_equal(second, np.maximum(before[0][:8] - before[0][8:], 0)) and fourth[0, 0] == 0
        part = bits[:8]
        part *= 7
        assert np.array_equal(bits, before[0]) and np.array_equal(ids, before[1])


# ------------------------------------------------------------------------------------- where it is


def test_a_copy_that_failed_is_tried_again_each_time(loader: loaderd.Loader, monkeypatch: pytest.MonkeyPatch):
    """No batch is lost; and when it is copied at last, nothing keeps the slot, and then the thread ends."""
    before = set(threading.enumerate())  # and some of an earlier test, of which one may end at any moment
    iterator = iter(loaderd_tf.batches(loader, "id", device="/CPU:1", prefetch=1))
    identity, tried = tf.identity, []

    def fail_twice(tensor: tf.Tensor) -> tf.Tensor:
        tried.append(int(tensor[0]))
        if tried.count(tried[-1]) < 3:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return identity(tensor)

    monkeypatch.setattr(tf, "identity", fail_twice)
    numbers: list[int] = []
    while len(numbers) < RECORDS:
        try:
            numbers += next(iterator).numpy().tolist()
        except tf.errors.ResourceExhaustedError:
            assert loader.position.batch == len(numbers) // BATCH_SIZE
    assert sorted(numbers) == list(range(RECORDS)) and len(tried) == 3 * NUM_BATCHES
    gc.collect()
    wait_until(lambda: loader.statistics().slots_lent == 0)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["loaderd-copy"]
    del iterator
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)


# -------------------------------------------------------------------------------- going on and ends


def test_the_daemon_is_killed_in_between(loader: loaderd.Loader):
    def two_passes(device: str | None) -> Iterator[dict[str, tf.Tensor]]:
        loader.load_state_dict(loaderd.Position())
        return itertools.chain.from_iterable(loaderd_tf.batches(loader, device=device) for _ in range(2))

    expected = [check(element) for element in two_passes(None)]
    kept, restarts = [], loader.statistics().daemon_restarts
    for number, element in enumerate(two_passes("/CPU:1")):
        kept.append(element)
        if number == 3:
            os.kill(newest_daemon(), signal.SIGKILL)
    assert [check(element) for element in kept] == expected
    assert loader.statistics().daemon_restarts == restarts + 1


def test_errors_come_in_their_turn_and_so_does_the_end(shards: list[Path]):
    def odd(numbers: Any) -> Any:  # in here, or the worker would import TensorFlow with this module
        if 25 in numbers or 77 in numbers:
            raise ValueError("no")
        return numbers

    fields = {"id": loaderd.Array("id"), "x": loaderd.Derived(odd, "id", (), "int64")}
    schema = loaderd.Schema({"id": loaderd.Int64()}, fields)
    with loaderd.Loader(shards, schema, batch_size=10, shuffle=False, workers=1) as loader:
        for device in (None, "/CPU:1"):
            loader.load_state_dict(loaderd.Position())
            iterator, found = iter(loaderd_tf.batches(loader, "x", device=device)), []
            for step in range(15):
                try:
                    found += next(iterator).numpy().tolist()
                except WorkerError:
                    assert step in (2, 7)
                assert loader.position.epoch * 15 + loader.position.batch == step + 1
            assert found == [number for number in range(150) if number // 10 not in (2, 7)]
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(iterator)


# ------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("way", ["tf.function", "XLA"])
def test_training_steps_learn_as_from_copies(loader: loaderd.Loader, way: str):
    """To the same weights, and without a copy of a batch."""

    def train(elements: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.optimizer.build(model.trainable_variables)

        def step(bits: tf.Tensor, target: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(bits, training=True)[:, 0] - target) ** 2)
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        run = tf.function(step, jit_compile=way == "XLA")
        before = model.get_weights()
        for bits, ids in itertools.islice(elements, 3):
            run(bits, tf.cast(ids, tf.float32) / RECORDS)
        assert not np.array_equal(model.get_weights()[0], before[0])
        return model.get_weights()

    copies = [(tf.constant(batch["bits"]), tf.constant(batch["id"])) for batch in loader]
    before = loader.statistics().batches_copied
    loader.load_state_dict(loaderd.Position())
    assert all(map(np.array_equal, train(loaderd_tf.batches(loader, ("bits", "id"))), train(copies)))
    assert loader.statistics().batches_copied == before


# ---------------------------------------------------------------------------------- from a server


def test_of_a_server(tmp_path: Path, write_numbered_to: Write):
    """Alone, a consumer has slots without a copy; what several read is copied; who take turns get each batch once."""

    def check_all(batches: loaderd_tf.eager.Batches, aliased: bool) -> None:
        kept = []
        for bits, ids in batches:
            assert address(bits) % 64 == 0, "or TensorFlow aborts"
            assert lies_in_a_slot(bits) == (aliased and len(kept) < HELD)
            kept.append((bits, ids.numpy()))
        assert sorted(np.concatenate([ids for _, ids in kept])) == list(range(RECORDS))
        for bits, ids in kept:
            assert np.array_equal(bits.numpy() @ 2.0 ** np.arange(31, -1, -1), ids)

    write_numbered_to(tmp_path / "shards", [100, 50])
    server = Restarted(tmp_path)
    try:
        for sharing in ("independent", "mirrored"):
            with server.connect(BATCH_SIZE, sharing=sharing) as loader:
                batches = loaderd_tf.batches(loader, ("bits", "id"))
                check_all(batches, aliased=sharing == "independent")
                if sharing == "mirrored":  # the loader's own copies of what lies at other places in a slot
                    held = list(itertools.islice(loader, HELD))
                    check_all(batches, aliased=False)
                    assert len(held) == HELD and loader.statistics().batches_copied == NUM_BATCHES
    finally:
        server.kill()
