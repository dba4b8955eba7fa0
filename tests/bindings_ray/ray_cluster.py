"""A Ray cluster for a test, what is served on it, and its processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import loaderd

MARK = "LOADERD_TEST_MARK"
SIZES = [300, 400, 300]
MODULE = """
import pathlib
import loaderd

schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)
shards = str(pathlib.Path(__file__).parent / "shards" / "*.tfrecord")
train = loaderd.Dataset(shards, schema, loaderd.Shuffle(window_records=200, block_records=16))
"""


class LocalCluster:
    """Nodes on this machine; this process is a driver at its head. ``ray_datasets`` can be imported on all."""

    def __init__(self, datasets: Path, cpus: Sequence[int]) -> None:
        import ray
        from ray.cluster_utils import Cluster

        path = [str(datasets), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        self._ray = ray
        self._before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._cluster = Cluster()
        self.nodes = [self.add_node(count) for count in cpus]
        ray.init(address=self._cluster.address, log_to_driver=False)
        self.address = self._cluster.address

    def add_node(self, cpus: int) -> Any:
        return self._cluster.add_node(num_cpus=cpus, include_dashboard=False)

    def remove_node(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()
        os.environ.pop("PYTHONPATH", None)
        if self._before is not None:
            os.environ["PYTHONPATH"] = self._before


def expected(datasets: Path, shard: tuple[int, int] = (0, 1), **options: Any) -> list[list[int]]:
    """The ids of each batch, in the planned order: those of an embedded loader."""
    import runpy

    dataset = runpy.run_path(str(datasets / "ray_datasets.py"))["train"]
    with loaderd.Loader(dataset, batch_size=64, workers=1, shard=shard, **options) as loader:
        return [batch["id"].tolist() for batch in loader]


def marked(mark: str) -> dict[int, str]:
    """The processes that have the mark in their environment, but for this one: their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def actors(mark: str, name: str) -> list[int]:
    """The processes of the actors of a class."""
    return [pid for pid, command in marked(mark).items() if command.startswith(f"ray::{name}")]


def check_nothing_is_left(mark: str) -> None:
    wait_until(lambda: not marked(mark), 20.0, lambda: f"processes are left: {marked(mark)}")


def wait_until(is_so: Callable[[], Any], limit_s: float = 60.0, why: Callable[[], str] = lambda: "") -> Any:
    """Look again and again; for what no event tells of: another process's end, the state of a cluster."""
    until_s = time.monotonic() + limit_s
    while not (found := is_so()):
        assert time.monotonic() < until_s, why() or "it did not come about"
        time.sleep(0.1)
    return found
