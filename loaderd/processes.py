"""What processes have used, as the kernel counts it in /proc: time on a core, time without one, bytes read.

What cannot be read is 0: the process may be over, or another user's, or the kernel may not count it. ``files`` is the
folder that /proc is in.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_ROOT = Path("/")
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/accel", "/dev/vfio")
"""How the paths of GPUs and TPUs begin: NVIDIA's, AMD's, Google's two kinds."""


def cpu_ns(pid: int, thread: int | None = None, files: Path = _ROOT, *, waited_for: bool = False) -> int:
    """Nanoseconds that a process, or one thread of it, has had a core; in steps of 10 ms as a rule.

    ``waited_for``: count those of its children, too, that have ended and that it has waited for.
    """
    # User and system time are fields 14 and 15 of the file; those of the children that were waited for, 16 and 17.
    found = _fields(files / f"proc/{pid}" / ("stat" if thread is None else f"task/{thread}/stat"))
    return sum(map(int, found[14 - 3 : 18 - 3 if waited_for else 16 - 3])) * _NS_PER_TICK


def idle_ns(files: Path = _ROOT) -> dict[int, int]:
    """Nanoseconds in which each core of the machine had nothing to do, by its number."""
    # The fields after the name: user, nice, system, idle, waiting for storage, …
    found = re.findall(r"^cpu(\d+)(?: \d+){3} (\d+) (\d+)", _read(files / "proc/stat"), flags=re.MULTILINE)
    return {int(core): (int(idle) + int(waiting)) * _NS_PER_TICK for core, idle, waiting in found}


def delay_ns(pid: int, thread: int, files: Path = _ROOT) -> int:
    """Nanoseconds in which a thread of a process could have run, but had no core."""
    found = _read(files / f"proc/{pid}/task/{thread}/schedstat").split()
    return int(found[1]) if len(found) == 3 else 0


def read_bytes(pid: int, files: Path = _ROOT) -> tuple[int, int]:
    """(bytes that a process has read, those of them that came from storage): the others were in the page cache."""
    found = dict(re.findall(r"^(\w+): (\d+)$", _read(files / f"proc/{pid}/io"), flags=re.MULTILINE))
    return int(found.get("rchar", 0)), int(found.get("read_bytes", 0))


def uses_accelerator(pid: int, files: Path = _ROOT) -> bool:
    """Whether a process has a GPU or a TPU open. Takes 2 µs for each file that it has open, where there is one."""
    if not any(f"/dev/{name}".startswith(_ACCELERATORS) for name in _names(files / "dev")):
        return False
    folder = files / f"proc/{pid}/fd"
    for name in _names(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(folder / name).startswith(_ACCELERATORS):
                return True
    return False


def name_of(pid: int, files: Path = _ROOT) -> str:
    """What ``ps`` calls a process."""
    return _read(files / f"proc/{pid}/comm").strip()


def command_of(pid: int, files: Path = _ROOT) -> str:
    """The command line of a process."""
    return _read(files / f"proc/{pid}/cmdline").replace("\0", " ").strip()


def parent_of(pid: int, files: Path = _ROOT) -> int:
    """The number of a process's parent; 0 if it cannot be read."""
    found = _fields(files / f"proc/{pid}/stat")
    return int(found[4 - 3]) if found else 0


def has_ended(pid: int, files: Path = _ROOT) -> bool:
    """Whether a process is gone, or dead and nobody has waited for it yet."""
    found = _fields(files / f"proc/{pid}/stat")
    return not found or found[0] in ("Z", "X")


def nice_of(pid: int, files: Path = _ROOT) -> int:
    """The nice value of a process: from -20, which gets most of a core that others want, to 19."""
    found = _fields(files / f"proc/{pid}/stat")
    return int(found[19 - 3]) if len(found) > 19 - 3 else 0


def cores_of(pid: int) -> set[int]:
    """The numbers of the cores that a process may run on; none if that cannot be known."""
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


def is_stopped(pid: int, files: Path = _ROOT) -> bool:
    """Whether a process was stopped by a signal."""
    return _fields(files / f"proc/{pid}/stat")[:1] == ["T"]


def pss_bytes(pid: int, files: Path = _ROOT) -> int:
    """The memory of a process; of memory that n processes share, it counts an n-th."""
    found = re.search(r"^Pss: +(\d+) kB$", _read(files / f"proc/{pid}/smaps_rollup"), flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _fields(stat: Path) -> list[str]:
    """The fields of a ``stat`` file from the third on: those that follow the name, which may hold anything."""
    return _read(stat).rpartition(")")[2].split()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
