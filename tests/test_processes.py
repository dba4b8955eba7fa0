"""What processes have used: of real ones, and of files as the kernel writes them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from loaderd import processes

_GONE = 1 << 22  # no process has so high a number


def test_of_this_process():
    before_ns, began_ns = processes.cpu_ns(os.getpid()), time.process_time_ns()
    while time.process_time_ns() - began_ns < 100_000_000:
        pass
    assert 50_000_000 <= processes.cpu_ns(os.getpid()) - before_ns <= 500_000_000
    assert processes.cpu_ns(os.getpid(), threading.get_native_id()) <= processes.cpu_ns(os.getpid())
    assert processes.parent_of(os.getpid()) == os.getppid()
    assert processes.command_of(os.getpid()).split()[0].endswith(Path(sys.executable).name)


def test_bytes_that_are_read(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 1_000_000)
    before, _ = processes.read_bytes(os.getpid())
    path.read_bytes()
    after, fetched = processes.read_bytes(os.getpid())
    assert after - before >= 1_000_000 and fetched >= 0


def test_the_name_of_a_process():
    with subprocess.Popen(["sleep", "60"]) as process:
        deadline_s = time.monotonic() + 60
        # The kernel gives a program its name a moment before it gives it its arguments.
        while processes.command_of(process.pid) != "sleep 60" and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert processes.name_of(process.pid) == "sleep" and processes.command_of(process.pid) == "sleep 60"
        process.kill()


def test_of_a_process_that_is_gone_there_is_nothing():
    assert processes.cpu_ns(_GONE) == processes.delay_ns(_GONE, _GONE) == processes.parent_of(_GONE) == 0
    assert processes.read_bytes(_GONE) == (0, 0)
    assert processes.name_of(_GONE) == processes.command_of(_GONE) == ""
    assert processes.has_ended(_GONE) and not processes.has_ended(os.getpid())


def test_who_is_stopped_nice_and_pinned():
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen(["nice", "-n", "7", "sleep", "60"]) as process:
        deadline_s = time.monotonic() + 60
        while processes.nice_of(process.pid) != os.nice(0) + 7:
            assert time.monotonic() < deadline_s
        os.sched_setaffinity(process.pid, {core})
        assert processes.cores_of(process.pid) == {core} and not processes.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        while not processes.is_stopped(process.pid):
            assert time.monotonic() < deadline_s
        process.kill()
    assert processes.cores_of(_GONE) == set() and processes.nice_of(_GONE) == 0 and not processes.is_stopped(_GONE)


def test_who_is_dead_has_ended_before_anybody_waits_for_it():
    with subprocess.Popen(["true"]) as process:
        select.select([pidfd := os.pidfd_open(process.pid)], [], [], 60)
        assert processes.has_ended(process.pid)
        os.close(pidfd)


def test_a_name_may_hold_anything(tmp_path: Path):
    folder = tmp_path / "proc/7"
    (folder / "task/8").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  10 20 30 4000 500 6 7 8 9 10\ncpu0 1 2 3 4 5 6\ncpu11 1 2 3 40 50 6\n")
    fields = "S 5 7 7 0 -1 4194560 1 2 3 4 {} {} 0 0 20 0 1"
    (folder / "stat").write_text(f"7 (a ) b) {fields.format(300, 40)}\n")
    (folder / "task/8/stat").write_text(f"8 (() {fields.format(20, 3)}\n")
    (folder / "task/8/schedstat").write_text("111 222 3\n")
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert processes.cpu_ns(7, files=tmp_path) == 340 * tick_ns
    assert processes.cpu_ns(7, 8, tmp_path) == 23 * tick_ns
    assert processes.parent_of(7, tmp_path) == 5
    assert processes.delay_ns(7, 8, tmp_path) == 222
    assert processes.idle_ns(tmp_path) == {0: 9 * tick_ns, 11: 90 * tick_ns}
    assert processes.nice_of(7, tmp_path) == 0 and not processes.is_stopped(7, tmp_path)


def test_whether_a_process_has_a_gpu_open(tmp_path: Path):
    files = tmp_path / "proc/7/fd"
    files.mkdir(parents=True)
    (files / "0").symlink_to("/dev/null")
    (files / "1").symlink_to("/dev/nvidia0")
    assert not processes.uses_accelerator(7, tmp_path), "there is none on this machine"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert processes.uses_accelerator(7, tmp_path) and not processes.uses_accelerator(8, tmp_path)
    (files / "1").unlink()
    (files / "1").write_text("no link")
    assert not processes.uses_accelerator(7, tmp_path)
