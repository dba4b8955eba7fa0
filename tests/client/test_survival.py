"""What a consumer may do to its loader, and what may happen to it: real signals, threads and forks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from damage import damage_unseen
from interrupts import InterruptAt, points_of
from own_processes import DAEMON, children_of, kill, newest_daemon, workers_of

import loaderd
from loaderd.client.patience import Patience
from loaderd.errors import ClosedError, CorruptRecordError, LoaderdError, WorkerError

Write = Callable[..., list[Path]]
Check = Callable[[loaderd.Batch], list[int]]


def with_field(function: Callable[[Any], Any]) -> loaderd.Schema:
    """The numbered records, and a field that ``function`` makes of their numbers."""
    fields = {"bits": loaderd.Bits("bits", shape=(32,)), "id": loaderd.Array("id")}
    derived = loaderd.Derived(function, "id", dtype="int64")
    return loaderd.Schema({"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}, {**fields, "x": derived})


def slow(numbers: Any) -> Any:
    """Takes for ever at record 5."""
    if 5 in numbers:
        time.sleep(1000)
    return numbers


def odd(numbers: Any) -> Any:
    """Refuses records 25 and 77."""
    if 25 in numbers or 77 in numbers:
        raise ValueError("no")
    return numbers


# --------------------------------------------------------------------------------------------- close


@pytest.mark.parametrize("stopped", ["nothing", "worker", "daemon"])
def test_close_ends_a_wait_in_another_thread(write_numbered: Write, stopped: str):
    """While a worker is at work for ever, or stopped, or the daemon is."""
    loader = loaderd.Loader(write_numbered([100]), with_field(slow), batch_size=10, shuffle=False, workers=1)
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
    assert str(error).startswith("the loader is closed") and ended_s - began_s < 15 and took_s < 15
    assert not Path(f"/proc/{daemon}").exists()
    for pid_fd in family:
        os.close(pid_fd)
    loader.close()
    with pytest.raises(ClosedError):
        next(batches)


def wait_until_asleep(thread: threading.Thread) -> None:
    """Until it waits in the kernel, as a consumer does for a batch."""
    stat = Path(f"/proc/self/task/{thread.native_id}/wchan")
    while "poll" not in stat.read_text():
        time.sleep(0.01)


def test_close_while_another_daemon_is_started(write_numbered: Write, numbered_schema: loaderd.Schema):
    """From a thread, at many moments of it: nothing of what was being started is left."""
    shards = write_numbered([100])
    for delay_ms in (0, 80, 200):
        loader = loaderd.Loader(shards, numbered_schema, batch_size=10, workers=1)
        kill(newest_daemon())
        timer = threading.Timer(delay_ms / 1000, loader.close)
        timer.start()
        with pytest.raises(ClosedError):
            while True:
                list(loader)
        timer.join()
        assert not children_of(os.getpid(), DAEMON)


def test_a_loader_that_is_dropped_while_a_batch_is_held(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    loader = loaderd.Loader(write_numbered([100]), numbered_schema, batch_size=10, shuffle=False, workers=1)
    batches = iter(loader)
    batch = next(batches)
    daemon = newest_daemon()
    del loader
    gc.collect()
    assert newest_daemon() == daemon and check_batch(next(batches)) == list(range(10, 20)), "the iterator keeps it"
    del batches
    assert not children_of(os.getpid(), DAEMON), "without the garbage collector"
    assert check_batch(batch) == list(range(10))


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
    number = loader.next_position.epoch
    batches = iter(loader)
    if number > 2:
        loader.seek(loaderd.Position())
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


def test_interrupts_at_any_moment(write_numbered: Write, tmp_path: Path):
    """A loop that is interrupted and gone on with sees every batch once, and the position is the next one's.

    An interrupt may cost a restart while the stream is being opened; once batches come, hardly any does.
    """
    script = tmp_path / "interrupted.py"
    script.write_text(_INTERRUPTED)
    shards = map(str, write_numbered([1000, 900]))
    found = subprocess.run(
        [sys.executable, script, *shards, "40", "1"], capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    at_openings, others, passes, restarts = map(int, found.stdout.split())
    assert at_openings >= 4 and others >= 40 and passes >= 1
    assert restarts <= at_openings + others / 4


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_interrupt_at_every_point_of_next(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, ahead: int
):
    """Python looks for signals behind a call, and where a function begins. None of these points loses a batch."""
    # Every place in these functions is tried, so they must be named: the promise is about places.
    iteration = loaderd.Loader.__iter__.__globals__["_Iteration"]
    points = points_of(iteration.__next__, iteration._read)
    with loaderd.Loader(write_numbered([600]), numbered_schema, batch_size=10, shuffle=False, workers=1) as loader:
        batches = loader.iterate(lambda batch: lambda: batch, ahead)
        numbers, interrupts = check_batch(next(batches)), 0
        for point in points:
            batch = None
            with InterruptAt(*point):
                batch = next(batches)
            if batch is None:
                interrupts += 1
                assert loader.position.batch == len(numbers) // 10
                batch = next(batches)
            numbers += check_batch(batch)
        assert numbers == list(range(10 + 10 * len(points))) and interrupts > 3
        assert loader.statistics().daemon_restarts == 0


def test_an_interrupt_in_a_wait_costs_nothing(write_numbered: Write, tmp_path: Path):
    go_on = tmp_path / "go on"

    def wait(numbers: Any, go_on: str = str(go_on)) -> Any:
        while 5 in numbers and not os.path.exists(go_on):
            time.sleep(0.01)
        return numbers

    with loaderd.Loader(write_numbered([100]), with_field(wait), batch_size=10, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        for _ in range(3):
            interrupter = threading.Timer(
                0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            )
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                next(batches)
            assert loader.position.batch == 0
        go_on.touch()
        assert [number for batch in batches for number in batch["x"]] == list(range(100))
        assert (loader.statistics().daemon_restarts, loader.statistics().starts) == (0, 1)


def test_a_fork_does_not_take_its_main_thread_for_one_of_tensorflows():
    """Or each such program would end 0.8 s later: Python 3.11 has the parent's number for that thread."""
    code = """
import os
from loaderd.client.end import _foreign_thread_runs
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os._exit(_foreign_thread_runs())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# -------------------------------------------------------------------------------- errors and going on


def test_an_iterator_goes_on_behind_a_broken_batch(write_numbered: Write):
    with loaderd.Loader(write_numbered([100]), with_field(odd), batch_size=10, shuffle=False, workers=2) as loader:
        found = going_on(iter(loader), lambda batch: batch["id"].tolist())
        assert [type(one) for one in found].count(WorkerError) == 2
        assert [isinstance(one, WorkerError) for one in found].index(True) == 2
        good = [one for one in found if not isinstance(one, WorkerError)]
        assert list(chain(*good)) == [n for n in range(100) if n // 10 not in (2, 7)]
        assert loader.position.epoch == 1 and loader.statistics().starts == 1


def going_on(batches: Iterator[loaderd.Batch], check: Callable[[loaderd.Batch], Any]) -> list[Any]:
    """What each batch is, or the error in its place."""
    found: list[Any] = []
    while True:
        try:
            found.append(check(next(batches)))
        except StopIteration:
            with pytest.raises(StopIteration):  # and stays at its end
                next(batches)
            return found
        except LoaderdError as error:
            found.append(error)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_iterator_of_growing_data_goes_on(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, ahead: int
):
    """Behind a shard that could not be indexed when an epoch began, which is when all of the one before was taken."""
    shards = write_numbered([40, 40, 20])
    whole = shards[2].read_bytes()
    dataset = loaderd.Dataset(str(shards[0].parent / "*"), numbered_schema, refresh="epoch")
    shards[2].unlink()
    with loaderd.Loader(dataset, batch_size=10, epochs=3, workers=1) as loader:
        batches = loader.iterate(lambda batch: lambda: batch, ahead)
        first = [check_batch(next(batches)) for _ in range(8)]
        shards[2].write_bytes(whole[:-5])
        with pytest.raises(CorruptRecordError):
            next(batches)
        shards[2].write_bytes(whole)
        rest = going_on(batches, check_batch)
    assert sorted(chain(*first)) == list(range(80))
    assert sorted(chain(*rest[:10])) == sorted(chain(*rest[10:])) == list(range(100))


def test_what_is_skipped_is_counted_when_its_batch_is_taken(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([100])
    with loaderd.Loader(
        shards, numbered_schema, batch_size=10, shuffle=False, workers=1, on_corrupt="skip_record"
    ) as loader:
        damage_unseen(shards[0], 77)
        numbers, counts = [], []
        for batch in loader:
            numbers += check_batch(batch)
            counts.append(loader.statistics().records_skipped)
        assert numbers == [n for n in range(100) if n != 77] and counts == [0] * 7 + [1] * 3
        for step, count in ((5, 1), (6, 1), (7, 2), (8, 2)):  # what was on its way is void
            loader.seek(loaderd.Position(0, step))
            next(iter(loader))
            assert loader.statistics().records_skipped == count
        assert {damage.record for damage in loader.statistics().damages} == {77}


# ------------------------------------------------------------------------------------------ consumers


def in_threads(consume: Callable[[list[int]], None], results: list[list[int]]) -> None:
    """A thread for each of ``results``, all at a time."""
    threads = [threading.Thread(target=consume, args=(numbers,)) for numbers in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def _restless_threads() -> Iterator[None]:
    """Python changes from one thread to another as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless_threads")
