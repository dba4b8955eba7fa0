"""Mixes, data sets in a row, and data sets that grow: real loaders."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_processes import kill, newest_daemon

import loaderd
from loaderd import Concat, Dataset, Mix, Position
from loaderd.errors import CorruptRecordError, NoShardsError, OptionError

Write = Callable[..., list[Path]]
Check = Callable[[loaderd.Batch], list[int]]

SMALL = loaderd.Shuffle(window_records=100, block_records=8)
MILLION = 1_000_000


@pytest.fixture
def sets(write_numbered: Write, numbered_schema: loaderd.Schema) -> dict[str, Dataset]:
    """300 records of "a", numbered from 0, and 100 of "b", which a field numbers from a million on."""

    def of(shards: list[Path]) -> Dataset:
        return Dataset(shards, numbered_schema, shuffle=SMALL)

    return {"a": of(write_numbered([120, 180], "a")), "b": of(write_numbered([40, 60], "b")[:])}


def told_apart(sets: Mapping[str, Dataset], write: Write) -> dict[str, Dataset]:
    """The same, but the records of "b" have numbers that "a" does not have."""
    whole = write([120, 180, 40, 60], "whole")
    first = next(iter(sets.values()))
    return {
        "a": Dataset(whole[:2], first.schema, shuffle=SMALL),
        "b": Dataset(whole[2:], first.schema, shuffle=SMALL),
    }


@pytest.fixture
def apart(sets: dict[str, Dataset], write_numbered: Write) -> dict[str, Dataset]:
    return told_apart(sets, write_numbered)


def epochs(dataset: Any, check: Check, number: int, **options: Any) -> list[list[list[int]]]:
    with loaderd.Loader(dataset, **{"batch_size": 20, "workers": 2, **options}) as loader:
        return [[check(batch) for batch in loader] for _ in range(number)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_a_mix_is_in_proportion_and_uses_each_set_up_evenly(apart: dict[str, Dataset], check_batch: Check):
    mix = Mix({"a": 0.75, "b": 0.25}, apart, epoch_records=200)
    found = [flat(epoch) for epoch in epochs(mix, check_batch, 6)]
    for numbers in found:
        assert sum(number >= 300 for number in numbers) == 50
        for window in (numbers[:100], numbers[100:]):
            assert sum(number >= 300 for number in window) == 25, "in every window"
    of_a = [number for numbers in found for number in numbers if number < 300]
    of_b = [number for numbers in found for number in numbers if number >= 300]
    assert Counter(of_a) == dict.fromkeys(range(300), 3), "900 of 300: three epochs of its own"
    assert Counter(of_b) == dict.fromkeys(range(300, 400), 3), "300 of 100"
    assert sorted(of_a[:300]) == sorted(of_a[300:600]) == list(range(300)) and of_a[:300] != of_a[300:600]
    first_batches = [sum(number >= 300 for number in numbers[:20]) for numbers in found]
    assert len(set(first_batches)) > 1, "and mixed at random within it"


def test_a_mix_has_an_order_and_positions(apart: dict[str, Dataset], check_batch: Check):
    mix = Mix({"a": 0.6, "b": 0.4}, apart)
    expected = epochs(mix, check_batch, 3)
    assert epochs(mix, check_batch, 3, workers=1, held_batches=1) == expected
    assert sum(map(len, expected[0])) == 400, "as many as there are in all"
    with loaderd.Loader(mix, batch_size=20, workers=1, start=Position(1, 7)) as loader:
        assert [check_batch(batch) for batch in loader] == expected[1][7:]
        position = loader.position
    other = Mix({"a": 0.5, "b": 0.5}, apart)
    with pytest.raises(OptionError, match=r"weights: .*3/5.*2/5.* when the position was taken, .*1/2.*1/2.* now"):
        loaderd.Loader(other, batch_size=20, start=position)
    changed = {"a": apart["a"], "b": apart["b"].take(90)}
    with pytest.raises(OptionError, match=r"b shards: 100 records in 2 .*, 90 records in 2"):
        loaderd.Loader(Mix({"a": 0.6, "b": 0.4}, changed, epoch_records=400), batch_size=20, start=position)


def test_hosts_share_a_mix(apart: dict[str, Dataset], check_batch: Check):
    mix = Mix({"a": 0.5, "b": 0.5}, apart, epoch_records=200)
    numbers = [n for host in range(3) for n in flat(epochs(mix, check_batch, 1, shard=(host, 3))[0])]
    assert sorted(n for n in numbers if n >= 300) == list(range(300, 400)) and len(set(numbers)) == 200


def test_weights_that_change(apart: dict[str, Dataset], check_batch: Check):
    weights = {0: {"a": 1.0, "b": 0.0}, 2: {"a": 0.5, "b": 0.5}, 3: {"b": 1.0, "a": 0.0}}
    mix = Mix(weights, apart, epoch_records=100)
    found = [flat(epoch) for epoch in epochs(mix, check_batch, 5)]
    assert [sum(number >= 300 for number in numbers) for numbers in found] == [0, 0, 50, 100, 100]
    of_a = [number for numbers in found for number in numbers if number < 300]
    assert len(set(of_a)) == len(of_a) == 250, "no record twice before all have come"
    assert Counter(flat(found[2:])).most_common(1)[0][1] <= 3
    assert epochs(pickle.loads(pickle.dumps(mix)), check_batch, 1)[0] == epochs(mix, check_batch, 1)[0]


def test_the_order_in_which_weights_are_given_is_no_part_of_a_position(apart: dict[str, Dataset]):
    early, late = {"a": 1.0, "b": 0.0}, {"b": 0.5, "a": 0.5}
    with loaderd.Loader(Mix({0: early, 2: late}, apart, 100), batch_size=20, workers=1) as loader:
        next(iter(loader))
        position = loader.position
    with loaderd.Loader(Mix({2: late, 0: early}, apart, 100), batch_size=20, workers=1, start=position) as loader:
        assert len(list(loader)) == 4


def test_a_mix_keeps_the_weights_that_it_was_made_of(sets: dict[str, Dataset]):
    """What becomes of the caller's dicts is not for it, nor for what is made of it by replace()."""
    both: tuple[dict[Any, Any], ...] = {"a": 0.75, "b": 0.25}, {0: {"a": 0.75, "b": 0.25}}
    for changing in both:
        mix = Mix(changing, sets)
        before = mix.weights == changing, mix.schedule
        changing.get(0, changing).update({"a": 0.25, "b": 0.75})
        assert before == (True, replace(mix).schedule) and mix.weights != changing
        assert pickle.loads(pickle.dumps(mix)) == mix


