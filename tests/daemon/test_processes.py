"""Real daemons and workers that are killed, and training processes that end in every way."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accidents import Check, crashing_schema, fetch_all
from own_processes import DAEMON, children_of, family_of, fork_server_of, kill, newest_daemon, wait_ends, workers_of

import loaderd
from loaderd.errors import ClosedError, DaemonError, LoaderdError, OptionError, WorkerError
from loaderd.plan.passes import Pass

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
                victims = workers_of(newest_daemon())[: 1 + step % 2]
                kill(*victims)
                killed += len(victims)

        with caplog.at_level(logging.WARNING, "loaderd"):
            assert fetch_all(loader, check_batch, before=before) == undisturbed
        assert loader.statistics().workers_restarted == killed >= 3
    assert len(caplog.records) == killed
    for record in caplog.records:
        warning = r"worker process \d+ was killed by SIGKILL( at .*)?; another one does its work again"
        assert re.fullmatch(warning, record.getMessage())


def test_what_workers_are_forks_of_may_be_killed(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    """All workers die with it; so another daemon goes on."""
    with loaderd.Loader(write_numbered([400]), numbered_schema, batch_size=20, workers=2) as loader:
        undisturbed = fetch_all(loader, check_batch)

        def before(step: int) -> None:
            if step == 5:
                fork_server = fork_server_of(newest_daemon())
                workers = [os.pidfd_open(pid) for pid in children_of(fork_server)]
                assert len(workers) == 2
                kill(fork_server)
                wait_ends(workers, 30)

        assert fetch_all(loader, check_batch, before=before) == undisturbed
        assert loader.statistics().daemon_restarts == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    # On a machine that is very busy, it is killed before it has ended by itself.
    ended = r"the daemon process (ended with status 1|was killed by SIGKILL); another one goes on at batch "
    assert re.match(ended, warning)


def test_a_worker_has_nothing_of_the_daemon(write_numbered: Write, numbered_schema: loaderd.Schema):
    """One thread, one socket, and no memory but what it was sent."""
    with loaderd.Loader(write_numbered([400]), numbered_schema, batch_size=20, workers=1) as loader:
        next(iter(loader))
        daemon = newest_daemon()
        for pid in (fork_server_of(daemon), *workers_of(daemon)):
            assert len(os.listdir(f"/proc/{pid}/task")) == 1
            sockets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]
            assert len([name for name in sockets if name.startswith("socket:")]) == 1, sockets
        mapped = Path(f"/proc/{fork_server_of(daemon)}/maps").read_text()
        assert "memfd" not in mapped and "memfd" in Path(f"/proc/{daemon}/maps").read_text()


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


def order_of(shards: list[Path], schema: loaderd.Schema, check: Check, **options: Any) -> list[list[int]]:
    """The batches of the first pass of a loader that nothing happens to."""
    with loaderd.Loader(shards, schema, **options) as loader:
        return [check(batch) for batch in loader]


SMALL: dict[str, Any] = {"batch_size": 10, "shuffle": loaderd.Shuffle(window_records=120, block_records=16)}


@pytest.mark.parametrize(
    "sign",
    [signal.SIGKILL, *(pytest.param(sign, marks=pytest.mark.slow) for sign in (signal.SIGSEGV, signal.SIGTERM))],
)
def test_the_daemon_may_die_again_and_again(
    write_numbered: Write,
    numbered_schema: loaderd.Schema,
    check_batch: Check,
    caplog: pytest.LogCaptureFixture,
    sign: signal.Signals,
):
    shards = write_numbered([300, 340])
    expected = order_of(shards, numbered_schema, check_batch, **SMALL, workers=1)
    with loaderd.Loader(shards, numbered_schema, **SMALL, workers=2) as loader:
        deaths = 0

        def before(step: int) -> None:
            nonlocal deaths
            if step in (0, 1, 30, 63):  # before the first batch, between two, before the last
                family = [os.pidfd_open(pid) for pid in family_of(newest_daemon())]
                signal.pidfd_send_signal(family[0], sign)
                wait_ends(family, 30)
                deaths += 1

        with caplog.at_level(logging.WARNING, "loaderd"):
            assert fetch_all(loader, check_batch, before=before) == expected
        assert 3 <= loader.statistics().daemon_restarts <= deaths
        assert loader.statistics().workers_restarted == 0
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"the daemon process was killed by {sign.name}; another one goes on at batch 0 of epoch 0"
    assert len(said) == loader.statistics().daemon_restarts


def test_batches_that_are_held_when_the_daemon_dies(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    """They keep the memory of the dead one, and none of the new one's slots is given back in their name."""
    shards = write_numbered([600])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, shuffle=False, workers=1, held_batches=3) as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        for _ in range(4):
            kill(newest_daemon())
            for _ in range(10):
                held.append(next(batches))
                del held[0]
        held += batches
        numbers = [number for batch in held for number in check_batch(batch)]
        assert numbers == list(range(600))[-len(numbers) :] and len(held) == 60 - 40
        assert loader.statistics().daemon_restarts == 4


