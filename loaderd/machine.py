"""What the machine lets this process have: cores, memory, open files, as the kernel says it (Linux).

A process is in a **cgroup**: a folder of files below /sys/fs/cgroup that a container, a batch system or systemd made.
The folder and those above it may allow less than the machine has, and a process that takes more memory than that is
killed. /proc/self/cgroup says which folder it is, and /proc/self/mountinfo where it can be seen. There are two
versions of cgroups, with different file names. A machine may use both; then each controller (cpu, memory) is in one.

``files`` is the folder that /proc and /sys are in. What cannot be read there sets no limit.
"""

from __future__ import annotations

import errno
import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")
# What a daemon of one stream opens, with some to spare: 26 files have been enough for 2 workers.
_OPEN_FILES, _OPEN_FILES_PER_WORKER = 23, 3
MAX_SENT_FILES = 253
"""Descriptors that fit in one message to another process: the kernel's own limit."""
# Of cgroups of version 2, then of 1: the files of the limit and of the usage, and the prefix of names in memory.stat.
_MEMORY_FILES = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))


class Memory(NamedTuple):
    """Memory that can still be had: ``free_bytes``, and what sets that limit, in words."""

    free_bytes: int
    limit: str


def usable_cores(files: Path = _ROOT) -> int:
    """Cores that this process may keep busy: those it may run on, or less if its cgroup has a quota of time."""
    quotas = [math.ceil(quota) for folder in _cgroup_folders("cpu", files) for quota in _cpu_quotas(folder)]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def available_memory(files: Path = _ROOT) -> Memory:
    """Memory to be had before the kernel kills a process for it: the least that the machine or a cgroup has left.

    Page cache counts as free: the kernel drops it first. So does swap, except in cgroups of version 1.
    """
    machine = _fields(files / "proc/meminfo")
    swap_bytes = machine.get("SwapFree", 0) << 10
    found = []
    if "MemAvailable" in machine:
        free_bytes = (machine["MemAvailable"] << 10) + swap_bytes
        found.append(Memory(free_bytes, f"this machine has {in_mib(machine['MemTotal'] << 10)}"))
    for folder in _cgroup_folders("memory", files):
        for limit_name, usage_name, prefix in _MEMORY_FILES:
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is None or usage is None:
                continue
            cache = _fields(folder / "memory.stat")
            cache_bytes = sum(cache.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive"))
            free_bytes = limit - usage + cache_bytes + min(swap_bytes, _free_swap_bytes(folder))
            found.append(Memory(max(0, free_bytes), f"{limit_name} of the cgroup {folder} is {in_mib(limit)}"))
    return min(found, key=lambda memory: memory.free_bytes, default=Memory(1 << 62, "nothing limits it"))


def oom_kills(files: Path = _ROOT) -> int | None:
    """How many processes the kernel has killed for memory: of this cgroup or, without one, of the machine.

    It never falls. If it has risen when a process was killed, memory was the reason. None: unknown.
    """
    counts = _fields(files / "proc/vmstat")
    for folder in _cgroup_folders("memory", files)[:1]:  # in those above, others are counted too
        counts |= _fields(folder / "memory.oom_control") | _fields(folder / "memory.events")
    return counts.get("oom_kill")


def throttled_ns(files: Path = _ROOT) -> int:
    """For how many ns the cgroup of this process was stopped, so far, because it had used its quota of time."""
    for folder in _cgroup_folders("cpu", files)[:1]:
        found = _fields(folder / "cpu.stat")
        return found.get("throttled_time", 1000 * found.get("throttled_usec", 0))  # of version 1; of version 2
    return 0


def memory_stall_ns(files: Path = _ROOT) -> int:
    """For how many ns some process of this cgroup, or else of the machine, has waited for memory, so far (PSI)."""
    folders = [*(folder / "memory.pressure" for folder in _cgroup_folders("memory", files)[:1])]
    for path in (*folders, files / "proc/pressure/memory"):
        if found := re.search(r"^some .*total=(\d+)", _read(path)):
            return 1000 * int(found[1])
    return 0


def filesystem_kind(folder: str, files: Path = _ROOT) -> str:
    """The kind of the file system that a folder is on, such as "ext4" or "nfs4"; "" if unknown."""
    path = PurePosixPath(os.path.realpath(folder))
    best = PurePosixPath("/"), ""
    for _, mount_point, kind, _ in _mounts(files):
        point = PurePosixPath(mount_point)
        if path.is_relative_to(point) and len(point.parts) >= len(best[0].parts):  # a later one hides those before it
            best = point, kind
    return best[1]


def be_killed_first() -> None:
    """If the kernel must kill a process for memory, have it choose this one: its work can be done again."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def max_open_files() -> int:
    """The number of files that this process may have open at a time."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_max_open_files() -> None:
    """Raise the limit of open files of this process, and of those that it starts, to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some sandboxes forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def remedy(error: BaseException) -> str:
    """What to do about an error that says that the machine has run out of something; "" for any other error."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if number == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"A process may have {soft} files open here: raise that with `ulimit -n` (the hard limit is {hard}). "
            f"loaderd needs {_OPEN_FILES}, and {_OPEN_FILES_PER_WORKER} more for each worker."
        )
    if number == errno.ENFILE:
        return "The machine has as many files open as it may: raise fs.file-max."
    if number == errno.EFBIG and (soft := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        return f"A process may write files of {in_mib(soft)} here, and shared memory counts: raise `ulimit -f`."
    if number == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            return f"A process may have {in_mib(soft)} of addresses here: raise that with `ulimit -v`."
        memory = available_memory()
        return f"{in_mib(memory.free_bytes)} of memory are free here ({memory.limit})."
    if number == errno.EAGAIN:
        return "No more processes are allowed: raise `ulimit -u`, or pids.max of the cgroup, or take fewer workers."
    return ""


def in_mib(num_bytes: int) -> str:
    """A number of bytes for people: "1,234 MiB"."""
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def _cgroup_folders(controller: str, files: Path) -> list[Path]:
    """The cgroup of this process and those above it, as far as they can be seen, the innermost first.

    In a container, the visible tree begins at its own cgroup, though /proc/self/cgroup may give a path from above it.
    """
    paths: dict[str, str] = {}  # by controller; "" is version 2
    for line in _lines(files / "proc/self/cgroup"):
        _, controllers, of_them = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), of_them))
    name = controller if controller in paths else ""
    for root, mount_point, kind, options in _mounts(files):
        if name in paths and (name in options.split(",") if kind == "cgroup" else kind == "cgroup2" and not name):
            top = files / mount_point.lstrip("/")
            path = PurePosixPath(paths[name])
            inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
            folder = top if ".." in inside.parts else top / inside
            return [folder, *folder.parents][: len(folder.parts) - len(top.parts) + 1]
    return []


