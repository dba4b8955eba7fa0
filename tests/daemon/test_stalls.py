"""Workers that make no progress, and those that only seem so."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.errors import WorkerError
from tests.daemon.accidents import Check, crashing_schema, fetch_all, job_of
from tests.helpers.own_processes import newest_daemon, workers_of

Write = Callable[..., list[Path]]


def test_stopped_workers_are_replaced(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    with loaderd.Loader(
        write_numbered([2000]), numbered_schema, batch_size=20, workers=2, held_batches=1, stall_timeout=2
    ) as loader:
        undisturbed = fetch_all(loader, check_batch)
        workers = workers_of(newest_daemon())

        def before(step: int) -> None:
            if step == 10:
                for worker in workers:
                    os.kill(worker, signal.SIGSTOP)

        assert fetch_all(loader, check_batch, before=before) == undisturbed
        assert loader.statistics().workers_restarted >= 1  # of both, if both had come to have work
        assert set(workers_of(newest_daemon())) != set(workers), "a stopped one is killed"
    assert re.match(r"worker process \d+ made no progress for 2 s (at|while) .*; another", caplog.messages[0])


@pytest.mark.one_variant
@pytest.mark.parametrize("on_corrupt", ["raise", "skip_record"])
def test_a_function_that_never_ends(write_numbered: Write, check_batch: Check, tmp_path: Path, on_corrupt: Any):
    def turn_for_ever(numbers: Any) -> Any:
        while 77 in numbers:
            pass
        return numbers

    with loaderd.Loader(
        write_numbered([120]),
        crashing_schema(turn_for_ever),
        batch_size=4,
        shuffle=False,
        workers=1,
        stall_timeout=0.5,
        on_corrupt=on_corrupt,
    ) as loader:
        found = fetch_all(loader, check_batch)
        if on_corrupt == "raise":
            error = found.pop(19)
            assert isinstance(error, WorkerError) and "lost at the decoding of batch 19" in error.message
            assert "the last one made no progress for 0.5 s" in error.message
            assert f"{tmp_path}/shards/000.tfrecord: 4 records from 76 on" in error.message
            assert list(chain(*found)) == [number for number in range(120) if number not in range(76, 80)]
        else:
            assert list(chain(*found)) == [number for number in range(120) if number != 77]
            assert loader.statistics().records_skipped == 1
            assert [damage.record for damage in loader.statistics().damages] == [77]


@pytest.mark.slow
def test_what_takes_long_but_goes_on_is_no_stall(
    numbered_schema: loaderd.Schema, tmp_path: Path, write_numbered: Write
):
    """A compressed shard is one block, and one task: ten times the limit, but always on its way."""
    (plain,) = write_numbered([100_000])
    packed = tmp_path / "packed.tfrecord.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
    loaded = dict(batch_size=10_000, workers=1, index_cache="none", shuffle=False)
    began_s = time.monotonic()
    with loaderd.Loader(packed, numbered_schema, **loaded) as loader:
        next(iter(loader))
    took_s = time.monotonic() - began_s
    for _ in range(3):  # a busy machine may give a worker no core for so long once, but not each time
        with loaderd.Loader(packed, numbered_schema, **loaded, stall_timeout=max(0.4, took_s / 8)) as loader:
            assert sum(batch.num_records for batch in loader) == 100_000
            restarted = loader.statistics().workers_restarted
        if not restarted:
            break
    assert restarted == 0


@pytest.mark.slow
def test_a_job_that_is_suspended_loses_no_worker(write_numbered: Write, tmp_path: Path):
    """SIGSTOP to all its processes for longer than the limit, and SIGCONT."""
    code = f"""
import sys, time, loaderd
schema = loaderd.Schema({{"id": loaderd.Int64()}}, {{
    "id": loaderd.Array("id"),
    "slow": loaderd.Derived(lambda numbers: __import__("time").sleep(0.05) or numbers, "id", (), "int64"),
}})
loader = loaderd.Loader({str(write_numbered([3000])[0])!r}, schema, batch_size=50, workers=2, stall_timeout=3)
numbers = []
for batch in loader:
    numbers += batch["id"].tolist()
    print(len(numbers), flush=True)
assert sorted(numbers) == list(range(3000))
print(loader.statistics().workers_restarted)
"""
    with job_of(tmp_path / "train.py", code, "50") as (job, daemon, workers):
        family = [job.pid, daemon, *workers]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.5)
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        output, errors = job.communicate(timeout=60)
    assert (output.splitlines()[-1], errors) == ("0", "")


def test_a_daemon_says_who_waits_for_whom(write_numbered: Write, tmp_path: Path):
    code = f"""
import signal, loaderd
schema = loaderd.Schema({{"id": loaderd.Int64()}}, {{"id": loaderd.Array("id")}})
loader = loaderd.Loader({str(write_numbered([3000])[0])!r}, schema, batch_size=50, workers=2, held_batches=1)
batches = iter(loader)
held = next(batches)
print("run", flush=True)
signal.pause()
"""
    with job_of(tmp_path / "train.py", code, "run") as (job, daemon, workers):
        assert job.stderr is not None
        lines = ["starts"]
        while any("starts" in line or " at " in line for line in lines):  # the second worker comes after the first
            time.sleep(0.1)
            os.kill(daemon, signal.SIGUSR1)
            lines = [job.stderr.readline() for _ in range(6)]
    assert lines[0] == f"daemon {daemon}: 0 workers were replaced so far\n"
    assert re.match(r"  consumer   has \d+ batches, taken or ready; 0 slots are free", lines[1])
    assert re.match(r"  batches    \d+ of 60 is due", lines[2])
    assert lines[-2:] == [f"  worker     {worker} is idle\n" for worker in workers]


@pytest.mark.slow
def test_neither_waits_for_the_other_to_read(tmp_path: Path, write_numbered: Write, numbered_schema: loaderd.Schema):
    """Tasks and answers, each larger than what a socket holds: blocks of one record, all of them damaged by now.

    In a process of its own: in one that has TensorFlow, the collector goes through all of that for each few damages.
    """
    (path,) = write_numbered([5000])
    shuffle = loaderd.Shuffle(block_records=1)
    options = dict(batch_size=1000, shuffle=shuffle, workers=1, on_corrupt="skip_record", stall_timeout=None)
    with loaderd.Loader(path, numbered_schema, **options):
        pass
    status = path.stat()
    content = bytearray(path.read_bytes())
    size = len(content) // 5000
    content[size // 2 :: size] = bytes(byte ^ 1 for byte in content[size // 2 :: size])
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    code = f"""
import loaderd
from tests.daemon.accidents import fetch_all
schema = loaderd.Schema(
    {{"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}},
    {{"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")}},
)
shuffle = loaderd.Shuffle(block_records=1)
options = dict(batch_size=1000, shuffle=shuffle, workers=1, on_corrupt="skip_record", stall_timeout=None)
with loaderd.Loader({str(path)!r}, schema, **options) as loader:
    print(len(fetch_all(loader, lambda batch: batch.num_records)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
