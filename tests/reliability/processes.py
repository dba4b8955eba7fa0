"""What /proc says of loaderd's processes (Linux)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "LOADERD_TEST_MARK"
"""An environment variable by which a process and all that it starts can be found, whoever is their parent by then."""

DAEMON, FORKS, WORKER = "loaderd-daemon", "loaderd-forks", "loaderd-worker"
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def read(pid: int, name: str) -> bytes:
    """/proc/PID/name; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except _GONE:
        return b""


def status_of(pid: int) -> dict[str, str]:
    """What /proc/PID/status says, by name."""
    return dict(line.split(":\t", 1) for line in read(pid, "status").decode().splitlines())


def own_mib(pid: int) -> float:
    """Memory of its own, in MiB."""
    return int(status_of(pid)["RssAnon"].split()[0]) / 1024


def state_of(pid: int) -> str:
    """As in /proc/PID/stat: R, S, T (stopped), Z (dead, not waited for) …; empty where the process is gone."""
    return read(pid, "stat").rpartition(b") ")[2][:1].decode()


def age_s(pid: int) -> float:
    """For how many seconds a process has lived; to a hundredth."""
    began = read(pid, "stat").rpartition(b") ")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(began[19]) / os.sysconf("SC_CLK_TCK") if began else 0.0


def parent_of(pid: int) -> int:
    return int(read(pid, "stat").rpartition(b") ")[2].split()[1] or 0) if state_of(pid) else 0


def marked(mark: str) -> list[int]:
    """Processes that live and were started with this mark."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in pids() if wanted in read(pid, "environ").split(b"\0") and state_of(pid) not in "Z"]


def roles(mark: str, role: str) -> list[int]:
    """Daemons, workers or what these are forks of among the processes of that mark."""
    return [pid for pid in marked(mark) if name_of(pid) == role]


def name_of(pid: int) -> str:
    return read(pid, "comm").decode().strip()


def send(pid: int, number: signal.Signals, mark: str) -> bool:
    """Send a signal, if ``pid`` still is a process of that mark; returns whether it was sent."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            # From here on the number cannot become another process's.
            if f"{MARK}={mark}".encode() in read(pid, "environ").split(b"\0"):
                signal.pidfd_send_signal(pidfd, number)
                return True
        finally:
            os.close(pidfd)
    return False


def num_fds(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except _GONE:
        return 0


def shm_names(of: list[int]) -> set[str]:
    """Names in /dev/shm that these processes have open or mapped."""
    found: set[str] = set()
    for pid in of:
        found.update(re.findall(r"/dev/shm/\S+", read(pid, "maps").decode(errors="replace")))
        with contextlib.suppress(*_GONE):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(*_GONE):
                    found.update(re.findall(r"^/dev/shm/\S+", os.readlink(f"/proc/{pid}/fd/{fd}")))
    return found


def wait_for_none(mark: str, session: int, until_s: float) -> list[int]:
    """The processes that are left of a program at that time, by its mark or in its session."""
    while True:
        in_session = [pid for pid in pids() if session_of(pid) == session and state_of(pid) not in ("Z", "")]
        left = sorted({*marked(mark), *in_session})
        if not left or time.monotonic() >= until_s:
            return left
        time.sleep(0.02)


def session_of(pid: int) -> int:
    """0 where the process is gone."""
    fields = read(pid, "stat").rpartition(b") ")[2].split()
    return int(fields[3]) if len(fields) > 3 else 0


def stacks_of(pid: int) -> str:
    """Where its threads are, if there is py-spy to tell."""
    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if py_spy is None:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run([py_spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=20).stdout
    return ""
