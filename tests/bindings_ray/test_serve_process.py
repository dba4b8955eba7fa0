"""The process that an actor keeps running: it is there, it is there again, and it never outlives the actor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest
from harness.process_tree import process_tree

from tests.bindings_ray.ray_cluster import wait_until

pytest.importorskip("ray", reason="loaderd_ray needs Ray: make test-ray installs it")

from loaderd_ray.serve_process import ServerProcess

ACTOR = """
import sys, time
from loaderd_ray.serve_process import ServerProcess

process = ServerProcess(["ray_datasets:train", "--listen", "127.0.0.1:0"], "token")
while process.address is None:
    time.sleep(0.05)
print(process.pid, flush=True)
time.sleep(600)
"""


def whole_family(pid: int) -> list[int]:
    """The supervisor, and what it has started."""
    wait_until(lambda: len(process_tree(pid)) >= 2)
    return process_tree(pid)


@pytest.fixture
def start(datasets, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(datasets))
    started = []

    def start(target="ray_datasets:train"):
        arguments = [target, "--listen", "127.0.0.1:0", "--workers", "1"]
        started.append(ServerProcess(arguments, "token"))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def test_it_is_started_again(start):
    process = start()
    wait_until(lambda: process.address)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: process.pid not in (None, first) and process.address)
    assert process.restarts == 1 and "SIGKILL" not in process.error


def test_a_log_that_cannot_be_written_costs_no_server(start, monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: full.write(text.encode())))
        process = start()
        wait_until(lambda: process.address)
        process.stop()
    assert process.restarts == 0 and "cannot start" not in process.error


def test_it_ends_with_all_that_it_started(start):
    process = start()
    wait_until(lambda: process.address)
    family = whole_family(process.pid)
    process.stop()
    assert process.pid is None
    wait_until(lambda: not any(is_alive(pid) for pid in family))


def test_what_it_says_at_its_end_is_kept(start):
    process = start("ray_datasets:no_such_data_set")
    wait_until(lambda: process.restarts)
    assert "no_such_data_set" in process.error


def test_it_imports_no_module_of_the_working_directory(start, tmp_path, monkeypatch):
    """Nor one of Python's own from the driver's, which Ray puts first in an actor's ``sys.path``."""
    log = tmp_path / "log"
    for folder in ("shared", "drivers"):
        (tmp_path / folder).mkdir()
        for name in (*sys.stdlib_module_names, *(["loaderd", "numpy"] if folder == "shared" else [])):
            if PathFinder.find_spec(name) is not None:
                (tmp_path / folder / f"{name}.py").write_text(f"open({str(log)!r}, 'a').write({name!r})")
    monkeypatch.syspath_prepend(str(tmp_path / "drivers"))
    monkeypatch.chdir(tmp_path / "shared")
    process = start()
    wait_until(lambda: process.address)
    assert not log.exists(), log.read_text()


def test_it_is_killed_with_the_process_that_started_it(datasets, tmp_path):
    path = os.pathsep.join([str(datasets), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", ACTOR, str(tmp_path / "x.sock")]
    actor = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
    try:
        family = whole_family(int(actor.stdout.readline()))
    finally:
        actor.kill()
        actor.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in family), 10.0)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
