"""The loader as users meet it: real shards, a real daemon, real workers."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loaderd
from loaderd.errors import (
    ClosedError,
    CorruptRecordError,
    NoShardsError,
    OptionError,
    RecordMismatchError,
    SchemaError,
    ShardReadError,
    WorkerError,
)

Write = Callable[..., list[Path]]
Check = Callable[[loaderd.Batch], list[int]]


def passes(loader: loaderd.Loader, check: Check, count: int = 1) -> list[list[list[int]]]:
    return [[check(batch) for batch in loader] for _ in range(count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_an_epoch_holds_every_record_once(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([1000, 0, 1, 2047, 500])
    with loaderd.Loader(shards, numbered_schema, batch_size=64, workers=2) as loader:
        assert len(loader) == -(-3548 // 64)
        first, second = passes(loader, check_batch, 2)
        assert sorted(flat(first)) == list(range(3548))
        assert sorted(flat(second)) == list(range(3548))
        assert first != second, "each pass is shuffled in its own way"
        assert [len(batch) for batch in first] == [64] * 55 + [28]
        assert flat(first) != sorted(flat(first))


def test_files_order_without_shuffle(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([700, 800])
    with loaderd.Loader(shards, numbered_schema, batch_size=100, shuffle=False, workers=2) as loader:
        assert flat(passes(loader, check_batch)[0]) == list(range(1500))


@pytest.mark.parametrize("remainder", ["drop", "short", "carry"])
def test_the_order_depends_on_neither_workers_nor_reading(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, remainder: str
):
    shards = write_numbered([500, 377, 123])
    orders = []
    for workers, held in ((1, 1), (2, 4), (5, 2)):
        shuffle = loaderd.Shuffle(window_records=150, block_records=16)
        with loaderd.Loader(
            shards,
            numbered_schema,
            batch_size=48,
            epochs=2,
            shuffle=shuffle,
            seed=5,
            remainder=remainder,  # type: ignore[arg-type]
            workers=workers,
            held_batches=held,
        ) as loader:
            orders.append(passes(loader, check_batch)[0])
    assert orders[0] == orders[1] == orders[2]
    counts = Counter(flat(orders[0]))
    if remainder == "drop":
        assert {len(batch) for batch in orders[0]} == {48}
        assert sum(counts.values()) == 2 * (1000 // 48) * 48
    else:
        assert counts == dict.fromkeys(range(1000), 2)
    if remainder == "carry":
        assert [len(batch) for batch in orders[0]] == [48] * 41 + [2000 - 41 * 48]


def test_another_seed_is_another_order(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([500])
    orders = []
    for seed in (0, 1, 0):
        with loaderd.Loader(shards, numbered_schema, batch_size=100, seed=seed, workers=1) as loader:
            orders.append(passes(loader, check_batch)[0])
    assert orders[0] == orders[2] != orders[1]


def test_hosts_share_an_epoch(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([601, 400])
    seen = []
    for host in range(3):
        with loaderd.Loader(shards, numbered_schema, batch_size=50, shard=(host, 3), workers=1) as loader:
            seen.append(flat(passes(loader, check_batch)[0]))
    assert sorted(flat(seen)) == list(range(1001))
    assert {len(numbers) for numbers in seen} == {333, 334}


def test_an_endless_loader_goes_on(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([100])
    with loaderd.Loader(shards, numbered_schema, batch_size=64, epochs=None, remainder="carry", workers=1) as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        batches = iter(loader)
        numbers = flat([check_batch(next(batches)) for _ in range(50)])
        for epoch in range(32):
            assert sorted(numbers[100 * epoch : 100 * (epoch + 1)]) == list(range(100))


def test_any_step_can_be_fetched(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([400])
    shuffle = loaderd.Shuffle(window_records=100, block_records=10)
    with loaderd.Loader(shards, numbered_schema, batch_size=30, epochs=2, shuffle=shuffle, workers=2) as loader:
        order = passes(loader, check_batch)[0]
        for step in (0, 7, 8, 27, 3, 3, 26, 1):
            batch = loader.fetch(0, step)
            assert batch is not None
            assert check_batch(batch) == order[step]
        assert loader.fetch(0, 28) is None


def test_position_counts_what_the_consumer_took(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([100])
    with loaderd.Loader(shards, numbered_schema, batch_size=40, epochs=2, workers=1) as loader:
        positions = [loader.position]
        for _ in loader:
            positions.append(loader.position)
        expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
        assert positions == [loaderd.Position(*place) for place in expected]


def test_two_iterators_at_a_time(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([300])
    with loaderd.Loader(shards, numbered_schema, batch_size=50, workers=1) as loader:
        one, two = iter(loader), iter(loader)
        taken: tuple[list[list[int]], list[list[int]]] = ([], [])
        for _ in range(6):
            taken[0].append(check_batch(next(one)))
            taken[1].append(check_batch(next(two)))
        assert sorted(flat(taken[0])) == sorted(flat(taken[1])) == list(range(300))


def test_breaking_out_and_iterating_again(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    shards = write_numbered([1000])
    with loaderd.Loader(shards, numbered_schema, batch_size=10, workers=2) as loader:
        for _ in range(20):
            for number, _batch in enumerate(loader):
                if number == 3:
                    break
        assert sorted(flat(passes(loader, check_batch)[0])) == list(range(1000))


def test_a_consumer_that_keeps_every_batch_gets_copies(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([2000])
    with loaderd.Loader(shards, numbered_schema, batch_size=20, workers=2, held_batches=3) as loader:
        kept = list(loader)
        assert sorted(flat([check_batch(batch) for batch in kept])) == list(range(2000))
        statistics = loader.statistics()
        assert statistics.batches_copied == 97
        assert statistics.slots_lent == 3
        assert all(batch[name].ctypes.data % 64 == 0 for batch in kept for name in batch)
        del kept
        gc.collect()
        assert loader.statistics().slots_lent == 0


def test_a_slot_comes_back_with_the_last_view_of_it(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([400])
    with loaderd.Loader(shards, numbered_schema, batch_size=100, workers=1) as loader:
        batch = next(iter(loader))
        view = batch["bits"][5:7].reshape(-1)[3:]
        values = view.copy()
        del batch
        assert loader.statistics().slots_lent == 1
        for _ in loader:
            assert np.array_equal(view, values), "nobody writes where a view looks"
        del view, _
        assert loader.statistics().slots_lent == 0


def test_batches_outlive_the_loader(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    loader = loaderd.Loader(write_numbered([100]), numbered_schema, batch_size=50, workers=1)
    batch = next(iter(loader))
    numbers = check_batch(batch)
    loader.close()
    loader.close()
    assert check_batch(batch) == numbers
    with pytest.raises(ClosedError, match="closed"):
        next(iter(loader))


def test_batches_are_read_only(write_numbered: Write, numbered_schema: loaderd.Schema):
    with loaderd.Loader(write_numbered([100]), numbered_schema, batch_size=50, workers=1) as loader:
        batch = next(iter(loader))
        assert list(batch) == ["bits", "id"] and len(batch) == 2 and "float32 (50, 32)" in repr(batch)
        with pytest.raises(ValueError, match="read-only"):
            batch["id"][0] = 1


def test_nothing_in_dev_shm_and_no_descriptor_left(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([100])
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with loaderd.Loader(shards, numbered_schema, batch_size=50, workers=2) as loader:
            assert sum(batch.num_records for batch in loader) == 100
            assert set(os.listdir("/dev/shm")) == before[0]
        del loader
    gc.collect()
    assert (set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before


def test_a_data_set_is_a_description(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    dataset = loaderd.Dataset(write_numbered([90]), numbered_schema, shuffle=False)
    with loaderd.Loader(dataset, batch_size=30, workers=1) as loader:
        assert flat(passes(loader, check_batch)[0]) == list(range(90))
    with pytest.raises(OptionError, match="left to the Dataset"):
        loaderd.Loader(dataset, batch_size=30, seed=3)


def test_the_index_is_made_once(write_numbered: Write, numbered_schema: loaderd.Schema, tmp_path: Path):
    shards = write_numbered([100, 100, 100])
    cache = str(tmp_path / "cache")
    cached = []
    for _ in range(2):
        with loaderd.Loader(shards, numbered_schema, batch_size=30, workers=2, index_cache=cache) as loader:
            cached.append(loader.statistics().index_cached)
    shards[1].write_bytes(shards[1].read_bytes() + shards[0].read_bytes())
    with loaderd.Loader(shards, numbered_schema, batch_size=30, workers=2, index_cache=cache) as loader:
        cached.append(loader.statistics().index_cached)
        assert loader.statistics().num_records == 400
    assert cached == [0, 3, 2]


# ------------------------------------------------------------------------------------------- bad input


def damage_data(path: Path, number: int) -> int:
    """Flip a bit in the data of a record; returns where its frame starts."""
    data = bytearray(path.read_bytes())
    offset = 0
    for _ in range(number):
        offset += int.from_bytes(data[offset : offset + 8], "little") + 16
    data[offset + 20] ^= 4
    path.write_bytes(data)
    return offset


def test_damage_is_named_before_training(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([100, 100])
    offset = damage_data(shards[1], 42)
    with pytest.raises(CorruptRecordError) as caught:
        loaderd.Loader(shards, numbered_schema, batch_size=10, workers=1)
    message = str(caught.value)
    assert f"{shards[1]}: record 42 at byte {offset}: expected data with CRC32C" in message
    assert "1 damaged record in 1 of 2 shards" in message and "skip_record" in message
    assert caught.value.damage is not None and caught.value.damage.record == 42


@pytest.mark.parametrize(("policy", "missing"), [("skip_record", [142]), ("skip_shard", list(range(100, 200)))])
def test_damage_is_left_out(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, policy: str, missing: list[int]
):
    shards = write_numbered([100, 100, 100])
    damage_data(shards[1], 42)
    with loaderd.Loader(
        shards,
        numbered_schema,
        batch_size=10,
        workers=1,
        on_corrupt=policy,  # type: ignore[arg-type]
    ) as loader:
        order = passes(loader, check_batch)[0]
        assert sorted(flat(order)) == [n for n in range(300) if n not in missing]
        assert all(len(batch) == 10 for batch in order[:-1]), "damage that the index found leaves no hole"
        (damage,) = loader.statistics().damages
        assert (damage.shard, damage.record) == (str(shards[1]), 42)


def test_damage_after_the_index_breaks_one_batch(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([200])
    with loaderd.Loader(shards, numbered_schema, batch_size=20, shuffle=False, workers=1) as loader:
        times = os.stat(shards[0])
        damage_data(shards[0], 77)
        os.utime(shards[0], ns=(times.st_atime_ns, times.st_mtime_ns))
        numbers = []
        for step in range(10):
            try:
                batch = loader.fetch(0, step)
            except CorruptRecordError as error:
                assert step == 3 and error.damage is not None and error.damage.record == 77
            else:
                assert batch is not None
                numbers += check_batch(batch)
        assert numbers == [n for n in range(200) if not 60 <= n < 80]


def test_damage_after_the_index_can_be_skipped(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([200])
    with loaderd.Loader(
        shards, numbered_schema, batch_size=20, shuffle=False, workers=1, on_corrupt="skip_record"
    ) as loader:
        times = os.stat(shards[0])
        damage_data(shards[0], 77)
        os.utime(shards[0], ns=(times.st_atime_ns, times.st_mtime_ns))
        order = passes(loader, check_batch)[0]
        assert flat(order) == [n for n in range(200) if n != 77]
        assert [len(batch) for batch in order] == [20, 20, 20, 19] + [20] * 6, "no other record moves"
        statistics = loader.statistics()
        assert statistics.records_skipped == 1 and statistics.damages[0].record == 77


def test_a_shard_that_changes_is_noticed(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([5000])
    with loaderd.Loader(shards, numbered_schema, batch_size=20, workers=1, index_cache="none") as loader:
        shards[0].write_bytes(b"")
        with pytest.raises(ShardReadError, match=r"changed while it was in use: expected \d+ bytes"):
            next(iter(loader))


def test_records_that_do_not_fit(write_numbered: Write, numbered_schema: loaderd.Schema):
    shards = write_numbered([10])
    schema = loaderd.Schema({"bits": loaderd.PackedBits(64)}, {"bits": loaderd.Packed("bits")})
    with pytest.raises(RecordMismatchError) as caught:
        loaderd.Loader(shards, schema, batch_size=5, workers=1, on_corrupt="skip_record")
    assert f"{shards[0]}: record 0 at byte 0: expected feature 'bits' of 8 bytes, found 4 bytes" in str(caught.value)


def test_a_function_that_fails_names_its_field(write_numbered: Write, check_batch: Check):
    shards = write_numbered([100])
    schema = loaderd.Schema(
        {"id": loaderd.Int64()},
        {"id": loaderd.Array("id"), "bad": loaderd.Derived(lambda n: 1 // (n - 50).all(), "id", shape=())},
    )
    with (
        loaderd.Loader(shards, schema, batch_size=10, shuffle=False, workers=1) as loader,
        pytest.raises(WorkerError, match="derived field 'bad'"),
    ):
        list(loader)


def test_bad_arguments(write_numbered: Write, numbered_schema: loaderd.Schema, tmp_path: Path):
    shards = write_numbered([10])

    def make(**options: object) -> None:
        loaderd.Loader(**{"shards": shards, "schema": numbered_schema, "batch_size": 5, **options})  # type: ignore[arg-type]

    for options, error, text in (
        ({"batch_size": 0}, OptionError, "batch_size must be a positive integer, got 0"),
        ({"epochs": 0}, OptionError, "epochs must be a positive integer or None, got 0"),
        ({"shuffle": 5}, OptionError, "shuffle must be True, False or loaderd.Shuffle, got 5"),
        ({"remainder": "keep"}, OptionError, "remainder must be drop, short or carry, got 'keep'"),
        ({"shard": (2, 2)}, OptionError, "shard must be a pair"),
        ({"workers": -1}, OptionError, "workers must be a positive integer or None, got -1"),
        ({"on_corrupt": "ignore"}, OptionError, "on_corrupt must be raise, skip_record or skip_shard"),
        ({"held_batches": 0}, OptionError, "held_batches must be a positive integer, got 0"),
        ({"schema": None}, OptionError, "schema must be a loaderd.Schema, got None"),
        ({"shards": str(tmp_path / "*.nothing")}, NoShardsError, "matches no file"),
        ({"shards": str(tmp_path)}, NoShardsError, "is a folder"),
        ({"shards": []}, NoShardsError, "at least one file"),
        ({"shards": [shards[0], shards[0]]}, OptionError, "twice"),
    ):
        with pytest.raises(error, match=text):
            make(**options)
    with pytest.raises(SchemaError, match="needs bits 30…33 of feature 'bits', which has 32"):
        loaderd.Schema({"bits": loaderd.PackedBits(32)}, {"x": loaderd.Bits("bits", start=30, shape=(4,))})
    (tmp_path / "empty.tfrecord").touch()
    with pytest.raises(NoShardsError, match="hold no record"):
        make(shards=str(tmp_path / "empty.tfrecord"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any),
    batch_size=st.integers(1, 70),
    window=st.integers(1, 90),
    block=st.integers(1, 20),
    remainder=st.sampled_from(["drop", "short", "carry"]),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_any_small_loader_delivers_what_was_planned(
    write_numbered: Write,
    numbered_schema: loaderd.Schema,
    check_batch: Check,
    sizes: list[int],
    batch_size: int,
    window: int,
    block: int,
    remainder: str,
    epochs: int,
    shuffle: bool,
):
    total = sum(sizes)
    with loaderd.Loader(
        write_numbered(sizes),
        numbered_schema,
        batch_size=batch_size,
        shuffle=loaderd.Shuffle(window, block) if shuffle else False,
        remainder=remainder,  # type: ignore[arg-type]
        epochs=epochs,
        workers=1,
        index_cache="none",
    ) as loader:
        order = passes(loader, check_batch)[0]
        assert len(order) == len(loader)
    counts = Counter(flat(order))
    if remainder == "drop":
        assert sum(counts.values()) == epochs * (total // batch_size) * batch_size
        assert all(count <= epochs for count in counts.values())
    else:
        assert counts == dict.fromkeys(range(total), epochs)
    if remainder == "short" or epochs == 1:
        whole, rest = divmod(total, batch_size)
        epoch_sizes = [batch_size] * whole + [rest] * (rest > 0 and remainder != "drop")
        assert [len(batch) for batch in order] == epoch_sizes * epochs
