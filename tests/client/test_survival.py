"""A loader that is closed, dropped or interrupted, by real signals."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.client import stream_client
from loaderd.errors import ClosedError
from loaderd.shm.anonymous import SharedMemory
from tests.helpers.interrupts import InterruptAt, points_of
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import (
    all_workers_of,
    children_of,
    kill,
    newest_daemon,
    wait_ends,
    wait_for_no_daemon,
    workers_of,
)


def with_field(function: Callable[[Any], Any]) -> loaderd.Schema:
    """The numbered records, and a field that ``function`` makes of their numbers."""
    fields = {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")}
    derived = loaderd.Derived(function, "id", (), "int64")
    return loaderd.Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, {**fields, "x": derived})


def slow(numbers: Any) -> Any:
    """Takes for ever at record 5."""
    if 5 in numbers:
        time.sleep(1000)
    return numbers


# --------------------------------------------------------------------------------------------- close


def starting_a_program(numbers: Any) -> Any:
    """Starts a program that nobody waits for."""
    if 0 in numbers:
        subprocess.Popen(["sleep", "1000"])
    return numbers


@pytest.mark.one_variant
@pytest.mark.parametrize("daemon_is", ["alive", "killed"])
def test_programs_that_a_field_started_end_with_the_daemon(numbered: Numbered, daemon_is: str):
    """So does a worker that is stopped at its birth, when it has not asked to die with its parent."""
    loader = loaderd.Loader(
        numbered.write([100]), with_field(starting_a_program), batch_size=10, shuffle=False, workers=1
    )
    next(iter(loader))
    (worker,) = workers_of(daemon := newest_daemon())
    sleepers = [os.pidfd_open(pid) for pid in children_of(worker)]
    assert sleepers
    if daemon_is == "killed":
        kill(daemon)
    loader.close()
    wait_ends(sleepers, 30)


@pytest.mark.one_variant
@pytest.mark.parametrize("stopped", ["nothing", "worker", "daemon"])
def test_close_ends_a_wait_in_another_thread(numbered: Numbered, stopped: str):
    """While a worker is at work for ever, or stopped, or the daemon is."""
    loader = loaderd.Loader(numbered.write([100]), with_field(slow), batch_size=10, shuffle=False, workers=1)
    batches = iter(loader)
    daemon = newest_daemon()
    ended: list[Any] = []

    def consume() -> None:
        try:
            next(batches)
        except ClosedError as error:
            ended.append((error, time.monotonic()))

    thread = threading.Thread(target=consume)
    thread.start()
    wait_until_asleep(thread)
    pids = {"nothing": [], "worker": workers_of(daemon), "daemon": [daemon]}[stopped]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    family = [os.pidfd_open(pid) for pid in (daemon, *workers_of(daemon))]
    began_s = time.monotonic()
    loader.close()
    took_s = time.monotonic() - began_s
    thread.join()
    (error, ended_s), *_ = ended
    # Not for as long as the worker sleeps; of 0.3 s, on a machine that does nothing else.
    assert str(error).startswith("the loader is closed") and ended_s - began_s < 60 and took_s < 60
    wait_ends(family, 60)
    loader.close()
    with pytest.raises(ClosedError):
        next(batches)


def wait_until_asleep(thread: threading.Thread) -> None:
    """Until it waits in the kernel, as a consumer does for a batch."""
    stat = Path(f"/proc/self/task/{thread.native_id}/wchan")
    while "poll" not in stat.read_text():
        time.sleep(0.01)


@pytest.mark.slow
def test_close_while_another_daemon_is_started(numbered: Numbered):
    """From a thread, at many moments of it: nothing of what was being started is left."""
    shards = numbered.write([100])
    for delay_ms in (0, 80, 200):
        loader = numbered.loader(shards)
        kill(newest_daemon())
        timer = threading.Timer(delay_ms / 1000, loader.close)
        timer.start()
        with pytest.raises(ClosedError):
            while True:
                list(loader)
        timer.join()
        wait_for_no_daemon()


def test_close_while_the_memory_of_another_daemon_is_taken_over(numbered: Numbered, monkeypatch: pytest.MonkeyPatch):
    loader = numbered.loader([100])

    def close_first(fd: int) -> SharedMemory:
        loader.close()  # as from another thread, that is
        return SharedMemory(fd)

    monkeypatch.setattr(stream_client, "SharedMemory", close_first)
    kill(newest_daemon())
    with pytest.raises(ClosedError):
        list(loader)
    wait_for_no_daemon()


def test_a_loader_that_is_dropped_while_a_batch_is_held(numbered: Numbered):
    loader = numbered.loader([100], shuffle=False)
    batches = iter(loader)
    batch = next(batches)
    daemon = newest_daemon()
    del loader
    gc.collect()
    assert newest_daemon() == daemon and numbered.check(next(batches)) == list(range(10, 20)), "the iterator keeps it"
    del batches
    wait_for_no_daemon()  # without the garbage collector
    assert numbered.check(batch) == list(range(10))


def test_a_loop_that_never_waits_hears_of_a_dead_worker(numbered: Numbered, caplog: pytest.LogCaptureFixture):
    """With the next batch: a training whose batches are always there reads what the daemon says all the same."""
    with numbered.loader([600], epochs=None, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        kill(all_workers_of(newest_daemon(), 2)[0])
        deadline_s = time.monotonic() + 30
        while "another one does its work again" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
            next(batches)
        assert loader.statistics().workers_restarted == 1


# ------------------------------------------------------------------------------------------- Ctrl-C

_INTERRUPTED = """
import random, signal, sys, threading, time
import loaderd

