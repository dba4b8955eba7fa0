"""CPU time and memory of a process and all its descendants, and of the machine, read from /proc (Linux)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """The second field of /proc/PID/stat, the name, and those behind it; or None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    end = text.rindex(")")  # the name may hold spaces and brackets
    return text[text.index("(") + 1 : end], text[end + 2 :].split()


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on, or None if the process is gone."""
    stat = _stat(pid)
    return None if stat is None else stat[1]


def process_tree(root: int) -> list[int]:
    """``root`` and its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    tree = [root]
    for pid in tree:  # grows while it is walked
        tree.extend(children.get(pid, []))
    return tree


def cpu_s(pids: list[int]) -> float:
    """User and system time of ``pids`` and of the children that they have waited for, in seconds.

    Resolution: one clock tick (10 ms) a process.
    """
    return sum(cpu_s_by_name(pids).values())


def cpu_s_by_name(pids: list[int]) -> dict[str, float]:
    """The same for all processes of one name together: such as "python", or "loaderd-worker"."""
    found: dict[str, float] = {}
    for pid in pids:
        if (stat := _stat(pid)) is not None:
            name, fields = stat
            found[name] = found.get(name, 0.0) + sum(map(int, fields[11:15])) * _TICK_S
    return found


def machine_cpu_s() -> float:
    """Time that all cores together were not idle since the machine started, in seconds; stolen time included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) * _TICK_S


class CpuMeter:
    """What this process and its descendants, and all others, have done since it was made."""

    def __init__(self) -> None:
        self._machine_s, self._tree_s = machine_cpu_s(), cpu_s(process_tree(os.getpid()))
        self._began_s = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """CPU time of this process and its descendants, in seconds; cores that all others kept busy."""
        seconds = time.perf_counter() - self._began_s
        tree_s = cpu_s(process_tree(os.getpid())) - self._tree_s
        machine_s = machine_cpu_s() - self._machine_s
        return tree_s, max(0.0, machine_s - tree_s) / seconds


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size of ``pids``: memory that several of them share counts once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended, or is about to
        total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return total