def test_several_threads_share_an_iterator(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([2000])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, workers=2) as loader:
        batches = iter(loader)
        found: list[list[int]] = [[] for _ in range(4)]

        def consume(numbers: list[int]) -> None:
            for batch in batches:
                numbers += batch["id"].tolist()

        in_threads(consume, found)
        assert sorted(chain(*found)) == list(range(2000))


def test_threads_with_iterators_of_their_own(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([60])
    with loaderd.Loader(shards, numbered_schema, batch_size=20, workers=1) as loader:
        found: list[list[int]] = [[] for _ in range(3)]

        def consume(numbers: list[int]) -> None:
            for batch in loader:
                numbers += batch["id"].tolist()

        in_threads(consume, found)
        assert [sorted(numbers) for numbers in found] == [list(range(60))] * 3
        assert found[0] != found[1] != found[2]


def test_slots_come_back_from_any_thread(write_numbered: Write, numbered_schema: loaderd.Schema):
    """More batches than there are slots, each dropped by a thread that knows nothing of the loader."""
    shards = write_numbered([1000])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, shuffle=False, workers=1, held_batches=4) as loader:
        numbers = []
        for batch in loader:
            numbers += batch["id"].tolist()
            box = [batch]
            del batch
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
        assert numbers == list(range(1000))
        assert loader.statistics().batches_copied == 0


