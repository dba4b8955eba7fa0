"""Real daemons and workers that are killed, and training processes that end in every way."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accidents import Check, children_of, crashing_schema, daemon_of, family_of, fetch_all, kill, wait_ends

import loaderd
from loaderd.errors import ClosedError, DaemonError, LoaderdError, WorkerError

Write = Callable[..., list[Path]]

_HINT = "must be importable, or picklable by value"


# ------------------------------------------------------------------------------------------ dying workers


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
                victims = children_of(daemon_of(loader))[: 1 + step % 2]
                kill(*victims)
                killed += len(victims)

        with caplog.at_level(logging.WARNING, "loaderd"):
            assert fetch_all(loader, check_batch, before=before) == undisturbed
        assert loader.statistics().workers_restarted == killed >= 3
    assert len(caplog.records) == killed
    for record in caplog.records:
        warning = r"worker process \d+ was killed by SIGKILL( at .*)?; another one does its work again"
        assert re.fullmatch(warning, record.getMessage())


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
        lost = f"3 workers in a row were lost at the decoding of 1 records of batch {step}; the last one {how}"
        assert error.message == f"{lost}. It holds\n  {shard}: {which}"
        assert error.damage is not None and error.damage.record == 10 * step + 7
        check_others(found, step)


def test_a_function_that_always_crashes_ends_the_stream(write_numbered: Write, check_batch: Check):
    schema = crashing_schema(lambda numbers: os._exit(7))
    with loaderd.Loader(write_numbered([200]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        found = fetch_all(loader, check_batch)
    assert [type(error) for error in found] == [DaemonError] + [ClosedError] * 19
    assert found[0].message == "10 workers died without having done anything; the last ended with status 7"


def check_others(found: list[Any], broken: int) -> None:
    """Every batch but one is as it should be: ten records in the order of the files."""
    expected = [list(range(10 * step, 10 * step + 10)) for step in range(20)]
    assert found[:broken] + found[broken + 1 :] == expected[:broken] + expected[broken + 1 :]


def test_a_function_that_raises_breaks_its_batch(write_numbered: Write, check_batch: Check):
    def refuse(numbers: Any) -> Any:
        if 123 in numbers:
            raise ValueError("no \udcff 123")
        return numbers

    with loaderd.Loader(
        write_numbered([200]), crashing_schema(refuse), batch_size=10, shuffle=False, workers=2
    ) as loader:
        found = fetch_all(loader, check_batch)
        error = found[12]
        assert isinstance(error, WorkerError) and "derived field 'x'" in error.message
        assert "ValueError: no \udcff 123" in error.message and "in refuse" in error.traceback
        check_others(found, 12)
        assert loader.statistics().workers_restarted == 0


# --------------------------------------------------------------------------- schemas that do not arrive


class Grenade:
    """A function that a process of this name cannot unpickle: there ``act`` is called instead."""

    def __init__(self, name: str, act: Callable[[], Any]) -> None:
        self.name, self.act = name, act

    def __call__(self, numbers: Any) -> Any:
        return numbers

    def __reduce__(self) -> Any:
        act, name = self.act, self.name

        def unpickle() -> Any:
            with open("/proc/self/comm") as file:
                return act() if file.read().strip() == name else abs

        return unpickle, ()


def fail() -> Any:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("process", "act", "error", "text"),
    [
        ("loaderd-daemon", fail, DaemonError, "the daemon cannot take the schema over: RuntimeError: no such luck"),
        ("loaderd-worker", fail, WorkerError, "a worker cannot take the schema over: RuntimeError: no such luck"),
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
    assert children_of(os.getpid()) == before


def test_a_module_that_only_this_process_has(write_numbered: Write, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("only_here")
    exec("def same(numbers):\n    return numbers", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(DaemonError, match="No module named 'only_here'") as caught:
        loaderd.Loader(write_numbered([10]), crashing_schema(module.same), batch_size=5, workers=1)
    assert _HINT in caught.value.hint


# ---------------------------------------------------------------------------------------- dying daemons


def test_a_daemon_that_is_killed(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    loader = loaderd.Loader(write_numbered([1000]), numbered_schema, batch_size=10, shuffle=False, workers=2)
    pass_, _ = loader.new_pass()
    first = loader.fetch(pass_, 0)
    assert first is not None
    family = family_of(loader)
    assert len(family) == 3
    workers = [os.pidfd_open(pid) for pid in family[1:]]
    kill(family[0])
    wait_ends(workers, 2)
    step = 1
    with pytest.raises(DaemonError, match="the daemon process was killed by SIGKILL"):
        while batch := loader.fetch(pass_, step):  # those that were ready are still given out
            assert check_batch(batch) == list(range(10 * step, 10 * step + 10))
            step += 1
    with pytest.raises(ClosedError):
        loader.fetch(pass_, 0)
    assert check_batch(first) == list(range(10)), "the memory stays"
    assert not Path(f"/proc/{family[0]}").exists(), "it was waited for"
    loader.close()


def test_nothing_is_left_by_close(write_numbered: Write, numbered_schema: loaderd.Schema):
    loader = loaderd.Loader(write_numbered([1000]), numbered_schema, batch_size=10, workers=2)
    next(iter(loader))
    pid_fds = [os.pidfd_open(pid) for pid in family_of(loader)]
    loader.close()
    wait_ends(pid_fds, 0)


# ----------------------------------------------------------------------------------- the training process

_SCRIPT = """
import ctypes, gc, os, signal, sys
import loaderd
print("run", flush=True)

