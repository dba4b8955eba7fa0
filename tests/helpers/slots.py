"""Where an array lies."""

from __future__ import annotations

from pathlib import Path


def lies_in_a_slot(address: int) -> bool:
    """Whether a slot of a loader of this process is at ``address``: so what is there was not copied."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:loaderd-slots" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < stop for start, stop in ranges)
