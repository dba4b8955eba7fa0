"""Nodes that go and come, and processes that are killed, in the middle of an epoch: nobody notices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness.process_tree import process_tree

from tests.bindings_ray.ray_cluster import MARK, actors, expected, wait_until

ray = pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")

import loaderd_ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.bindings_ray.ray_trainer import Trainer


def start_trainers(nodes, name):
    """One on each of ``nodes``: they share epochs without end."""
    return [
        ray.remote(Trainer)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), num_cpus=0, max_concurrency=2)
        .remote(name, shard=(rank, len(nodes)), epochs=None)
        for rank, node in enumerate(nodes)
    ]


def check(found, datasets):
    """What each trainer has got is the beginning of its plan, epoch by epoch, and of some length."""
    epochs = 1 + max(map(len, found)) // 8  # of eight batches for each of two
    for rank, batches in enumerate(found):
        assert len(batches) > 100
        assert batches == expected(datasets, (rank, len(found)), epochs=epochs)[: len(batches)]


@pytest.mark.parametrize("servers", [2, "per-node"])
def test_a_node_goes_and_another_comes(start_cluster, datasets, servers):
    """Trainers are on the head; of two nodes with servers one is killed, and a new one gets a server."""
    cluster = start_cluster(0, 1, 1)
    before = loaderd_ray.serve("ray_datasets:train", name="moving", servers=servers)
    (head,) = [each["NodeID"] for each in ray.nodes() if "CPU" not in each["Resources"]]
    trainers = start_trainers([head, head], "moving")
    reading = [trainer.read.remote() for trainer in trainers]
    wait_until(lambda: all(count > 30 for count in ray.get([each.num_taken.remote() for each in trainers])))

    cluster.remove_node(cluster.nodes[1])
    new = cluster.add_node(1)
    wait_until(lambda: new.node_id in {state.node for state in loaderd_ray.status("moving") if state.address})
    cluster.remove_node(cluster.nodes[2])  # from here on, only the new one has the data
    ray.get([trainer.end_after.remote(100) for trainer in trainers])
    check(ray.get(reading, timeout=60), datasets)
    assert {state.node for state in before}.isdisjoint({new.node_id})
    loaderd_ray.stop("moving")


def test_each_kind_of_process_is_killed(start_cluster, datasets):
    """The manager, a server's actor, its server, one of the server's processes, and a loader's own worker."""
    cluster = start_cluster(1, 1)
    loaderd_ray.serve("ray_datasets:train", name="hunted")
    trainers = start_trainers([node.node_id for node in cluster.nodes], "hunted")
    reading = [trainer.read.remote() for trainer in trainers]

    def num_taken():
        return ray.get([trainer.num_taken.remote() for trainer in trainers])

    def victims():
        """One of each kind."""
        (manager,), (server, *_), (trainer, *_) = (
            actors(os.environ[MARK], name) for name in ("Manager", "Server", "Trainer")
        )
        (_, serve, process, *_) = process_tree(server)
        worker = next(pid for pid in process_tree(trainer) if is_worker(pid))
        return [manager, server, serve, process, worker]

    for kind in range(5):
        wait_until(lambda: all(each.address and each.report for each in loaderd_ray.status("hunted")))
        before = num_taken()
        os.kill(victims()[kind], signal.SIGKILL)
        wait_until(lambda before=before: all(now > then + 20 for now, then in zip(num_taken(), before, strict=True)))
    ray.get([trainer.end_after.remote(20) for trainer in trainers])
    check(ray.get(reading, timeout=60), datasets)
    wait_until(lambda: all(each.address and each.report for each in loaderd_ray.status("hunted")))
    loaderd_ray.stop("hunted")


def is_worker(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "loaderd-worker"
    except OSError:
        return False