shards, wanted, seed = sys.argv[1:-2], int(sys.argv[-2]), int(sys.argv[-1])
schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
options = dict(batch_size=5, workers=1, held_batches=3, shuffle=loaderd.Shuffle(window_records=200, block_records=20))
with loaderd.Loader(shards, schema, **options) as loader:
    passes = [[batch["id"].tolist() for batch in loader] for _ in range(3)]

chance = random.Random(seed)
main = threading.main_thread().ident
lock = threading.Lock()
armed = going = over = False
at_openings = others = 0

def arm(on):
    global armed
    with lock:
        armed = on

def interrupt():
    global armed, at_openings, others
    while not over:
        time.sleep(chance.choice([0, 0.001, 0.003, 0.01, 0.03]))
        with lock:  # so nothing comes behind arm(False)
            if armed:
                armed = False
                at_openings += not going
                others += going
                signal.pthread_kill(main, signal.SIGINT)

thread = threading.Thread(target=interrupt, daemon=True)
loader = loaderd.Loader(shards, schema, **options)
thread.start()
taken = 0
while at_openings < wanted / 10 or others < wanted:
    number = loader.next_position().epoch
    batches = iter(loader)
    if number > 2:
        loader.load_state_dict(loaderd.Position())
        continue
    got, batch = [], None
    while True:
        going = False
        try:
            try:
                if chance.random() < 0.2:
                    arm(True)
                for batch in batches:
                    got.append(batch["id"].tolist())
                    going = True
                    arm(True)
                arm(False)
                break
            finally:
                arm(False)
        except KeyboardInterrupt:
            pass
        # Interrupted between having a batch and writing it down: it is the one that the loop has.
        step = loader.position.batch
        if loader.position.epoch == number and len(got) == step - 1:
            got.append(batch["id"].tolist())
        assert loader.position.epoch > number or len(got) == step, (len(got), step, loader.position)
    assert got == passes[number], (number, len(got), len(passes[number]))
    taken += 1
over = True
thread.join()
print(at_openings, others, taken, loader.statistics().daemon_restarts)
"""


@pytest.mark.slow
def test_interrupts_at_any_moment(numbered: Numbered, tmp_path: Path):
    """A loop that is interrupted and gone on with sees every batch once, and the position is the next one's.

    An interrupt costs one restart at most. How many do depends on the machine: one in ten of those that come when
    there are batches, and one in two beside four busy processes.
    """
    script = tmp_path / "interrupted.py"
    script.write_text(_INTERRUPTED)
    shards = map(str, numbered.write([1000, 900]))
    found = subprocess.run(
        [sys.executable, script, *shards, "40", "1"], capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    at_openings, others, passes, restarts = map(int, found.stdout.split())
    assert at_openings >= 4 and others >= 40 and passes >= 1
    assert restarts <= at_openings + others


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_interrupt_at_every_point_of_next(numbered: Numbered, ahead: int):
    """Python looks for signals behind a call, and where a function begins. None of these points loses a batch."""
    # Every place in these functions is tried, so they must be named: the promise is about places.
    iteration = loaderd.Loader.__iter__.__globals__["_Iteration"]
    points = points_of(iteration.__next__, iteration._read)
    with numbered.loader([600], shuffle=False) as loader:
        batches = loader._iterate(lambda batch: lambda: batch, ahead)
        numbers, interrupts = numbered.check(next(batches)), 0
        for point in points:
            batch = None
            with InterruptAt(*point):
                batch = next(batches)
            if batch is None:
                interrupts += 1
                assert loader.position.batch == len(numbers) // 10
                batch = next(batches)
            numbers += numbered.check(batch)
        assert numbers == list(range(10 + 10 * len(points))) and interrupts > 3
        assert loader.statistics().daemon_restarts == 0


def test_an_interrupt_in_a_wait_costs_nothing(numbered: Numbered, tmp_path: Path):
    go_on = tmp_path / "go on"

    def wait(numbers: Any, go_on: str = str(go_on)) -> Any:
        while 5 in numbers and not os.path.exists(go_on):
            time.sleep(0.01)
        return numbers

    with loaderd.Loader(numbered.write([100]), with_field(wait), batch_size=10, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        main = threading.main_thread()

        def interrupt() -> None:
            wait_until_asleep(main)
            signal.pthread_kill(main.ident, signal.SIGINT)

        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                threading.Thread(target=interrupt).start()
                next(batches)
            assert loader.position.batch == 0
        go_on.touch()
        assert [number for batch in batches for number in batch["x"]] == list(range(100))
        assert (loader.statistics().daemon_restarts, loader.statistics().starts) == (0, 1)


def test_a_fork_does_not_take_its_main_thread_for_one_of_tensorflows():
    """Or each such program would end 0.8 s later: Python 3.11 has the parent's number for that thread."""
    code = """
import os
from loaderd.client.shutdown import _running_foreign_threads
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os._exit(len(_running_foreign_threads()))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_threads_may_end_by_a_collection_while_they_are_looked_at():
    """As those of a DataLoader do, whose iterator is garbage: in Python 3.11, a program died of SIGSEGV or hung."""
    code = """
import gc, threading
from loaderd.client.shutdown import _foreign_thread_is_in_python, _running_foreign_threads

class EndsThread:
    def __init__(self, left):
        self.left, self.itself = left, self
    def __del__(self):  # one in each collection
        event, thread = self.left.pop()
        event.set()
        thread.join()
        if self.left:
            EndsThread(self.left)

def wait(event, depth):
    wait(event, depth - 1) if depth else event.wait()

events = [threading.Event() for _ in range(60)]
waiting = [(event, threading.Thread(target=wait, args=(event, 30))) for event in events]
for _, thread in waiting:
    thread.start()
gc.disable()
EndsThread(waiting)
gc.set_threshold(1)
gc.enable()
for look in (_running_foreign_threads, _foreign_thread_is_in_python):
    look()
while waiting:
    gc.collect()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0
