"""CPU time and memory of a tree of processes include what its grandchildren do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from harness.process_tree import CpuMeter, cpu_s, cpu_s_by_name, machine_cpu_s, process_tree, pss_bytes

# A process that starts another one; that one works for 0.3 s of CPU, holds 64 MiB, says so and waits.
_GRANDCHILD = """
import sys, time
open("/proc/self/comm", "w").write("grand (child)")
held = b"x" * (64 << 20)
while time.process_time() < 0.3: pass
print("ready", flush=True)
sys.stdin.read()
"""
# Works as long, its parent gone at once; whoever reads its output waits for it.
_ORPHAN = """
import os, time
if os.fork() > 0: os._exit(0)
while time.process_time() < 0.3: pass
"""
_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_GRANDCHILD!r}])"


def test_grandchildren_count() -> None:
    machine_before, meter = machine_cpu_s(), CpuMeter()
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        tree = process_tree(child.pid)
        assert len(tree) == 2 and tree[0] == child.pid
        assert set(tree) < set(process_tree(os.getpid()))
        assert cpu_s(tree) >= 0.28 > cpu_s([child.pid])
        by_name = cpu_s_by_name(tree)
        assert by_name["grand (child)"] >= 0.28 and sum(by_name.values()) == pytest.approx(cpu_s(tree), abs=0.011)
        assert pss_bytes(tree) > 64 << 20 > pss_bytes([child.pid])
        assert machine_cpu_s() - machine_before >= 0.28 and meter.read()[0] >= 0.28
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
    assert cpu_s([child.pid]) == pss_bytes([child.pid]) == 0


def test_what_others_do_is_told_apart() -> None:
    meter, began_s = CpuMeter(), time.perf_counter()
    subprocess.run([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, check=True)
    tree_s, other_cores = meter.read()
    assert tree_s < 0.25 and other_cores * (time.perf_counter() - began_s) >= 0.25
