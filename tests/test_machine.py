"""What the kernel says of limits: in files as it writes them, and, where this machine allows it, in real cgroups."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from loaderd.machine import (
    Memory,
    _cgroup_folders,
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


# ---------------------------------------------------------------------------------------------- real cgroups

_numbers = count()


@pytest.fixture
def limited() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs Python in a cgroup of its own, below that of the tests; skips where that cannot be made."""
    made: list[Path] = []

    def run(controller: str, limits: dict[str, str], text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        above = _cgroup_folders(controller, Path("/"))
        if not above:
            pytest.skip("no cgroups")
        folder = above[0] / f"loaderd-test-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
            made.append(folder)
            for name, value in limits.items():
                (folder / name).write_text(value)
        except OSError as error:
            pytest.skip(f"no cgroup of version 1 can be made here: {error}")
        enter = f"import os; open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        return subprocess.run(
            [sys.executable, "-c", enter + text, *arguments], capture_output=True, text=True, timeout=60
        )

    yield run
    for folder in made:
        for _ in range(100):  # a process that was killed leaves it a little later
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


Limited = Callable[..., "subprocess.CompletedProcess[str]"]

MEMORY_TEXT = """
import mmap, signal, subprocess, sys
from loaderd.machine import available_memory, oom_kills
from loaderd.options import default_workers

first = available_memory()
assert 100 << 20 < first.free_bytes < 200 << 20 and "limit_in_bytes of the cgroup" in first.limit, first
assert "loaderd-test" in first.limit and first.limit.endswith(" is 200 MiB"), first
assert default_workers() == 1

shared = mmap.mmap(-1, 110 << 20)
for page in range(0, len(shared), 4096):
    shared[page] = 1
second = available_memory()
assert 106 << 20 < first.free_bytes - second.free_bytes < 116 << 20, (first, second)

path = sys.argv[1]
with open(path, "wb") as file:
    for _ in range(80):
        file.write(bytes(1 << 20))
for _ in range(3):
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass
third = available_memory()
assert abs(third.free_bytes - second.free_bytes) < 16 << 20, ("page cache is free", second, third)

assert oom_kills() == 0
glutton = "from loaderd.machine import be_killed_first; be_killed_first(); bytes(1) * (300 << 20)"
assert subprocess.run([sys.executable, "-c", glutton]).returncode == -signal.SIGKILL
assert oom_kills() == 1
"""


def test_memory_of_a_real_cgroup(limited: Limited, tmp_path: Path):
    """What is shared and written counts as used, page cache doesn't.

    The kernel kills not the largest process but the one that said it may, and counts.
    """
    done = limited("memory", {"memory.limit_in_bytes": str(200 * MIB)}, MEMORY_TEXT, str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr


def test_cores_of_a_real_cgroup(limited: Limited):
    text = "from loaderd.machine import usable_cores\nprint(usable_cores())"
    for quota, cores in (("50000", 1), ("100000", 1), ("150000", min(CORES, 2)), ("-1", CORES)):
        done = limited("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota}, text)
        assert done.stdout == f"{cores}\n", done.stderr


# -------------------------------------------------------------------------------- a loader on a short machine

TRAINING_TEXT = """
import gc, json, os, resource, sys
import cloudpickle, msgpack
import loaderd
from loaderd import *  # all of it, before there is a limit

exec(sys.argv[1])
options = json.loads(sys.argv[2])
options["shuffle"] = loaderd.Shuffle(window_records=options.pop("window_records", 500))
schema = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64()},
    fields={"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")},
)
try:
    with loaderd.Loader(sys.argv[3], schema, **{"batch_size": 20, "index_cache": "none", **options}) as loader:
        numbers = sorted(int(number) for batch in loader for number in batch["id"])
        assert numbers == list(range(loader.statistics().num_records))
        print(loader.statistics().workers, "workers,", len(numbers), "records")
except loaderd.errors.DaemonError as error:
    print(error)
"""


def limit_of(name: str, soft: int, hard: int) -> str:
    return f"resource.setrlimit(resource.RLIMIT_{name}, ({soft}, {hard}))"


@pytest.fixture
def many_shards(write_numbered: Callable[..., list[Path]]) -> str:
    """A glob of 100 shards of 20 records."""
    return str(write_numbered([20] * 100)[0].parent / "*.tfrecord")


def train(limit: str, shards: str, *, user: tuple[str, ...] = (), **options: object) -> str:
    """What a process with that limit prints: the records that it was delivered, or the error."""
    command = [*user, sys.executable, "-c", TRAINING_TEXT, limit, json.dumps(options), shards]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("soft", "hard", "workers"), [(29, 29, 2), (12, 64, 2), (41, 41, 6)])
def test_few_open_files_are_enough(many_shards: str, soft: int, hard: int, workers: int):
    assert train(limit_of("NOFILE", soft, hard), many_shards, workers=workers) == f"{workers} workers, 2000 records"


def test_too_few_open_files_are_named(many_shards: str):
    error = train(limit_of("NOFILE", 24, 24), many_shards, workers=24)
    assert error.startswith("cannot start a worker: Too many open files")
    assert "have 24 files open here: raise that with `ulimit -n` (the hard limit is 24)" in error
    assert "loaderd needs 23, and 3 more for each worker" in error
    assert train("", many_shards, workers=2, index_cache="user") == "2 workers, 2000 records"
    for limit in (8, 12, 15):  # at the first worker; at the memory, which comes next; at the second worker
        error = train(limit_of("NOFILE", limit, limit), many_shards, workers=2, index_cache="user")
        assert re.match(rf"cannot .*: Too many open files\nA process may have {limit} files open here", error), error
    for left in (0, 3):
        full = f"{limit_of('NOFILE', 50, 60)}\nwhile os.open(os.devnull, os.O_RDONLY) < 49 - {left}: pass"
        assert "have 50 files open here" in train(full, many_shards, workers=1)


def test_too_few_addresses_are_named(many_shards: str):
    error = train(limit_of("AS", 600 * MIB, 600 * MIB), many_shards, workers=1, held_batches=3000, batch_size=2000)
    assert re.match(r"cannot have \d+ MiB of shared memory: Cannot allocate memory\n", error), error
    assert "A process may have 600 MiB of addresses here: raise that with `ulimit -v`" in error


def test_one_core(many_shards: str):
    assert train("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", many_shards) == "1 workers, 2000 records"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="nobody counts the processes of root"
)
def test_too_few_processes_are_named(many_shards: str):
    capabilities = "-all,+dac_override"
    user = ("setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={capabilities}")
    user += (f"--ambient-caps={capabilities}", f"--bounding-set={capabilities}")
    for most in (1, 3):
        error = train(limit_of("NPROC", most, most), many_shards, user=user, workers=8)
        assert re.match("cannot start (a process for .*|a worker): Resource temporarily unavailable\n", error), error
        assert "raise `ulimit -u`" in error