def twice(numbers):
    return offset + 2 * numbers

offset = 5
derived = dict(
    twice=loaderd.Derived(twice, "id", dtype="int64"),
    thrice=loaderd.Derived(lambda numbers: 3 * numbers, "id", dtype="int64"),
)
schema = loaderd.Schema({{"id": loaderd.Int64()}}, {{"id": loaderd.Array("id"), **derived}})
loader = loaderd.Loader({shards!r}, schema, batch_size=10, shuffle=False, workers=2, held_batches=2)
batches = iter(loader)
batch = next(batches)
"""


def run_script(tmp_path: Path, shards: list[Path], rest: str) -> subprocess.Popen[str]:
    """A training process: takes one batch, and goes on with ``rest``."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(shards=[str(shard) for shard in shards]) + textwrap.dedent(rest))
    return subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("print(os.getpid(), flush=True); signal.pause()", -signal.SIGKILL),
        # A fork that Python knows nothing of, and so keeps everything open.
        ("ctypes.PyDLL(None).fork() and print(os.getpid(), flush=True); signal.pause()", -signal.SIGKILL),
        ("print(os.getpid(), flush=True); sys.stdin.readline(); os._exit(3)", 3),
        ("print(os.getpid(), flush=True); sys.stdin.readline(); raise SystemExit(4)", 4),
    ],
    ids=["SIGKILL", "SIGKILL with a fork that lives on", "os._exit", "exit without close"],
)
def test_nothing_outlives_the_training_process(write_numbered: Write, tmp_path: Path, rest: str, status: int):
    before = set(os.listdir("/dev/shm"))
    with run_script(tmp_path, write_numbered([1000]), rest) as training:
        assert [training.stdout.readline() for _ in range(2)] == ["run\n", f"{training.pid}\n"]
        comms = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children_of(training.pid)}
        (daemon,) = [pid for pid, comm in comms.items() if comm == "loaderd-daemon"]
        forks = [pid for pid in comms if pid != daemon]
        try:
            family = [daemon, *children_of(daemon)]
            assert len(family) == 3 and len(forks) == ("fork" in rest)
            pid_fds = [os.pidfd_open(pid) for pid in family]
            if status < 0:
                training.kill()
            else:
                training.stdin.write("go\n")
                training.stdin.flush()
            wait_ends(pid_fds, 2)
            assert training.wait(30) == status
            assert set(os.listdir("/dev/shm")) == before
        finally:
            training.kill()
            kill(*forks)


def test_forks_of_the_training_process_do_not_disturb_it(write_numbered: Write, tmp_path: Path):
    """Forks that end in each way, that drop batches, close the loader, or try to go on with it."""
    training = run_script(
        tmp_path,
        write_numbered([1000]),
        """
        def fork(act):
            child = os.fork()
            if child == 0:
                act()
                sys.exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def drop():
            global batch
            del batch
            gc.collect()

        def go_on():
            try:
                list(batches)
            except loaderd.errors.LoaderdError:
                os._exit(5)

        numbers = batch["id"].tolist()
        print([fork(act) for act in (drop, loader.close, go_on, lambda: os._exit(6), lambda: None)])
        for other in batches:
            assert batch["id"].tolist() == list(range(10)), "its slot is not given back"
            numbers += other["id"].tolist()
            assert (other["twice"] == 5 + 2 * other["id"]).all() and (other["thrice"] == 3 * other["id"]).all()
        assert numbers == list(range(1000)), numbers
        print(loader.statistics().workers_restarted)
        """,
    )
    output, _ = training.communicate(timeout=60)
    assert training.returncode == 0
    assert output.replace("run\n", "", 1) == "[0, 0, 5, 6, 0]\n0\n"
