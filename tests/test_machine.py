"""What the kernel says of limits, in files as it writes them."""

from __future__ import annotations

import errno
import os
import resource
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest

from loaderd.machine import (
    Memory,
    available_memory,
    filesystem_kind,
    memory_stall_ns,
    oom_kills,
    remedy,
    throttled_ns,
    usable_cores,
)

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0))

MEMINFO = """\
MemTotal:        8000000 kB
MemFree:          200000 kB
MemAvailable:    4000000 kB
Active(file):    1000000 kB
SwapTotal:       1000000 kB
SwapFree:         500000 kB
HugePages_Total:       0
"""
V2_MOUNT = "35 25 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
V1_MOUNTS = """\
23 28 0:22 / /proc rw - proc proc rw
33 32 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
34 32 0:31 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 32 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""
V1_CGROUPS = "12:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n1:name=systemd:/x\n0::/system.slice/docker.service\n"

Write = Callable[[dict[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files by their path; returns the folder that they are in."""

    def write(texts: dict[str, str]) -> Path:
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def version_2(folder: str, **values: str) -> dict[str, str]:
    """Files of a cgroup, of the names that kernels write, each with a dot for its underscore."""
    return {f"sys/fs/cgroup/{folder}{name.replace('_', '.')}": f"{value}\n" for name, value in values.items()}


def test_cgroups_of_version_2(write: Write):
    """Of a cgroup and those above it, whichever leaves the least; a service of systemd with a dash in its name."""
    name = r"user.slice/job\x2d7.service"
    stat = "anon 1\nfile 300000000\ninactive_file 100000000\nactive_file 200000000\nshmem 5\n"
    files = write(
        {
            "proc/meminfo": MEMINFO,
            "proc/vmstat": "nr_free_pages 5\noom_kill 77\n",
            "proc/self/cgroup": f"0::/{name}\n",
            "proc/self/mountinfo": V2_MOUNT,
            **version_2("", cpu_stat="usage_usec 1"),
            **version_2("user.slice/", cpu_max="150000 100000", memory_max="max", memory_current="1000000000"),
            **version_2(f"{name}/", cpu_max="max 100000", memory_max="2000000000", memory_current="1600000000"),
            **version_2(f"{name}/", memory_stat=stat, memory_events="low 0\noom 3\noom_kill 2\n"),
        }
    )
    own = files / "sys/fs/cgroup" / name
    in_mib = f"{2000000000 / MIB:,.0f} MiB"
    assert usable_cores(files) == min(CORES, 2)
    assert available_memory(files) == Memory(700_000_000, f"memory.max of the cgroup {own} is {in_mib}")
    assert oom_kills(files) == 2
    write(version_2(f"{name}/", memory_swap_max="max", memory_swap_current="0"))
    assert available_memory(files).free_bytes == 700_000_000 + (500_000 << 10), "all that the machine has"
    write(version_2(f"{name}/", memory_swap_max="60000000", memory_swap_current="10000000"))
    assert available_memory(files).free_bytes == 750_000_000
    write(version_2("user.slice/", memory_max="1000000000", cpu_max="20000 100000"))
    assert available_memory(files).free_bytes == 0 and usable_cores(files) == 1
    write(version_2("user.slice/", memory_current="1000000001"))
    assert available_memory(files).free_bytes == 0, "never less"
    write({**version_2("user.slice/", memory_max="max"), **version_2(f"{name}/", memory_max="9000000000")})
    assert available_memory(files) == Memory(4_500_000 << 10, "this machine has 7,812 MiB")
    (own / "memory.events").unlink()
    assert oom_kills(files) == 77


def test_mounts_of_any_name(write: Write):
    """Bytes that are no UTF-8, and what other than a line feed may end a line; the kernel escapes that alone."""
    files = write(
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT, **version_2("", cpu_max="100000 100000")}
    )
    assert usable_cores(files) == 1
    mounts = files / "proc/self/mountinfo"
    odd = b"".join(
        b"41 2 0:5 / /mnt/%s rw - tmpfs tmpfs rw\n" % name for name in (b"caf\351", b"a\rb", b"a\x0cb", b"a\xc2\x85b")
    )
    mounts.write_bytes(odd + mounts.read_bytes())
    assert usable_cores(files) == 1
    assert filesystem_kind("/mnt/a\rb", files) == "tmpfs"


