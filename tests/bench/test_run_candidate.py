"""What a measured process leaves behind: nothing, however the benchmark itself ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from harness.process_tree import process_tree

# It waits in C, where no Python handler of a signal runs and no thread gets its turn.
_STUCK = """
import ctypes, os, pathlib, subprocess, sys
from harness.interface import Step

def steps(config):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(config.shards[0]).write_text(f"{os.getpid()} {child.pid}\\n")
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    yield Step(1, None)
"""


def test_what_waits_in_c_is_ended_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    (tmp_path / "candidates").mkdir()
    (tmp_path / "candidates" / "stuck.py").write_text(_STUCK)
    os.mkfifo(tmp_path / "pids")
    told = os.open(tmp_path / "pids", os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-m", "harness.run_candidate", "stuck", str(tmp_path / "pids"), "--timeout=200"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL) as bench:
        try:
            assert select.select([told], [], [], 60)[0]
            pids = [int(word) for word in os.read(told, 100).split()]
            assert set(pids) <= set(process_tree(bench.pid))
            waiting = [os.pidfd_open(pid) for pid in pids]
        finally:
            bench.kill()
    os.close(told)
    try:
        for process in waiting:
            assert select.select([process], [], [], 60)[0], "it outlives the benchmark"
    finally:
        for process in waiting:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