# ---------------------------------------------------------------------------------------------- forks


def test_a_fork_is_told_whose_loader_it_has(write_numbered: Write, tmp_path: Path):
    script = tmp_path / "forking.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, threading, time
        import loaderd

        schema = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})
        loader = loaderd.Loader(sys.argv[1], schema, batch_size=10, shuffle=False, workers=1)
        batches = iter(loader)
        numbers = next(batches)["id"].tolist()
        time.sleep(0.2)  # batches lie ready, which a fork must not take
        loader._stream.lock.acquire()  # as another thread has it that is in the middle of a fetch
        child = os.fork()
        if not child:
            for act in (lambda: next(batches), lambda: next(iter(loader)), loader.new_pass):
                try:
                    act()
                except loaderd.errors.ClosedError as error:
                    print(error.message, flush=True)
            loader.close()
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        loader._stream.lock.release()
        print(os.getpid(), child, flush=True)
        numbers += [number for batch in batches for number in batch["id"]]
        assert numbers == list(range(100)) and loader.statistics().daemon_restarts == 0
        """)
    )
    (shard,) = write_numbered([100])
    found = subprocess.run([sys.executable, script, shard], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    *said, pids = found.stdout.splitlines()
    parent, child = pids.split()
    assert said == [f"the loader belongs to process {parent}, of which this one, {child}, is a fork"] * 2


# ------------------------------------------------------------------------------------------- patience


def test_patience_asks_then_gives_up():
    patience = Patience(120.0)
    asked = []
    for second in range(1, 121):
        assert not patience.is_over
        patience.tick()
        if patience.must_ask():
            asked.append(second)
    assert patience.is_over and asked == [30, 60, 90, 120]


def test_patience_ends_with_the_last_sign_of_life():
    patience = Patience(2.0)
    for _ in range(100):
        patience.tick()
        assert patience.tick_s == 1.0 and patience.must_ask()
        patience.heard()
    assert not patience.is_over
    patience.tick(), patience.tick()
    assert patience.is_over


def test_patience_reports_ever_more_seldom():
    patience = Patience(None)
    reported = []
    for second in range(1, 1000):
        patience.tick()
        patience.heard()
        if patience.must_report():
            reported.append(second)
    assert reported == [30, 60, 120, 240, 480, 960] and not patience.is_over
