"""Nodes that go and come, and processes that are killed, in the middle of an epoch: nobody notices."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
from harness.process_tree import process_tree

from tests.bindings_ray.ray_cluster import MARK, actors, expected, wait_until

ray = pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")

import loaderd_ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.bindings_ray.ray_trainer import Trainer

KILLING_S = 60.0


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


def test_processes_are_killed_for_a_minute(start_cluster, datasets):
    """Any of the actors, their servers, and what these have started; and the loaders' own workers.

    Meanwhile a node goes, and another one comes.
    """
    cluster = start_cluster(1, 1, 1)
    loaderd_ray.serve("ray_datasets:train", name="hunted")
    trainers = start_trainers([node.node_id for node in cluster.nodes[:2]], "hunted")
    reading = [trainer.read.remote() for trainer in trainers]
    over = threading.Event()
    killed: dict[str, int] = {}
    rng = random.Random(7)

    def victims():
        mark = os.environ[MARK]
        roots = {name: actors(mark, name) for name in ("Manager", "Server", "Trainer")}
        for name, pids in roots.items():
            for pid in pids:
                # A loader gives up where three of its daemons in a row are killed, which has nothing to do with Ray.
                family = [each for each in process_tree(pid) if name != "Trainer" or is_worker(each)]
                yield from ((name if each == pid else f"{name}'s", each) for each in family)

    def kill():
        # First of which kind, then which of it: else managers would hardly have their turn among so many processes.
        while not over.wait(rng.uniform(0.3, 1.5)):
            kinds: dict[str, list[int]] = {}
            for what, pid in victims():
                kinds.setdefault(what, []).append(pid)
            if not kinds:  # all are just being started again
                continue
            what = rng.choice(sorted(kinds))
            pid = rng.choice(kinds[what])
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed[what] = killed.get(what, 0) + 1

    # On a busy machine a server needs longer for its start than it lives here: without this, nothing would be read.
    wait_until(lambda: all(ray.get([each.num_taken.remote() for each in trainers])))
    killing = threading.Thread(target=kill)
    killing.start()

    def go_on_reading():
        ended, _ = ray.wait(reading, timeout=KILLING_S / 3)
        assert not ended, ray.get(ended)

    try:
        go_on_reading()
        cluster.remove_node(cluster.nodes[2])
        go_on_reading()
        new = cluster.add_node(1)
        go_on_reading()
    finally:
        over.set()
        killing.join()
    ray.get([trainer.end_after.remote(100) for trainer in trainers])
    check(ray.get(reading, timeout=60), datasets)
    assert killed.keys() == {"Manager", "Server", "Server's", "Trainer's"}, killed

    def all_serve():
        states = loaderd_ray.status("hunted")
        return new.node_id in {state.node for state in states} and all(
            each.address and each.report for each in states
        )

    wait_until(all_serve)
    # Not stopped: that the cluster's end is the end of all of it, is seen to by whoever has started it.


def is_worker(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "loaderd-worker"
    except OSError:
        return False
