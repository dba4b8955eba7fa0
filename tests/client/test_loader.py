"""The loader as users meet it: real shards, a real daemon, real workers."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.errors import ClosedError, OptionError
from loaderd.plan.passes import Pass
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import family_of, newest_daemon, seen_of_newest
from tests.reliability.processes import shm_names

Check = Callable[[loaderd.Batch], list[int]]


def passes(loader: loaderd.Loader, check: Check, count: int = 1) -> list[list[list[int]]]:
    return [[check(batch) for batch in loader] for _ in range(count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_an_epoch_holds_every_record_once(numbered: Numbered):
    with numbered.loader([1000, 0, 1, 2047, 500], batch_size=64, workers=2) as loader:
        assert len(loader) == -(-3548 // 64)
        first, second = passes(loader, numbered.check, 2)
        assert sorted(flat(first)) == list(range(3548))
        assert sorted(flat(second)) == list(range(3548))
        assert first != second, "each pass is shuffled in its own way"
        assert [len(batch) for batch in first] == [64] * 55 + [28]
        assert flat(first) != sorted(flat(first))


@pytest.mark.one_variant
@pytest.mark.parametrize("remainder", ["drop", "short", "carry"])
def test_the_order_depends_on_neither_workers_nor_reading(numbered: Numbered, remainder: str):
    shards = numbered.write([500, 377, 123])
    orders = []
    for workers, held in ((1, 1), (2, 4), (5, 2)):
        shuffle = loaderd.Shuffle(window_records=150, block_records=16)
        with numbered.loader(
            shards,
            batch_size=48,
            epochs=2,
            shuffle=shuffle,
            seed=5,
            remainder=remainder,
            workers=workers,
            held_batches=held,
        ) as loader:
            orders.append(numbered.batches(loader))
    assert orders[0] == orders[1] == orders[2]
    counts = Counter(flat(orders[0]))
    if remainder == "drop":
        assert {len(batch) for batch in orders[0]} == {48}
        assert sum(counts.values()) == 2 * (1000 // 48) * 48
    else:
        assert counts == dict.fromkeys(range(1000), 2)
    if remainder == "carry":
        assert [len(batch) for batch in orders[0]] == [48] * 41 + [2000 - 41 * 48]


def test_hosts_share_an_epoch(numbered: Numbered):
    shards = numbered.write([601, 400])
    seen = []
    for host in range(3):
        with numbered.loader(shards, batch_size=50, shard=(host, 3)) as loader:
            seen.append(numbered.records(loader))
    assert sorted(flat(seen)) == list(range(1001))
    assert {len(numbers) for numbers in seen} == {333, 334}


def test_an_endless_loader_goes_on(numbered: Numbered):
    with numbered.loader([100], batch_size=64, epochs=None, remainder="carry") as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        assert loader
        batches = iter(loader)
        numbers = flat([numbered.check(next(batches)) for _ in range(50)])
        for epoch in range(32):
            assert sorted(numbers[100 * epoch : 100 * (epoch + 1)]) == list(range(100))


def test_any_step_can_be_fetched(numbered: Numbered):
    shuffle = loaderd.Shuffle(window_records=100, block_records=10)
    with numbered.loader([400], batch_size=30, epochs=2, shuffle=shuffle, workers=2) as loader:
        order = numbered.batches(loader)
        first_pass = Pass(0, 2)
        for step in (0, 7, 8, 27, 3, 3, 26, 1):
            batch = loader._fetch(first_pass, step)
            assert batch is not None
            assert numbered.check(batch) == order[step]
        assert loader._fetch(first_pass, 28) is None
        with pytest.raises(OptionError, match=r"loader\.position is unknown"):
            _ = loader.position
        assert seen_of_newest().takes_ahead
        next(iter(loader))
        assert not seen_of_newest().takes_ahead, "a loop does not"
        assert (loader.position.epoch, loader.position.batch) == (2, 1), "behind a pass of two epochs"


def test_a_consumer_that_keeps_every_batch_gets_copies(numbered: Numbered):
    with numbered.loader([2000], batch_size=20, workers=2, held_batches=3) as loader:
        kept = list(loader)
        assert sorted(numbered.records(kept)) == list(range(2000))
        statistics = loader.statistics()
        assert statistics.batches_copied == 97
        assert statistics.slots_lent == 3
        assert all(batch[name].ctypes.data % 64 == 0 for batch in kept for name in batch)
        del kept
        gc.collect()
        assert loader.statistics().slots_lent == 0


def test_a_slot_comes_back_with_the_last_view_of_it(numbered: Numbered):
    with numbered.loader([400], batch_size=100) as loader:
        batch = next(iter(loader))
        view = batch["bits"][5:7].reshape(-1)[3:]
        values = view.copy()
        del batch
        assert loader.statistics().slots_lent == 1
        for _ in loader:
            assert np.array_equal(view, values), "nobody writes where a view looks"
        del view, _
        assert loader.statistics().slots_lent == 0


def test_batches_outlive_the_loader(numbered: Numbered):
    loader = numbered.loader([100], batch_size=50)
    batch = next(iter(loader))
    numbers = numbered.check(batch)
    loader.close()
    loader.close()
    assert numbered.check(batch) == numbers
    with pytest.raises(ClosedError, match="closed"):
        next(iter(loader))


def test_read_ahead_is_not_taken(numbered: Numbered):
    begun: list[int] = []

    def hand_over(batch: loaderd.Batch) -> Callable[[], list[int]]:
        begun.append(batch.num_records)
        return lambda: numbered.check(batch)

    with numbered.loader([45], shuffle=False) as loader:
        iterator = loader._iterate(hand_over, ahead=2)
        assert not begun
        for step, numbers in enumerate(iterator):
            assert numbers == list(range(45))[10 * step : 10 * step + 10]
            assert len(begun) == min(step + 3, 5)
            assert loader.position.epoch * 5 + loader.position.batch == step + 1
        assert begun == [10, 10, 10, 10, 5] and loader.statistics().starts == 1


def test_an_iterator_of_which_nothing_is_taken_begins_no_pass(numbered: Numbered):
    """Wrappers make some that they drop."""
    with numbered.loader([45], shuffle=False) as loader:
        for epoch in range(2):
            iter(loader)
            dropped, used = iter(loader), iter(loader)
            assert repr(loader.next_position()) == f"Position(epoch={epoch}, batch=0)"
            assert numbered.records(used) == list(range(45))
            del dropped


def test_a_writable_array_is_the_same_memory(numbered: Numbered):
    """In a slot and in a copy, at a multiple of 64 bytes; and it holds the lease."""
    with numbered.loader([40], held_batches=2) as loader:
        kept = list(loader)
        assert loader.statistics().batches_copied == 2
        for batch in kept:
            array = batch.writable("bits")
            array[0] = 7
            assert (batch["bits"][0] == 7).all() and array.ctypes.data % 64 == 0
            assert not batch["bits"].flags.writeable
        array = kept[0].writable("id")
        del kept, batch
        assert loader.statistics().slots_lent == 1
        del array
        assert loader.statistics().slots_lent == 0


def test_batches_are_read_only(numbered: Numbered):
    with numbered.loader([100], batch_size=50) as loader:
        batch = next(iter(loader))
        assert list(batch) == ["bits", "id"] and len(batch) == 2 and "float32 (50, 32)" in repr(batch)
        with pytest.raises(ValueError, match="read-only"):
            batch["id"][0] = 1


def test_nothing_in_dev_shm_and_no_descriptor_left(numbered: Numbered):
    shards = numbered.write([100])
    before = shm_names([os.getpid()]), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with numbered.loader(shards, batch_size=50, workers=2) as loader:
            assert sum(batch.num_records for batch in loader) == 100
            assert shm_names([os.getpid(), *family_of(newest_daemon())]) == before[0]
        del loader
    gc.collect()
    assert (shm_names([os.getpid()]), len(os.listdir("/proc/self/fd"))) == before


def test_the_index_is_made_once(numbered: Numbered, tmp_path: Path):
    shards = numbered.write([100, 100, 100])
    cache = str(tmp_path / "cache")
    cached = []
    for _ in range(2):
        with numbered.loader(shards, batch_size=30, workers=2, index_cache=cache) as loader:
            cached.append(loader.statistics().index_cached)
    shards[1].write_bytes(shards[1].read_bytes() + shards[0].read_bytes())
    with numbered.loader(shards, batch_size=30, workers=2, index_cache=cache) as loader:
        cached.append(loader.statistics().index_cached)
        assert loader.statistics().num_records == 400
    assert cached == [0, 3, 0], "small shards are indexed together"
