"""Real limits: what is seen of them, and a loader where files, addresses, processes, cores or memory are few.

Where this machine allows it, a process is put into a cgroup of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from loaderd.machine import _cgroup_folders

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0))

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


@pytest.mark.one_variant
@pytest.mark.parametrize(("soft", "hard", "workers"), [(29, 29, 2), (12, 64, 2), (41, 41, 6)])
def test_few_open_files_are_enough(many_shards: str, soft: int, hard: int, workers: int):
    assert train(limit_of("NOFILE", soft, hard), many_shards, workers=workers) == f"{workers} workers, 2000 records"


@pytest.mark.slow
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
    assert re.match(r"cannot allocate \d+ MiB of shared memory: Cannot allocate memory\n", error), error
    assert "A process may have 600 MiB of addresses here: raise that with `ulimit -v`" in error


@pytest.mark.parametrize("size", [0, 16 << 10])
def test_files_that_may_not_be_large_are_named(many_shards: str, size: int):
    """Linux counts shared memory as a file."""
    error = train(limit_of("FSIZE", size, size), many_shards, workers=1)
    assert re.match(r"cannot (start a process for .*|allocate .*): File too large\n", error), error
    assert "A process may write files of 0 MiB here, and shared memory counts: raise `ulimit -f`" in error


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
    fields={"id": loaderd.Derived(glutton, "number", (), "float32")},
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
