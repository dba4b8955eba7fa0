"""Threads and forks that have one loader."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import loaderd
from tests.helpers.numbered import Numbered


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
def test_several_threads_share_an_iterator(numbered: Numbered):
    with numbered.loader([2000], workers=2) as loader:
        batches = iter(loader)
        found: list[list[int]] = [[] for _ in range(4)]

        def consume(numbers: list[int]) -> None:
            for batch in batches:
                numbers += batch["id"].tolist()

        in_threads(consume, found)
        assert sorted(chain(*found)) == list(range(2000))


def test_threads_with_iterators_of_their_own(numbered: Numbered):
    with numbered.loader([60], batch_size=20) as loader:
        found: list[list[int]] = [[] for _ in range(3)]

        def consume(numbers: list[int]) -> None:
            for batch in loader:
                numbers += batch["id"].tolist()

        in_threads(consume, found)
        assert [sorted(numbers) for numbers in found] == [list(range(60))] * 3
        assert found[0] != found[1] != found[2]


def test_after_waits_for_a_fetch_only_where_shards_must_be_listed(numbered: Numbered):
    """To list them in the middle of another thread's wait would leave that without the answer that it waits for."""
    shards = numbered.write([20, 20])
    dataset = loaderd.Dataset(str(shards[0].parent / "*.tfrecord"), numbered.schema, refresh="epoch")
    whole = shards[1].read_bytes()
    shards[1].unlink()
    with loaderd.Loader(dataset, batch_size=10, epochs=None, workers=1) as loader:
        next(iter(loader))
        old = loader.position
    shards[1].write_bytes(whole)
    with loaderd.Loader(dataset, batch_size=10, epochs=None, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        stream = loader._stream
        list_shards, locked = stream.list_shards, []

        def watched(*listing: Any) -> None:
            locked.append(stream.lock.locked())
            list_shards(*listing)

        stream.list_shards = watched  # type: ignore[method-assign]
        with stream.lock:  # as a fetch has it, in the middle of which a signal's handler may ask
            assert loader.after(loader.position, 1).batch == loader.position.batch + 1
        behind = loader.after(old, 1)
        assert (behind.epoch, behind.batch) == (old.epoch + 1, 0)
        assert locked == [True]
        assert len(next(batches)["id"]) == 10


def test_slots_come_back_from_any_thread(numbered: Numbered):
    """More batches than there are slots, each dropped by a thread that knows nothing of the loader."""
    with numbered.loader([1000], shuffle=False, held_batches=4) as loader:
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


def test_a_fork_is_told_whose_loader_it_has(numbered: Numbered, tmp_path: Path):
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
            for act in (lambda: next(batches), lambda: next(iter(loader)), loader._new_pass):
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
    (shard,) = numbered.write([100])
    found = subprocess.run([sys.executable, script, shard], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    *said, pids = found.stdout.splitlines()
    parent, child = pids.split()
    assert said == [f"the loader belongs to process {parent}, of which this one, {child}, is a fork"] * 2