def test_sets_in_a_row(apart: dict[str, Dataset], check_batch: Check):
    row = Concat([apart["b"], apart["a"]])
    (numbers,) = map(flat, epochs(row, check_batch, 1))
    assert sorted(numbers) == list(range(400)) and set(numbers[:100]) == set(range(300, 400))
    mix = Mix({"row": 0.5, "a": 0.5}, {"row": row, "a": apart["a"]}, epoch_records=800)
    (numbers,) = map(flat, epochs(mix, check_batch, 1))
    assert Counter(numbers[:]) == Counter(list(range(400)) + list(range(300)) + numbers_twice(numbers))


def numbers_twice(numbers: list[int]) -> list[int]:
    """The 100 records with which "a" begins its second epoch in a mix of 400 of its 300."""
    counts = Counter(numbers)
    again = [number for number in range(300) if counts[number] == 3]
    assert len(again) == 100
    return again


def test_sets_in_a_row_in_the_files_order(write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check):
    paths = write_numbered([30, 50, 40])
    sets = [Dataset(path, numbered_schema, shuffle=False) for path in paths]
    assert flat(epochs(Concat([sets[2], sets[0]]), check_batch, 1)[0]) == [*range(80, 120), *range(30)]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 0.8, "b": 0.3}, r"the weights of a Mix must sum to 1, got 1\.1"),
        ({"a": 1.5, "b": -0.5}, "the weight of 'b' must be a number of at least 0, got -0.5"),
        ({"a": 1.0}, r"weights must name the sets \['a', 'b'\], got \['a'\]"),
        ({3: {"a": 0.5, "b": 0.5}}, r"weights must begin at epoch 0, got the epochs \[3\]"),
        ({0: {"a": 0.5, "b": 0.5}, "10": {"a": 0.5}}, r"weights must name the sets \['a', 'b'\], got \[0, '10'\]"),
    ],
)
def test_weights_that_make_no_mix(sets: dict[str, Dataset], weights: Any, message: str):
    with pytest.raises(OptionError, match=message):
        Mix(weights, sets)


