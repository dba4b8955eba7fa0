"""CPU time and memory of a process and all its descendants, and of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from loaderd import processes


def process_tree(root: int) -> list[int]:
    """``root`` and its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        children.setdefault(processes.parent_of(pid), []).append(pid)
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
    """The same, added up by the names of the processes, such as "python" or "loaderd-worker"."""
    found: dict[str, float] = {}
    for pid in pids:
        if name := processes.name_of(pid):
            found[name] = found.get(name, 0.0) + processes.cpu_ns(pid, waited_for=True) / 1e9
    return found


def machine_cpu_s() -> float:
    """Time that all cores together were not idle since the machine started, in seconds; stolen time included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """The CPU time of this process and its descendants, and of all others, since the meter was made."""

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
    """Proportional set size of ``pids``: memory that several of them share counts once. Ended ones count 0."""
    return sum(map(processes.pss_bytes, pids))
