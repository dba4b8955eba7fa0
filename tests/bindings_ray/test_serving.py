"""Servers on a cluster: started, asked, refused, ended; and loaders of what they have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import loaderd
from loaderd.errors import OptionError, ServerError
from tests.bindings_ray.ray_cluster import MARK, actors, expected, marked, wait_until
from tests.remote.certificates import make_certificates

ray = pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")

import loaderd_ray
from loaderd_ray import serving
from loaderd_ray.loaders import Addresses
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def groups(*states):
    """What the placement groups that are in one of these states belong to."""
    return [each["name"].partition("/")[0] for each in placement_group_table().values() if each["state"] in states]


@pytest.fixture
def served(cluster):
    """Servers called "numbers", one on each of two nodes."""
    states = loaderd_ray.serve("ray_datasets:train", name="numbers")
    yield states
    loaderd_ray.stop("numbers")


def test_a_loader_has_the_planned_order(served, datasets):
    assert len({state.node for state in served}) == len(served) == 2
    assert all(state.address.startswith("http://127.0.0.1:") for state in served)
    with loaderd_ray.connect("numbers", batch_size=64, epochs=2) as loader:
        assert [batch["id"].tolist() for batch in loader] == expected(datasets, epochs=2)


def test_a_training_of_several_processes_is_warned_of_the_same_batches(served, monkeypatch):
    two = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch.distributed", two)
    with (
        pytest.warns(UserWarning, match=r"has 2 processes, and this loader has no shard=: all of them get the same"),
        loaderd_ray.connect("numbers", batch_size=64, epochs=1) as loader,
    ):
        next(iter(loader))


def test_each_node_is_served_by_its_own(served):
    """A trainer asks the server of its node, as long as that serves; and else the other one."""
    manager = ray.get_actor("numbers/manager", "loaderd")

    @ray.remote(num_cpus=0)
    def asked():
        return tuple(Addresses(manager, "numbers")())

    for state in served:
        here = asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(state.node, soft=False))
        assert ray.get(here.remote()) == (state.address,)
    own, other = served
    here = asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(own.node, soft=False))
    os.kill(own.actor_pid, signal.SIGSTOP)
    try:
        wait_until(lambda: ray.get(here.remote()) == (other.address,))
    finally:
        os.kill(own.actor_pid, signal.SIGCONT)
    wait_until(lambda: ray.get(here.remote()) == (own.address,))


def test_status(served):
    for state in loaderd_ray.status("numbers"):
        assert state.report["datasets"][0]["name"] == "train" and state.restarts == 0
        os.kill(state.actor_pid, 0)
        os.kill(state.pid, 0)


def test_a_token_is_asked_for(served):
    with pytest.raises(ServerError, match="token"):
        loaderd.connect(served[0].address, "train", batch_size=64, token="wrong")


def test_to_serve_again_changes_nothing(served):
    again = loaderd_ray.serve("ray_datasets:train", name="numbers")
    assert [state.pid for state in again] == [state.pid for state in served]
    with pytest.raises(OptionError, match="another cpus, token"):
        loaderd_ray.serve("ray_datasets:train", name="numbers", cpus=2, token="other")


def test_two_that_serve_at_once_get_the_same_servers(cluster):
    """The second one finds the name taken when it starts its Manager, or waits for cores that the first one has."""
    found = []

    def serve():
        found.append(loaderd_ray.serve("ray_datasets:train", name="raced", servers=2, cpus=2))

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and [s.pid for s in found[0]] == [s.pid for s in found[1]]
    assert groups("PENDING", "CREATED", "RESCHEDULING").count("loaderd-raced") == 1
    loaderd_ray.stop("raced")


def test_stop_removes_the_place_though_the_manager_does_not_answer(cluster):
    loaderd_ray.serve("ray_datasets:train", name="silent", servers=2)
    (manager,) = actors(os.environ[MARK], "Manager")
    os.kill(manager, signal.SIGSTOP)
    loaderd_ray.stop("silent")
    wait_until(lambda: "loaderd-silent" not in groups("PENDING", "CREATED", "RESCHEDULING"), 20.0)


def test_stop_leaves_nothing(cluster):
    loaderd_ray.serve("ray_datasets:train", name="short", servers=1)
    assert any("ray_datasets:train" in command for command in marked(os.environ[MARK]).values())
    loaderd_ray.stop("short")
    wait_until(lambda: not any("ray_datasets:train" in command for command in marked(os.environ[MARK]).values()))
    wait_until(lambda: not actors(os.environ[MARK], "Manager") + actors(os.environ[MARK], "Server"))
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0)
    with pytest.raises(ServerError, match="no servers are called 'short'"):
        loaderd_ray.connect("short", batch_size=64)
    loaderd_ray.stop("short")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"targets": "no_such_module:train"}, ServerError, "no_such_module"),
        ({"cpus": 3}, OptionError, "cpus=3 is more than any node"),
        ({"servers": 3, "timeout": 2.0}, ServerError, "could not be placed within 2 s"),
        ({"servers": 0}, OptionError, 'servers must be "per-node" or a positive integer'),
        ({"targets": "module"}, OptionError, "mypackage.module:dataset"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, ServerError, "/nowhere must be a certificate"),
    ],
)
def test_what_cannot_be_served_is_said(cluster, arguments, error, text):
    with pytest.raises(error, match=text):
        loaderd_ray.serve(**{"targets": "ray_datasets:train", "name": "wrong", **arguments})
    with pytest.raises(ServerError):
        loaderd_ray.status("wrong")


def test_an_interrupted_start_leaves_no_place_taken(cluster):
    """By Ctrl-C, while it waits for a third node; Ray hears of it when the time is over."""

    def interrupt():
        try:
            wait_until(lambda: "loaderd-waiting" in groups("PENDING"))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loaderd_ray.serve("ray_datasets:train", name="waiting", servers=3, timeout=5.0)
    thread.join()
    wait_until(lambda: "loaderd-waiting" not in groups("PENDING", "CREATED", "RESCHEDULING"), 20.0)


def test_a_manager_that_fails_leaves_no_place_taken(cluster, monkeypatch):
    class Broken(serving.Manager):
        def __init__(self, spec, group):
            raise OSError("not on this machine")

    monkeypatch.setattr(serving, "Manager", Broken)
    with pytest.raises(ServerError, match=r"(?s)manager has ended: .*not on this machine"):
        loaderd_ray.serve("ray_datasets:train", name="broken", servers=2)
    wait_until(lambda: "loaderd-broken" not in groups("PENDING", "CREATED", "RESCHEDULING"), 20.0)


def test_a_manager_that_does_not_start_leaves_no_place_taken(cluster, monkeypatch):
    class Endless(serving.Manager):
        def __init__(self, spec, group):
            time.sleep(600.0)

    monkeypatch.setattr(serving, "Manager", Endless)
    monkeypatch.setattr(serving, "_ANSWER_S", 1.0)
    with pytest.raises(ServerError, match="have not come to serve for 3 s"):
        loaderd_ray.serve("ray_datasets:train", name="endless", servers=2, timeout=3.0)
    wait_until(lambda: "loaderd-endless" not in groups("PENDING", "CREATED", "RESCHEDULING"), 20.0)
    with pytest.raises(ServerError, match="no servers are called 'endless'"):
        loaderd_ray.status("endless")


def test_servers_outlive_the_driver_that_started_them(cluster):
    program = (
        f"import ray, loaderd_ray; ray.init({cluster.address!r}, log_to_driver=False); "
        "loaderd_ray.serve('ray_datasets:train', name='lasting', servers=2)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90)
    try:
        with loaderd_ray.connect("lasting", batch_size=64) as loader:
            assert sum(len(batch["id"]) for batch in loader) == 1000
    finally:
        loaderd_ray.stop("lasting")


def test_tls(cluster, tmp_path, datasets):
    certificates = make_certificates(tmp_path)
    files = {"tls_cert": certificates.server_cert, "tls_key": certificates.server_key}
    loaderd_ray.serve("ray_datasets:train", name="secret", servers=1, **files)
    try:
        trusted = loaderd.TLS(ca=certificates.ca, server_name="localhost")
        with loaderd_ray.connect("secret", batch_size=64, tls=trusted) as loader:
            assert [batch["id"].tolist() for batch in loader] == expected(datasets)
        (state,) = loaderd_ray.status("secret")
        assert state.report["datasets"][0]["name"] == "train", state.error
        with pytest.raises(ServerError, match="is not trusted"):
            loaderd_ray.connect("secret", batch_size=64, tls=loaderd.TLS(ca=certificates.other_ca))
    finally:
        loaderd_ray.stop("secret")


def test_a_position_is_kept_in_a_folder(served, datasets, tmp_path):
    with loaderd_ray.connect("numbers", batch_size=64) as loader:
        for _ in zip(range(5), loader, strict=False):
            pass
        loaderd_ray.save(loader, tmp_path)
    start = loaderd_ray.load(str(tmp_path))
    with loaderd_ray.connect("numbers", batch_size=64, start=start) as loader:
        assert [batch["id"].tolist() for batch in loader] == expected(datasets)[5:]
    assert loaderd_ray.load(None) is None
    with pytest.raises(OptionError, match="has no position of a loader"):
        loaderd_ray.load(tmp_path / "elsewhere")