def test_of_schemas_that_differ_the_difference_is_said():
    def of(features: Any = (), fields: Any = (), intermediates: Any = ()) -> Dataset:
        stored = {"a": loaderd.Int64(), "b": loaderd.Int64(), **dict(features)}
        made = {"x": loaderd.Array("a"), **dict(fields)}
        return Dataset("*.tfrecord", loaderd.Schema(stored, made, dict(intermediates)))

    turned = loaderd.Schema({"b": loaderd.Int64(), "a": loaderd.Int64()}, {"x": loaderd.Array("a")})
    for other, said in [
        (of({"a": loaderd.Int64((2,))}), r"features\['a'\] Int64\(shape=\(\), .*\) and Int64\(shape=\(2,\), .*\)"),
        (of({}, {"y": loaderd.Array("b")}), r"fields\['y'\] none and Array\(.*\)"),
        (of({}, {}, {"y": loaderd.Array("b")}), r"intermediates\['y'\] none and Array\(.*\)"),
        (Dataset("*.tfrecord", turned), "features of the same names in another order, or at other places"),
    ]:
        with pytest.raises(OptionError, match=f"must agree in schema, got {said}\n") as caught:
            Concat([of(), of(), other])
        assert len(caught.value.message) < 300


def test_sets_that_cannot_be_joined(sets: dict[str, Dataset], numbered_schema: loaderd.Schema):
    a, b = sets.values()
    with pytest.raises(OptionError, match=r"the sets of a Concat must agree in seed, got \[0, 3\]"):
        Concat([a, Dataset(b.shards, numbered_schema, shuffle=SMALL, seed=3)])
    unshuffled = Dataset(a.shards, numbered_schema, shuffle=False)
    with pytest.raises(OptionError, match="the sets of a Mix must be shuffled"):
        Mix({"a": 1.0}, {"a": unshuffled})
    with pytest.raises(OptionError, match="a set of a Concat must be a Dataset, Concat or Mix, got 'x'"):
        Concat(["x"])  # type: ignore[list-item]
    growing = Dataset(b.shards, numbered_schema, shuffle=SMALL, refresh="epoch")
    with pytest.raises(OptionError, match="a Mix of a data set that grows needs epoch_records"):
        Mix({"a": 0.5, "b": 0.5}, {"a": a, "b": growing})
    with pytest.raises(OptionError, match="the sets of a Concat must not grow"):
        Concat([a, growing])


# -------------------------------------------------------------------------------------- data that grow


def grow(paths: list[Path], folder: Path, number: int) -> None:
    """Put the next shards into the folder, as a writer would: whole, under their last name."""
    for path in paths[:number]:
        temporary = folder / f".{path.name}.tmp"
        temporary.write_bytes(path.read_bytes())
        temporary.rename(folder / path.name)
    del paths[:number]


def test_shards_are_picked_up_between_epochs(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, tmp_path: Path
):
    paths = write_numbered([50, 50, 60, 70, 80])
    folder = tmp_path / "growing"
    folder.mkdir()
    grow(paths, folder, 2)
    expected: list[list[list[int]]] = []
    tail = Dataset(str(folder / "*.tfrecord"), numbered_schema, shuffle=SMALL, refresh="epoch").newest(100)
    with loaderd.Loader(tail, batch_size=20, epochs=None, workers=2, remainder="drop") as loader:
        assert loader.passes_of_an_iteration is None
        batches = iter(loader)
        texts: list[list[str]] = []
        for newest in (range(100), range(60, 160), range(130, 230)):
            expected.append([])
            texts.append([])
            for step in range(5):
                texts[-1].append(loader.position.to_json())
                expected[-1].append(check_batch(next(batches)))
                if step == 2:
                    grow(paths, folder, 1)  # in the middle of an epoch, which does not change by it
            assert sorted(flat(expected[-1])) == list(newest)
        assert loader.statistics().num_records == 100 and loader.statistics().num_shards == 4
    for epoch, of_epoch in enumerate(texts):
        for step in (1, 4):
            position = Position.from_json(of_epoch[step])
            with loaderd.Loader(tail, batch_size=20, epochs=1, workers=1, remainder="drop", start=position) as loader:
                assert [check_batch(batch) for batch in loader] == expected[epoch][step:], "of the shards of then"
                assert repr(loader.position) == f"Position(epoch={epoch + 1}, batch=0)"
                numbers = flat([check_batch(batch) for batch in loader])
                assert sorted(numbers) == list(range(210, 310)), "and then of those of now"
    assert [entry[:3] for entry in json.loads(texts[2][1])["listing"]] == [["002.tfrecord", "003.tfrecord", 2]]
    (folder / "000.tfrecord").unlink()  # old ones may go
    with loaderd.Loader(
        tail, batch_size=20, workers=1, remainder="drop", start=Position.from_json(texts[2][1])
    ) as loader:
        loader.seek(Position.from_json(texts[2][3]))
        assert [check_batch(batch) for batch in loader] == expected[2][3:]
        with pytest.raises(
            OptionError, match=r"belongs to 2 shards, 000.tfrecord to 001.tfrecord: .* 000.tfrecord missing"
        ):
            loader.seek(Position.from_json(texts[0][1]))
        assert len([check_batch(batch) for batch in loader]) == 5, "a position that is refused costs nothing"


