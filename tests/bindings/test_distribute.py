"""Data sets for tf.distribute: all replicas of one process, and one process for each of two hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import loaderd_tf
import numpy as np
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from tests.helpers.numbered import Numbered
from tests.helpers.serving import wait_until

RATE = 0.1


class Named(NamedTuple):
    id: Any
    bits: Any


def bits_of(ids: np.ndarray) -> np.ndarray:
    """float32, (n, 32): the field ``bits`` of the records ``ids``."""
    return (ids[:, None] >> np.arange(31, -1, -1) & 1).astype(np.float32)


def train(
    strategy: Any, batches: Any, global_batch_size: int, epochs: int
) -> tuple[list[list[list[list[int]]]], Any]:
    """The ids that each local replica saw, by epoch and step; and the weights, float32, (32,).

    The model is linear, and is to learn the number of each record; its gradients are summed over all replicas.
    """
    with strategy.scope():
        weights = tf.Variable(tf.zeros([32]), aggregation=tf.VariableAggregation.MEAN)

    def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            error = tf.linalg.matvec(batch["bits"], weights) - tf.cast(batch["id"], tf.float32) / 1000
            loss = tf.reduce_sum(error**2) / global_batch_size
        gradient = tape.gradient(loss, weights)
        replica = tf.distribute.get_replica_context()
        weights.assign_sub(RATE * replica.all_reduce(tf.distribute.ReduceOp.SUM, gradient))
        return batch["id"]

    run = tf.function(lambda batch: strategy.run(step, args=(batch,)))
    seen = [
        [[ids.numpy().tolist() for ids in strategy.experimental_local_results(run(batch))] for batch in batches]
        for _ in range(epochs)
    ]
    return seen, weights


def train_alone(steps: list[list[int]], global_batch_size: int) -> np.ndarray:
    """The weights that :func:`train` should come to, in numpy and on one replica, by the ids of every step."""
    weights = np.zeros(32)
    for step in steps:
        bits = bits_of(np.array(step))
        weights -= RATE * 2 / global_batch_size * bits.T @ (bits @ weights - np.array(step) / 1000)
    return weights


@pytest.mark.parametrize(("size", "last"), [pytest.param(430, [20, 10], marks=pytest.mark.slow), (410, [10, 0])])
def test_every_replica_trains_on_rows_of_its_own(
    mirrored: tf.distribute.Strategy, numbered: Numbered, size: int, last: list[int]
):
    shards = numbered.write([size // 2, size - size // 2])
    batches = loaderd_tf.distribute(mirrored, shards, numbered.schema, global_batch_size=40, workers=1)
    seen, weights = train(mirrored, batches, 40, epochs=2)
    assert seen[0] != seen[1]
    for epoch in seen:
        assert len(epoch) == int(batches.cardinality)
        for step in epoch[:-1]:
            assert [len(ids) for ids in step] == [20, 20]
        assert [len(ids) for ids in epoch[-1]] == last
        assert sorted(n for step in epoch for ids in step for n in ids) == list(range(size))
    expected = train_alone([step[0] + step[1] for epoch in seen for step in epoch], 40)
    for replica in mirrored.experimental_local_results(weights):
        np.testing.assert_allclose(replica, expected, atol=1e-4)


def test_replicas_unpack_what_they_get(mirrored: tf.distribute.Strategy, numbered: Numbered):
    batches = loaderd_tf.distribute(
        mirrored, numbered.write([100]), numbered.schema, global_batch_size=40, workers=1, unpack="device"
    )
    step_of = tf.function(lambda packed: loaderd_tf.unpack(packed, numbered.schema))
    seen: list[int] = []
    for step in batches:
        fields = mirrored.run(step_of, (step,))
        local = [mirrored.experimental_local_results(fields[name]) for name in ("bits", "id")]
        for bits, ids in zip(*local, strict=True):
            assert np.array_equal(bits, bits_of(ids.numpy()))
            seen += ids.numpy().tolist()
    assert sorted(seen) == list(range(100))


@pytest.mark.slow
def test_steps_go_on_from_a_position(mirrored: tf.distribute.Strategy, numbered: Numbered):
    """After so many steps of an epoch, a host has taken so many batches for each of its replicas."""

    def steps(**options: Any) -> list[list[list[int]]]:
        batches = loaderd_tf.distribute(
            mirrored, shards, numbered.schema, global_batch_size=40, structure="id", workers=1, **options
        )
        return [
            [[ids.numpy().tolist() for ids in mirrored.experimental_local_results(step)] for step in batches]
            for _ in range(2)
        ]

    shards = numbered.write([430])
    first, second = steps()
    assert steps(start=loaderd.Position(0, 7 * 2)) == [first[7:], second]


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["id", ("id",), Named("id", "bits")])
def test_drop_gives_all_replicas_the_same(mirrored: tf.distribute.Strategy, numbered: Numbered, structure: Any):
    batches = loaderd_tf.distribute(
        mirrored,
        numbered.write([430]),
        numbered.schema,
        global_batch_size=40,
        structure=structure,
        remainder="drop",
        workers=1,
    )
    assert int(batches.cardinality) == 10, "21 batches are ten for each of two replicas"
    for _ in range(2):
        steps = [mirrored.experimental_local_results(tf.nest.flatten(step)[0]) for step in batches]
        assert [[ids.shape.as_list() for ids in step] for step in steps] == [[[20], [20]]] * 10
        ids = np.concatenate([ids for step in steps for ids in step])
        assert len(np.unique(ids)) == 400


def test_batches_are_copied_ahead_onto_every_replica(mirrored: tf.distribute.Strategy, numbered: Numbered):
    options = {"held_batches": 3}  # so that a call of Python takes one batch, and no other
    batches = loaderd_tf.distribute(
        mirrored, numbered.write([400]), numbered.schema, global_batch_size=20, epochs=None, workers=1, **options
    )
    loader = batches.loader
    iterator = iter(batches)
    for steps in range(1, 4):
        for tensor in next(iterator).values():
            local = mirrored.experimental_local_results(tensor)
            assert [replica.backing_device[-5:] for replica in local] == ["CPU:0", "CPU:1"]
        # Two batches a step are used; two lie on the devices, and two on the host.
        wait_until(lambda: loader.statistics().batches_delivered >= 2 * steps + 4)  # noqa: B023


@pytest.mark.parametrize("remainder", ["short", pytest.param("drop", marks=pytest.mark.slow)])
def test_batches_are_not_copied_in_memory(mirrored: tf.distribute.Strategy, numbered: Numbered, remainder: str):
    batches = loaderd_tf.distribute(
        mirrored, numbered.write([430]), numbered.schema, global_batch_size=20, remainder=remainder, workers=1
    )
    for step in batches:
        del step
    assert batches.loader.statistics().batches_copied <= 4, "of 43; some, where TensorFlow lets go late"


def test_what_cannot_be_distributed(mirrored: tf.distribute.Strategy, numbered: Numbered):
    def distribute(strategy: Any = mirrored, global_batch_size: Any = 40, **options: Any) -> Any:
        return loaderd_tf.distribute(
            strategy, numbered.write([400]), numbered.schema, global_batch_size=global_batch_size, **options
        )

    with pytest.raises(OptionError, match=r"strategy must be a tf\.distribute\.Strategy, got 'mirrored'"):
        distribute("mirrored")
    servers = tf.distribute.ParameterServerStrategy
    with pytest.raises(OptionError, match="must feed its replicas from their own process, got a ParameterServer"):
        distribute(servers.__new__(servers))
    for size in (0, 41, 40.0, True):
        with pytest.raises(OptionError, match=f"positive multiple of the strategy's 2 replicas, got {size}"):
            distribute(global_batch_size=size)
    for name in ("shard", "batch_size", "device", "prefetch"):
        with pytest.raises(TypeError, match=f"^distribute has no option '{name}': it follows from the strategy"):
            distribute(**{name: 2})


# ------------------------------------------------------------------------------------------- several hosts

WORKER = """
    import json, sys
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # it wants to be first
    from test_distribute import train
    import loaderd, loaderd_tf

    jobs, out = json.loads(sys.argv[1])
    schema = loaderd.Schema(
        features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
        fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
    )
    results = []
    for shards, options in jobs:
        batches = loaderd_tf.distribute(strategy, shards, schema, global_batch_size=40, workers=1, **options)
        seen, weights = train(strategy, batches, 40, epochs=2)
        results.append([seen, weights.numpy().tolist()])
    with open(out, "w") as file:
        json.dump(results, file)