def _mounts(files: Path) -> Iterator[tuple[str, str, str, str]]:
    """The root, mount point, kind of file system, and its options, of each mount: proc_pid_mountinfo(5)."""
    for line in _lines(files / "proc/self/mountinfo"):
        mounted, _, filesystem = line.partition(" - ")
        root, mount_point = (re.sub(r"\\([0-7]{3})", _character, text) for text in mounted.split(" ")[3:5])
        kind, _, options = filesystem.split(" ", 2)
        yield root, mount_point, kind, options


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 8))


def _cpu_quotas(folder: Path) -> Iterator[float]:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    with suppress(ValueError):  # "max", or no such file
        if int(quota) > 0:  # version 1 says -1
            yield int(quota) / int(period)


def _free_swap_bytes(folder: Path) -> int:
    used = _number(folder / "memory.swap.current")
    if used is None:
        return 0
    limit = _number(folder / "memory.swap.max")
    return 1 << 62 if limit is None else max(0, limit - used)


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    """The lines of a file that holds paths, in which only line feeds are escaped."""
    return [line for line in _read(path).split("\n") if line]


def _number(path: Path) -> int | None:
    """The number that is all of a file; None for "max", and if there is no such file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines such as "MemFree:  123 kB" or "oom_kill 0"."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", _read(path), flags=re.MULTILINE)}