def test_growing_data_as_an_option_and_in_a_mix(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, tmp_path: Path
):
    paths = write_numbered([100, 100, 100])
    folder = tmp_path / "growing"
    folder.mkdir()
    grow(paths, folder, 1)
    pattern = str(folder / "*.tfrecord")
    options: dict[str, Any] = {"shuffle": SMALL, "refresh": "epoch"}
    with loaderd.Loader(pattern, numbered_schema, batch_size=20, epochs=2, workers=1, **options) as loader:
        batches = iter(loader)
        first = [check_batch(next(batches)) for _ in range(5)]
        grow(paths, folder, 1)
        second = [check_batch(batch) for batch in batches]
        assert sorted(flat(first)) == list(range(100)) and sorted(flat(second)) == list(range(200))
        with pytest.raises(TypeError, match="has no length"):
            len(loader)
    games = Dataset(paths[0], numbered_schema, shuffle=SMALL)  # the third shard, which is not in the folder
    growing = Dataset(pattern, numbered_schema, **options)
    mix = Mix({"selfplay": 0.8, "games": 0.2}, {"selfplay": growing, "games": games}, epoch_records=100)
    with loaderd.Loader(mix, batch_size=20, epochs=3, workers=1) as loader:
        numbers = flat([check_batch(batch) for batch in loader])
    assert [sum(n >= 200 for n in numbers[e : e + 100]) for e in (0, 100, 200)] == [20, 20, 20]
    of_games = [number for number in numbers if number >= 200]
    assert len(set(of_games)) == 60, "a set that does not grow goes on where it was"


