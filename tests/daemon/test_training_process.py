"""What is left when the training process ends, and what its forks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.own_processes import all_workers_of, children_of, fork_server_of, kill, wait_ends
from tests.reliability.processes import shm_names

Write = Callable[..., list[Path]]

_SCRIPT = """
import ctypes, gc, os, signal, subprocess, sys
import loaderd
print("run", flush=True)

def twice(numbers):
    if 0 in numbers and open("/proc/self/comm").read() == "loaderd-worker\\n":
        subprocess.Popen(["sleep", "1000"])  # nobody waits for it
    return offset + 2 * numbers

offset = 5
derived = dict(
    twice=loaderd.Derived(twice, "id", dtype="int64"),
    thrice=loaderd.Derived(lambda numbers: 3 * numbers, "id", dtype="int64"),
)
schema = loaderd.Schema({{"id": loaderd.Int64()}}, {{"id": loaderd.Array("id"), **derived}})
loader = loaderd.Loader({shards!r}, schema, batch_size=10, shuffle=False, workers=2, held_batches=2)
batches = iter(loader)
batch = next(batches)
"""


def run_script(tmp_path: Path, shards: list[Path], rest: str) -> subprocess.Popen[str]:
    """A training process: takes one batch, and goes on with ``rest``."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(shards=[str(shard) for shard in shards]) + textwrap.dedent(rest))
    return subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("print(os.getpid(), flush=True); signal.pause()", -signal.SIGKILL),
        # A fork that Python knows nothing of, and so keeps everything open.
        ("ctypes.PyDLL(None).fork() and print(os.getpid(), flush=True); signal.pause()", -signal.SIGKILL),
        pytest.param("print(os.getpid(), flush=True); sys.stdin.readline(); os._exit(3)", 3, marks=pytest.mark.slow),
        ("print(os.getpid(), flush=True); sys.stdin.readline(); raise SystemExit(4)", 4),
    ],
    ids=["SIGKILL", "SIGKILL with a fork that lives on", "os._exit", "exit without close"],
)
def test_nothing_outlives_the_training_process(write_numbered: Write, tmp_path: Path, rest: str, status: int):
    with run_script(tmp_path, write_numbered([1000]), rest) as training:
        assert [training.stdout.readline() for _ in range(2)] == ["run\n", f"{training.pid}\n"]
        comms = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children_of(training.pid)}
        (daemon,) = [pid for pid, comm in comms.items() if comm == "loaderd-daemon"]
        forks = [pid for pid in comms if pid != daemon]
        try:
            workers = all_workers_of(daemon, 2)
            programs = [pid for worker in workers for pid in children_of(worker)]
            assert len(programs) == 1
            family = [daemon, fork_server_of(daemon), *workers, *programs]
            assert len(forks) == ("fork" in rest)
            assert shm_names([training.pid, *family]) == set()
            pid_fds = [os.pidfd_open(pid) for pid in family]
            if status < 0:
                training.kill()
            else:
                training.stdin.write("go\n")
                training.stdin.flush()
            wait_ends(pid_fds, 60)
            assert training.wait(60) == status
        finally:
            training.kill()
            kill(*forks)


def test_forks_of_the_training_process_do_not_disturb_it(write_numbered: Write, tmp_path: Path):
    """Forks that end in each way, that drop batches, close the loader, or try to go on with it."""
    training = run_script(
        tmp_path,
        write_numbered([1000]),
        """
        def fork(act):
            child = os.fork()
            if child == 0:
                act()
                sys.exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def drop():
            global batch
            del batch
            gc.collect()

        def go_on():
            try:
                list(batches)
            except loaderd.errors.LoaderdError:
                os._exit(5)

        numbers = batch["id"].tolist()
        print([fork(act) for act in (drop, loader.close, go_on, lambda: os._exit(6), lambda: None)])
        for other in batches:
            assert batch["id"].tolist() == list(range(10)), "its slot is not given back"
            numbers += other["id"].tolist()
            assert (other["twice"] == 5 + 2 * other["id"]).all() and (other["thrice"] == 3 * other["id"]).all()
        assert numbers == list(range(1000)), numbers
        print(loader.statistics().workers_restarted)
        """,
    )
    output, _ = training.communicate(timeout=60)
    assert training.returncode == 0
    assert output.replace("run\n", "", 1) == "[0, 0, 5, 6, 0]\n0\n"
