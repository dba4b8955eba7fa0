"""Real workers that are killed or fail, and schemas that do not arrive."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import DaemonError, LoaderdError, WorkerError
from tests.daemon.accidents import Check, Grenade, crashing_schema, fetch_all
from tests.helpers import fixed_files
from tests.helpers.own_processes import (
    all_workers_of,
    children_of,
    fork_server_of,
    kill,
    newest_daemon,
    wait_ends,
    wait_for_no_daemon,
    workers_of,
)
from tests.helpers.serving import wait_until

Write = Callable[..., list[Path]]

_HINT = "must be importable, or picklable by value"


def test_workers_may_be_killed_at_any_time(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    shuffle = loaderd.Shuffle(window_records=400, block_records=50)
    with loaderd.Loader(
        write_numbered([1200, 800]), numbered_schema, batch_size=20, shuffle=shuffle, workers=2, held_batches=1
    ) as loader:
        undisturbed = fetch_all(loader, check_batch)
        assert sorted(chain(*undisturbed)) == list(range(2000))
        killed = 0

        def before(step: int) -> None:
            nonlocal killed
            if step in (3, 30, 31, 75):
                victims = workers_of(newest_daemon())[: 1 + step % 2]
                kill(*victims)
                killed += len(victims)

        with caplog.at_level(logging.WARNING, "loaderd"):
            assert fetch_all(loader, check_batch, before=before) == undisturbed
            # Of the last ones, a consumer that waits for nothing hears in its next pass.
            wait_until(lambda: next(iter(loader)) and loader.statistics().workers_restarted == killed)
        assert killed >= 3
    assert len(caplog.records) == killed
    for record in caplog.records:
        warning = r"worker process \d+ was killed by SIGKILL( at .*)?; another one does its work again"
        assert re.fullmatch(warning, record.getMessage())


@pytest.mark.parametrize("kind", ["parquet", "columns"])
def test_workers_that_read_tables_may_be_killed(kind: str, tmp_path: Path):
    for shard in range(2):
        records = fixed_files.records_from(1000 * shard, 1000)
        (tmp_path / f"{shard}.parquet").write_bytes(fixed_files.parquet_of(records))
        np.save(tmp_path / f"{shard}.npy", records["number"])
    columns = loaderd.Columns(rest=tmp_path / "*.parquet", number=tmp_path / "*.npy")
    shards: Any = columns if kind == "columns" else tmp_path / "*.parquet"
    shuffle = loaderd.Shuffle(window_records=400)
    with loaderd.Loader(
        shards, fixed_files.SCHEMA, batch_size=20, shuffle=shuffle, workers=2, held_batches=1
    ) as loader:
        undisturbed = fetch_all(loader, _row_bytes)
        rows = [row for batch in undisturbed for row in batch]
        assert sorted(int.from_bytes(row[:4], "little") for row in rows) == list(range(2000))

        def before(step: int) -> None:
            if step in (3, 30, 75):
                kill(workers_of(newest_daemon())[0])

        assert fetch_all(loader, _row_bytes, before=before) == undisturbed
        wait_until(lambda: next(iter(loader)) and loader.statistics().workers_restarted == 3)


def _row_bytes(batch: loaderd.Batch) -> Any:
    """Of each record, its number and all that it holds."""
    return [b"".join(batch[name][row].tobytes() for name in batch) for row in range(batch.num_records)]


@pytest.mark.slow
def test_a_consumer_does_not_wait_for_ever_for_a_worker_that_cannot_be_replaced(
    write_numbered: Write, numbered_schema: loaderd.Schema
):
    """It holds all slots of the other worker, as it may."""
    with loaderd.Loader(
        write_numbered([2000]), numbered_schema, batch_size=10, workers=2, held_batches=8, stall_timeout=1.0
    ) as loader:
        batches = iter(loader)
        held = deque([next(batches)], maxlen=8)
        daemon = newest_daemon()
        first, _ = all_workers_of(daemon, 2)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (3, most))
        kill(first)
        with pytest.raises(DaemonError, match="cannot start a worker: Too many open files") as caught:
            held.extend(batches)
    assert "ulimit -n" in caught.value.hint


def test_what_workers_are_forks_of_may_be_killed(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    """All workers die with it; so another daemon goes on."""
    with loaderd.Loader(write_numbered([400]), numbered_schema, batch_size=20, workers=2) as loader:
        undisturbed = fetch_all(loader, check_batch)

        def before(step: int) -> None:
            if step == 5:
                fork_server = fork_server_of(newest_daemon())
                workers = [os.pidfd_open(pid) for pid in all_workers_of(newest_daemon(), 2)]
                kill(fork_server)
                wait_ends(workers, 60)

        assert fetch_all(loader, check_batch, before=before) == undisturbed
        assert loader.statistics().daemon_restarts == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    # On a machine that is very busy, it is killed before it has ended by itself.
    ended = r"the daemon process (ended with status 1|was killed by SIGKILL); another one takes its place"
    assert re.match(ended, warning)


def test_a_worker_has_nothing_of_the_daemon(write_numbered: Write, numbered_schema: loaderd.Schema):
    """One thread, one socket, and no memory but what it was sent."""
    with loaderd.Loader(write_numbered([400]), numbered_schema, batch_size=20, workers=1) as loader:
        next(iter(loader))
        daemon = newest_daemon()
        for pid in (fork_server_of(daemon), *workers_of(daemon)):
            assert len(os.listdir(f"/proc/{pid}/task")) == 1
            names = []
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # a shard that it has closed meanwhile
                    names += [os.readlink(f"/proc/{pid}/fd/{fd}")] * (int(fd) > 2)
            assert len([name for name in names if name.startswith("socket:")]) == 1, names
        mapped = Path(f"/proc/{fork_server_of(daemon)}/maps").read_text()
        assert "memfd" not in mapped and "memfd" in Path(f"/proc/{daemon}/maps").read_text()


@pytest.mark.one_variant
@pytest.mark.parametrize("leaves_a_fork", [False, True])
def test_a_worker_may_die_in_the_middle_of_a_task(
    write_numbered: Write, check_batch: Check, tmp_path: Path, leaves_a_fork: bool
):
    """Twice at the same batch. A fork of the worker holds what the worker had open, and lives on."""
    once, twice, fork = (str(tmp_path / name) for name in ("once", "twice", "fork"))

    def crash(numbers: Any) -> Any:
        import os
        import signal

        if 77 in numbers and not os.path.exists(twice):
            os.rename(once, twice) if os.path.exists(once) else open(once, "x").close()
            if leaves_a_fork:
                child = os.fork()
                if child == 0:
                    signal.pause()
                with open(fork, "a") as file:
                    file.write(f"{child}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers

    try:
        with loaderd.Loader(
            write_numbered([300]), crashing_schema(crash), batch_size=10, shuffle=False, workers=1
        ) as loader:
            assert list(chain(*fetch_all(loader, check_batch))) == list(range(300))
            assert loader.statistics().workers_restarted == 2
    finally:
        for child in Path(fork).read_text().split() if leaves_a_fork else ():
            kill(int(child))


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("crash", "how", "step"),
    [
        # The first of the batches of one task: six workers die in a row before it is known which one is at fault.
        (lambda: os._exit(7), "ended with status 7", 0),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV", 7),
    ],
    ids=["exit", "segfault"],
)
def test_a_record_that_kills_every_worker_breaks_its_batch(
    write_numbered: Write, check_batch: Check, tmp_path: Path, crash: Callable[[], None], how: str, step: int
):
    schema = crashing_schema(lambda numbers: crash() if 10 * step + 7 in numbers else numbers)
    with loaderd.Loader(write_numbered([200]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        found = fetch_all(loader, check_batch)
        error = found[step]
        assert isinstance(error, WorkerError) and "derived field" in error.hint
        shard = f"{tmp_path}/shards/000.tfrecord"
        which = f"record {10 * step + 7}, of the block of 200 from record 0 at byte 0"
        lost = f"3 workers were lost at the decoding of 1 record of batch {step}; the last one {how}"
        assert error.message == f"{lost}. It holds\n  {shard}: {which}"
        assert error.damage is not None and error.damage.record == 10 * step + 7
        check_others(found, step)


@pytest.mark.one_variant
@pytest.mark.parametrize("workers", [1, 2])
def test_records_that_kill_are_left_out_wherever_they_lie(write_numbered: Write, check_batch: Check, workers: int):
    """Side by side, and one in each of several batches: ten workers and more are lost before any has made a batch."""
    deadly = {0, 1, 2, 3, 27, 47, 67}
    schema = crashing_schema(lambda numbers: os._exit(7) if deadly & set(numbers.tolist()) else numbers)
    options: Any = {"batch_size": 20, "shuffle": False, "on_corrupt": "skip_record", "workers": workers}
    with loaderd.Loader(write_numbered([80]), schema, **options) as loader:
        found = [number for batch in fetch_all(loader, check_batch) for number in batch]
        assert found == [number for number in range(80) if number not in deadly]
        assert loader.statistics().records_skipped == len(deadly)


def check_others(found: list[Any], broken: int) -> None:
    """Every batch but one is as it should be: ten records in the order of the files."""
    expected = [list(range(10 * step, 10 * step + 10)) for step in range(20)]
    assert found[:broken] + found[broken + 1 :] == expected[:broken] + expected[broken + 1 :]


@pytest.mark.parametrize("shuffle", [False, loaderd.Shuffle(window_records=100, block_records=20)])
def test_a_function_that_raises_breaks_its_batch_and_the_record_is_named(
    write_numbered: Write, check_batch: Check, shuffle: bool | loaderd.Shuffle
):
    def refuse(numbers: Any) -> Any:
        if 123 in numbers:
            raise ValueError("no \udcff 123")
        return numbers

    shards = write_numbered([120, 80])
    with loaderd.Loader(shards, crashing_schema(refuse), batch_size=10, shuffle=shuffle, workers=2) as loader:
        found = fetch_all(loader, check_batch)
        (step,) = [step for step, batch in enumerate(found) if isinstance(batch, LoaderdError)]
        error = found[step]
        assert isinstance(error, WorkerError) and "derived field 'x'" in error.message
        assert "ValueError: no \\udcff 123" in error.message and "in refuse" in error.traceback
        assert f"fails first at\n  {shards[1]}: record 3, of the block of " in error.message
        assert error.damage is not None and (error.damage.shard, error.damage.record) == (str(shards[1]), 3)
        others = {number for batch in found if not isinstance(batch, LoaderdError) for number in batch}
        assert len(others) == 190 and 123 not in others
        assert loader.statistics().workers_restarted == 0


def test_records_at_which_a_function_raises_are_left_out_where_the_user_chose_so(
    write_numbered: Write, check_batch: Check
):
    def refuse(numbers: Any) -> Any:
        if not (numbers % 70).all():
            raise ValueError("no multiples of 70")
        return numbers

    (shard,) = write_numbered([200])
    options: Any = {"batch_size": 64, "workers": 2, "on_corrupt": "skip_record"}
    with loaderd.Loader(shard, crashing_schema(refuse), **options) as loader:
        found = sorted(chain(*fetch_all(loader, check_batch)))
        assert found == [number for number in range(200) if number % 70]
        statistics = loader.statistics()
        assert (statistics.records_skipped, statistics.workers_restarted) == (3, 0)
        assert sorted((damage.shard, damage.record) for damage in statistics.damages) == [
            (str(shard), number) for number in (0, 70, 140)
        ]
        assert all("no multiples of 70" in damage.found for damage in statistics.damages)


# --------------------------------------------------------------------------- schemas that do not arrive


def fail() -> Any:
    raise RuntimeError("no such luck")


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("process", "act", "error", "text"),
    [
        ("loaderd-daemon", fail, DaemonError, "the daemon cannot take the schema over: RuntimeError: no such luck"),
        ("loaderd-worker", fail, WorkerError, "a worker cannot take the schema over: RuntimeError: no such luck"),
        ("loaderd-daemon", sys.exit, DaemonError, "the daemon cannot take the schema over: SystemExit"),
        ("loaderd-worker", sys.exit, WorkerError, "a worker cannot take the schema over: SystemExit"),
        ("loaderd-daemon", lambda: os._exit(9), DaemonError, "the daemon process ended with status 9"),
        ("loaderd-worker", lambda: os._exit(9), DaemonError, "10 workers died .* ended with status 9"),
    ],
)
def test_a_schema_that_cannot_be_unpickled(
    write_numbered: Write, process: str, act: Callable[[], Any], error: type[LoaderdError], text: str
):
    before = children_of(os.getpid())
    with pytest.raises(error, match=text) as caught:
        loaderd.Loader(write_numbered([10]), crashing_schema(Grenade(process, act)), batch_size=5, workers=1)
    assert act is not fail or _HINT in caught.value.hint
    wait_for_no_daemon(before)


def test_a_module_that_only_this_process_has(write_numbered: Write, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("only_here")
    exec("def same(numbers):\n    return numbers", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(DaemonError, match="No module named 'only_here'") as caught:
        loaderd.Loader(write_numbered([10]), crashing_schema(module.same), batch_size=5, workers=1)
    assert _HINT in caught.value.hint