def test_growing_data_that_end_or_cannot_be_carried(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    shards = write_numbered([50, 50])
    pattern = str(shards[0].parent / "*.tfrecord")
    with pytest.raises(OptionError, match="cannot complete a batch from an epoch that has not been listed"):
        loaderd.Loader(pattern, numbered_schema, batch_size=20, refresh="epoch", remainder="carry")
    with loaderd.Loader(pattern, numbered_schema, batch_size=20, refresh="epoch", epochs=None, workers=1) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        content = [shard.read_bytes() for shard in shards]
        shards[1].write_bytes(content[1][:-3])
        with pytest.raises(CorruptRecordError, match="1 damaged record in 1 of 2 shards"):
            next(batches)
        for shard in shards:
            shard.unlink()
        with pytest.raises(NoShardsError, match="matches no file"):
            next(iter(loader))
        shards[0].write_bytes(content[0])
        numbers = [number for batch, _ in zip(loader, range(3), strict=False) for number in check_batch(batch)]
        assert sorted(numbers) == list(range(50)), "the loader is none the worse"


def test_growing_data_of_which_the_newest_lie_in_one_of_several_folders(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, tmp_path: Path
):
    """Of these alone, all folders are the same, and no folder need be named."""
    write_numbered([60, 40], "data/0")
    write_numbered([60, 40], "data/1")
    shards = str(tmp_path / "data" / "*" / "*.tfrecord")
    tail = Dataset(shards, numbered_schema, shuffle=SMALL, refresh="epoch").newest(80)
    with loaderd.Loader(tail, batch_size=10, epochs=None, workers=1, remainder="drop") as loader:
        batches = iter(loader)
        expected = [check_batch(next(batches)) for _ in range(16)]
        loader.seek(loaderd.Position())
        batches = iter(loader)
        found = [check_batch(next(batches)) for _ in range(3)]
        position = loader.position
        kill(newest_daemon())
        assert found + [check_batch(next(batches)) for _ in range(13)] == expected
    assert position.listing is not None and position.listing[0] is not None
    assert position.listing[0][:2] == ("1/000.tfrecord", "1/001.tfrecord")
    with loaderd.Loader(tail, batch_size=10, epochs=1, workers=1, remainder="drop", start=position) as loader:
        assert [check_batch(batch) for batch in loader] == expected[3:8]


def test_growing_data_whose_folders_hold_the_same_names(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check, tmp_path: Path
):
    """A folder for each generation, say."""
    paths = write_numbered([50] * 6)
    for number, path in enumerate(paths):
        folder = tmp_path / f"all/gen-{number // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        if number < 4:
            path.rename(folder / f"part-{number % 2}.tfrecord")
    tail = Dataset(str(tmp_path / "all/gen-*/*.tfrecord"), numbered_schema, shuffle=SMALL, refresh="epoch")
    with loaderd.Loader(tail, batch_size=20, workers=2) as loader:
        batches = iter(loader)
        taken = check_batch(next(batches))
        position = Position.from_json(loader.position.to_json())
        kill(newest_daemon())
        rest = [check_batch(batch) for batch in batches]
        assert loader.statistics().daemon_restarts == 1
    assert sorted(taken + flat(rest)) == list(range(200))
    assert [entry[:3] for entry in position.listing or () if entry] == [
        ("gen-0/part-0.tfrecord", "gen-1/part-1.tfrecord", 4)
    ]
    for number, path in enumerate(paths[4:]):
        path.rename(tmp_path / f"all/gen-2/part-{number}.tfrecord")
    with loaderd.Loader(tail, batch_size=20, workers=1, start=position) as loader:
        assert [check_batch(batch) for batch in loader] == rest
        assert sorted(flat([check_batch(batch) for batch in loader])) == list(range(300))


def test_a_position_of_data_of_another_number_of_sets(
    write_numbered: Write, numbered_schema: loaderd.Schema, check_batch: Check
):
    one = Dataset(write_numbered([100]), numbered_schema, shuffle=SMALL, refresh="epoch")
    with loaderd.Loader(one, batch_size=20, workers=1) as loader:
        check_batch(next(iter(loader)))
        position = loader.position
    mix = Mix({"a": 0.5, "b": 0.5}, {"a": one, "b": one}, epoch_records=100)
    with pytest.raises(OptionError, match="data of 1 sets: expected to find them again, found 2"):
        loaderd.Loader(mix, batch_size=20, workers=1, start=replace(position, of={}))


def test_a_shard_of_several_sets_is_indexed_once_and_its_damage_is_named_once(
    write_numbered: Write, numbered_schema: loaderd.Schema, tmp_path: Path
):
    paths = write_numbered([100, 100])
    data = bytearray(paths[0].read_bytes())
    data[len(data) // 2] ^= 0xFF
    paths[0].write_bytes(data)
    halves = Concat(Dataset(paths, numbered_schema, shuffle=SMALL, index_cache="none").split(0.5, 0.5))
    with pytest.raises(CorruptRecordError, match="1 damaged record in 1 of 2 shards") as caught:
        loaderd.Loader(halves, batch_size=20, workers=1)
    assert len(caught.value.damages) == 1
    skipping = halves.with_leaves(lambda leaf: replace(leaf, on_corrupt="skip_record"))
    skipping = skipping.with_leaves(lambda leaf: replace(leaf, index_cache=tmp_path / "cache"))
    for cached in (0, 2):
        with loaderd.Loader(skipping, batch_size=20, workers=1) as loader:
            statistics = loader.statistics()
            assert (statistics.num_records, statistics.index_cached) == (199, cached)


def test_weights_of_a_mix_in_a_row_of_sets_are_part_of_a_position(apart: dict[str, Dataset], check_batch: Check):
    def rows(weights: dict[str, float]) -> Concat:
        return Concat([Mix(weights, apart, 100), apart["a"]])

    with loaderd.Loader(rows({"a": 0.5, "b": 0.5}), batch_size=20, workers=1) as loader:
        next(iter(loader))
        position = loader.position
    with pytest.raises(OptionError, match=r"0 weights: .*1/2.* when the position was taken, .*9/10.* now"):
        loaderd.Loader(rows({"a": 0.9, "b": 0.1}), batch_size=20, workers=1, start=position)