"""


def run_on_hosts(folder: Path, jobs: list[tuple[list[str], dict[str, Any]]]) -> list[Any]:
    """What WORKER writes, of each of two processes that train together."""
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    addresses = [f"localhost:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    outs = [folder / f"{host}.json" for host in range(2)]
    hosts = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps([jobs, str(out)])],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": host}}
                ),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, out in enumerate(outs)
    ]
    try:
        for host in hosts:
            _, errors = host.communicate(timeout=250)
            assert host.returncode == 0, errors
    finally:
        for host in hosts:
            host.kill()
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.slow  # TensorFlow is imported twice more; that hosts share an epoch is tested without it
def test_two_hosts_train_together(numbered: Numbered, tmp_path: Path):
    """400 records are ten steps; of the last of 401, one host gets nothing."""
    cases = [(401, "short", 401), (439, "drop", 400)]
    jobs = []
    for size, remainder, _ in cases:
        shards = numbered.write([size - 300, 100, 100, 100], folder=f"{size}")
        jobs.append(([str(path) for path in shards], {"remainder": remainder}))
    hosts = run_on_hosts(tmp_path, jobs)
    for (size, _, num_seen), *both in zip(cases, *hosts, strict=True):
        (_, weights), (_, other_weights) = both
        assert weights == other_weights
        steps = []
        for epoch in zip(*[seen for seen, _ in both], strict=True):
            together = [own[0] + other[0] for own, other in zip(*epoch, strict=True)]
            ids = [n for step in together for n in step]
            assert len(ids) == len(set(ids)) == num_seen and set(ids) <= set(range(size))
            assert len(together) == -(-num_seen // 40)
            steps += together
        np.testing.assert_allclose(weights, train_alone(steps, 40), atol=1e-4)
