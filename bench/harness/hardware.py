"""What machine a measurement was made on, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Processor, cores that this process may use, last-level cache, memory, kernel."""
    processor = _after_colon("/proc/cpuinfo", "model name") or platform.machine()
    memory = int(_after_colon("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20)
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    last_level = caches[-1].read_text().strip() if caches else "unknown"
    cores = len(os.sched_getaffinity(0))
    return (
        f"{processor}, {cores} cores, last-level cache {last_level}, {memory:.0f} GiB memory, "
        f"Linux {platform.release()}"
    )


def _after_colon(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