def test_too_little_memory_is_named_and_nobody_is_killed(limited: Limited, many_shards: str):
    """In a cgroup of 200 MiB: with 15 MiB of batches it works, with 600 the error says for what, and of what."""
    text = f"{TRAINING_TEXT}\nfrom loaderd.machine import oom_kills\nassert oom_kills() == 0"
    limits = {"memory.limit_in_bytes": str(200 * MIB)}
    done = limited("memory", limits, text, "", "{}", many_shards)
    assert done.stdout == "1 workers, 2000 records\n", done.stderr
    options = {"batch_size": 2000, "held_batches": 2000, "workers": 2}
    done = limited("memory", limits, text, "", json.dumps(options), many_shards)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"not enough memory: 5\d\d MiB are needed \(0 MiB for 2 shuffle windows of 2,000 records, "
        r"5\d\d MiB for 20\d\d batches of 2,000 records\), 1?\d\d MiB are free \(memory.limit_in_bytes of the cgroup "
        r"/.*/loaderd-test-\d+-\d+ is 200 MiB\)\nChoose a smaller batch_size, ",
        done.stdout,
    ), done.stdout


GLUTTON_TEXT = """
import logging, sys
import loaderd

def glutton(number):
    return number + len(bytes(1) * (300 << 20)) * 0

schema = loaderd.Schema(
    features={"id": loaderd.Int64()},
    fields={"id": loaderd.Derived(glutton, "number")},
    intermediates={"number": loaderd.Array("id")},
)
logging.basicConfig()
one = loaderd.Dataset(sys.argv[1], schema, index_cache="none").take(1)
with loaderd.Loader(one, batch_size=1, workers=1) as loader:
    try:
        next(iter(loader))
    except loaderd.errors.WorkerError as error:
        print(error)
"""


def test_a_field_that_takes_too_much_is_an_error_and_not_the_end_of_the_training(limited: Limited, many_shards: str):
    done = limited("memory", {"memory.limit_in_bytes": str(200 * MIB)}, GLUTTON_TEXT, many_shards)
    assert done.returncode == 0, done.stderr
    why = r"was killed by SIGKILL, for memory ran out \(memory.limit_in_bytes of the cgroup .* is 200 MiB\)"
    assert len(re.findall(why, done.stderr)) == len(done.stderr.splitlines()) >= 3, done.stderr
    assert re.search(why, done.stdout) and "too little memory" in done.stdout, done.stdout


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