@pytest.mark.parametrize(("root", "folder"), [("/docker/4f", ""), ("/", "docker/4f/")], ids=["container", "host"])
def test_cgroups_of_version_1(write: Write, root: str, folder: str):
    """A container sees its own cgroup where the host sees the root of the tree; version 2 is there, but idle."""
    files = write(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": V1_CGROUPS,
            "proc/self/mountinfo": V1_MOUNTS.format(root=root),
            f"sys/fs/cgroup/cpu,cpuacct/{folder}cpu.cfs_quota_us": "50000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{folder}cpu.cfs_period_us": "100000\n",
            f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": "500000000\n",
            f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": "300000000\n",
            f"sys/fs/cgroup/memory/{folder}memory.stat": "active_file 7\ntotal_active_file 100\n",
            f"sys/fs/cgroup/memory/{folder}memory.oom_control": "under_oom 0\noom_kill 5\n",
        }
    )
    assert usable_cores(files) == 1
    limit = f"memory.limit_in_bytes of the cgroup {files}/sys/fs/cgroup/memory/{folder}".rstrip("/")
    assert available_memory(files) == Memory(200_000_100, f"{limit} is 477 MiB")
    assert oom_kills(files) == 5
    write({f"sys/fs/cgroup/cpu,cpuacct/{folder}cpu.cfs_quota_us": "-1\n"})
    write({f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": "9223372036854771712\n"})
    assert usable_cores(files) == CORES
    assert available_memory(files) == Memory(4_500_000 << 10, "this machine has 7,812 MiB")


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"proc/self/cgroup": "0::/x\n"},
        {"proc/self/cgroup": "0::/x\n", "proc/self/mountinfo": "1 2 0:1 / / rw - ext4 /dev/root rw\n"},
        {"proc/self/cgroup": "0::/../../x\n", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/cpu.max": "max 100000"},
    ],
)
def test_what_cannot_be_read_sets_no_limit(write: Write, texts: dict[str, str]):
    files = write(texts)
    assert usable_cores(files) == CORES
    assert available_memory(files).free_bytes > 1 << 60
    assert oom_kills(files) is None
    write({"proc/meminfo": MEMINFO})
    assert available_memory(files) == Memory(4_500_000 << 10, "this machine has 7,812 MiB")


def test_this_machine():
    assert 1 <= usable_cores() <= CORES
    memory = available_memory()
    assert 0 < memory.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + (1 << 50)
    assert min(timeit.repeat(available_memory, number=1, repeat=20)) < 0.02


def test_an_error_of_the_machine_has_a_remedy():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"have {soft} files open here" in remedy(OSError(errno.EMFILE, ""))
    assert f"the hard limit is {hard}" in remedy(OSError(errno.EMFILE, ""))
    assert "fs.file-max" in remedy(OSError(errno.ENFILE, ""))
    for error in (OSError(errno.ENOMEM, ""), MemoryError()):
        assert "MiB of memory are free here (" in remedy(error)
    assert "ulimit -u" in remedy(BlockingIOError(errno.EAGAIN, ""))
    assert remedy(OSError(errno.ENOENT, "")) == remedy(ValueError()) == ""


def test_how_long_a_cgroup_was_stopped_and_has_waited_for_memory(write: Write):
    pressure = "some avg10=0.00 avg60=0.12 avg300=0.00 total=274212\nfull avg10=0.00 avg60=0.00 total=54835\n"
    here = {"proc/self/mountinfo": V2_MOUNT, "proc/self/cgroup": "0::/job\n", "proc/pressure/memory": pressure}
    files = write({**here, **version_2("job/", cpu_stat="usage_usec 5\nnr_throttled 2\nthrottled_usec 1234")})
    assert throttled_ns(files) == 1_234_000 and memory_stall_ns(files) == 274_212_000
    files = write(version_2("job/", memory_pressure=pressure.replace("274212", "17")))
    assert memory_stall_ns(files) == 17_000, "of the cgroup, where it says so"


def test_how_long_a_cgroup_of_version_1_was_stopped(write: Write):
    stat = {"sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_time 777\n"}
    mounts = V1_MOUNTS.format(root="/docker/4f")
    files = write({"proc/self/mountinfo": mounts, "proc/self/cgroup": V1_CGROUPS, **stat})
    assert throttled_ns(files) == 777 and memory_stall_ns(files) == 0


def test_the_kind_of_a_file_system(write: Write, tmp_path: Path):
    mounts = (
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 20 0:50 / /data rw shared:3 - nfs4 server:/x rw\n"
        "31 30 0:51 / /data/with\\040blank rw - fuse.gcsfuse b rw\n"
    )
    files = write({"proc/self/mountinfo": mounts})
    kinds = {
        path: filesystem_kind(path, files) for path in ("/home/me", "/data/a/b", "/database", "/data/with blank/x")
    }
    assert kinds == {
        "/home/me": "ext4",
        "/data/a/b": "nfs4",
        "/database": "ext4",
        "/data/with blank/x": "fuse.gcsfuse",
    }
    assert filesystem_kind("/", tmp_path / "nowhere") == "" and filesystem_kind("/proc") == "proc"