@pytest.mark.parametrize(("sign", "restarts"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_the_daemon_ends_in_the_middle_of_a_wait(
    write_numbered: Write, tmp_path: Path, sign: signal.Signals, restarts: int
):
    """A worker is busy, and the consumer waits for it, when the daemon dies; or stops, which nobody notices.

    For the batches are granted, and need it no more.
    """
    began, go_on = tmp_path / "began", tmp_path / "go on"

    def wait(numbers: Any, began: str = str(began), go_on: str = str(go_on)) -> Any:
        import os
        import time

        while 35 in numbers and not os.path.exists(go_on):
            open(began, "a").close()
            time.sleep(0.01)
        return numbers

    schema = crashing_schema(wait)
    with loaderd.Loader(
        write_numbered([100]), schema, batch_size=10, shuffle=False, workers=1, stall_timeout=2
    ) as loader:
        daemon = newest_daemon()

        def disturb() -> None:
            while not began.exists():
                time.sleep(0.01)
            family = [os.pidfd_open(pid) for pid in family_of(daemon)]
            os.kill(daemon, sign)
            if restarts:  # else the worker may be done with all batches before it is gone
                wait_ends(family, 30)
            go_on.touch()

        thread = threading.Thread(target=disturb)
        thread.start()
        assert [number for batch in loader for number in batch["x"]] == list(range(100))
        thread.join()
        assert loader.statistics().daemon_restarts == restarts
        assert Path(f"/proc/{daemon}").exists() != bool(restarts)


def test_a_daemon_that_stalls(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    """What is granted it is not needed for: two windows of 16,384 records."""
    shards = write_numbered([40_000])
    with loaderd.Loader(shards, numbered_schema, batch_size=100, shuffle=False, workers=2, stall_timeout=2) as loader:
        batches = iter(loader)
        numbers = check_batch(next(batches))
        family = [os.pidfd_open(pid) for pid in family_of(newest_daemon())]
        signal.pidfd_send_signal(family[0], signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, "loaderd"):
            for batch in batches:
                numbers += check_batch(batch)
        assert numbers == list(range(40_000))
        wait_ends(family, 30)
    said = caplog.records[0].getMessage()
    assert "the daemon process said nothing for 2 s and was killed; another one goes on at batch" in said


def test_a_busy_worker_is_no_stalled_daemon(write_numbered: Write, tmp_path: Path):
    """The daemon answers when it is asked."""
    once = str(tmp_path / "once")

    def dawdle(numbers: Any) -> Any:
        import os
        import time

        if 35 in numbers and not os.path.exists(once):
            open(once, "x").close()
            time.sleep(3)
        return numbers

    with loaderd.Loader(
        write_numbered([100]), crashing_schema(dawdle), batch_size=10, shuffle=False, workers=1, stall_timeout=2
    ) as loader:
        assert [number for batch in loader for number in batch["x"]] == list(range(100))
        assert loader.statistics().daemon_restarts == 0


def test_the_daemon_dies_while_it_opens(
    write_numbered: Write, tmp_path: Path, check_batch: Check, caplog: pytest.LogCaptureFixture
):
    once, twice = str(tmp_path / "once"), str(tmp_path / "twice")

    def crash() -> Any:
        import os

        if not os.path.exists(twice):
            os.rename(once, twice) if os.path.exists(once) else open(once, "x").close()
            os.kill(os.getpid(), 9)
        return abs

    schema = crashing_schema(Grenade("loaderd-daemon", crash))
    with (
        caplog.at_level(logging.WARNING, "loaderd"),
        loaderd.Loader(write_numbered([100]), schema, batch_size=10, shuffle=False, workers=1) as loader,
    ):
        assert list(chain(*map(check_batch, loader))) == list(range(100))
        assert loader.statistics().daemon_restarts == 2
    warning = "the daemon process was killed by SIGKILL; another one goes on at its beginning"
    assert [record.getMessage() for record in caplog.records] == [warning] * 2


def test_daemons_that_die_in_a_row(write_numbered: Write, numbered_schema: loaderd.Schema, tmp_path: Path):
    """An error says so; who asks again gets another try, and then exactly the next batch."""
    lethal = tmp_path / "lethal"

    def crash(lethal: str = str(lethal)) -> Any:
        import os

        if os.path.exists(lethal):
            os._exit(9)
        return abs

    schema = crashing_schema(Grenade("loaderd-daemon", crash))
    with loaderd.Loader(write_numbered([900]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        found = [next(batches)["id"][0]]
        lethal.touch()
        kill(newest_daemon())
        with pytest.raises(
            DaemonError, match=r"3 daemons in a row ended without .*; the daemon process ended with status"
        ):
            while True:
                found.append(next(batches)["id"][0])
        lethal.unlink()
        found += [batch["id"][0] for batch in batches]
        assert found == list(range(0, 900, 10))


def test_another_daemon_refuses_other_data(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([500, 500])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        numbers = check_batch(next(batches))
        (other,) = write_numbered([500], "other")  # as many records, but others
        os.replace(other, shards[1])
        kill(newest_daemon())
        with pytest.raises(OptionError, match="the position belongs to other data or to another order:\n  shards: "):
            while True:
                numbers += check_batch(next(batches))
        assert numbers == list(range(len(numbers))), "what was ready is given out, and nothing else"
        with pytest.raises(ClosedError, match="the loader ended: the position belongs to other data"):
            next(batches)


def test_another_daemon_has_room_for_what_was_left_by_other_hosts(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    """A batch of a pass that goes on with what several numbers of hosts left is cut from more windows than others."""
    shards = write_numbered([2000])
    options: dict[str, Any] = {"shuffle": loaderd.Shuffle(window_records=100, block_records=10), "workers": 1}
    start = loaderd.Position()
    for hosts, batches in ((7, 5), (3, 9), (5, 4)):
        with loaderd.Loader(
            shards, numbered_schema, batch_size=20, shard=(0, hosts), start=start, **options
        ) as loader:
            for _ in zip(range(batches), loader, strict=False):
                pass
            start = loader.position
    with loaderd.Loader(shards, numbered_schema, batch_size=90, start=start, **options) as loader:
        first, second = loader.new_pass(), loader.new_pass()
        expected = [check_all(loader, *begin, check_batch) for begin in (first, second)]
    with loaderd.Loader(shards, numbered_schema, batch_size=90, start=start, **options) as loader:
        assert first[0].past and (loader.new_pass(), loader.new_pass()) == (first, second)
        for dies, begin, batches in ((1, first, expected[0]), (1, second, expected[1]), (0, first, expected[0])):
            if dies:
                kill(newest_daemon())
            assert check_all(loader, *begin, check_batch) == batches


def check_all(loader: loaderd.Loader, pass_: Pass, step: int, check: Check) -> list[list[int]]:
    """The batches of a pass."""
    found = []
    while (batch := loader.fetch(pass_, step)) is not None:
        found.append(check(batch))
        step += 1
    return found


def test_the_daemon_of_growing_data_dies(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, tmp_path: Path
):
    """In the middle of an epoch, whose shards another daemon finds again, and when the shards are to be listed."""
    paths = write_numbered([50, 60, 70, 80, 90], "all")
    folder = tmp_path / "growing"
    folder.mkdir()
    new = iter(paths)

    def grow() -> None:
        path = next(new)
        path.rename(folder / path.name)

    grow()
    dataset = loaderd.Dataset(str(folder / "*.tfrecord"), numbered_schema, refresh="epoch")
    with loaderd.Loader(dataset, batch_size=10, epochs=None, workers=1, remainder="drop") as loader:
        batches = iter(loader)
        for records in (50, 110, 180, 260):
            numbers = []
            for step in range(records // 10):
                if step in (0, 3):
                    kill(*children_of(os.getpid(), DAEMON))  # it may be dead, and nobody has noticed
                numbers += check_batch(next(batches))
                if step == 1:
                    grow()
            assert sorted(numbers) == list(range(records))
        kill(*children_of(os.getpid(), DAEMON))
        (folder / paths[0].name).unlink()  # nothing that is to come needs it
        assert min(check_batch(next(batches))) >= 50
        (folder / paths[1].name).unlink()
        kill(*children_of(os.getpid(), DAEMON))
        with pytest.raises(OptionError, match="the position belongs to 4 shards"):
            list(batches)


def test_what_the_daemon_said_last_is_not_lost(write_numbered: Write, numbered_schema: loaderd.Schema):
    """It gave up and ended while nobody listened."""
    schema = crashing_schema(lambda numbers: os._exit(7) if numbers[-1] >= 50 else numbers)
    with loaderd.Loader(write_numbered([200]), schema, batch_size=10, shuffle=False, workers=1) as loader:
        next(iter(loader))
        wait_ends([os.pidfd_open(newest_daemon())], 30)
        loader.seek(loaderd.Position(0, 5))
        with pytest.raises(DaemonError, match="10 workers died without having done anything"):
            next(iter(loader))


def test_nothing_is_left_by_close(write_numbered: Write, numbered_schema: loaderd.Schema):
    loader = loaderd.Loader(write_numbered([1000]), numbered_schema, batch_size=10, workers=2)
    next(iter(loader))
    pid_fds = [os.pidfd_open(pid) for pid in family_of(newest_daemon())]
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
        pytest.param("print(os.getpid(), flush=True); sys.stdin.readline(); os._exit(3)", 3, marks=pytest.mark.slow),
        ("print(os.getpid(), flush=True); sys.stdin.readline(); raise SystemExit(4)", 4),
    ],
    ids=["SIGKILL", "SIGKILL with a fork that lives on", "os._exit", "exit without close"],
)
def test_nothing_outlives_the_training_process(write_numbered: Write, tmp_path: Path, rest: str, status: int):
    before = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
    with run_script(tmp_path, write_numbered([1000]), rest) as training:
        assert [training.stdout.readline() for _ in range(2)] == ["run\n", f"{training.pid}\n"]
        comms = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children_of(training.pid)}
        (daemon,) = [pid for pid, comm in comms.items() if comm == "loaderd-daemon"]
        forks = [pid for pid in comms if pid != daemon]
        try:
            family = family_of(daemon)
            assert len(family) == 4 and len(forks) == ("fork" in rest)
            pid_fds = [os.pidfd_open(pid) for pid in family]
            if status < 0:
                training.kill()
            else:
                training.stdin.write("go\n")
                training.stdin.flush()
            wait_ends(pid_fds, 30)
            assert training.wait(30) == status
            assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} == before
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
